package pgstore_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/archlab/idempotency/internal/pgtest"
	"github.com/archlab/idempotency/pgstore"
)

// dotxBody is a function for DoTx.
type dotxBody = func(ctx context.Context, tx pgx.Tx, r pgstore.Record) (string, error)

// dotxInserts is a function for DoTx whose effect is a row in a table of the caller's own. It counts its runs.
func dotxInserts(table string, runs *atomic.Int64, response string, err error) dotxBody {
	return func(ctx context.Context, tx pgx.Tx, _ pgstore.Record) (string, error) {
		runs.Add(1)
		if _, err := tx.Exec(ctx, `INSERT INTO `+table+` VALUES (1)`); err != nil {
			return "", err
		}
		return response, err
	}
}

func dotxNever(t *testing.T) dotxBody {
	t.Helper()
	return func(context.Context, pgx.Tx, pgstore.Record) (string, error) {
		t.Error("the function ran")
		return "", errors.New("it should not have run")
	}
}

// One commit for the effect and the record, or none for both.
func TestDoTxCommitsEffectAndRecordTogether(t *testing.T) {
	t.Parallel()
	const response = "\x00 any bytes \xff"
	for name, ending := range map[string]struct {
		err     error
		effects int
		state   pgstore.State // or none
		again   error         // of a repeat
	}{
		"a response":                 {nil, 1, pgstore.StateDone, nil},
		"retryable":                  {pgstore.Retryable(errDo), 0, "", nil},
		"an error of no class":       {errDo, 0, "", nil},
		"a cancelled context":        {errors.Join(errDo, context.Canceled), 0, "", nil},
		"an ErrInProgress, not ours": {errors.Join(errDo, &pgstore.InProgressError{RetryAfter: 1}), 0, "", nil},
		"permanent":                  {pgstore.Permanent(errDo), 0, pgstore.StateFailed, pgstore.ErrFailed},
		"permanent, wrapped":         {fmt.Errorf("deep: %w", pgstore.Permanent(errDo)), 0, pgstore.StateFailed, pgstore.ErrFailed},
		"retryable around permanent": {pgstore.Retryable(pgstore.Permanent(errDo)), 0, pgstore.StateFailed, pgstore.ErrFailed},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := setup(t)
			own := faultOwn(t, f)
			var runs atomic.Int64
			outcome, err := f.DoTx(t.Context(), key, fingerprint, dotxInserts(own, &runs, response, ending.err), pgstore.WithWait(time.Hour))
			if ending.err == nil {
				require.NoError(t, err)
				require.Equal(t, pgstore.Outcome{Response: response, Attempt: 1}, outcome)
			} else {
				require.ErrorIs(t, err, errDo)
				require.ErrorContains(t, err, `idempotency: do in a transaction "tenant-a"/"order.create"/"req-1001": `)
				require.Equal(t, ending.state == pgstore.StateFailed, errors.Is(err, pgstore.ErrFailed))
				require.NotErrorIs(t, err, pgstore.ErrOutcomeUnknown)
				require.Zero(t, outcome)
			}
			require.EqualValues(t, 1, runs.Load())
			require.Equal(t, ending.effects, faultCount(t, f, own))
			if ending.state == "" {
				require.Empty(t, faultRows(t, f, key))
			} else {
				require.Equal(t, ending.state, faultTheRow(t, f, key).State)
			}

			outcome, err = f.DoTx(t.Context(), key, fingerprint, dotxInserts(own, &runs, response, nil))
			require.ErrorIs(t, err, ending.again)
			if ending.again == nil {
				require.Equal(t, response, outcome.Response)
				require.Equal(t, 1, faultCount(t, f, own))
			}
			require.Equal(t, ending.state != "", outcome.Replayed)
			_, err = f.DoTx(t.Context(), key, "sha256:of another", dotxNever(t))
			require.ErrorIs(t, err, pgstore.ErrConflict)
		})
	}
}

