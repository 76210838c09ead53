package pgstore_test

import (
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/archlab/idempotency/internal/pgtest"
	"github.com/archlab/idempotency/migrations"
	"github.com/archlab/idempotency/pgstore"
)

// hotDatabase is a fixture in a database of its own: in a shared one, other tests' open transactions keep old versions of rows
// on their pages, whoever's rows they are.
func hotDatabase(t *testing.T, opts ...pgtest.DatabaseOption) *fixture {
	t.Helper()
	pool, err := pgxpool.New(t.Context(), pgtest.Database(t, opts...))
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	f := &fixture{Pool: pool, Schema: pgstore.SchemaDefault}
	_, err = migrations.Up(t.Context(), pool, migrations.WithSchema(f.Schema))
	require.NoError(t, err)
	f.Store = f.NewStore(t, pool, lease, retention)
	return f
}

// hotUpdates runs a call inside the transaction and counts its updates of the fixture's table, and those of them that wrote no
// index entry. The session's counters still hold what earlier transactions of the session did, so the difference counts.
func hotUpdates(t *testing.T, f *fixture, tx pgx.Tx, call func()) (all, hot int) {
	t.Helper()
	count := func() (all, hot int) {
		require.NoError(t, tx.QueryRow(t.Context(), `SELECT pg_stat_get_xact_tuples_updated($1::text::regclass),
			pg_stat_get_xact_tuples_hot_updated($1::text::regclass)`, recordTable(f)).Scan(&all, &hot))
		return all, hot
	}
	allBefore, hotBefore := count()
	call()
	all, hot = count()
	return all - allBefore, hot - hotBefore
}

// One operation after another, so that pages fill up as they do in service: rows of completed operations stay, and the next
// ones come behind them.
func TestEndingAnAttemptWritesNoIndexEntry(t *testing.T) {
	t.Parallel()
	const operations = 200 // fewer than autovacuum takes notice of
	type ending struct {
		name string
		end  func(t *testing.T, store *pgstore.Store, k pgstore.Key, attempt uint64)
	}
	endings := []ending{
		{"failed", func(t *testing.T, store *pgstore.Store, k pgstore.Key, attempt uint64) {
			t.Helper()
			require.NoError(t, store.Fail(t.Context(), k, fingerprint, attempt, false))
		}},
		{"retryable", func(t *testing.T, store *pgstore.Store, k pgstore.Key, attempt uint64) {
			t.Helper()
			require.NoError(t, store.Fail(t.Context(), k, fingerprint, attempt, true))
		}},
	}
	for _, size := range []int{0, 200, 1024, 8192} { // the last is stored outside the page
		response := string(bytesRandom(t, size))
		endings = append(endings, ending{
			fmt.Sprintf("done with %d bytes", size),
			func(t *testing.T, store *pgstore.Store, k pgstore.Key, attempt uint64) {
				t.Helper()
				require.NoError(t, store.Complete(t.Context(), k, fingerprint, attempt, response))
			},
		})
	}
	for _, e := range endings {
		t.Run(e.name, func(t *testing.T) {
			t.Parallel()
			f := hotDatabase(t)
			var hot int
			for n := range operations {
				k := recordKey(fmt.Sprintf("operation %d", n))
				record, _, err := f.Begin(t.Context(), k, fingerprint)
				require.NoError(t, err)
				tx := directedTx(t, f.Pool)
				all, hotNow := hotUpdates(t, f, tx, func() { e.end(t, f.WithTx(tx), k, record.Attempt) })
				require.Equal(t, 1, all)
				hot += hotNow
				require.NoError(t, tx.Commit(t.Context()))
			}
			require.Equal(t, operations, hot)
		})
	}
}

// The indexes of a table whose operations were completed are as large as those of one whose operations were only begun.
func TestIndexesDoNotGrowByCompletions(t *testing.T) {
	t.Parallel()
	const operations = 1000
	var sizes []int64
	for _, complete := range []bool{false, true} {
		f := hotDatabase(t)
		recordExec(t, f, `ALTER TABLE %s SET (autovacuum_enabled = off)`)
		for n := range operations {
			k := recordKey(fmt.Sprintf("operation %d", n))
			record, _, err := f.Begin(t.Context(), k, fingerprint)
			require.NoError(t, err)
			if complete {
				require.NoError(t, f.Complete(t.Context(), k, fingerprint, record.Attempt, recordResponse))
			}
		}
		sizes = append(sizes, recordScalar[int64](t, f, `SELECT pg_indexes_size(min(tableoid::bigint)::oid) FROM %s`))
	}
	require.Positive(t, sizes[0])
	require.Equal(t, sizes[0], sizes[1])
}

// Extend moves purge_after along, which is indexed. That is its price for a lapsed lease that is remembered for a whole
// retention; this holds the fact that the documents state.
func TestExtendWritesAnIndexEntry(t *testing.T) {
	t.Parallel()
	f := setup(t)
	attempt := recordPut(t, f, key, pgstore.StateInProgress)
	tx := directedTx(t, f.Pool)
	all, hot := hotUpdates(t, f, tx, func() {
		_, err := f.WithTx(tx).Extend(t.Context(), key, fingerprint, attempt)
		require.NoError(t, err)
	})
	require.Equal(t, 1, all)
	require.Zero(t, hot)
	require.NoError(t, tx.Commit(t.Context()))
}

// An outcome that must be kept for longer than Begin set aside moves purge_after too.
func TestOutcomeWithALongerRetentionWritesAnIndexEntry(t *testing.T) {
	t.Parallel()
	f := setup(t)
	attempt := recordPut(t, f, key, pgstore.StateInProgress)
	tx := directedTx(t, f.Pool)
	all, hot := hotUpdates(t, f, tx, func() {
		require.NoError(t, f.NewStore(t, tx, lease, 2*retention).Complete(t.Context(), key, fingerprint, attempt, ""))
	})
	require.Equal(t, 1, all)
	require.Zero(t, hot)
	require.NoError(t, tx.Commit(t.Context()))
}
