package pgstore_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/archlab/idempotency/internal/pgtest"
	"github.com/archlab/idempotency/pgstore"
)

// recordModes are the ways in which pgx can send a statement and its arguments.
var recordModes = []pgx.QueryExecMode{
	pgx.QueryExecModeCacheStatement,
	pgx.QueryExecModeCacheDescribe,
	pgx.QueryExecModeDescribeExec,
	pgx.QueryExecModeExec,
	pgx.QueryExecModeSimpleProtocol,
}

// recordConn opens a connection of its own that sends statements in the given mode.
func recordConn(tb testing.TB, mode pgx.QueryExecMode) *pgx.Conn {
	tb.Helper()
	config, err := pgx.ParseConfig(pgtest.DSN(tb))
	require.NoError(tb, err)
	config.DefaultQueryExecMode = mode
	conn, err := pgx.ConnectConfig(tb.Context(), config)
	require.NoError(tb, err)
	tb.Cleanup(func() { _ = conn.Close(context.WithoutCancel(tb.Context())) })
	return conn
}

// recordTable is the quoted name of the fixture's table.
func recordTable(f *fixture) string { return pgx.Identifier{f.Schema, "idempotency_keys"}.Sanitize() }

// recordSequence is the quoted name of the fixture's sequence of attempts.
func recordSequence(f *fixture) string {
	return pgx.Identifier{f.Schema, "idempotency_keys_attempt_seq"}.Sanitize()
}

// recordExec runs an SQL text with %s in the place of the table's name, and returns the number of rows that it changed.
func recordExec(tb testing.TB, f *fixture, format string, args ...any) int64 {
	tb.Helper()
	tag, err := f.Pool.Exec(tb.Context(), fmt.Sprintf(format, recordTable(f)), args...)
	require.NoError(tb, err)
	return tag.RowsAffected()
}

// recordScalar reads one value by an SQL text with %s in the place of the table's name.
func recordScalar[T any](tb testing.TB, f *fixture, format string, args ...any) T {
	tb.Helper()
	var value T
	require.NoError(tb, f.Pool.QueryRow(tb.Context(), fmt.Sprintf(format, recordTable(f)), args...).Scan(&value))
	return value
}

// recordNow reads the database's clock.
func recordNow(tb testing.TB, f *fixture) time.Time {
	tb.Helper()
	var now time.Time
	require.NoError(tb, f.Pool.QueryRow(tb.Context(), `SELECT clock_timestamp()`).Scan(&now))
	return now
}

// recordRow is everything that the table holds for k, every byte of every column and the identity of the row's version,
// as text to compare; empty where there is no row. A row that was written again, even with the same values, differs.
func recordRow(tb testing.TB, f *fixture, k pgstore.Key) string {
	tb.Helper()
	return recordScalar[string](tb, f, `SELECT coalesce(string_agg(ROW(r.ctid, r.xmin, r)::text, ''), '') FROM %s AS r
		WHERE tenant = $1 AND operation = $2 AND key = $3`, k.Tenant, k.Operation, k.Value)
}

// recordAge makes the record of k older by d: what would be there if d had gone by.
func recordAge(tb testing.TB, f *fixture, k pgstore.Key, d time.Duration) {
	tb.Helper()
	require.EqualValues(tb, 1, recordExec(tb, f, `UPDATE %s SET begun_at = begun_at - $4::interval,
		expires_at = expires_at - $4::interval, purge_after = purge_after - $4::interval
		WHERE tenant = $1 AND operation = $2 AND key = $3`, k.Tenant, k.Operation, k.Value, d), "rows of %s", k)
}

// recordPut brings k into the state by the calls of a first attempt, with the test's fingerprint, and returns that attempt.
func recordPut(tb testing.TB, f *fixture, k pgstore.Key, state pgstore.State) uint64 {
	tb.Helper()
	record, created, err := f.Begin(tb.Context(), k, fingerprint)
	require.NoError(tb, err)
	require.True(tb, created)
	switch state {
	case pgstore.StateInProgress:
	case pgstore.StateDone:
		require.NoError(tb, f.Complete(tb.Context(), k, fingerprint, record.Attempt, recordResponse))
	case pgstore.StateFailed, pgstore.StateRetryable:
		require.NoError(tb, f.Fail(tb.Context(), k, fingerprint, record.Attempt, state == pgstore.StateRetryable))
	}
	return record.Attempt
}

// recordResponse is what recordPut completes with.
const recordResponse = "201 Created"

// recordStates are all states of a record.
var recordStates = []pgstore.State{
	pgstore.StateInProgress, pgstore.StateDone, pgstore.StateFailed, pgstore.StateRetryable,
}

