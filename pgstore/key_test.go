package pgstore_test

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/archlab/idempotency/internal/pgtest"
	"github.com/archlab/idempotency/migrations"
	"github.com/archlab/idempotency/pgstore"
)

// keyNoSQL is a handle for calls that must not send anything: it counts what they send and refuses it.
type keyNoSQL struct{ sent int }

var errKeySQLSent = errors.New("SQL was sent")

func (db *keyNoSQL) Exec(context.Context, string, ...any) (pgconn.CommandTag, error) {
	db.sent++
	return pgconn.CommandTag{}, errKeySQLSent
}

func (db *keyNoSQL) Query(context.Context, string, ...any) (pgx.Rows, error) {
	db.sent++
	return nil, errKeySQLSent
}

// keyStore returns a store that has no database.
func keyStore(tb testing.TB, opts ...pgstore.Option) (*pgstore.Store, *keyNoSQL) {
	tb.Helper()
	db := &keyNoSQL{}
	store, err := pgstore.New(db, lease, retention, opts...)
	require.NoError(tb, err)
	return store, db
}

// keyCalls are all calls that take a key.
var keyCalls = map[string]func(ctx context.Context, s *pgstore.Store, k pgstore.Key) error{
	"begin": func(ctx context.Context, s *pgstore.Store, k pgstore.Key) error {
		_, _, err := s.Begin(ctx, k, fingerprint)
		return err
	},
	"complete": func(ctx context.Context, s *pgstore.Store, k pgstore.Key) error {
		return s.Complete(ctx, k, fingerprint, 1, recordResponse)
	},
	"fail": func(ctx context.Context, s *pgstore.Store, k pgstore.Key) error {
		return s.Fail(ctx, k, fingerprint, 1, true)
	},
	"extend": func(ctx context.Context, s *pgstore.Store, k pgstore.Key) error {
		_, err := s.Extend(ctx, k, fingerprint, 1)
		return err
	},
	"get": func(ctx context.Context, s *pgstore.Store, k pgstore.Key) error {
		_, _, err := s.Get(ctx, k)
		return err
	},
}

// keyWant is the documented rule.
func keyWant(k pgstore.Key) error {
	if slices.Contains([]string{k.Tenant, k.Operation, k.Value}, "") {
		return pgstore.ErrKeyEmpty
	}
	for _, component := range []string{k.Tenant, k.Operation, k.Value} {
		if len(component) > 512 || !utf8.ValidString(component) || strings.ContainsRune(component, 0) {
			return pgstore.ErrKeyInvalid
		}
	}
	return nil
}

func TestInvalidKeysAreRefusedBeforeAnySQL(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("é", 256) // 512 bytes
	for name, test := range map[string]struct {
		text string
		want error
		says string
	}{
		"empty":                {"", pgstore.ErrKeyEmpty, ""},
		"one byte too long":    {long + "x", pgstore.ErrKeyInvalid, " is 513 bytes long, the limit is 512"},
		"a megabyte too long":  {strings.Repeat("x", 1<<20), pgstore.ErrKeyInvalid, " is 1048576 bytes long, the limit is 512"},
		"invalid UTF-8":        {"\xff", pgstore.ErrKeyInvalid, " is not valid UTF-8"},
		"a surrogate":          {"\xed\xa0\x80", pgstore.ErrKeyInvalid, " is not valid UTF-8"},
		"an overlong NUL":      {"\xc0\x80", pgstore.ErrKeyInvalid, " is not valid UTF-8"},
		"a code point too far": {"\xf4\x90\x80\x80", pgstore.ErrKeyInvalid, " is not valid UTF-8"},
		"cut in a character":   {long[:511], pgstore.ErrKeyInvalid, " is not valid UTF-8"},
		"NUL":                  {"\x00", pgstore.ErrKeyInvalid, " holds a NUL byte"},
		"NUL inside":           {"a\x00b", pgstore.ErrKeyInvalid, " holds a NUL byte"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			store, db := keyStore(t)
			for component, k := range map[string]pgstore.Key{
				"tenant":    {Tenant: test.text, Operation: "o", Value: "v"},
				"operation": {Tenant: "t", Operation: test.text, Value: "v"},
				"value":     {Tenant: "t", Operation: "o", Value: test.text},
			} {
				for call, do := range keyCalls {
					err := do(t.Context(), store, k)
					require.ErrorIs(t, err, test.want)
					text := "idempotency: " + call + " " + k.String() + ": " + test.want.Error()
					if test.says != "" {
						text += ": the " + component + test.says
					}
					require.EqualError(t, err, text)
					require.Less(t, len(text), 2000, "the key floods the log")
				}
			}
			require.Zero(t, db.sent)
		})
	}
}