func TestDoTxRollsBackWhenItsFunctionLeaves(t *testing.T) {
	t.Parallel()
	for name, leave := range map[string]func(){"panic": func() { panic(errDo) }, "Goexit": runtime.Goexit} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := setup(t)
			own := faultOwn(t, f)
			pool := newFaultPool(t, pgtest.DSN(t), faultSingle)
			store := f.NewStore(t, pool, lease, retention)
			var runs atomic.Int64
			returned, recovered := false, any(nil)
			var wg sync.WaitGroup
			wg.Go(func() {
				defer func() { recovered = recover() }()
				_, _ = store.DoTx(t.Context(), key, fingerprint, func(ctx context.Context, tx pgx.Tx, r pgstore.Record) (string, error) {
					_, err := dotxInserts(own, &runs, "", nil)(ctx, tx, r)
					leave()
					return "", err
				})
				returned = true
			})
			wg.Wait()
			require.False(t, returned)
			require.Equal(t, name == "panic", recovered == errDo) //nolint:errorlint // the very value
			require.True(t, pool.isIdle())
			require.Zero(t, pool.sessions(t, f.Pool, `state LIKE 'idle in transaction%'`))
			require.Zero(t, faultCount(t, f, own))
			require.Empty(t, faultRows(t, f, key), "as if nobody had called")

			_, err := store.DoTx(t.Context(), key, fingerprint, dotxInserts(own, &runs, "", nil))
			require.NoError(t, err)
			require.Equal(t, 1, faultCount(t, f, own))
		})
	}
}

func TestDoTxIsReadCommittedWhateverTheSessionsDefault(t *testing.T) {
	t.Parallel()
	f := setup(t)
	for _, level := range []string{"serializable", "repeatable read", "read committed"} {
		pool := newFaultPool(t, pgtest.DSN(t), faultSetting("default_transaction_isolation", level), faultSetting("lock_timeout", "7s"))
		store := f.NewStore(t, pool, lease, retention)
		_, err := store.DoTx(t.Context(), recordKey(level), fingerprint, func(ctx context.Context, tx pgx.Tx, _ pgstore.Record) (string, error) {
			var isolation, wait string
			require.NoError(t, tx.QueryRow(ctx, `SELECT current_setting('transaction_isolation'), current_setting('lock_timeout')`).Scan(&isolation, &wait))
			require.Equal(t, "read committed", isolation)
			require.Equal(t, "1234ms", wait)
			return "", nil
		}, pgstore.WithLockWait(1234*time.Millisecond+time.Microsecond))
		require.NoError(t, err)
		var wait string
		require.NoError(t, pool.QueryRow(t.Context(), `SHOW lock_timeout`).Scan(&wait))
		require.Equal(t, "7s", wait, "the setting ends with the transaction")
	}
}

// dotxGivesWay makes the first n COMMITs of transactions that write to table fail with 40001, as a serializable transaction may.
func dotxGivesWay(t *testing.T, f *fixture, table string, n int) {
	t.Helper()
	schema := pgx.Identifier{f.Schema}.Sanitize()
	for _, statement := range []string{
		`CREATE SEQUENCE %[1]s.commits`,
		`CREATE FUNCTION %[1]s.give_way() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
			IF nextval('%[4]s.commits') <= %[3]d THEN RAISE EXCEPTION 'no luck' USING ERRCODE = '40001'; END IF;
			RETURN NULL; END $$`,
		`CREATE CONSTRAINT TRIGGER give_way AFTER INSERT ON %[2]s DEFERRABLE INITIALLY DEFERRED
			FOR EACH ROW EXECUTE FUNCTION %[1]s.give_way()`,
	} {
		_, err := f.Pool.Exec(t.Context(), fmt.Sprintf(statement+`--%[1]s%[2]s%[3]d%[4]s`, schema, table, n, strings.ReplaceAll(schema, "'", "''")))
		require.NoError(t, err)
	}
}

