package httpidem_test

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/dunglas/httpsfv"
	"github.com/stretchr/testify/require"

	"github.com/archlab/idempotency/httpidem"
	"github.com/archlab/idempotency/pgstore"
)

// seen returns the key's value that the store would get for field lines, or the rejection.
func seen(tb testing.TB, lines []string, opts ...httpidem.Option) (value, problem string) {
	tb.Helper()
	store := &spy{}
	idempotent, err := httpidem.New(store, func(*http.Request) string { return "t" }, opts...)
	require.NoError(tb, err)
	r := httptest.NewRequestWithContext(tb.Context(), http.MethodPost, "/", http.NoBody)
	r.Header[httpidem.KeyHeader] = lines
	w := httptest.NewRecorder()
	idempotent(http.NotFoundHandler()).ServeHTTP(w, r)
	if len(store.keys) == 1 {
		return store.keys[0].Value, ""
	}
	require.Equal(tb, http.StatusBadRequest, w.Code)
	return "", answer{Header: w.Header()}.Problem()
}

func TestKeyIsAStringOrABareValue(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("k", pgstore.MaxKeyComponentBytes)
	for _, c := range []struct {
		field, value string // no value: refused
		strict       bool   // taken in the strict mode too
	}{
		{`"8e03978e-40d5-43e8-bc93-6894a57f9324"`, "8e03978e-40d5-43e8-bc93-6894a57f9324", true},
		{`8e03978e-40d5-43e8-bc93-6894a57f9324`, "8e03978e-40d5-43e8-bc93-6894a57f9324", false},
		{`"a b"`, "a b", true},
		{`" a"`, " a", true},
		{`"a\"b\\c"`, `a"b\c`, true},
		{`"a,b;c"`, "a,b;c", true},
		{`"a";p=1;q="x"`, "a", true},
		{`"a" `, "a", true},
		{`  "a"  `, "a", true},
		{` a `, "a", false},
		{`:YWJj:`, ":YWJj:", false},
		{`?1`, "?1", false},
		{`17`, "17", false},
		{`'a'`, "'a'", false},
		{`"` + long + `"`, long, true},
		{long, long, false},
		{field: ``}, {field: ` `}, {field: `""`}, {field: `"  "`},
		{field: `"a`}, {field: `a"`}, {field: `"`}, {field: `"a\"`}, {field: `"a\b"`}, {field: `"a""b"`},
		{field: `"a", "b"`}, {field: `a, b`}, {field: `a,b`}, {field: `a;p=1`}, {field: `a b`}, {field: `a\b`}, {field: `"a" b`},
		{field: "\"a\tb\""}, {field: "a\x00b"}, {field: "\"a\x7fb\""}, {field: "clé"}, {field: `"clé"`}, {field: "\xff"}, {field: "\t"},
		{field: `"` + long + `k"`}, {field: long + "k"},
		{field: `"a";`}, {field: `"a";P=1`},
	} {
		value, problem := seen(t, []string{c.field})
		require.Equal(t, c.value, value, "%q", c.field)
		require.Equal(t, c.value == "", problem == "key-invalid", "%q: %q", c.field, problem)
		value, problem = seen(t, []string{c.field}, httpidem.WithStrictKey())
		require.Equal(t, c.strict, value == c.value && c.value != "", "%q", c.field)
		require.Equal(t, !c.strict, problem == "key-invalid", "%q: %q", c.field, problem)
	}
	for _, lines := range [][]string{{`"a"`, `"a"`}, {`"a"`, ""}, {"a", "b", "c"}} {
		_, problem := seen(t, lines)
		require.Equal(t, "key-invalid", problem, lines)
	}
	for _, lines := range [][]string{nil, {}} {
		_, problem := seen(t, lines)
		require.Equal(t, "key-missing", problem)
	}
}

// On the socket: one identity for both spellings, and 400 for what net/http lets through to us.
func TestQuotedAndBareKeysAreOneOnTheSocket(t *testing.T) {
	t.Parallel()
	s := serve(t, created)
	require.False(t, s.send(t, request{key: `"abc"`}).Replayed())
	require.True(t, s.send(t, request{key: `abc`}).Replayed())
	require.True(t, s.send(t, request{key: `"abc";v=1`}).Replayed())
	require.False(t, s.send(t, request{key: `"ABC"`}).Replayed())
	for _, key := range []string{`"abc`, "clé", "\xff", " ", `"a", "b"`} {
		a := s.send(t, request{key: key})
		require.Equal(t, http.StatusBadRequest, a.Status, "%q", key)
		require.Equal(t, "key-invalid", a.Problem(), "%q", key)
	}
	twice := s.send(t, request{key: "-", header: http.Header{httpidem.KeyHeader: {`"abc"`, `"abc"`}}})
	require.Equal(t, "key-invalid", twice.Problem())
	require.EqualValues(t, 2, s.runs.Load())
}

// Whatever a client sends, it is refused, or one value that both spellings of it lead to.
func FuzzKey(f *testing.F) {
	for _, seed := range []string{`"a"`, `a`, `"a\"b\\"`, `"a";p=1`, `a,b`, `""`, "\x00", `"é"`, ` "a" `, `"a`, `?1`, `:YQ==:`} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, field string) {
		value, problem := seen(t, []string{field})
		if problem != "" {
			require.Equal(t, "key-invalid", problem)
			_, problem = seen(t, []string{field}, httpidem.WithStrictKey())
			require.Equal(t, "key-invalid", problem) // strict takes nothing more
			return
		}
		require.NotEmpty(t, strings.TrimSpace(value))
		require.LessOrEqual(t, len(value), pgstore.MaxKeyComponentBytes)
		require.False(t, strings.ContainsFunc(value, func(r rune) bool { return r < ' ' || r > '~' }))
		quoted, err := httpsfv.Marshal(httpsfv.NewItem(value))
		require.NoError(t, err)
		for _, opts := range [][]httpidem.Option{nil, {httpidem.WithStrictKey()}} {
			again, problem := seen(t, []string{quoted}, opts...)
			require.Empty(t, problem)
			require.Equal(t, value, again)
		}
	})
}