func TestEmptyComponentIsNamedBeforeAnInvalidOne(t *testing.T) {
	t.Parallel()
	store, _ := keyStore(t)
	_, _, err := store.Begin(t.Context(), pgstore.Key{Tenant: "\xff", Operation: "a\x00"}, "")
	require.ErrorIs(t, err, pgstore.ErrKeyEmpty)
	require.NotErrorIs(t, err, pgstore.ErrKeyInvalid)
}

func TestInvalidFingerprintsAreRefusedBeforeAnySQL(t *testing.T) {
	t.Parallel()
	store, db := keyStore(t)
	for fingerprint, says := range map[string]string{
		"":                              "it is empty",
		strings.Repeat("\xff", 1024+1):  "it is 1025 bytes long, the limit is 1024: use a digest of the request",
		strings.Repeat("body", 1<<18/4): "it is 262144 bytes long, the limit is 1024: use a digest of the request",
	} {
		_, _, begin := store.Begin(t.Context(), key, fingerprint)
		_, extend := store.Extend(t.Context(), key, fingerprint, 1)
		for call, err := range map[string]error{
			"begin":    begin,
			"complete": store.Complete(t.Context(), key, fingerprint, 1, ""),
			"fail":     store.Fail(t.Context(), key, fingerprint, 1, false),
			"extend":   extend,
		} {
			require.ErrorIs(t, err, pgstore.ErrFingerprintInvalid)
			require.EqualError(t, err, "idempotency: "+call+` "tenant-a"/"order.create"/"req-1001": `+
				"idempotency: invalid fingerprint: "+says)
		}
	}
	require.Zero(t, db.sent)
}

func TestLongResponseIsRefusedBeforeAnySQL(t *testing.T) {
	t.Parallel()
	for limit, response := range map[int]string{0: "x", 3: "four", pgstore.MaxResponseDefault: strings.Repeat("x", 8<<20+1)} {
		store, db := keyStore(t, pgstore.WithMaxResponse(limit))
		err := store.Complete(t.Context(), key, fingerprint, 1, response)
		require.ErrorIs(t, err, pgstore.ErrResponseTooLarge)
		require.EqualError(t, err, `idempotency: complete "tenant-a"/"order.create"/"req-1001": idempotency: response too large: `+
			"it is "+strconv.Itoa(len(response))+" bytes long, the limit is "+strconv.Itoa(limit))
		require.Zero(t, db.sent)
	}
}

func TestCallsWithAContextThatIsOverSendNothing(t *testing.T) {
	t.Parallel()
	for want, over := range map[error]func(context.Context) (context.Context, context.CancelFunc){
		context.Canceled: func(ctx context.Context) (context.Context, context.CancelFunc) {
			ctx, cancel := context.WithCancel(ctx)
			cancel()
			return ctx, cancel
		},
		context.DeadlineExceeded: func(ctx context.Context) (context.Context, context.CancelFunc) {
			return context.WithTimeout(ctx, -1)
		},
	} {
		store, db := keyStore(t)
		ctx, cancel := over(t.Context())
		defer cancel()
		for call, do := range keyCalls {
			err := do(ctx, store, key)
			require.ErrorIs(t, err, want)
			require.EqualError(t, err, "idempotency: "+call+` "tenant-a"/"order.create"/"req-1001": nothing was sent: `+want.Error())
		}
		_, err := store.Sweep(ctx, 1)
		require.EqualError(t, err, "idempotency: sweep: nothing was sent: "+want.Error())
		require.Zero(t, db.sent)
	}
}

