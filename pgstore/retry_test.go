package pgstore_test

import (
	"context"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/archlab/idempotency/internal/pgtest"
	"github.com/archlab/idempotency/pgstore"
)

// retryMost is how often a statement is run at the most, and retryBound what that takes at the very most: the pauses add up to
// two thirds of a second, the rest is for a busy machine.
const (
	retryMost  = 10
	retryBound = 10 * time.Second
)

// retryForever is more often than any statement is run.
const retryForever = 1000

// When a write fails that retryFail makes fail.
const (
	retryAtOnce   = `TRIGGER fail BEFORE INSERT OR UPDATE OR DELETE ON %s FOR EACH ROW`
	retryAtCommit = `CONSTRAINT TRIGGER fail AFTER INSERT OR UPDATE OR DELETE ON %s DEFERRABLE INITIALLY DEFERRED FOR EACH ROW`
)

// retryFail makes the next writes of records fail with the SQLSTATE, so many of them. The returned function says how many writes
// were tried since: a sequence counts, which no rollback takes back.
func retryFail(t *testing.T, f *fixture, when, code string, writes int) (tried func() int) {
	t.Helper()
	schema := pgx.Identifier{f.Schema}.Sanitize()
	_, err := f.Pool.Exec(t.Context(), `
		CREATE SEQUENCE `+schema+`.tried;
		CREATE FUNCTION `+schema+`.fail() RETURNS trigger LANGUAGE plpgsql AS $$
			BEGIN
				IF nextval(TG_ARGV[0]::regclass) <= TG_ARGV[1]::int THEN
					RAISE EXCEPTION 'as the test wishes' USING ERRCODE = TG_ARGV[2];
				END IF;
				RETURN coalesce(NEW, OLD);
			END $$`)
	require.NoError(t, err)
	recordExec(t, f, fmt.Sprintf(`CREATE `+when+` EXECUTE FUNCTION %s.fail('%s.tried', %d, '%s')`,
		"%s", schema, strings.ReplaceAll(schema, `'`, `''`), writes, code))
	return func() int {
		t.Helper()
		return recordScalar[int](t, f, `SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM `+schema+`.tried -- %s`)
	}
}

// retryWriters are the calls that write.
func retryWriters() (writers []faultCall) {
	for _, call := range faultCalls() {
		if call.done != nil {
			writers = append(writers, call)
		}
	}
	return writers
}

// A serialization failure or a deadlock that does not pass is the caller's in the end: after ten runs, within a bounded time, with
// the server's error in it.
func TestStatementIsRunTenTimesAtTheMost(t *testing.T) {
	t.Parallel()
	for _, call := range retryWriters() {
		for _, code := range []string{"40001", "40P01"} {
			t.Run(call.name+" "+code, func(t *testing.T) {
				t.Parallel()
				f := setup(t)
				attempt := call.put(t, f, key)
				before := recordRow(t, f, key)
				tried := retryFail(t, f, retryAtOnce, code, retryForever)
				started := time.Now()
				answer := call.do(t.Context(), f.Store, key, attempt)
				require.Less(t, time.Since(started), retryBound)
				faultIsNoSentinel(t, answer.err)
				require.Equal(t, code, faultCode(t, answer.err))
				require.ErrorContains(t, answer.err, "gave up after 10 runs")
				require.Equal(t, retryMost, tried())
				call.isTrue(t, f, key, attempt, answer)
				require.Equal(t, before, recordRow(t, f, key))
			})
		}
	}
}

// A failure that passes within nine runs is not the caller's business.
func TestNineFailuresAreOutlived(t *testing.T) {
	t.Parallel()
	for _, call := range retryWriters() {
		t.Run(call.name, func(t *testing.T) {
			t.Parallel()
			f := setup(t)
			attempt := call.put(t, f, key)
			tried := retryFail(t, f, retryAtOnce, "40001", retryMost-1)
			answer := call.do(t.Context(), f.Store, key, attempt)
			require.NoError(t, answer.err)
			require.Equal(t, retryMost, tried())
			call.isTrue(t, f, key, attempt, answer)
			require.True(t, call.done(t, f, key, attempt))
		})
	}
}