func TestDoTxRunsAgainWhereCommitGivesWay(t *testing.T) {
	t.Parallel()
	for failures, name := range map[int]string{1: "once", 4: "four times", 1000: "for ever"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := setup(t)
			own := faultOwn(t, f)
			dotxGivesWay(t, f, own, failures)
			var runs atomic.Int64
			outcome, err := f.DoTx(t.Context(), key, fingerprint, dotxInserts(own, &runs, recordResponse, nil))
			if failures > 4 {
				require.Equal(t, "40001", faultCode(t, err))
				require.EqualValues(t, 5, runs.Load(), "it is bounded")
				require.NotErrorIs(t, err, pgstore.ErrOutcomeUnknown)
				require.Zero(t, faultCount(t, f, own))
				require.Empty(t, faultRows(t, f, key))
				return
			}
			require.NoError(t, err)
			require.EqualValues(t, failures+1, runs.Load())
			require.Equal(t, recordResponse, outcome.Response)
			require.False(t, outcome.Replayed)
			require.Equal(t, 1, faultCount(t, f, own))
			require.Equal(t, outcome.Attempt, faultTheRow(t, f, key).Attempt)
		})
	}
}

// Two transactions lock two accounts in opposite order.
func TestDoTxRunsAgainAfterADeadlock(t *testing.T) {
	t.Parallel()
	f := setup(t)
	own := faultOwn(t, f)
	_, err := f.Pool.Exec(t.Context(), `INSERT INTO `+own+` VALUES (1), (2)`)
	require.NoError(t, err)
	var (
		runs   atomic.Int64
		locked sync.WaitGroup
		g      errgroup.Group
	)
	locked.Add(2)
	for _, order := range [][2]int{{1, 2}, {2, 1}} {
		g.Go(func() error {
			first := sync.OnceFunc(locked.Done)
			_, err := f.DoTx(t.Context(), recordKey(fmt.Sprint(order)), fingerprint, func(ctx context.Context, tx pgx.Tx, _ pgstore.Record) (string, error) {
				runs.Add(1)
				for i, n := range order {
					if _, err := tx.Exec(ctx, `UPDATE `+own+` SET n = n WHERE n = $1`, n); err != nil {
						return "", pgstore.Retryable(fmt.Errorf("wrapped by the caller: %w", err))
					}
					if i == 0 {
						first()
						locked.Wait()
					}
				}
				return "", nil
			}, pgstore.WithLockWait(time.Minute))
			return err
		})
	}
	require.NoError(t, g.Wait())
	require.EqualValues(t, 3, runs.Load(), "one of them ran twice")
}

func TestPermanentCountsMoreThanADeadlock(t *testing.T) {
	t.Parallel()
	f := setup(t)
	var runs atomic.Int64
	_, err := f.DoTx(t.Context(), key, fingerprint, func(context.Context, pgx.Tx, pgstore.Record) (string, error) {
		runs.Add(1)
		return "", pgstore.Permanent(&pgconn.PgError{Code: "40P01"})
	})
	require.ErrorIs(t, err, pgstore.ErrFailed)
	require.EqualValues(t, 1, runs.Load())
}

// The function swallowed an error of the server: what it says is not what happened.
func TestDoTxDoesNotCommitAnAbortedTransaction(t *testing.T) {
	t.Parallel()
	f := setup(t)
	own := faultOwn(t, f)
	_, err := f.DoTx(t.Context(), key, fingerprint, func(ctx context.Context, tx pgx.Tx, _ pgstore.Record) (string, error) {
		_, err := tx.Exec(ctx, `INSERT INTO `+own+` VALUES (1)`)
		require.NoError(t, err)
		_, _ = tx.Exec(ctx, `SELECT 1/0`)
		return "all is well", nil
	})
	require.Equal(t, "25P02", faultCode(t, err))
	require.Zero(t, faultCount(t, f, own))
	require.Empty(t, faultRows(t, f, key))
}