// The longest keys that pass validation fit the index, whatever they hold: letters that compress, and bytes that do not.
func TestLongestKeysAreStored(t *testing.T) {
	t.Parallel()
	f := setup(t)
	random := bytesRandom(t, 3*256)
	var incompressible strings.Builder
	for _, b := range random {
		incompressible.WriteRune(rune(b) + 0x100) // two bytes in UTF-8
	}
	for name, texts := range map[string][3]string{
		"letters": {strings.Repeat("a", 512), strings.Repeat("b", 512), strings.Repeat("c", 512)},
		"noise":   {incompressible.String()[:512], incompressible.String()[512:1024], incompressible.String()[1024:]},
		"emoji":   {strings.Repeat("\U0001f9fe", 128), strings.Repeat("é", 256), strings.Repeat("\x01", 512)},
	} {
		k := pgstore.Key{Tenant: texts[0], Operation: texts[1], Value: texts[2]}
		require.Len(t, k.Tenant+k.Operation+k.Value, 3*pgstore.MaxKeyComponentBytes)
		record, created, err := f.Begin(t.Context(), k, fingerprint)
		require.NoError(t, err, name)
		require.True(t, created)
		require.NoError(t, f.Complete(t.Context(), k, fingerprint, record.Attempt, name))
		record, created, err = f.Begin(t.Context(), k, fingerprint)
		require.NoError(t, err)
		require.False(t, created)
		require.Equal(t, name, record.Response)
	}
}

// In a database of another language than C, and whatever a new version of its collation library thinks of hyphens: the
// columns have an order of their own, that of bytes.
func TestKeysAreComparedByteForByteUnderEveryCollation(t *testing.T) {
	t.Parallel()
	pool, err := pgxpool.New(t.Context(), pgtest.Database(t, pgtest.WithCollation()))
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	_, err = migrations.Up(t.Context(), pool)
	require.NoError(t, err)
	f := &fixture{Pool: pool, Schema: pgstore.SchemaDefault}
	f.Store = f.NewStore(t, pool, lease, retention)
	var linguistic bool
	require.NoError(t, pool.QueryRow(t.Context(), `SELECT 'a' < 'B'`).Scan(&linguistic))
	require.True(t, linguistic, "the database has the order of bytes anyway")

	values := []string{"11", "1-1", "1 1", "a", "A", "á", "a\u0301", "ss", "ß", "\u200b1\u200b1", "\ufb01", "fi"}
	attempts := map[string]uint64{}
	for _, value := range values {
		record, created, err := f.Begin(t.Context(), recordKey(value), fingerprint)
		require.NoError(t, err)
		require.True(t, created, "%q was taken for another key", value)
		attempts[value] = record.Attempt
	}
	for _, value := range values {
		require.NoError(t, f.Complete(t.Context(), recordKey(value), fingerprint, attempts[value], value))
		record, live, err := f.Get(t.Context(), recordKey(value))
		require.NoError(t, err)
		require.True(t, live)
		require.Equal(t, value, record.Response)
	}

	// The sweep that lists keys in their order lists each once.
	recordExec(t, f, `UPDATE %s SET expires_at = 'epoch', purge_after = 'epoch'`)
	sweepPoison(t, f, `OLD.key IN ('11', '1-1', 'A', 'fi')`)
	deleted, err := f.Sweep(t.Context(), 100)
	require.EqualValues(t, len(values)-4, deleted)
	require.Equal(t, 4, strings.Count(err.Error(), "stays"))
}

