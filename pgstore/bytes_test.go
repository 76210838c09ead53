package pgstore_test

import (
	"math/rand/v2"
	"strconv"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/archlab/idempotency/pgstore"
)

// bytesRandom returns n bytes that no compression makes smaller. They are the same in every run.
func bytesRandom(tb testing.TB, n int) []byte {
	tb.Helper()
	random := make([]byte, n)
	_, err := rand.NewChaCha8([32]byte{}).Read(random)
	require.NoError(tb, err)
	return random
}

// bytesSame compares what may be megabytes, which nobody wants printed.
func bytesSame(t *testing.T, want, got string) {
	t.Helper()
	if want != got {
		t.Fatalf("%d bytes became %d others", len(want), len(got))
	}
}

// bytesAll holds every byte value once.
func bytesAll() string {
	var all [256]byte
	for i := range all {
		all[i] = byte(i)
	}
	return string(all[:])
}

func TestResponsesComeBackByteForByte(t *testing.T) {
	t.Parallel()
	responses := map[string]string{
		"empty":                  "",
		"NUL":                    "\x00",
		"every byte":             bytesAll(),
		"invalid UTF-8":          "\xff\xfe\xed\xa0\x80",
		"what JSON would change": `{"a":1.0,"a":2,  "b":"\u0000", "n":9007199254740993}`,
		"bytea escapes":          `\x00\\000\'"$1::text%s`,
		"line ends":              "a\r\nb\nc\r",
		"70 KB of noise":         string(bytesRandom(t, 70_000)),
		"a megabyte of noise":    string(bytesRandom(t, 1<<20)),
		"a megabyte of zeros":    strings.Repeat("\x00", 1<<20),
	}
	for _, mode := range recordModes {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			f := setup(t)
			store := f.NewStore(t, recordConn(t, mode), lease, retention)
			for name, response := range responses {
				k := recordKey(name)
				record, created, err := store.Begin(t.Context(), k, fingerprint)
				require.NoError(t, err)
				require.True(t, created)
				require.NoError(t, store.Complete(t.Context(), k, fingerprint, record.Attempt, response))
				require.NoError(t, store.Complete(t.Context(), k, fingerprint, record.Attempt, response), "a repeat")
				for range 2 {
					record, created, err = store.Begin(t.Context(), k, fingerprint)
					require.NoError(t, err)
					require.False(t, created)
					require.Equal(t, pgstore.StateDone, record.State)
					bytesSame(t, response, record.Response)
				}
				got, live, err := store.Get(t.Context(), k)
				require.NoError(t, err)
				require.True(t, live)
				bytesSame(t, response, got.Response)
			}
		})
	}
}

func TestFingerprintsAreComparedByteForByte(t *testing.T) {
	t.Parallel()
	fingerprints := []string{bytesAll(), bytesAll()[1:], string(bytesRandom(t, 1024)), string(bytesRandom(t, 1023)), "a", "A", "a ", "a\x00"}
	for i := range 256 {
		fingerprints = append(fingerprints, string([]byte{byte(i), 'x'}))
	}
	for _, mode := range recordModes {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			f := setup(t)
			store := f.NewStore(t, recordConn(t, mode), lease, retention)
			for i, own := range fingerprints {
				k := recordKey(strconv.Itoa(i))
				record, created, err := store.Begin(t.Context(), k, own)
				require.NoError(t, err)
				require.True(t, created)
				require.Equal(t, own, record.Fingerprint)
				got, _, err := store.Get(t.Context(), k)
				require.NoError(t, err)
				require.Equal(t, own, got.Fingerprint)
				_, _, err = store.Begin(t.Context(), k, own)
				require.ErrorIs(t, err, pgstore.ErrInProgress)
				other := fingerprints[(i+1)%len(fingerprints)]
				_, _, err = store.Begin(t.Context(), k, other)
				require.ErrorIs(t, err, pgstore.ErrConflict)
				require.ErrorIs(t, store.Complete(t.Context(), k, other, record.Attempt, ""), pgstore.ErrConflict)
				require.NoError(t, store.Complete(t.Context(), k, own, record.Attempt, ""))
			}
		})
	}
}

// An empty response is a response: only what has none is stored without one.
func TestEmptyResponseIsNotAbsent(t *testing.T) {
	t.Parallel()
	f := setup(t, pgstore.WithMaxResponse(0))
	stored := func(k pgstore.Key) bool {
		return recordScalar[bool](t, f, `SELECT response IS NOT NULL FROM %s WHERE key = $1`, k.Value)
	}
	for _, state := range recordStates {
		k := recordKey(string(state))
		record, _, err := f.Begin(t.Context(), k, fingerprint)
		require.NoError(t, err)
		switch state {
		case pgstore.StateInProgress:
		case pgstore.StateDone:
			require.NoError(t, f.Complete(t.Context(), k, fingerprint, record.Attempt, ""))
			require.ErrorIs(t, f.Complete(t.Context(), k, fingerprint, record.Attempt, "x"), pgstore.ErrResponseTooLarge)
		case pgstore.StateFailed, pgstore.StateRetryable:
			require.NoError(t, f.Fail(t.Context(), k, fingerprint, record.Attempt, state == pgstore.StateRetryable))
		}
		require.Equal(t, state == pgstore.StateDone, stored(k), "%s", state)
		got, live, err := f.Get(t.Context(), k)
		require.NoError(t, err)
		require.True(t, live)
		require.Equal(t, state, got.State)
		require.Empty(t, got.Response)
	}
}