// What passes by itself is run again, and nothing else: an error that comes back the same every time is returned at once.
func TestOnlyWhatMayPassIsRunAgain(t *testing.T) {
	t.Parallel()
	for code, runs := range map[string]int{
		"40001": retryMost, // serialization_failure
		"40P01": retryMost, // deadlock_detected
		"57P01": retryMost, // admin_shutdown
		"57P02": retryMost, // crash_shutdown
		"57P03": retryMost, // cannot_connect_now
		"57P05": retryMost, // idle_session_timeout
		"08000": retryMost, // connection_exception
		"08006": retryMost, // connection_failure
		"0A000": 1,         // feature_not_supported
		"22000": 1,         // data_exception
		"23505": 1,         // unique_violation
		"23514": 1,         // check_violation
		"25006": 1,         // read_only_sql_transaction
		"25P02": 1,         // in_failed_sql_transaction
		"40000": 1,         // transaction_rollback
		"40003": 1,         // statement_completion_unknown
		"42501": 1,         // insufficient_privilege
		"42P01": 1,         // undefined_table
		"53100": 1,         // disk_full
		"53200": 1,         // out_of_memory
		"53300": 1,         // too_many_connections
		"54000": 1,         // program_limit_exceeded
		"55P03": 1,         // lock_not_available
		"57014": 1,         // query_canceled
		"57P04": 1,         // database_dropped
		"P0001": 1,         // raise_exception
		"XX000": 1,         // internal_error
	} {
		t.Run(code, func(t *testing.T) {
			t.Parallel()
			f := setup(t)
			tried := retryFail(t, f, retryAtOnce, code, retryForever)
			record, created, err := f.Begin(t.Context(), key, fingerprint)
			require.Equal(t, code, faultCode(t, err))
			require.False(t, created)
			require.Zero(t, record)
			require.Equal(t, runs, tried())
			require.Equal(t, runs > 1, strings.Contains(err.Error(), "gave up"))
			require.Empty(t, faultRows(t, f, key))
		})
	}
}

// The row that a statement returns arrives before its commit, which can still fail: then there was no success.
func TestFailureAtCommitIsNoSuccess(t *testing.T) {
	t.Parallel()
	for _, mode := range recordModes {
		for _, call := range retryWriters() {
			t.Run(mode.String()+" "+call.name, func(t *testing.T) {
				t.Parallel()
				f := setup(t)
				pool := newFaultPool(t, pgtest.DSN(t), faultSingle, func(config *pgxpool.Config) { config.ConnConfig.DefaultQueryExecMode = mode })
				store := f.NewStore(t, pool, lease, retention)
				attempt := call.put(t, f, key)
				before := recordRow(t, f, key)
				tried := retryFail(t, f, retryAtCommit, "54000", 1)
				answer := call.do(t.Context(), store, key, attempt)
				require.Equal(t, "54000", faultCode(t, answer.err))
				require.Equal(t, 1, tried())
				call.isTrue(t, f, key, attempt, answer)
				require.Equal(t, before, recordRow(t, f, key))

				answer = call.do(t.Context(), store, key, attempt)
				require.NoError(t, answer.err)
				call.isTrue(t, f, key, attempt, answer)
				require.True(t, call.done(t, f, key, attempt))
			})
			if mode != pgx.QueryExecModeCacheStatement && mode != pgx.QueryExecModeSimpleProtocol {
				continue
			}
			t.Run(mode.String()+" "+call.name+", run again", func(t *testing.T) {
				t.Parallel()
				f := setup(t)
				pool := newFaultPool(t, pgtest.DSN(t), faultSingle, func(config *pgxpool.Config) { config.ConnConfig.DefaultQueryExecMode = mode })
				attempt := call.put(t, f, key)
				tried := retryFail(t, f, retryAtCommit, "40001", 2)
				answer := call.do(t.Context(), f.NewStore(t, pool, lease, retention), key, attempt)
				require.NoError(t, answer.err)
				require.Equal(t, 3, tried())
				call.isTrue(t, f, key, attempt, answer)
				require.True(t, call.done(t, f, key, attempt))
			})
		}
	}
}