// A constraint that is checked at the end says no.
func TestErrorOfCommitThatIsCertainIsNotUnknown(t *testing.T) {
	t.Parallel()
	f := setup(t)
	own := faultOwn(t, f)
	_, err := f.Pool.Exec(t.Context(), `ALTER TABLE `+own+` ADD UNIQUE (n) DEFERRABLE INITIALLY DEFERRED; INSERT INTO `+own+` VALUES (1)`)
	require.NoError(t, err)
	var runs atomic.Int64
	_, err = f.DoTx(t.Context(), key, fingerprint, dotxInserts(own, &runs, "", nil))
	require.Equal(t, "23505", faultCode(t, err))
	require.NotErrorIs(t, err, pgstore.ErrOutcomeUnknown)
	require.EqualValues(t, 1, runs.Load())
	require.Empty(t, faultRows(t, f, key))
}

func TestFunctionCannotEndTheTransaction(t *testing.T) {
	t.Parallel()
	f := setup(t)
	own := faultOwn(t, f)
	_, err := f.DoTx(t.Context(), key, fingerprint, func(ctx context.Context, tx pgx.Tx, _ pgstore.Record) (string, error) {
		_, err := tx.Exec(ctx, `INSERT INTO `+own+` VALUES (1)`)
		require.NoError(t, err)
		require.ErrorContains(t, tx.Commit(ctx), "DoTx ends the transaction")
		require.ErrorContains(t, tx.Rollback(ctx), "DoTx ends the transaction")
		savepoint, err := tx.Begin(ctx)
		require.NoError(t, err)
		_, err = savepoint.Exec(ctx, `INSERT INTO `+own+` VALUES (2)`)
		require.NoError(t, err)
		return "", savepoint.Rollback(ctx) // which is its own
	})
	require.NoError(t, err)
	require.Equal(t, 1, faultCount(t, f, own))
}

func TestResponseOverTheLimitRollsTheTransactionBack(t *testing.T) {
	t.Parallel()
	f := setup(t, pgstore.WithMaxResponse(10))
	own := faultOwn(t, f)
	var runs atomic.Int64
	_, err := f.DoTx(t.Context(), key, fingerprint, dotxInserts(own, &runs, "longer than ten bytes", nil))
	require.ErrorIs(t, err, pgstore.ErrResponseTooLarge)
	require.Zero(t, faultCount(t, f, own))
	require.Empty(t, faultRows(t, f, key))
}

func TestDoTxOfACallerWhoLeaves(t *testing.T) {
	t.Parallel()
	for name, fnErr := range map[string]error{"commits what its function has done": nil, "rolls back what it has not": context.Canceled} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := setup(t)
			own := faultOwn(t, f)
			pool := newFaultPool(t, pgtest.DSN(t), faultSingle)
			store := f.NewStore(t, pool, lease, retention)
			var runs atomic.Int64
			ctx, cancel := context.WithCancel(t.Context())
			_, err := store.DoTx(ctx, key, fingerprint, func(ctx context.Context, tx pgx.Tx, r pgstore.Record) (string, error) {
				response, err := dotxInserts(own, &runs, recordResponse, fnErr)(ctx, tx, r)
				cancel()
				return response, err
			})
			require.Equal(t, fnErr == nil, err == nil, err)
			require.True(t, pool.isIdle())
			want := 0
			if fnErr == nil {
				want = 1
			}
			require.Equal(t, want, faultCount(t, f, own))
			require.Len(t, faultRows(t, f, key), want)
			require.Zero(t, pool.sessions(t, f.Pool, `state LIKE 'idle in transaction%'`))
		})
	}
}

