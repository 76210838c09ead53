package pgstore_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"io"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/archlab/idempotency/pgstore"
)

func TestFingerprintIsTheDigestOfFramedParts(t *testing.T) {
	t.Parallel()
	digest := sha256.Sum256([]byte("" +
		"\x00\x00\x00\x00\x00\x00\x00\x04POST" +
		"\x00\x00\x00\x00\x00\x00\x00\x00" +
		"\x00\x00\x00\x00\x00\x00\x00\x02\x00\xff"))
	require.Equal(t, string(digest[:]), pgstore.Fingerprint("POST", "", "\x00\xff"))
}

// Two lists of parts have one fingerprint only if they are one list; also where bytes move between neighbours, or parts are empty.
func TestFingerprintsOfDifferentPartsDiffer(t *testing.T) {
	t.Parallel()
	part := rapid.StringOf(rapid.SampledFrom([]rune{'a', 'b', 0, 1, 0x80}))
	rapid.Check(t, func(r *rapid.T) {
		parts := rapid.SliceOfN(part, 0, 4).Draw(r, "parts")
		var others []string
		switch rapid.SampledFrom([]string{"any", "the same bytes, cut elsewhere", "an empty part more"}).Draw(r, "others are") {
		case "any":
			others = rapid.SliceOfN(part, 0, 4).Draw(r, "others")
		case "an empty part more":
			others = slices.Insert(slices.Clone(parts), rapid.IntRange(0, len(parts)).Draw(r, "at"), "")
		default:
			joined := strings.Join(parts, "")
			for range rapid.IntRange(0, 4).Draw(r, "cuts") {
				n := rapid.IntRange(0, len(joined)).Draw(r, "cut")
				others, joined = append(others, joined[:n]), joined[n:]
			}
			others = append(others, joined)
		}
		require.Equal(r, slices.Equal(parts, others), pgstore.Fingerprint(parts...) == pgstore.Fingerprint(others...))
	})
}

func TestFingerprintFitsTheStore(t *testing.T) {
	t.Parallel()
	f := setup(t)
	body := `{"amount":4200}`
	record, created, err := f.Begin(t.Context(), key, pgstore.Fingerprint("POST", "/payments", body))
	require.NoError(t, err)
	require.True(t, created)
	require.Equal(t, pgstore.Fingerprint("POST", "/payments", body), record.Fingerprint)
	_, _, err = f.Begin(t.Context(), key, pgstore.Fingerprint("POST", "/payments", body+" "))
	require.ErrorIs(t, err, pgstore.ErrConflict, "bytes are compared, whatever they mean")
}