// retryHold changes the record for which a call is meant, in a transaction that is still open.
func retryHold(t *testing.T, f *fixture, call faultCall, attempt uint64) pgx.Tx {
	t.Helper()
	holder := directedTx(t, f.Pool)
	var err error
	if call.name == "begin" {
		_, _, err = f.WithTx(holder).Begin(t.Context(), key, fingerprint)
	} else {
		_, err = f.WithTx(holder).Extend(t.Context(), key, fingerprint, attempt)
	}
	require.NoError(t, err)
	return holder
}

// Sessions whose transactions are of a higher isolation level meet real serialization failures when somebody commits what they
// wait for. The calls get along with it, and tell what has become of the key.
func TestSerializationFailuresAreRunAgain(t *testing.T) {
	t.Parallel()
	for _, level := range []string{"repeatable read", "serializable"} {
		for _, call := range retryWriters() {
			if call.name == "sweep" {
				continue // it waits for nobody
			}
			t.Run(level+" "+call.name, func(t *testing.T) {
				t.Parallel()
				f := setup(t)
				pool := newFaultPool(t, pgtest.DSN(t), faultSetting("default_transaction_isolation", level))
				attempt := call.put(t, f, key)
				holder := retryHold(t, f, call, attempt)
				answered := make(chan faultAnswer, 1)
				store := f.NewStore(t, pool, lease, retention)
				go func() { answered <- call.do(t.Context(), store, key, attempt) }()
				faultEventually(t, "a call that waits", func() bool { return pool.sessions(t, f.Pool, faultWaiting) == 1 })
				require.NoError(t, holder.Commit(t.Context()))
				answer := <-answered
				require.Equal(t, 1, pool.met("40001"))
				if call.name == "begin" {
					require.ErrorIs(t, answer.err, pgstore.ErrInProgress)
					require.False(t, answer.is)
					return
				}
				require.NoError(t, answer.err)
				call.isTrue(t, f, key, attempt, answer)
				require.True(t, call.done(t, f, key, attempt))
			})
		}
	}
}

// A statement that becomes the victim of a real deadlock, here by what a trigger locks, is run again.
func TestDeadlockVictimIsRunAgain(t *testing.T) {
	t.Parallel()
	f := setup(t)
	own, schema := faultOwn(t, f), pgx.Identifier{f.Schema}.Sanitize()
	_, err := f.Pool.Exec(t.Context(), `INSERT INTO `+own+` VALUES (1), (2);
		CREATE FUNCTION `+schema+`.lock() RETURNS trigger LANGUAGE plpgsql AS $$
			BEGIN
				PERFORM FROM `+own+` WHERE n = 1 FOR UPDATE;
				PERFORM FROM `+own+` WHERE n = 2 FOR UPDATE;
				RETURN NEW;
			END $$`)
	require.NoError(t, err)
	attempt := recordPut(t, f, key, pgstore.StateInProgress)
	recordExec(t, f, `CREATE TRIGGER lock AFTER UPDATE ON %s FOR EACH ROW EXECUTE FUNCTION `+schema+`.lock()`)
	lock := func(n int) pgx.Tx {
		t.Helper()
		tx := directedTx(t, f.Pool)
		_, err := tx.Exec(t.Context(), `SELECT FROM `+own+` WHERE n = $1 FOR UPDATE`, n)
		require.NoError(t, err)
		return tx
	}
	// The last who starts to wait finds the deadlock, if he looks first.
	gate, holder := lock(1), lock(2)
	_, err = holder.Exec(t.Context(), `SET LOCAL deadlock_timeout = '1h'`)
	require.NoError(t, err)
	pool := newFaultPool(t, pgtest.DSN(t), faultSetting("deadlock_timeout", "1ms"))
	completed := make(chan error, 1)
	store := f.NewStore(t, pool, lease, retention)
	go func() {
		completed <- store.Complete(t.Context(), key, fingerprint, attempt, recordResponse)
	}()
	faultEventually(t, "Complete that waits at the gate", func() bool { return directedBlocks(t, f.Pool, gate) })
	held := make(chan error, 1)
	go func() {
		_, err := holder.Exec(t.Context(), `SELECT FROM `+recordTable(f)+` FOR UPDATE`)
		held <- err
	}()
	faultEventually(t, "a holder that waits for Complete", func() bool {
		var n int
		require.NoError(t, f.Pool.QueryRow(t.Context(), `SELECT count(*) FROM pg_stat_activity WHERE pid = $1 AND `+faultWaiting,
			int64(holder.Conn().PgConn().PID())).Scan(&n))
		return n == 1
	})
	require.NoError(t, gate.Rollback(t.Context()))
	require.NoError(t, <-held, "the other one is the victim")
	require.NoError(t, holder.Rollback(t.Context()))
	require.NoError(t, <-completed)
	require.Equal(t, 1, pool.met("40P01"))
	require.Equal(t, pgstore.StateDone, faultTheRow(t, f, key).State)
}

