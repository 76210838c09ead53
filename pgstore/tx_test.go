package pgstore_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/archlab/idempotency/pgstore"
)

// txLevels are the isolation levels that PostgreSQL tells apart.
var txLevels = []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable}

// txOpenings are the ways in which a caller's transaction can be open: they return a store inside it, and the connection.
var txOpenings = map[string]func(t *testing.T, f *fixture, level pgx.TxIsoLevel) (*pgstore.Store, *pgx.Conn){
	"WithTx": func(t *testing.T, f *fixture, level pgx.TxIsoLevel) (*pgstore.Store, *pgx.Conn) {
		t.Helper()
		tx := txBegin(t, f, level)
		return f.WithTx(tx), tx.Conn()
	},
	"New(tx)": func(t *testing.T, f *fixture, level pgx.TxIsoLevel) (*pgstore.Store, *pgx.Conn) {
		t.Helper()
		tx := txBegin(t, f, level)
		return f.NewStore(t, tx, lease, retention), tx.Conn()
	},
	"BEGIN by hand": func(t *testing.T, f *fixture, level pgx.TxIsoLevel) (*pgstore.Store, *pgx.Conn) {
		t.Helper()
		conn := recordConn(t, pgx.QueryExecModeCacheStatement)
		_, err := conn.Exec(t.Context(), "BEGIN ISOLATION LEVEL "+string(level))
		require.NoError(t, err)
		return f.NewStore(t, conn, lease, retention), conn
	},
}

func txBegin(t *testing.T, f *fixture, level pgx.TxIsoLevel) pgx.Tx {
	t.Helper()
	tx, err := f.Pool.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: level})
	require.NoError(t, err)
	t.Cleanup(func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) })
	return tx
}

// everyTransaction runs the test in each level, opened in each way.
func everyTransaction(t *testing.T, test func(t *testing.T, f *fixture, store *pgstore.Store, conn *pgx.Conn)) {
	t.Helper()
	for name, open := range txOpenings {
		for _, level := range txLevels {
			t.Run(name+"/"+string(level), func(t *testing.T) {
				t.Parallel()
				f := setup(t)
				store, conn := open(t, f, level)
				test(t, f, store, conn)
			})
		}
	}
}

// txID is the transaction that the connection is in; it gives it an ID where it has none.
func txID(t *testing.T, conn *pgx.Conn) string {
	t.Helper()
	var id string
	require.NoError(t, conn.QueryRow(t.Context(), `SELECT pg_current_xact_id()::text`).Scan(&id))
	return id
}

// txEvery makes every call that succeeds, and every sentinel that comes without an error of the server.
func txEvery(t *testing.T, store *pgstore.Store) {
	t.Helper()
	ctx := t.Context()
	_, _, err := store.Begin(ctx, pgstore.Key{}, fingerprint)
	require.ErrorIs(t, err, pgstore.ErrKeyEmpty)
	_, _, err = store.Begin(ctx, recordKey("\x00"), fingerprint)
	require.ErrorIs(t, err, pgstore.ErrKeyInvalid)
	_, _, err = store.Begin(ctx, key, "")
	require.ErrorIs(t, err, pgstore.ErrFingerprintInvalid)

	first, created, err := store.Begin(ctx, key, fingerprint)
	require.NoError(t, err)
	require.True(t, created)
	_, created, err = store.Begin(ctx, key, fingerprint)
	require.ErrorIs(t, err, pgstore.ErrInProgress, "its own record, uncommitted")
	require.False(t, created)
	_, _, err = store.Begin(ctx, key, "another")
	require.ErrorIs(t, err, pgstore.ErrConflict)
	got, live, err := store.Get(ctx, key)
	require.NoError(t, err)
	require.True(t, live)
	require.Equal(t, first.Attempt, got.Attempt)
	_, err = store.Extend(ctx, key, fingerprint, first.Attempt)
	require.NoError(t, err)
	require.NoError(t, store.Fail(ctx, key, fingerprint, first.Attempt, true))
	require.NoError(t, store.Fail(ctx, key, fingerprint, first.Attempt, true))

	second, created, err := store.Begin(ctx, key, fingerprint)
	require.NoError(t, err)
	require.True(t, created)
	large := strings.Repeat("x", pgstore.MaxResponseDefault+1)
	require.ErrorIs(t, store.Complete(ctx, key, fingerprint, second.Attempt, large), pgstore.ErrResponseTooLarge)
	require.ErrorIs(t, store.Complete(ctx, key, fingerprint, first.Attempt, ""), pgstore.ErrStaleAttempt)
	require.ErrorIs(t, store.Complete(ctx, key, "another", second.Attempt, ""), pgstore.ErrConflict)
	require.ErrorIs(t, store.Complete(ctx, recordKey("never begun"), fingerprint, second.Attempt, ""), pgstore.ErrLeaseExpired)
	require.NoError(t, store.Complete(ctx, key, fingerprint, second.Attempt, recordResponse))
	require.NoError(t, store.Complete(ctx, key, fingerprint, second.Attempt, recordResponse))
	require.ErrorIs(t, store.Complete(ctx, key, fingerprint, second.Attempt, "other"), pgstore.ErrStaleAttempt)
	_, err = store.Extend(ctx, key, fingerprint, second.Attempt)
	require.ErrorIs(t, err, pgstore.ErrStaleAttempt)
	done, created, err := store.Begin(ctx, key, fingerprint)
	require.NoError(t, err)
	require.False(t, created)
	require.Equal(t, recordResponse, done.Response)
	_, err = store.Sweep(ctx, 10)
	require.NoError(t, err)
}

