package pgstore_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/archlab/idempotency/pgstore"
)

var txLevels = []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable}

// txBegin begins a transaction that is rolled back when the test ends, if it has not ended before.
func txBegin(t *testing.T, f *fixture, level pgx.TxIsoLevel) pgx.Tx {
	t.Helper()
	tx, err := f.Pool.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: level})
	require.NoError(t, err)
	t.Cleanup(func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) })
	return tx
}

// txID returns the number of the transaction that is open on conn.
func txID(t *testing.T, conn *pgx.Conn) (id string) {
	t.Helper()
	require.NoError(t, conn.QueryRow(t.Context(), `SELECT pg_current_xact_id()::text`).Scan(&id))
	return id
}

// txOwn creates a table of the caller's own.
func txOwn(t *testing.T, f *fixture) (table string) {
	t.Helper()
	table = pgx.Identifier{f.Schema, "own"}.Sanitize()
	_, err := f.Pool.Exec(t.Context(), `CREATE TABLE `+table+` (n int)`)
	require.NoError(t, err)
	return table
}

func txCount(t *testing.T, f *fixture, table string) (n int) {
	t.Helper()
	require.NoError(t, f.Pool.QueryRow(t.Context(), `SELECT count(*) FROM `+table).Scan(&n))
	return n
}

// All calls work inside a transaction, which stays the caller's: it is the same one before and after, and decides alone whether
// what they recorded is there.
func TestCallsInATransactionAreTheCallersToCommit(t *testing.T) {
	t.Parallel()
	for _, level := range txLevels {
		for _, commit := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s/commit=%t", level, commit), func(t *testing.T) {
				t.Parallel()
				f := setup(t)
				own := txOwn(t, f)
				tx := txBegin(t, f, level)
				id := txID(t, tx.Conn())
				inTx := f.WithTx(tx)

				record, created, err := inTx.Begin(t.Context(), key, fingerprint)
				require.NoError(t, err)
				require.True(t, created)
				_, _, err = inTx.Begin(t.Context(), key, fingerprint)
				require.ErrorIs(t, err, pgstore.ErrInProgress, "a transaction sees its own reservation")
				_, err = inTx.Extend(t.Context(), key, fingerprint, record.Attempt)
				require.NoError(t, err)
				_, err = tx.Exec(t.Context(), `INSERT INTO `+own+` VALUES (1)`)
				require.NoError(t, err)
				require.NoError(t, inTx.Complete(t.Context(), key, fingerprint, record.Attempt, "done"))
				require.NoError(t, inTx.Complete(t.Context(), key, fingerprint, record.Attempt, "done"))
				other := pgstore.Key{Tenant: "t", Operation: "o", Value: "failed"}
				failing, _, err := inTx.Begin(t.Context(), other, fingerprint)
				require.NoError(t, err)
				require.NoError(t, inTx.Fail(t.Context(), other, fingerprint, failing.Attempt, false))
				_, err = inTx.Sweep(t.Context(), 10)
				require.NoError(t, err)
				replayed, created, err := inTx.Begin(t.Context(), key, fingerprint)
				require.NoError(t, err)
				require.False(t, created)
				require.Equal(t, "done", replayed.Response)
				require.Equal(t, id, txID(t, tx.Conn()), "no call commits, rolls back or begins")

				_, live, err := f.Get(t.Context(), key)
				require.NoError(t, err)
				require.False(t, live, "nobody sees it before the commit")
				if commit {
					require.NoError(t, tx.Commit(t.Context()))
				} else {
					require.NoError(t, tx.Rollback(t.Context()))
				}
				for k, state := range map[pgstore.Key]pgstore.State{key: pgstore.StateDone, other: pgstore.StateFailed} {
					record, live, err := f.Get(t.Context(), k)
					require.NoError(t, err)
					require.Equal(t, commit, live)
					if commit {
						require.Equal(t, state, record.State)
					}
				}
				require.Equal(t, commit, txCount(t, f, own) == 1)
			})
		}
	}
}