// Two transactions begin two keys in opposite orders. One of them is the victim, is told so by the server's error, and
// succeeds when its caller runs it again from the start.
func TestTransactionsThatDeadlockAreTheirCallersToRunAgain(t *testing.T) {
	t.Parallel()
	for _, commits := range []bool{true, false} {
		t.Run(fmt.Sprintf("commits=%t", commits), func(t *testing.T) {
			t.Parallel()
			f := setup(t)
			a, b := recordKey("a"), recordKey("b")
			begin := func(tx pgx.Tx, k pgstore.Key) (attempt uint64, created bool, err error) {
				record, created, err := f.WithTx(tx).Begin(t.Context(), k, fingerprint)
				return record.Attempt, created, err
			}
			patient, hasty := directedTx(t, f.Pool), directedTx(t, f.Pool)
			for tx, timeout := range map[pgx.Tx]string{patient: "1h", hasty: "1ms"} {
				_, err := tx.Exec(t.Context(), `SELECT set_config('deadlock_timeout', $1, true)`, timeout)
				require.NoError(t, err)
			}
			attemptA, created, err := begin(patient, a)
			require.NoError(t, err)
			require.True(t, created)
			_, created, err = begin(hasty, b)
			require.NoError(t, err)
			require.True(t, created)
			second := goBegin(t.Context(), f.WithTx(patient), b)
			second.waitsFor(t, f.Pool, hasty)

			_, created, err = begin(hasty, a)
			faultIsNoSentinel(t, err)
			require.Equal(t, "40P01", faultCode(t, err))
			require.NotContains(t, err.Error(), "gave up")
			require.False(t, created)
			require.NoError(t, hasty.Rollback(t.Context()))

			record, created, err := second.result(t)
			require.NoError(t, err)
			require.True(t, created)
			if commits {
				require.NoError(t, f.WithTx(patient).Complete(t.Context(), a, fingerprint, attemptA, recordResponse))
				require.NoError(t, f.WithTx(patient).Complete(t.Context(), b, fingerprint, record.Attempt, recordResponse))
				require.NoError(t, patient.Commit(t.Context()))
			} else {
				require.NoError(t, patient.Rollback(t.Context()))
			}
			again := directedTx(t, f.Pool)
			for _, k := range []pgstore.Key{b, a} {
				attempt, created, err := begin(again, k)
				require.NoError(t, err)
				require.Equal(t, !commits, created)
				require.NoError(t, f.WithTx(again).Complete(t.Context(), k, fingerprint, attempt, recordResponse))
			}
			require.NoError(t, again.Commit(t.Context()))
			for _, k := range []pgstore.Key{a, b} {
				require.Equal(t, pgstore.StateDone, faultTheRow(t, f, k).State)
			}
		})
	}
}