func TestCallsInATransactionNeitherEndNorAbortIt(t *testing.T) {
	t.Parallel()
	everyTransaction(t, func(t *testing.T, f *fixture, store *pgstore.Store, conn *pgx.Conn) {
		t.Helper()
		before := txID(t, conn)
		txEvery(t, store)
		require.Equal(t, byte('T'), conn.PgConn().TxStatus())
		require.Equal(t, before, txID(t, conn))
		_, live, err := f.Get(t.Context(), key)
		require.NoError(t, err)
		require.False(t, live, "others see what has not been committed")
		_, err = conn.Exec(t.Context(), "COMMIT")
		require.NoError(t, err)
		record, live, err := f.Get(t.Context(), key)
		require.NoError(t, err)
		require.True(t, live)
		require.Equal(t, pgstore.StateDone, record.State)
		require.Equal(t, recordResponse, record.Response)
	})
}

func TestRollbackLeavesNothing(t *testing.T) {
	t.Parallel()
	everyTransaction(t, func(t *testing.T, f *fixture, store *pgstore.Store, conn *pgx.Conn) {
		t.Helper()
		held := recordKey("begun before")
		attempt := recordPut(t, f, held, pgstore.StateInProgress)
		row := recordRow(t, f, held)
		txEvery(t, store)
		require.NoError(t, store.Complete(t.Context(), held, fingerprint, attempt, recordResponse))
		_, err := conn.Exec(t.Context(), "ROLLBACK")
		require.NoError(t, err)
		require.Empty(t, recordRow(t, f, key))
		require.Equal(t, row, recordRow(t, f, held))
		_, created, err := f.Begin(t.Context(), key, fingerprint)
		require.NoError(t, err)
		require.True(t, created)
		require.NoError(t, f.Complete(t.Context(), held, fingerprint, attempt, "another"))
	})
}

// txWrites is a table of the caller's.
func txWrites(t *testing.T, f *fixture) string {
	t.Helper()
	table := pgx.Identifier{f.Schema, "writes"}.Sanitize()
	_, err := f.Pool.Exec(t.Context(), `CREATE TABLE `+table+` (id bigint PRIMARY KEY)`)
	require.NoError(t, err)
	return table
}

func TestCallersWritesAndTheOutcomeAreOne(t *testing.T) {
	t.Parallel()
	for _, level := range txLevels {
		t.Run(string(level), func(t *testing.T) {
			t.Parallel()
			f := setup(t)
			writes := txWrites(t, f)
			attempt := recordPut(t, f, key, pgstore.StateInProgress)
			do := func(attempt uint64) error {
				return pgx.BeginTxFunc(t.Context(), f.Pool, pgx.TxOptions{IsoLevel: level}, func(tx pgx.Tx) error {
					if _, err := tx.Exec(t.Context(), `INSERT INTO `+writes+` VALUES ($1)`, int64(attempt)); err != nil { //nolint:gosec // small
						return err //nolint:wrapcheck // the test looks at it
					}
					return f.WithTx(tx).Complete(t.Context(), key, fingerprint, attempt, recordResponse)
				})
			}
			written := func() (ids []int64) {
				rows, err := f.Pool.Query(t.Context(), `SELECT id FROM `+writes)
				require.NoError(t, err)
				ids, err = pgx.CollectRows(rows, pgx.RowTo[int64])
				require.NoError(t, err)
				return ids
			}

			recordAge(t, f, key, 2*lease)
			require.ErrorIs(t, do(attempt), pgstore.ErrLeaseExpired)
			require.Empty(t, written())
			second, created, err := f.Begin(t.Context(), key, fingerprint)
			require.NoError(t, err)
			require.True(t, created)
			require.Equal(t, attempt, second.Abandoned)
			require.ErrorIs(t, do(attempt), pgstore.ErrStaleAttempt)
			require.Empty(t, written())
			require.NoError(t, do(second.Attempt))
			require.Equal(t, []int64{int64(second.Attempt)}, written()) //nolint:gosec // small
		})
	}
}

