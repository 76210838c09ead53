package pgstore_test

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/archlab/idempotency/pgstore"
)

// compatWhole drives every call once on keys of its own, and returns the record that it left behind.
func compatWhole(t *testing.T, store *pgstore.Store, value string) {
	t.Helper()
	k := pgstore.Key{Tenant: "tenant " + value, Operation: "o", Value: value}
	record, created, err := store.Begin(t.Context(), k, fingerprint)
	require.NoError(t, err)
	require.True(t, created)
	_, _, err = store.Begin(t.Context(), k, fingerprint)
	require.ErrorIs(t, err, pgstore.ErrInProgress)
	_, _, err = store.Begin(t.Context(), k, "other")
	require.ErrorIs(t, err, pgstore.ErrConflict)
	_, err = store.Extend(t.Context(), k, fingerprint, record.Attempt)
	require.NoError(t, err)
	require.NoError(t, store.Fail(t.Context(), k, fingerprint, record.Attempt, true))
	record, created, err = store.Begin(t.Context(), k, fingerprint)
	require.NoError(t, err)
	require.True(t, created)
	require.NoError(t, store.Complete(t.Context(), k, fingerprint, record.Attempt, "\x00response\xff"))
	require.ErrorIs(t, store.Fail(t.Context(), k, fingerprint, record.Attempt, false), pgstore.ErrStaleAttempt)
	record, created, err = store.Begin(t.Context(), k, fingerprint)
	require.NoError(t, err)
	require.False(t, created)
	require.Equal(t, "\x00response\xff", record.Response)
	got, live, err := store.Get(t.Context(), k)
	require.NoError(t, err)
	require.True(t, live)
	require.Equal(t, record.Attempt, got.Attempt)
}

// A version of the library that is running does not mind what a later migration adds, whatever its connections have prepared, and
// the later version reads what it wrote.
func TestRunningStoreSurvivesNewColumns(t *testing.T) {
	t.Parallel()
	for _, mode := range recordModes {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			f := setup(t)
			store := f.NewStore(t, recordConn(t, mode), lease, retention)
			for n := range 7 { // beyond the runs after which PostgreSQL settles on a plan
				compatWhole(t, store, fmt.Sprintf("before %d", n))
			}
			_, err := store.Sweep(t.Context(), 10)
			require.NoError(t, err)
			for i, column := range []string{"added_null text", "added_default int NOT NULL DEFAULT 7", "added_volatile timestamptz NOT NULL DEFAULT clock_timestamp()"} {
				recordExec(t, f, `ALTER TABLE %s ADD COLUMN `+column)
				compatWhole(t, store, fmt.Sprintf("after %d", i))
				_, err := store.Sweep(t.Context(), 10)
				require.NoError(t, err)
				_, created, err := store.Begin(t.Context(), pgstore.Key{Tenant: "tenant before 0", Operation: "o", Value: "before 0"}, fingerprint)
				require.NoError(t, err)
				require.False(t, created, "what was written before is still there")
			}
		})
	}
}

// compatPartitioned puts a table that is hash-partitioned by tenant in the place of the plain one.
func compatPartitioned(t *testing.T, f *fixture, partitions int) {
	t.Helper()
	table := recordTable(f)
	var b strings.Builder
	fmt.Fprintf(&b, "CREATE TABLE %s (LIKE %s INCLUDING DEFAULTS INCLUDING CONSTRAINTS, PRIMARY KEY (tenant, operation, key)) PARTITION BY HASH (tenant);\n",
		pgx.Identifier{f.Schema, "partitioned"}.Sanitize(), table)
	for n := range partitions {
		fmt.Fprintf(&b, "CREATE TABLE %s PARTITION OF %s FOR VALUES WITH (MODULUS %d, REMAINDER %d);\n",
			pgx.Identifier{f.Schema, fmt.Sprintf("part_%d", n)}.Sanitize(), pgx.Identifier{f.Schema, "partitioned"}.Sanitize(), partitions, n)
	}
	fmt.Fprintf(&b, "CREATE INDEX ON %s (purge_after); DROP TABLE %s; ALTER TABLE %s RENAME TO idempotency_keys;",
		pgx.Identifier{f.Schema, "partitioned"}.Sanitize(), table, pgx.Identifier{f.Schema, "partitioned"}.Sanitize())
	_, err := f.Pool.Exec(t.Context(), b.String())
	require.NoError(t, err)
}

// The table may be partitioned by tenant, as its primary key allows.
func TestTableMayBePartitionedByTenant(t *testing.T) {
	t.Parallel()
	now := newClock()
	f := setup(t, pgstore.WithClock(now.Now))
	compatPartitioned(t, f, 4)
	const tenants = 24
	for n := range tenants {
		compatWhole(t, f.Store, strconv.Itoa(n))
	}
	require.Greater(t, recordScalar[int](t, f, `SELECT count(DISTINCT tableoid) FROM %s`), 1)

	now.Advance(lease + retention + time.Hour)
	compatWhole(t, f.Store, "live")
	var swept int64
	for swept < tenants {
		n, err := f.Sweep(t.Context(), 5)
		require.NoError(t, err)
		require.LessOrEqual(t, n, int64(5), "not more than the limit, though rows of several partitions share a position")
		require.Positive(t, n)
		swept += n
	}
	require.EqualValues(t, tenants, swept)
	require.Equal(t, 1, recordScalar[int](t, f, `SELECT count(*) FROM %s`), "the live one")
}