// A store that was made on a transaction, and one on a connection on which BEGIN was run by hand, work inside it as well.
func TestStoreFollowsTheTransactionOfItsHandle(t *testing.T) {
	t.Parallel()
	f := setup(t)
	conn, err := f.Pool.Acquire(t.Context())
	require.NoError(t, err)
	defer conn.Release()
	tx := txBegin(t, f, pgx.ReadCommitted)
	for name, handle := range map[string]struct {
		db       pgstore.DB
		begin    string
		rollback func() error
	}{
		"New on a transaction": {db: tx, rollback: func() error { return tx.Rollback(t.Context()) }},
		"BEGIN by hand": {db: conn.Conn(), begin: "BEGIN", rollback: func() error {
			_, err := conn.Exec(t.Context(), "ROLLBACK")
			return err
		}},
		"BEGIN by hand on a pool's connection": {db: conn, begin: "BEGIN", rollback: func() error {
			_, err := conn.Exec(t.Context(), "ROLLBACK")
			return err
		}},
	} {
		if handle.begin != "" {
			_, err := handle.db.Exec(t.Context(), handle.begin)
			require.NoError(t, err, name)
		}
		store := f.NewStore(t, handle.db, lease, retention)
		_, created, err := store.Begin(t.Context(), key, fingerprint)
		require.NoError(t, err, name)
		require.True(t, created, name)

		// An error of the server aborts it. Another run would meet 25P02, and bury the cause.
		_, err = handle.db.Exec(t.Context(), `SET LOCAL statement_timeout = 1; SELECT pg_sleep(10)`)
		require.Error(t, err, name)
		_, _, err = store.Begin(t.Context(), key, fingerprint)
		pgErr := txPgError(t, err)
		require.Equal(t, "25P02", pgErr.Code, name)
		require.NotContains(t, err.Error(), "gave up", name)
		require.NoError(t, handle.rollback(), name)
		_, live, err := f.Get(t.Context(), key)
		require.NoError(t, err, name)
		require.False(t, live, name)
	}
}

func txPgError(t *testing.T, err error) *pgconn.PgError {
	t.Helper()
	var pgErr *pgconn.PgError
	require.ErrorAs(t, err, &pgErr)
	return pgErr
}

// Every sentinel but those that carry a PgError leaves the transaction usable.
func TestSentinelsLeaveTheTransactionUsable(t *testing.T) {
	t.Parallel()
	for _, level := range txLevels {
		t.Run(string(level), func(t *testing.T) {
			t.Parallel()
			f := setup(t, pgstore.WithMaxResponse(10))
			held, _, err := f.Begin(t.Context(), key, fingerprint)
			require.NoError(t, err)
			free := pgstore.Key{Tenant: "t", Operation: "o", Value: "free"}
			tx := txBegin(t, f, level)
			inTx := f.WithTx(tx)
			begin := func(k pgstore.Key, fingerprint string) error {
				_, _, err := inTx.Begin(t.Context(), k, fingerprint)
				return err
			}
			extend := func(k pgstore.Key, fingerprint string, attempt uint64) error {
				_, err := inTx.Extend(t.Context(), k, fingerprint, attempt)
				return err
			}
			for _, call := range []struct {
				want error
				err  error
			}{
				{pgstore.ErrKeyEmpty, begin(pgstore.Key{}, fingerprint)},
				{pgstore.ErrKeyInvalid, begin(pgstore.Key{Tenant: "\xff", Operation: "o", Value: "v"}, fingerprint)},
				{pgstore.ErrKeyInvalid, begin(pgstore.Key{Tenant: "a\x00", Operation: "o", Value: "v"}, fingerprint)},
				{pgstore.ErrKeyInvalid, begin(pgstore.Key{Tenant: strings.Repeat("x", 513), Operation: "o", Value: "v"}, fingerprint)},
				{pgstore.ErrFingerprintInvalid, begin(key, "")},
				{pgstore.ErrResponseTooLarge, inTx.Complete(t.Context(), key, fingerprint, held.Attempt, "eleven bytes")},
				{pgstore.ErrInProgress, begin(key, fingerprint)},
				{pgstore.ErrConflict, begin(key, "other")},
				{pgstore.ErrConflict, inTx.Complete(t.Context(), key, "other", held.Attempt, "")},
				{pgstore.ErrStaleAttempt, inTx.Complete(t.Context(), key, fingerprint, held.Attempt+1, "")},
				{pgstore.ErrStaleAttempt, inTx.Fail(t.Context(), key, fingerprint, 0, true)},
				{pgstore.ErrLeaseExpired, inTx.Complete(t.Context(), free, fingerprint, 1, "")},
				{pgstore.ErrLeaseExpired, extend(free, fingerprint, 1)},
			} {
				require.ErrorIs(t, call.err, call.want)
				require.Equal(t, byte('T'), tx.Conn().PgConn().TxStatus(), "%v", call.want)
			}
			require.NoError(t, inTx.Complete(t.Context(), key, fingerprint, held.Attempt, "done"))
			require.NoError(t, tx.Commit(t.Context()))
			record, live, err := f.Get(t.Context(), key)
			require.NoError(t, err)
			require.True(t, live)
			require.Equal(t, "done", record.Response)
		})
	}
}

// Above READ COMMITTED, a key that another session committed since the snapshot cannot be judged: 40001 comes back with the
// server's error, is not retried, and a new transaction knows.
func TestOldSnapshotGetsASerializationFailureNotAGuess(t *testing.T) {
	t.Parallel()
	for _, level := range []pgx.TxIsoLevel{pgx.RepeatableRead, pgx.Serializable} {
		t.Run(string(level), func(t *testing.T) {
			t.Parallel()
			f := setup(t)
			tx := txBegin(t, f, level)
			txID(t, tx.Conn()) // takes the snapshot
			_, _, err := f.Begin(t.Context(), key, fingerprint)
			require.NoError(t, err)

			_, created, err := f.WithTx(tx).Begin(t.Context(), key, fingerprint)
			require.False(t, created)
			require.Equal(t, "40001", txPgError(t, err).Code)
			require.Equal(t, byte('E'), tx.Conn().PgConn().TxStatus())

			_, _, err = f.WithTx(txBegin(t, f, level)).Begin(t.Context(), key, fingerprint)
			require.ErrorIs(t, err, pgstore.ErrInProgress)
		})
	}
}