// recordKey is a key that no other test data uses.
func recordKey(name string) pgstore.Key {
	return pgstore.Key{Tenant: key.Tenant, Operation: key.Operation, Value: name}
}

func TestReturnedInstantsAreTheStoredOnes(t *testing.T) {
	t.Parallel()
	for _, mode := range recordModes {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			f := setup(t)
			store := f.NewStore(t, recordConn(t, mode), lease, retention)
			stored := func() time.Time {
				return recordScalar[time.Time](t, f, `SELECT expires_at FROM %s`).UTC()
			}
			reread := func() time.Time {
				record, live, err := store.Get(t.Context(), key)
				require.NoError(t, err)
				require.True(t, live)
				return record.ExpiresAt
			}

			begun, _, err := store.Begin(t.Context(), key, fingerprint)
			require.NoError(t, err)
			require.Equal(t, stored(), begun.ExpiresAt)
			require.Equal(t, begun.ExpiresAt, reread())

			extended, err := store.Extend(t.Context(), key, fingerprint, begun.Attempt)
			require.NoError(t, err)
			require.True(t, extended.ExpiresAt.After(begun.ExpiresAt))
			require.Equal(t, stored(), extended.ExpiresAt)
			require.Equal(t, extended.ExpiresAt, reread())

			require.NoError(t, store.Complete(t.Context(), key, fingerprint, begun.Attempt, recordResponse))
			replayed, created, err := store.Begin(t.Context(), key, fingerprint)
			require.NoError(t, err)
			require.False(t, created)
			require.Equal(t, stored(), replayed.ExpiresAt)
			require.Equal(t, replayed.ExpiresAt, reread())
		})
	}
}

// A nanosecond that were rounded instead of cut would carry this moment into the next day.
func TestLastNanosecondOfADayIsCutToItsMicrosecond(t *testing.T) {
	t.Parallel()
	now := time.Date(2031, 12, 31, 23, 59, 59, 999_999_900, time.UTC)
	for _, mode := range recordModes {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			f := setup(t)
			store := f.NewStore(t, recordConn(t, mode), lease, retention, pgstore.WithClock(func() time.Time { return now }))
			want := time.Date(2032, 1, 1, 0, 0, 59, 999_999_000, time.UTC)

			record, created, err := store.Begin(t.Context(), key, fingerprint)
			require.NoError(t, err)
			require.True(t, created)
			require.Equal(t, want, record.ExpiresAt)
			require.Equal(t, lease, record.Remaining)
			require.Equal(t, want, recordScalar[time.Time](t, f, `SELECT expires_at FROM %s`).UTC())

			again, live, err := store.Get(t.Context(), key)
			require.NoError(t, err)
			require.True(t, live)
			require.Equal(t, record, again)
		})
	}
}

// A record without an end would hold its key for ever.
func TestNoRecordIsWithoutAnEnd(t *testing.T) {
	t.Parallel()
	f := setup(t)
	recordPut(t, f, key, pgstore.StateInProgress)
	for _, column := range []string{"expires_at", "purge_after", "begun_at", "attempt", "state", "fingerprint"} {
		_, err := f.Pool.Exec(t.Context(), `UPDATE `+recordTable(f)+` SET `+column+` = NULL`)
		pgErr, ok := errors.AsType[*pgconn.PgError](err)
		require.True(t, ok, "%s: %v", column, err)
		require.Equal(t, "23502", pgErr.Code, column)
	}
}

func TestRemainingIsMeasuredByTheDatabase(t *testing.T) {
	t.Parallel()
	f := setup(t)
	check := func(call func() (pgstore.Record, error)) uint64 {
		t.Helper()
		before := recordNow(t, f)
		record, err := call()
		after := recordNow(t, f)
		require.NoError(t, err)
		require.LessOrEqual(t, record.Remaining, record.ExpiresAt.Sub(before))
		require.GreaterOrEqual(t, record.Remaining, record.ExpiresAt.Sub(after))
		return record.Attempt
	}

	attempt := check(func() (pgstore.Record, error) {
		record, _, err := f.Begin(t.Context(), key, fingerprint)
		return record, err
	})
	recordAge(t, f, key, 40*time.Second)
	check(func() (pgstore.Record, error) {
		record, _, err := f.Get(t.Context(), key)
		require.Less(t, record.Remaining, 20*time.Second)
		return record, err
	})
	check(func() (pgstore.Record, error) { return f.Extend(t.Context(), key, fingerprint, attempt) })
	require.NoError(t, f.Complete(t.Context(), key, fingerprint, attempt, ""))
	recordAge(t, f, key, 23*time.Hour)
	check(func() (pgstore.Record, error) {
		record, _, err := f.Begin(t.Context(), key, fingerprint)
		require.LessOrEqual(t, record.Remaining, time.Hour)
		return record, err
	})
}