// The same inside a transaction, which has to end well however its statements were prepared.
func TestNewColumnsDoNotDisturbATransaction(t *testing.T) {
	t.Parallel()
	for _, mode := range recordModes {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			f := setup(t)
			conn := recordConn(t, mode)
			for n := range 7 {
				compatWhole(t, f.NewStore(t, conn, lease, retention), fmt.Sprintf("before %d", n))
			}
			recordExec(t, f, `ALTER TABLE %s ADD COLUMN priority int NOT NULL DEFAULT 7,
				ADD COLUMN size int GENERATED ALWAYS AS (length(response)) STORED`)
			tx, err := conn.Begin(t.Context())
			require.NoError(t, err)
			compatWhole(t, f.WithTx(tx), "after")
			require.NoError(t, tx.Commit(t.Context()))
			require.Equal(t, 8, recordScalar[int](t, f, `SELECT count(*) FROM %s WHERE size > 0`))
		})
	}
}

// compatPartitions is how many partitions the tests of single positions make.
const compatPartitions = 4

// compatTenants returns one tenant for each partition.
func compatTenants(t *testing.T, f *fixture) []string {
	t.Helper()
	rows, err := f.Pool.Query(t.Context(), fmt.Sprintf(`SELECT DISTINCT ON (partition) tenant
		FROM (SELECT 'tenant ' || n AS tenant FROM generate_series(1, 200) n) AS candidates,
			LATERAL (SELECT r FROM generate_series(0, %[1]d - 1) r
				WHERE satisfies_hash_partition($1::text::regclass, %[1]d, r, tenant COLLATE "C")) AS p (partition)
		ORDER BY partition`, compatPartitions), recordTable(f))
	require.NoError(t, err)
	tenants, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	require.Len(t, tenants, compatPartitions)
	return tenants
}

// compatRow puts the first row of its partition there: the rows of all partitions have the same position.
func compatRow(t *testing.T, f *fixture, tenant string, purgeAfter time.Duration) {
	t.Helper()
	recordExec(t, f, `INSERT INTO %s
			(tenant, operation, key, state, fingerprint, attempt, claim, begun_at, expires_at, purge_after)
		VALUES ($1, 'o', 'v', 'failed', '\x01', 1, 1, 'epoch', statement_timestamp() + $2::interval,
			statement_timestamp() + $2::interval)`, tenant, purgeAfter)
}

// A row's position says in which place it lies, not in which partition.
func TestSweepOfAPartitionedTableDeletesOnlyWhatItChose(t *testing.T) {
	t.Parallel()
	f := setup(t)
	compatPartitioned(t, f, compatPartitions)
	tenants := compatTenants(t, f)
	for n, tenant := range tenants {
		due := -time.Duration(10-n) * time.Minute
		if n == 0 {
			due = time.Hour // live
		}
		compatRow(t, f, tenant, due)
	}
	require.EqualValues(t, 1, recordScalar[int64](t, f, `SELECT count(DISTINCT ctid) FROM %s`), "the rows do not show it")
	left := func() []string {
		rows, err := f.Pool.Query(t.Context(), `SELECT tenant FROM `+recordTable(f)+` ORDER BY purge_after`)
		require.NoError(t, err)
		left, err := pgx.CollectRows(rows, pgx.RowTo[string])
		require.NoError(t, err)
		return left
	}
	require.Equal(t, append(append([]string{}, tenants[1:]...), tenants[0]), left())

	holder := directedTx(t, f.Pool)
	_, err := holder.Exec(t.Context(), `SELECT FROM `+recordTable(f)+` WHERE tenant = $1 FOR UPDATE`, tenants[1])
	require.NoError(t, err)
	deleted := directedWithoutWaiting(t, f.Pool, holder, func(ctx context.Context) (int64, error) { return f.Sweep(ctx, 1) })
	require.EqualValues(t, 1, deleted)
	require.Equal(t, []string{tenants[1], tenants[3], tenants[0]}, left())
	require.NoError(t, holder.Rollback(t.Context()))
	deleted, err = f.Sweep(t.Context(), 10)
	require.NoError(t, err)
	require.EqualValues(t, 2, deleted)
	require.Equal(t, []string{tenants[0]}, left())
}

func TestPurgeInAPartitionedTableDeletesOnlyItsKey(t *testing.T) {
	t.Parallel()
	f := setup(t)
	compatPartitioned(t, f, compatPartitions)
	tenants := compatTenants(t, f)
	for n, tenant := range tenants {
		compatRow(t, f, tenant, time.Duration(2*n-1)*time.Hour) // the first is due, the others are live
	}
	for n, tenant := range tenants {
		tag, err := f.Pool.Exec(t.Context(), f.Statements().Purge, tenant, "o", "v")
		require.NoError(t, err)
		require.Equal(t, n == 0, tag.RowsAffected() == 1)
	}
	require.EqualValues(t, len(tenants)-1, recordScalar[int64](t, f, `SELECT count(*) FROM %s`))
}
