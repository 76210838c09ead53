package pgstore_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/archlab/idempotency/pgstore"
)

// BenchmarkFillfactor measures Begin + Complete on tables that leave different shares of a page free: how many of the
// completions are HOT, how many bytes of table and indexes a row takes in the end, and how many bytes of WAL were written for it,
// by this and by whatever else the server does: leave it alone. Some keys are in progress at a time, begun
// one after the other and completed in the same order: what a page holds when the first of its rows is completed decides.
// The rows stay, as they do in production for the retention.
func BenchmarkFillfactor(b *testing.B) {
	for _, inProgress := range []int{1, 16, 64} {
		for _, size := range []int{0, 200, 1000, 2000} {
			for _, fillfactor := range []int{50, 60, 70, 80, 90, 100} {
				b.Run(fmt.Sprintf("in_progress=%d/response=%d/fillfactor=%d", inProgress, size, fillfactor), func(b *testing.B) {
					benchmarkFillfactor(b, inProgress, string(bytesRandom(b, size)), fillfactor)
				})
			}
		}
	}
}

func benchmarkFillfactor(b *testing.B, inProgress int, response string, fillfactor int) {
	b.Helper()
	f := setup(b)
	recordExec(b, f, fmt.Sprintf(`ALTER TABLE %%s SET (fillfactor = %d, autovacuum_enabled = off)`, fillfactor))
	recordExec(b, f, `TRUNCATE %s`)          // the pages that the migration leaves would count
	conn, err := f.Pool.Acquire(b.Context()) // one connection, so that its counters are all there are
	require.NoError(b, err)
	defer conn.Release()
	store := f.NewStore(b, conn, lease, retention)
	var from string
	require.NoError(b, conn.QueryRow(b.Context(), `SELECT pg_current_wal_insert_lsn()::text`).Scan(&from))
	attempts := make([]uint64, 0, inProgress)
	name := func(n int) pgstore.Key {
		return pgstore.Key{Tenant: "acct_7", Operation: "payment.create", Value: fmt.Sprintf("%036d", n)}
	}
	b.ResetTimer()
	for n := range b.N {
		record, _, err := store.Begin(b.Context(), name(n), benchmarkFingerprint)
		if err != nil {
			b.Fatal(err)
		}
		attempts = append(attempts, record.Attempt)
		if len(attempts) < inProgress && n < b.N-1 {
			continue
		}
		for i, attempt := range attempts {
			k := name(n - len(attempts) + 1 + i)
			if err := store.Complete(b.Context(), k, benchmarkFingerprint, attempt, response); err != nil {
				b.Fatal(err)
			}
		}
		attempts = attempts[:0]
	}
	b.StopTimer()
	var updated, hot, bytes, wal float64
	_, err = conn.Exec(b.Context(), `SELECT pg_stat_force_next_flush()`)
	require.NoError(b, err)
	require.NoError(b, conn.QueryRow(b.Context(), `SELECT n_tup_upd, n_tup_hot_upd, pg_total_relation_size(relid),
	pg_current_wal_insert_lsn() - $2::text::pg_lsn
FROM pg_stat_user_tables WHERE relid = $1::text::regclass`, recordTable(f), from).Scan(&updated, &hot, &bytes, &wal))
	b.ReportMetric(100*hot/max(updated, 1), "%HOT")
	b.ReportMetric(bytes/float64(b.N), "table-B/op")
	b.ReportMetric(wal/float64(b.N), "WAL-B/op")
}

// benchmarkFingerprint has the length of a SHA-256.
var benchmarkFingerprint = strings.Repeat("f", 32)

// BenchmarkBareLoop sends the two statements of Begin and Complete by pgx alone, on one connection: what the store itself costs
// is the difference to BenchmarkOneConnection.
func BenchmarkBareLoop(b *testing.B) {
	f := setup(b)
	conn, err := f.Pool.Acquire(b.Context())
	require.NoError(b, err)
	defer conn.Release()
	response, fingerprint := bytesRandom(b, 200), []byte(benchmarkFingerprint)
	statements := f.Statements()
	var (
		created, same bool
		state         string
		stored        []byte
		attempt       int64
		abandoned     *int64
		expires, left int64
	)
	b.ReportAllocs()
	b.ResetTimer()
	for n := range b.N {
		value := fmt.Sprintf("%036d", n)
		err := conn.QueryRow(b.Context(), statements.Begin, "acct_7", "payment.create", value, fingerprint, int64(n), lease, retention).
			Scan(&created, &same, &state, &stored, &attempt, &abandoned, &expires, &left)
		if err == nil {
			_, err = conn.Exec(b.Context(), statements.Complete, "acct_7", "payment.create", value, fingerprint, attempt, response, retention)
		}
		if err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkOneConnection is BenchmarkBareLoop through the store.
func BenchmarkOneConnection(b *testing.B) {
	f := setup(b)
	conn, err := f.Pool.Acquire(b.Context())
	require.NoError(b, err)
	defer conn.Release()
	store := f.NewStore(b, conn, lease, retention)
	response := string(bytesRandom(b, 200))
	b.ReportAllocs()
	b.ResetTimer()
	for n := range b.N {
		k := pgstore.Key{Tenant: "acct_7", Operation: "payment.create", Value: fmt.Sprintf("%036d", n)}
		record, _, err := store.Begin(b.Context(), k, benchmarkFingerprint)
		if err == nil {
			err = store.Complete(b.Context(), k, benchmarkFingerprint, record.Attempt, response)
		}
		if err != nil {
			b.Fatal(err)
		}
	}
}