func TestResponseLimitIsExact(t *testing.T) {
	t.Parallel()
	f := setup(t)
	response := string(bytesRandom(t, pgstore.MaxResponseDefault+1))
	attempt := recordPut(t, f, key, pgstore.StateInProgress)
	require.ErrorIs(t, f.Complete(t.Context(), key, fingerprint, attempt, response), pgstore.ErrResponseTooLarge)
	response = response[:pgstore.MaxResponseDefault]
	require.NoError(t, f.Complete(t.Context(), key, fingerprint, attempt, response))
	require.NoError(t, f.Complete(t.Context(), key, fingerprint, attempt, response), "a repeat")
	require.ErrorIs(t, f.Complete(t.Context(), key, fingerprint, attempt, response[1:]+"x"), pgstore.ErrStaleAttempt)

	// What is stored comes back whole, also through a store with a smaller limit.
	for _, store := range []*pgstore.Store{f.Store, f.NewStore(t, f.Pool, lease, retention, pgstore.WithMaxResponse(1))} {
		record, created, err := store.Begin(t.Context(), key, fingerprint)
		require.NoError(t, err)
		require.False(t, created)
		bytesSame(t, response, record.Response)
	}

	larger := f.NewStore(t, f.Pool, lease, retention, pgstore.WithMaxResponse(pgstore.MaxResponseDefault+1))
	k := recordKey("larger")
	attempt = recordPut(t, f, k, pgstore.StateInProgress)
	require.NoError(t, larger.Complete(t.Context(), k, fingerprint, attempt, response+"x"))
	record, _, err := f.Get(t.Context(), k)
	require.NoError(t, err)
	bytesSame(t, response+"x", record.Response)
}

// What PostgreSQL would refuse as text, and abort the transaction for, never reaches it.
func TestInvalidBytesLeaveTheTransactionUsable(t *testing.T) {
	t.Parallel()
	for _, mode := range recordModes {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			f := setup(t)
			tx, err := recordConn(t, mode).Begin(t.Context())
			require.NoError(t, err)
			store := f.WithTx(tx)
			record, _, err := store.Begin(t.Context(), key, "\x00\xff")
			require.NoError(t, err)
			for _, invalid := range []string{"a\x00b", "\xff", "\xed\xa0\x80", strings.Repeat("x", 513)} {
				for _, k := range []pgstore.Key{
					{Tenant: invalid, Operation: "o", Value: "v"},
					{Tenant: "t", Operation: invalid, Value: "v"},
					{Tenant: "t", Operation: "o", Value: invalid},
				} {
					for call, do := range keyCalls {
						require.ErrorIs(t, do(t.Context(), store, k), pgstore.ErrKeyInvalid, call)
					}
				}
			}
			require.ErrorIs(t, store.Complete(t.Context(), key, "", record.Attempt, ""), pgstore.ErrFingerprintInvalid)
			require.ErrorIs(t, store.Complete(t.Context(), key, "\x00\xff", record.Attempt, strings.Repeat("x", 8<<20+1)),
				pgstore.ErrResponseTooLarge)
			require.NoError(t, store.Complete(t.Context(), key, "\x00\xff", record.Attempt, "\x00\xff"))
			require.NoError(t, tx.Commit(t.Context()))
			got, live, err := f.Get(t.Context(), key)
			require.NoError(t, err)
			require.True(t, live)
			require.Equal(t, "\x00\xff", got.Response)
		})
	}
}

// bytesEightMiB is the size of the responses that the benchmarks move.
const bytesEightMiB = 8 << 20

func BenchmarkComplete8MiB(b *testing.B) {
	f := setup(b)
	store := f.NewStore(b, recordConn(b, pgx.QueryExecModeCacheStatement), lease, retention)
	response := string(bytesRandom(b, bytesEightMiB))
	b.SetBytes(bytesEightMiB)
	b.ReportAllocs()
	n := 0
	for b.Loop() {
		b.StopTimer()
		n++
		k := recordKey(strconv.Itoa(n))
		record, _, err := store.Begin(b.Context(), k, fingerprint)
		require.NoError(b, err)
		b.StartTimer()
		require.NoError(b, store.Complete(b.Context(), k, fingerprint, record.Attempt, response))
	}
}

func BenchmarkReplay8MiB(b *testing.B) {
	f := setup(b)
	store := f.NewStore(b, recordConn(b, pgx.QueryExecModeCacheStatement), lease, retention)
	record, _, err := store.Begin(b.Context(), key, fingerprint)
	require.NoError(b, err)
	require.NoError(b, store.Complete(b.Context(), key, fingerprint, record.Attempt, string(bytesRandom(b, bytesEightMiB))))
	b.SetBytes(bytesEightMiB)
	b.ReportAllocs()
	for b.Loop() {
		record, created, err := store.Begin(b.Context(), key, fingerprint)
		require.NoError(b, err)
		require.False(b, created)
		require.Len(b, record.Response, bytesEightMiB)
	}
}