// In an old transaction the lease of another session's attempt lapses as it does outside, and is taken over.
func TestLapsedLeaseIsTakenOverInsideAnOldTransaction(t *testing.T) {
	t.Parallel()
	for name, open := range txOpenings {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := setup(t)
			brief := f.NewStore(t, f.Pool, 50*time.Millisecond, retention)
			store, conn := open(t, f, pgx.ReadCommitted)
			before := txID(t, conn)
			lost, created, err := brief.Begin(t.Context(), key, fingerprint)
			require.NoError(t, err)
			require.True(t, created)
			var record pgstore.Record
			require.Eventually(t, func() bool {
				record, created, err = store.Begin(t.Context(), key, fingerprint)
				return !errors.Is(err, pgstore.ErrInProgress)
			}, directedWait, 5*time.Millisecond)
			require.NoError(t, err)
			require.True(t, created)
			require.Equal(t, lost.Attempt, record.Abandoned)
			require.Equal(t, before, txID(t, conn))
			require.NoError(t, store.Complete(t.Context(), key, fingerprint, record.Attempt, recordResponse))
			_, err = conn.Exec(t.Context(), "COMMIT")
			require.NoError(t, err)
			require.ErrorIs(t, brief.Complete(t.Context(), key, fingerprint, lost.Attempt, ""), pgstore.ErrStaleAttempt)
		})
	}
}

// A snapshot that is older than another session's commit cannot write over it. The error of the server comes back at once,
// for the caller to run the whole transaction again; in a fresh one the key tells what happened.
func TestSerializationFailureReachesTheCaller(t *testing.T) {
	t.Parallel()
	for _, level := range txLevels[1:] {
		for _, state := range recordStates {
			t.Run(string(level)+"/"+string(state), func(t *testing.T) {
				t.Parallel()
				f := setup(t)
				tx := txBegin(t, f, level)
				_ = txID(t, tx.Conn()) // the snapshot
				recordPut(t, f, key, state)
				_, created, err := f.WithTx(tx).Begin(t.Context(), key, fingerprint)
				require.False(t, created)
				pgErr, ok := errors.AsType[*pgconn.PgError](err)
				require.True(t, ok, "%v", err)
				require.Equal(t, "40001", pgErr.Code)
				require.ErrorContains(t, err, "idempotency: begin ")
				require.ErrorIs(t, tx.Commit(t.Context()), pgx.ErrTxCommitRollback)

				fresh := txBegin(t, f, level)
				record, created, err := f.WithTx(fresh).Begin(t.Context(), key, fingerprint)
				switch state {
				case pgstore.StateInProgress:
					require.ErrorIs(t, err, pgstore.ErrInProgress)
				case pgstore.StateRetryable:
					require.NoError(t, err)
					require.True(t, created)
				case pgstore.StateDone, pgstore.StateFailed:
					require.NoError(t, err)
					require.False(t, created)
					require.Equal(t, state, record.State)
				}
				require.NoError(t, fresh.Commit(t.Context()))
			})
		}
	}
}

// A transaction that an error has aborted refuses every call with the server's own error, and what was begun in it is gone.
func TestAbortedTransactionRefusesEveryCallAndItsCommit(t *testing.T) {
	t.Parallel()
	f := setup(t)
	for call, do := range keyCalls {
		t.Run(call, func(t *testing.T) {
			t.Parallel()
			k := recordKey(call)
			tx := txBegin(t, f, pgx.ReadCommitted)
			_, created, err := f.WithTx(tx).Begin(t.Context(), k, fingerprint)
			require.NoError(t, err)
			require.True(t, created)
			_, err = tx.Exec(t.Context(), `SELECT 1/0`)
			require.Error(t, err)
			err = do(t.Context(), f.WithTx(tx), k)
			pgErr, ok := errors.AsType[*pgconn.PgError](err)
			require.True(t, ok, "%v", err)
			require.Equal(t, "25P02", pgErr.Code)
			require.ErrorIs(t, tx.Commit(t.Context()), pgx.ErrTxCommitRollback)
			require.Empty(t, recordRow(t, f, k))
		})
	}
}