// The examples of RFC 8785, sections 3.2.2 to 3.2.4, and the inputs and outputs that its authors publish beside their
// implementations (cyberphone/json-canonicalization, testdata). Numbers are spelled here as they come in, and there as the nearest double.
func TestCanonicalJSONIsThatOfRFC8785ButForNumbers(t *testing.T) {
	t.Parallel()
	for name, vector := range map[string]struct {
		input, output string
		numbers       []string // as the output spells them here, and there
	}{
		"values (3.2.2)": {
			"{\n  \"numbers\": [333333333.33333329, 1E30, 4.50,\n              2e-3, 0.000000000000000000000000001],\n" +
				`  "string": "\u20ac$\u000F\u000aA'\u0042\u0022\u005c\\\"\/",` + "\n  \"literals\": [null, true, false]\n}",
			`{"literals":[null,true,false],"numbers":[333333333.3333333,1e+30,4.5,0.002,1e-27],"string":"€$\u000f\nA'B\"\\\\\"/"}`,
			[]string{
				"333333333.33333329", "333333333.3333333", "1E30", "1e+30", "4.50", "4.5", "2e-3", "0.002",
				"0.000000000000000000000000001", "1e-27",
			},
		},
		"sorting (3.2.3)": {
			`{"\u20ac": "Euro Sign", "\r": "Carriage Return", "\ufb33": "Hebrew Letter Dalet With Dagesh", "1": "One",
			  "\ud83d\ude00": "Emoji: Grinning Face", "\u0080": "Control", "\u00f6": "Latin Small Letter O With Diaeresis"}`,
			`{"\r":"Carriage Return","1":"One","` + "\u0080" + `":"Control","ö":"Latin Small Letter O With Diaeresis",` +
				`"€":"Euro Sign","` + "\U0001f600" + `":"Emoji: Grinning Face","` + "\ufb33" + `":"Hebrew Letter Dalet With Dagesh"}`,
			nil,
		},
		"values": {
			"{\n  \"numbers\": [1E30, 4.50, 333333333.33333329, 2e-3, 0.000000000000000000000000001],\n" +
				`  "escaping": "\u20ac$\u000F\u000aA'\u0042\u0022\u005c\\\"\/",` + "\n  \"literals\": [null, true, false]\n}",
			`{"escaping":"€$\u000f\nA'B\"\\\\\"/","literals":[null,true,false],"numbers":[1e+30,4.5,333333333.3333333,0.002,1e-27]}`,
			[]string{
				"1E30", "1e+30", "4.50", "4.5", "333333333.33333329", "333333333.3333333", "2e-3", "0.002",
				"0.000000000000000000000000001", "1e-27",
			},
		},
		"structures": {
			"{\n  \"1\": {\"f\": {\"f\": \"hi\",\"F\": 5} ,\"\\n\": 56.0},\n  \"10\": { },\n  \"\": \"empty\",\n  \"a\": { },\n  \"111\": [ { } ],\n  \"A\": { }\n}",
			`{"":"empty","1":{"\n":56,"f":{"F":5,"f":"hi"}},"10":{},"111":[{}],"A":{},"a":{}}`,
			[]string{"56.0", "56"},
		},
		"weird": {
			`{"\u20ac": "Euro Sign", "1": "One", "\u0080": "Control\u007f", "\ud83d\ude02": "Smiley",
			  "\u00f6": "Latin Small Letter O With Diaeresis", "\ufb33": "Hebrew Letter Dalet With Dagesh", "</script>": "Browser Challenge"}`,
			`{"1":"One","</script>":"Browser Challenge","` + "\u0080" + `":"Control` + "\u007f" + `","ö":"Latin Small Letter O With Diaeresis",` +
				`"€":"Euro Sign","` + "\U0001f602" + `":"Smiley","` + "\ufb33" + `":"Hebrew Letter Dalet With Dagesh"}`,
			nil,
		},
		"french": {
			"{\n  \"peach\": \"This sorting order\",\n  \"péché\": \"is wrong according to French\",\n  \"pêche\": \"but canonicalization MUST\",\n  \"sin\":   \"ingnore locale\"\n}\n",
			`{"peach":"This sorting order","péché":"is wrong according to French","pêche":"but canonicalization MUST","sin":"ingnore locale"}`,
			nil,
		},
		"arrays":  {"[\n  56,\n  {\n    \"d\": true,\n    \"10\": null,\n    \"1\": [ ]\n  }\n]", `[56,{"1":[],"10":null,"d":true}]`, nil},
		"unicode": {`{ "Unnormalized Unicode":"A\u030a" }`, "{\"Unnormalized Unicode\":\"A\u030a\"}", nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			canonical, err := pgstore.CanonicalJSON(vector.input)
			require.NoError(t, err)
			for spelled := range slices.Chunk(vector.numbers, 2) {
				require.Contains(t, canonical, spelled[0])
				canonical = strings.Replace(canonical, spelled[0], spelled[1], 1)
			}
			require.Equal(t, vector.output, canonical)
		})
	}
}