func TestKeyTextIsQuoted(t *testing.T) {
	t.Parallel()
	for want, k := range map[string]pgstore.Key{
		`"tenant-a"/"order.create"/"req-1001"`:          key,
		`""/""/""`:                                      {},
		`"a\"/\"b"/"c\\"/"d\n2026 FAKE LINE"`:           {Tenant: `a"/"b`, Operation: `c\`, Value: "d\n2026 FAKE LINE"},
		`"é"/"\u202e"/"\xff\x00"`:                       {Tenant: "é", Operation: "\u202e", Value: "\xff\x00"},
		`"t"/"o"/"` + strings.Repeat("v", 512) + `"`:    {Tenant: "t", Operation: "o", Value: strings.Repeat("v", 512)},
		`"t"/"o"/"` + strings.Repeat("v", 512) + `"...`: {Tenant: "t", Operation: "o", Value: strings.Repeat("v", 513)},
	} {
		require.Equal(t, want, k.String())
	}
}

// FuzzKeyValidation checks for any two keys: that every call refuses exactly the keys that the rule refuses, with its
// sentinel and before any SQL; and that the text of a key is one line without control characters that gives the
// components back, so that it is another text for another key.
func FuzzKeyValidation(f *testing.F) {
	long := strings.Repeat("x", 512)
	for _, seed := range [][6]string{
		{"tenant-a", "order.create", "req-1001", "tenant-b", "order.create", "req-1001"},
		{"a/b", "c", "d", "a", "b/c", "d"},
		{`a"/"b`, "c", "d", "a", `b"/"c`, "d"},
		{"", "", "", "\x00", "\xff", "\xed\xa0\x80"},
		{"t", "o", "\ufffd", "t", "o", "\xff"},
		{`\xff`, "o", "v", "\xff", "o", "v"},
		{"t", "o", "line\nline\r\u2028\u0085\t\x7f\u202e\ufeff", "t", "o", "é e\u0301"},
		{long, long, long, long + "x", long + "y", long[1:] + "é"},
		{long + "x", "o", "v", long, "o", "v"},
		{"...", `"...`, `..."`, "/", `"/"`, `\`},
	} {
		f.Add(seed[0], seed[1], seed[2], seed[3], seed[4], seed[5])
	}
	f.Fuzz(func(t *testing.T, a, b, c, x, y, z string) {
		one, other := pgstore.Key{Tenant: a, Operation: b, Value: c}, pgstore.Key{Tenant: x, Operation: y, Value: z}
		keyFuzzOne(t, one)
		keyFuzzOne(t, other)
		if one != other && keyWant(one) == nil && keyWant(other) == nil {
			require.NotEqual(t, one.String(), other.String())
		}
	})
}

func keyFuzzOne(t *testing.T, k pgstore.Key) {
	t.Helper()
	store, db := keyStore(t)
	want := keyWant(k)
	for call, do := range keyCalls {
		db.sent = 0
		err := do(t.Context(), store, k)
		if want == nil {
			require.ErrorIs(t, err, errKeySQLSent, call)
			require.Equal(t, 1, db.sent)
			continue
		}
		require.ErrorIs(t, err, want, call)
		require.Zero(t, db.sent)
		require.True(t, strings.HasPrefix(err.Error(), "idempotency: "+call+" "+k.String()+": "+want.Error()), "%v", err)
		require.False(t, strings.ContainsFunc(err.Error(), unicode.IsControl))
	}

	text := k.String()
	require.True(t, utf8.ValidString(text))
	require.Negative(t, strings.IndexFunc(text, func(r rune) bool {
		return unicode.IsControl(r) || unicode.In(r, unicode.Cf, unicode.Zl, unicode.Zp)
	}))
	rest := text
	for i, component := range []string{k.Tenant, k.Operation, k.Value} {
		if i > 0 {
			require.True(t, strings.HasPrefix(rest, "/"), text)
			rest = rest[1:]
		}
		quoted, err := strconv.QuotedPrefix(rest)
		require.NoError(t, err, text)
		rest = rest[len(quoted):]
		unquoted, err := strconv.Unquote(quoted)
		require.NoError(t, err)
		if len(component) > 512 {
			require.True(t, strings.HasPrefix(rest, "..."), text)
			rest = rest[3:]
			component = component[:512]
		}
		require.Equal(t, component, unquoted)
	}
	require.Empty(t, rest)
}