// COMMIT of a transaction that has failed is a rollback, and pgx says so: nothing that was recorded in it is there.
func TestCommitOfAFailedTransactionRecordsNothing(t *testing.T) {
	t.Parallel()
	f := setup(t)
	tx := txBegin(t, f, pgx.ReadCommitted)
	_, created, err := f.WithTx(tx).Begin(t.Context(), key, fingerprint)
	require.NoError(t, err)
	require.True(t, created)
	_, err = tx.Exec(t.Context(), `SELECT 1/0`)
	require.Error(t, err)
	require.ErrorIs(t, tx.Commit(t.Context()), pgx.ErrTxCommitRollback)
	_, live, err := f.Get(t.Context(), key)
	require.NoError(t, err)
	require.False(t, live)
}

// The attempt that lost its lease cannot complete inside its transaction, and its own writes go with it.
func TestLostLeaseUndoesTheCallersWrites(t *testing.T) {
	t.Parallel()
	for _, level := range txLevels {
		t.Run(string(level), func(t *testing.T) {
			t.Parallel()
			now := newClock()
			f := setup(t, pgstore.WithClock(now.Now))
			own := txOwn(t, f)
			slow, _, err := f.Begin(t.Context(), key, fingerprint)
			require.NoError(t, err)
			now.Advance(lease)
			next, created, err := f.Begin(t.Context(), key, fingerprint)
			require.NoError(t, err)
			require.True(t, created)
			require.Equal(t, slow.Attempt, next.Abandoned)

			for attempt, want := range map[uint64]error{slow.Attempt: pgstore.ErrStaleAttempt, next.Attempt: nil} {
				err := pgx.BeginTxFunc(t.Context(), f.Pool, pgx.TxOptions{IsoLevel: level}, func(tx pgx.Tx) error {
					if _, err := tx.Exec(t.Context(), `INSERT INTO `+own+` VALUES (1)`); err != nil {
						return err
					}
					return f.WithTx(tx).Complete(t.Context(), key, fingerprint, attempt, "done")
				})
				require.ErrorIs(t, err, want)
			}
			require.Equal(t, 1, txCount(t, f, own))
		})
	}
}

// Time goes on inside a transaction: a lease that is given late in a long one counts from then, though now() stands still.
func TestTimeGoesOnInsideALongTransaction(t *testing.T) {
	t.Parallel()
	f := setup(t)
	tx := txBegin(t, f, pgx.ReadCommitted)
	inTx := f.WithTx(tx)
	var began time.Time
	require.NoError(t, tx.QueryRow(t.Context(), `SELECT now()`).Scan(&began))
	_, err := tx.Exec(t.Context(), `SELECT pg_sleep(0.05)`) // the one thing that makes a transaction old
	require.NoError(t, err)

	record, created, err := inTx.Begin(t.Context(), key, fingerprint)
	require.NoError(t, err)
	require.True(t, created)
	require.GreaterOrEqual(t, record.ExpiresAt.Sub(began), lease+50*time.Millisecond)
	extended, err := inTx.Extend(t.Context(), key, fingerprint, record.Attempt)
	require.NoError(t, err)
	require.True(t, extended.ExpiresAt.After(record.ExpiresAt))

	short := f.NewStore(t, tx, time.Millisecond, retention)
	other := pgstore.Key{Tenant: "t", Operation: "o", Value: "short"}
	lapsing, _, err := short.Begin(t.Context(), other, fingerprint)
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), `SELECT pg_sleep(0.005)`)
	require.NoError(t, err)
	require.ErrorIs(t, short.Complete(t.Context(), other, fingerprint, lapsing.Attempt, ""), pgstore.ErrLeaseExpired)
	next, created, err := short.Begin(t.Context(), other, fingerprint)
	require.NoError(t, err)
	require.True(t, created, "a lease lapses inside an old transaction too")
	require.Equal(t, lapsing.Attempt, next.Abandoned)
}

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

// txEverywhere runs the test in each level, opened in each way.
func txEverywhere(t *testing.T, test func(t *testing.T, f *fixture, store *pgstore.Store, conn *pgx.Conn)) {
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
	txEverywhere(t, func(t *testing.T, f *fixture, store *pgstore.Store, conn *pgx.Conn) {
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
	txEverywhere(t, func(t *testing.T, f *fixture, store *pgstore.Store, conn *pgx.Conn) {
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