func TestCanonicalJSONForgetsOnlySpelling(t *testing.T) {
	t.Parallel()
	canonical := func(document string) string {
		t.Helper()
		c, err := pgstore.CanonicalJSON(document)
		require.NoError(t, err, document)
		return c
	}
	for _, same := range [][2]string{
		{`{"a":1,"b":2}`, ` { "b" : 2, "a" : 1 } `},
		{`"\u0041\/"`, `"A/"`},
		{`{"a":{"c":[1,{"e":2,"d":3}]}}`, `{"a":{"c":[1,{"d":3,"e":2}]}}`},
	} {
		require.Equal(t, canonical(same[0]), canonical(same[1]))
	}
	for _, different := range [][2]string{
		{`{"a":"0.001"}`, `{"a":"0.0010"}`},
		{`9007199254740993`, `9007199254740992`},
		{`{"a":1.0}`, `{"a":1}`},
		{`1e400`, `1e401`},
		{`1E400`, `1e400`},
		{`0`, `-0`},
		{`0.1`, `0.1000000000000000055511151231257827`},
		{`123456789012345678901234567890`, `123456789012345678901234567891`},
		{`[1,2]`, `[2,1]`},
		{`"a"`, `"a "`},
		{`"é"`, "\"e\u0301\""},
		{`null`, `"null"`},
		{`{"a":null}`, `{}`},
	} {
		require.NotEqual(t, canonical(different[0]), canonical(different[1]))
	}
	f := setup(t)
	_, _, err := f.Begin(t.Context(), key, pgstore.Fingerprint(canonical(`{"a":1,"b":2}`)))
	require.NoError(t, err)
	_, _, err = f.Begin(t.Context(), key, pgstore.Fingerprint(canonical(`{"b":2,"a":1}`)))
	require.ErrorIs(t, err, pgstore.ErrInProgress, "it is the same request")
	_, _, err = f.Begin(t.Context(), key, pgstore.Fingerprint(`{"b":2,"a":1}`))
	require.ErrorIs(t, err, pgstore.ErrConflict)
}

func TestCanonicalJSONRefusesWhatTheRFCDoes(t *testing.T) {
	t.Parallel()
	for name, document := range map[string]string{
		"nothing": "", "white space": " ", "not JSON": "{a:1}", "two documents": "1 2", "half of one": `{"a":`, "trailing comma": `[1,]`,
		"a name twice": `{"a":1,"a":1}`, "a name twice, spelled differently": `{"a":1,"\u0061":2}`,
		"a lone surrogate": `"\ud800"`, "invalid UTF-8": "\"\xff\"", "an encoded surrogate": "\"\xed\xa0\x80\"",
		"NaN": "NaN", "a leading zero": "01", "a plus": "+1",
	} {
		_, err := pgstore.CanonicalJSON(document)
		require.ErrorContains(t, err, "idempotency: canonical JSON: ", name)
	}
}

// What has a canonical form means what it meant, and is its own canonical form.
func FuzzCanonicalJSON(f *testing.F) {
	for _, seed := range []string{
		`{"b":[1.0,9007199254740993,1e400,-0],"a":"\u00e9\ud83d\ude00"}`, `"\u0000\u001f</script>\u2028"`, `[{"":{}},null,true]`, ` 1 `, `{"a":1,"a":2}`,
	} {
		f.Add(seed)
	}
	decode := func(t *testing.T, document string) any {
		t.Helper()
		var v any
		decoder := json.NewDecoder(strings.NewReader(document))
		decoder.UseNumber()
		require.NoError(t, decoder.Decode(&v))
		_, err := decoder.Token()
		require.ErrorIs(t, err, io.EOF)
		return v
	}
	f.Fuzz(func(t *testing.T, document string) {
		canonical, err := pgstore.CanonicalJSON(document)
		if err != nil {
			return
		}
		again, err := pgstore.CanonicalJSON(canonical)
		require.NoError(t, err)
		require.Equal(t, canonical, again)
		require.Equal(t, decode(t, document), decode(t, canonical))
		var compact bytes.Buffer
		require.NoError(t, json.Compact(&compact, []byte(canonical)))
		require.Equal(t, canonical, compact.String())
	})
}