// A failure has aborted a caller's transaction: the error is the caller's at once, and he runs the whole of it again.
func TestNothingIsRunAgainInACallersTransaction(t *testing.T) {
	t.Parallel()
	for _, call := range retryWriters() {
		for _, code := range []string{"40001", "40P01", "57P01", "08006"} {
			t.Run(call.name+" "+code, func(t *testing.T) {
				t.Parallel()
				f := setup(t)
				attempt := call.put(t, f, key)
				tried := retryFail(t, f, retryAtOnce, code, 1)
				run := func() (answer faultAnswer) {
					tx := directedTx(t, f.Pool)
					answer = call.do(t.Context(), f.WithTx(tx), key, attempt)
					if answer.err != nil {
						require.Equal(t, byte('E'), tx.Conn().PgConn().TxStatus())
						require.NoError(t, tx.Rollback(t.Context()))
						return answer
					}
					require.NoError(t, tx.Commit(t.Context()))
					return answer
				}
				answer := run()
				faultIsNoSentinel(t, answer.err)
				require.Equal(t, code, faultCode(t, answer.err))
				require.Equal(t, 1, tried())
				call.isTrue(t, f, key, attempt, answer)
				answer = run()
				require.NoError(t, answer.err)
				require.Equal(t, 2, tried())
				call.isTrue(t, f, key, attempt, answer)
				require.True(t, call.done(t, f, key, attempt))
			})
		}
	}
}

// A session that does not wait for locks for long is told that somebody else is at it.
func TestLockTimeoutIsInProgress(t *testing.T) {
	t.Parallel()
	for _, call := range retryWriters() {
		t.Run(call.name, func(t *testing.T) {
			t.Parallel()
			f := setup(t)
			pool := newFaultPool(t, pgtest.DSN(t), faultSetting("lock_timeout", "10ms"))
			store := f.NewStore(t, pool, lease, retention)
			attempt := call.put(t, f, key)
			before := recordRow(t, f, key)
			var holder pgx.Tx
			if call.name == "sweep" { // which goes around rows
				holder = directedTx(t, f.Pool)
				_, err := holder.Exec(t.Context(), `LOCK TABLE `+recordTable(f))
				require.NoError(t, err)
			} else {
				holder = retryHold(t, f, call, attempt)
			}
			answer := call.do(t.Context(), store, key, attempt)
			require.ErrorIs(t, answer.err, pgstore.ErrInProgress)
			var inProgress *pgstore.InProgressError
			require.ErrorAs(t, answer.err, &inProgress)
			require.Positive(t, inProgress.RetryAfter)
			require.Equal(t, "55P03", faultCode(t, answer.err))
			require.Equal(t, 1, pool.met("55P03"), "it is not run again")

			require.NoError(t, holder.Rollback(t.Context()))
			require.Equal(t, before, recordRow(t, f, key))
			answer = call.do(t.Context(), store, key, attempt)
			require.NoError(t, answer.err)
			call.isTrue(t, f, key, attempt, answer)
		})
	}
}

// The context ends between two runs: there is no further one, and the error says both why there should have been and why not.
func TestNothingIsRunAgainWhenTheContextIsOver(t *testing.T) {
	t.Parallel()
	for _, call := range retryWriters() {
		t.Run(call.name, func(t *testing.T) {
			t.Parallel()
			f := setup(t)
			pool := newFaultPool(t, pgtest.DSN(t))
			attempt := call.put(t, f, key)
			tried := retryFail(t, f, retryAtOnce, "40001", retryForever)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			var failures atomic.Int64
			pool.onFailure = func() {
				if failures.Add(1) == 3 {
					cancel()
				}
			}
			answer := call.do(ctx, f.NewStore(t, pool, lease, retention), key, attempt)
			require.ErrorIs(t, answer.err, context.Canceled)
			require.Equal(t, "40001", faultCode(t, answer.err))
			require.Equal(t, 3, tried())
			call.isTrue(t, f, key, attempt, answer)
		})
	}
}