// The transaction outlives its lease, and it does not matter: nobody else can have the key.
func TestLeaseDoesNotBoundATransaction(t *testing.T) {
	t.Parallel()
	f := setup(t)
	own := faultOwn(t, f)
	const lease = 50 * time.Millisecond
	store := f.NewStore(t, f.Pool, lease, retention)
	second := newFaultPool(t, pgtest.DSN(t), faultSingle)
	var runs atomic.Int64
	var g errgroup.Group
	lapsed, leave := make(chan struct{}), make(chan struct{})
	g.Go(func() error {
		outcome, err := store.DoTx(t.Context(), key, fingerprint, func(ctx context.Context, tx pgx.Tx, r pgstore.Record) (string, error) {
			if err := beatPasses(ctx, f, 4*lease); err != nil {
				return "", err
			}
			close(lapsed)
			<-leave
			return dotxInserts(own, &runs, recordResponse, nil)(ctx, tx, r)
		})
		if err == nil && outcome.Replayed {
			return errors.New("replayed")
		}
		return err
	})
	<-lapsed
	g.Go(func() error {
		outcome, err := f.NewStore(t, second, lease, retention).DoTx(t.Context(), key, fingerprint, dotxNever(t))
		if err == nil && !outcome.Replayed {
			return errors.New("not replayed")
		}
		return err
	})
	faultEventually(t, "the second one waiting", func() bool { return second.sessions(t, f.Pool, faultWaiting) == 1 })
	close(leave)
	require.NoError(t, g.Wait())
	require.EqualValues(t, 1, runs.Load())
	require.Equal(t, 1, faultCount(t, f, own))
}

// A second caller waits for the first one's transaction, but not for ever.
func TestSecondDoTxWaitsForTheFirst(t *testing.T) {
	t.Parallel()
	for name, first := range map[string]error{"which commits": nil, "which rolls back": errDo} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := setup(t)
			own := faultOwn(t, f)
			pool := newFaultPool(t, pgtest.DSN(t))
			store := f.NewStore(t, pool, lease, retention)
			var runs atomic.Int64
			leave, entered := make(chan struct{}), make(chan struct{})
			var g, others errgroup.Group
			g.Go(func() error {
				_, err := store.DoTx(t.Context(), key, fingerprint, func(ctx context.Context, tx pgx.Tx, r pgstore.Record) (string, error) {
					close(entered)
					<-leave
					return dotxInserts(own, &runs, recordResponse, first)(ctx, tx, r)
				})
				if !errors.Is(err, first) {
					return err
				}
				return nil
			})
			<-entered
			_, err := store.DoTx(t.Context(), key, fingerprint, dotxNever(t), pgstore.WithLockWait(20*time.Millisecond))
			require.ErrorIs(t, err, pgstore.ErrInProgress)
			require.Equal(t, "55P03", faultCode(t, err))
			require.NotErrorIs(t, err, pgstore.ErrOutcomeUnknown)
			for _, wait := range []pgstore.DoOption{pgstore.WithLockWait(time.Hour), pgstore.WithWait(time.Hour)} {
				others.Go(func() error {
					outcome, err := store.DoTx(t.Context(), key, fingerprint, dotxInserts(own, &runs, recordResponse, nil),
						pgstore.WithLockWait(100*time.Millisecond), wait)
					if err == nil && outcome.Response != recordResponse {
						return fmt.Errorf("got %q", outcome.Response)
					}
					return err
				})
			}
			faultEventually(t, "both waiting", func() bool { return pool.sessions(t, f.Pool, faultWaiting) == 2 })
			close(leave)
			require.NoError(t, g.Wait())
			require.NoError(t, others.Wait())
			require.Equal(t, 1, faultCount(t, f, own))
		})
	}
}

// Many callers, a small pool, one connection each: all finish.
func TestDoTxOfManyCallersRunsOnceOnAnyPool(t *testing.T) {
	t.Parallel()
	for _, conns := range []int32{1, 5} {
		t.Run(fmt.Sprintf("%d connections", conns), func(t *testing.T) {
			t.Parallel()
			f := setup(t)
			own := faultOwn(t, f)
			pool := newFaultPool(t, pgtest.DSN(t), func(config *pgxpool.Config) { config.MaxConns = conns })
			store := f.NewStore(t, pool, lease, retention)
			var runs atomic.Int64
			var g errgroup.Group
			for range 50 {
				g.Go(func() error {
					outcome, err := store.DoTx(t.Context(), key, fingerprint, dotxInserts(own, &runs, recordResponse, nil), pgstore.WithWait(faultWait))
					if err == nil && outcome.Response != recordResponse {
						return fmt.Errorf("got %q", outcome.Response)
					}
					return err
				})
			}
			require.NoError(t, g.Wait())
			require.EqualValues(t, 1, runs.Load())
			require.Equal(t, 1, faultCount(t, f, own))
		})
	}
}

// A committed attempt is polled by one query, not by a transaction each time.
func TestDoTxPollsACommittedAttemptByOneQuery(t *testing.T) {
	t.Parallel()
	f := setup(t)
	pool := newFaultPool(t, pgtest.DSN(t), faultSingle)
	store := f.NewStore(t, pool, lease, retention)
	attempt := recordPut(t, f, key, pgstore.StateInProgress)
	var g errgroup.Group
	g.Go(func() error {
		outcome, err := store.DoTx(t.Context(), key, fingerprint, dotxNever(t), pgstore.WithWait(faultWait))
		if err == nil && (!outcome.Replayed || outcome.Response != recordResponse) {
			return fmt.Errorf("got %v", outcome)
		}
		return err
	})
	faultEventually(t, "some polls", func() bool { return pool.ran(store.Statements().Get) > 5 })
	require.NoError(t, f.Complete(t.Context(), key, fingerprint, attempt, recordResponse))
	require.NoError(t, g.Wait())
	require.Equal(t, 2, pool.ran(store.Statements().Begin))
	require.Equal(t, 2, pool.ran("rollback"))
	require.Zero(t, pool.ran("commit"))
}

// Many callers find out at the same moment: it is recorded once, and none of them fails to record it.
func TestPermanentOfManyCallersIsOneFailure(t *testing.T) {
	t.Parallel()
	f := setup(t)
	var g errgroup.Group
	for range 20 {
		g.Go(func() error {
			_, err := f.DoTx(t.Context(), key, fingerprint, func(context.Context, pgx.Tx, pgstore.Record) (string, error) {
				return "", pgstore.Permanent(errDo)
			}, pgstore.WithWait(faultWait))
			if !errors.Is(err, pgstore.ErrFailed) || errors.Is(err, pgstore.ErrNotRecorded) {
				return fmt.Errorf("got %w", err)
			}
			return nil
		})
	}
	require.NoError(t, g.Wait())
	require.Equal(t, pgstore.StateFailed, faultTheRow(t, f, key).State)
}

// Another caller has completed it between the rollback and the record of the failure: theirs is the truth.
func TestPermanentGivesWayToWhoeverWasFaster(t *testing.T) {
	t.Parallel()
	f := setup(t)
	proxy := pgtest.NewProxy(t, pgtest.DSN(t))
	store := f.NewStore(t, newFaultPool(t, proxy.URL()), lease, retention)
	held := proxy.HoldRequest(pgtest.Nth(2, pgtest.Executes(store.Statements().Begin)))
	var g errgroup.Group
	g.Go(func() error {
		_, err := store.DoTx(t.Context(), key, fingerprint, func(context.Context, pgx.Tx, pgstore.Record) (string, error) {
			return "", pgstore.Permanent(errDo)
		})
		if !errors.Is(err, errDo) || !errors.Is(err, pgstore.ErrNotRecorded) || errors.Is(err, pgstore.ErrFailed) {
			return fmt.Errorf("got %w", err)
		}
		return nil
	})
	held.Wait(t)
	recordPut(t, f, key, pgstore.StateDone)
	held.Release()
	require.NoError(t, g.Wait())
	require.Equal(t, pgstore.StateDone, faultTheRow(t, f, key).State)
}
