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
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/archlab/idempotency/internal/pgtest"
	"github.com/archlab/idempotency/pgstore"
)

// doReturns is a function for Do that ends at once, and counts its runs.
func doReturns(runs *atomic.Int64, response string, err error) func(context.Context, pgstore.Record) (string, error) {
	return func(context.Context, pgstore.Record) (string, error) {
		runs.Add(1)
		return response, err
	}
}

// doNever is a function for a Do that must not run it.
func doNever(t *testing.T) func(context.Context, pgstore.Record) (string, error) {
	t.Helper()
	return func(context.Context, pgstore.Record) (string, error) {
		t.Error("the function ran")
		return "", errors.New("it should not have run")
	}
}

var errDo = errors.New("what the function said")

func TestDoRecordsHowItsFunctionEnded(t *testing.T) {
	t.Parallel()
	const response = "\x00 any bytes \xff"
	for name, ending := range map[string]struct {
		err   error
		state pgstore.State
		again error // of a repeat
		reran int64
	}{
		"a response":                    {nil, pgstore.StateDone, nil, 0},
		"retryable":                     {pgstore.Retryable(errDo), pgstore.StateRetryable, nil, 1},
		"retryable, wrapped":            {fmt.Errorf("deep: %w", pgstore.Retryable(fmt.Errorf("deeper: %w", errDo))), pgstore.StateRetryable, nil, 1},
		"retryable, joined":             {errors.Join(errors.New("another"), pgstore.Retryable(errDo)), pgstore.StateRetryable, nil, 1},
		"permanent":                     {pgstore.Permanent(errDo), pgstore.StateFailed, pgstore.ErrFailed, 0},
		"permanent, wrapped":            {fmt.Errorf("deep: %w", pgstore.Permanent(errDo)), pgstore.StateFailed, pgstore.ErrFailed, 0},
		"permanent around retryable":    {pgstore.Permanent(pgstore.Retryable(errDo)), pgstore.StateFailed, pgstore.ErrFailed, 0},
		"retryable around permanent":    {pgstore.Retryable(pgstore.Permanent(errDo)), pgstore.StateFailed, pgstore.ErrFailed, 0},
		"retryable and permanent":       {errors.Join(pgstore.Retryable(errDo), pgstore.Permanent(errDo)), pgstore.StateFailed, pgstore.ErrFailed, 0},
		"an error of no class":          {errDo, pgstore.StateInProgress, pgstore.ErrInProgress, 0},
		"a cancelled context":           {errors.Join(errDo, context.Canceled), pgstore.StateInProgress, pgstore.ErrInProgress, 0},
		"a deadline that has passed":    {errors.Join(errDo, context.DeadlineExceeded), pgstore.StateInProgress, pgstore.ErrInProgress, 0},
		"an ErrInProgress of its own":   {errors.Join(errDo, &pgstore.InProgressError{RetryAfter: 1}), pgstore.StateInProgress, pgstore.ErrInProgress, 0},
		"retryable around no error":     {errors.Join(errDo, pgstore.Retryable(nil)), pgstore.StateInProgress, pgstore.ErrInProgress, 0},
		"permanent around no error":     {errors.Join(errDo, pgstore.Permanent(nil)), pgstore.StateInProgress, pgstore.ErrInProgress, 0},
		"a refusal of another's record": {errors.Join(errDo, pgstore.ErrStaleAttempt), pgstore.StateInProgress, pgstore.ErrInProgress, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := setup(t)
			var runs atomic.Int64
			outcome, err := f.Do(t.Context(), key, fingerprint, doReturns(&runs, response, ending.err))
			if ending.err == nil {
				require.NoError(t, err)
				require.Equal(t, pgstore.Outcome{Response: response, Attempt: 1}, outcome)
			} else {
				require.ErrorIs(t, err, errDo)
				require.ErrorContains(t, err, `idempotency: do "tenant-a"/"order.create"/"req-1001": `)
				require.Equal(t, ending.state == pgstore.StateFailed, errors.Is(err, pgstore.ErrFailed))
				require.NotErrorIs(t, err, pgstore.ErrNotRecorded)
				require.Zero(t, outcome)
			}
			row := faultTheRow(t, f, key)
			require.Equal(t, ending.state, row.State)
			require.EqualValues(t, 1, row.Attempt)

			outcome, err = f.Do(t.Context(), key, fingerprint, doReturns(&runs, "second", nil))
			require.ErrorIs(t, err, ending.again)
			require.Equal(t, 1+ending.reran, runs.Load())
			switch {
			case ending.state == pgstore.StateDone:
				require.Equal(t, pgstore.Outcome{Response: response, Replayed: true, Attempt: 1}, outcome)
			case ending.state == pgstore.StateFailed:
				require.Equal(t, pgstore.Outcome{Replayed: true, Attempt: 1}, outcome)
			case ending.reran == 1:
				require.Equal(t, pgstore.Outcome{Response: "second", Attempt: 2}, outcome)
			default:
				require.Zero(t, outcome)
				recordAge(t, f, key, lease)
				outcome, err = f.Do(t.Context(), key, fingerprint, func(_ context.Context, r pgstore.Record) (string, error) {
					require.EqualValues(t, 1, r.Abandoned)
					return "third", nil
				})
				require.NoError(t, err)
				require.Equal(t, "third", outcome.Response)
			}
			_, err = f.Do(t.Context(), key, "sha256:of another", doNever(t))
			require.ErrorIs(t, err, pgstore.ErrConflict)
		})
	}
}

// errors.As finds the types of the function's errors, but not the marks: those have had their effect.
func TestMarksDoNotReachAnOuterCall(t *testing.T) {
	t.Parallel()
	for name, mark := range map[string]func(error) error{"retryable": pgstore.Retryable, "permanent": pgstore.Permanent} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := setup(t)
			inner, outer := recordKey("inner"), recordKey("outer")
			_, err := f.Do(t.Context(), outer, fingerprint, func(ctx context.Context, _ pgstore.Record) (string, error) {
				_, err := f.Do(ctx, inner, fingerprint, func(context.Context, pgstore.Record) (string, error) {
					return "", mark(&doError{errDo})
				})
				return "", fmt.Errorf("after an effect of the outer one: %w", err)
			})
			require.ErrorIs(t, err, errDo)
			found := new(doError)
			require.ErrorAs(t, err, &found)
			require.NotEqual(t, pgstore.StateInProgress, faultTheRow(t, f, inner).State)
			require.Equal(t, pgstore.StateInProgress, faultTheRow(t, f, outer).State, "the inner promise freed the outer key")
		})
	}
}

type doError struct{ err error }

func (e *doError) Error() string { return e.err.Error() }
func (e *doError) Unwrap() error { return e.err }

func TestMarksAroundNothingAreErrorsThatSaySo(t *testing.T) {
	t.Parallel()
	require.ErrorContains(t, pgstore.Retryable(nil), "around nothing")
	require.ErrorContains(t, pgstore.Permanent(nil), "around nothing")
	require.EqualError(t, pgstore.Retryable(errDo), errDo.Error())
	require.EqualError(t, pgstore.Permanent(errDo), errDo.Error())
}

func TestDoLetsPanicsAndGoexitPassAndTellsTheNextAttempt(t *testing.T) {
	t.Parallel()
	for name, leave := range map[string]func(){
		"panic":         func() { panic(errDo) },
		"panic(nil)":    func() { panic(nil) },
		"Goexit":        runtime.Goexit,
		"runtime error": func() { _ = []int{}[len(key.Value)] },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := setup(t)
			pool := newFaultPool(t, pgtest.DSN(t))
			store := f.NewStore(t, pool, lease, retention)
			for attempt := uint64(1); attempt <= 4; attempt++ { // several in a row
				var abandoned uint64
				returned, recovered := false, any(nil)
				var wg sync.WaitGroup
				wg.Go(func() {
					defer func() { recovered = recover() }()
					_, _ = store.Do(t.Context(), key, fingerprint, func(_ context.Context, r pgstore.Record) (string, error) {
						abandoned = r.Abandoned
						leave()
						return "", nil
					})
					returned = true
				})
				wg.Wait()
				require.False(t, returned)
				require.Equal(t, name != "Goexit", recovered != nil)
				if name == "panic" {
					require.Equal(t, errDo, recovered)
				}
				require.Equal(t, attempt-1, abandoned)
				row := faultTheRow(t, f, key)
				require.Equal(t, pgstore.StateInProgress, row.State)
				require.Equal(t, attempt, row.Attempt)
				require.True(t, pool.isIdle())

				_, err := store.Do(t.Context(), key, fingerprint, doNever(t))
				require.ErrorIs(t, err, pgstore.ErrInProgress, "the key is held")
				recordAge(t, f, key, lease)
			}
			require.Zero(t, pool.ran(store.Statements().Extend), "no heartbeat outlives its work")
		})
	}
}

// The pool has one connection, and the function itself can have it.
func TestDoHoldsNoConnectionWhileItsFunctionRuns(t *testing.T) {
	t.Parallel()
	f := setup(t)
	pool := newFaultPool(t, pgtest.DSN(t), faultSingle)
	store := f.NewStore(t, pool, 3*time.Second, retention) // a beat each second
	idleInTx := func() int { return pool.sessions(t, f.Pool, `state LIKE 'idle in transaction%'`) }
	_, err := store.Do(t.Context(), key, fingerprint, func(ctx context.Context, _ pgstore.Record) (string, error) {
		require.True(t, pool.isIdle())
		require.Zero(t, idleInTx())
		faultEventually(t, "a heartbeat on the one connection", func() bool { return pool.ran(store.Statements().Extend) >= 3 })
		_, err := pool.Exec(ctx, `SELECT 1`)
		return "done", err
	})
	require.NoError(t, err)
	require.True(t, pool.isIdle())
}

// Fifty callers, two pools, one slow function.
func TestDoOfManyCallersRunsOnce(t *testing.T) {
	t.Parallel()
	const callers = 50
	for name, wait := range map[string]time.Duration{"without a wait": 0, "with a wait": faultWait} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := setup(t)
			stores := []*pgstore.Store{
				f.NewStore(t, newFaultPool(t, pgtest.DSN(t)), lease, retention),
				f.NewStore(t, newFaultPool(t, pgtest.DSN(t)), lease, retention),
			}
			var (
				runs, refused, replayed atomic.Int64
				others                  sync.WaitGroup // those who are refused, or ask for the first time
				g                       errgroup.Group
			)
			others.Add(callers - 1)
			response := strings.Repeat("slow ", 1000)
			for i := range callers {
				g.Go(func() error {
					left := sync.OnceFunc(others.Done)
					owner := false
					outcome, err := stores[i%2].Do(t.Context(), key, fingerprint, func(ctx context.Context, _ pgstore.Record) (string, error) {
						owner = true
						runs.Add(1)
						if wait == 0 {
							others.Wait() // every other caller has got its answer
						} else if err := doPause(ctx, 200*time.Millisecond); err != nil {
							return "", err
						}
						return response, nil
					}, pgstore.WithWait(wait))
					if !owner {
						left()
					}
					if held, ok := errors.AsType[*pgstore.InProgressError](err); ok {
						refused.Add(1)
						if held.RetryAfter <= 0 || held.RetryAfter > lease {
							return fmt.Errorf("retry after %v", held.RetryAfter)
						}
						return nil
					}
					if err == nil && outcome.Response != response {
						return fmt.Errorf("another response: %q", outcome.Response)
					}
					if outcome.Replayed {
						replayed.Add(1)
					}
					return err
				})
			}
			require.NoError(t, g.Wait())
			require.EqualValues(t, 1, runs.Load())
			if wait == 0 {
				require.EqualValues(t, callers-1, refused.Load())
			} else {
				require.EqualValues(t, callers-1, replayed.Load())
			}
		})
	}
}

// doPause is work that takes time, and ends when its context does.
func doPause(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(d):
		return nil
	}
}

func TestDoOfAThousandCallersOfTwentyKeysRunsEachOnce(t *testing.T) {
	t.Parallel()
	const callers, keys = 1000, 20
	f := setup(t)
	pool := newFaultPool(t, pgtest.DSN(t))
	store := f.NewStore(t, pool, lease, retention)
	var runs [keys]atomic.Int64
	var g errgroup.Group
	for i := range callers {
		g.Go(func() error {
			k := recordKey(fmt.Sprint("key ", i%keys))
			outcome, err := store.Do(t.Context(), k, fingerprint, doReturns(&runs[i%keys], k.Value, nil), pgstore.WithWait(faultWait))
			if err == nil && outcome.Response != k.Value {
				return fmt.Errorf("%s got %q", k, outcome.Response)
			}
			return err
		})
	}
	require.NoError(t, g.Wait())
	for i := range runs {
		require.EqualValues(t, 1, runs[i].Load())
	}
	faultEventually(t, "an idle pool", pool.isIdle)
}

func TestDoWaitsForARunningAttempt(t *testing.T) {
	t.Parallel()
	// begun returns a store on a pool of one connection, and an attempt of somebody else that is in progress.
	begun := func(t *testing.T) (*fixture, *faultPool, *pgstore.Store, uint64) {
		t.Helper()
		f := setup(t)
		pool := newFaultPool(t, pgtest.DSN(t), faultSingle)
		return f, pool, f.NewStore(t, pool, lease, retention), recordPut(t, f, key, pgstore.StateInProgress)
	}
	polls := func(pool *faultPool, store *pgstore.Store) int { return pool.ran(store.Statements().Begin) }

	t.Run("and gives up when the wait is over", func(t *testing.T) {
		t.Parallel()
		f, _, store, _ := begun(t)
		_, err := store.Do(t.Context(), key, fingerprint, doNever(t), pgstore.WithWait(50*time.Millisecond))
		held := new(pgstore.InProgressError)
		require.ErrorAs(t, err, &held)
		require.Positive(t, held.RetryAfter)
		require.EqualValues(t, 1, faultTheRow(t, f, key).Attempt)
	})
	t.Run("and replays its outcome, with one query each time and no connection in between", func(t *testing.T) {
		t.Parallel()
		f, pool, store, attempt := begun(t)
		var outcome pgstore.Outcome
		var g errgroup.Group
		g.Go(func() (err error) {
			outcome, err = store.Do(t.Context(), key, fingerprint, doNever(t), pgstore.WithWait(faultWait))
			return err
		})
		faultEventually(t, "some polls", func() bool { return polls(pool, store) > 5 })
		faultEventually(t, "a free connection between polls", pool.isIdle)
		require.NoError(t, f.Complete(t.Context(), key, fingerprint, attempt, recordResponse))
		require.NoError(t, g.Wait())
		require.Equal(t, pgstore.Outcome{Response: recordResponse, Replayed: true, Attempt: attempt}, outcome)
		pool.mu.Lock()
		defer pool.mu.Unlock()
		require.Len(t, pool.runs, 1, "polls are one statement, and the pool's own are none")
	})
	t.Run("and runs when it is released", func(t *testing.T) {
		t.Parallel()
		f, pool, store, attempt := begun(t)
		var runs atomic.Int64
		var g errgroup.Group
		g.Go(func() error {
			_, err := store.Do(t.Context(), key, fingerprint, doReturns(&runs, "", nil), pgstore.WithWait(faultWait))
			return err
		})
		faultEventually(t, "some polls", func() bool { return polls(pool, store) > 2 })
		require.NoError(t, f.Fail(t.Context(), key, fingerprint, attempt, true))
		require.NoError(t, g.Wait())
		require.EqualValues(t, 1, runs.Load())
	})
	t.Run("and takes over when it lapses", func(t *testing.T) {
		t.Parallel()
		f, pool, store, attempt := begun(t)
		var g errgroup.Group
		g.Go(func() error {
			_, err := store.Do(t.Context(), key, fingerprint, func(_ context.Context, r pgstore.Record) (string, error) {
				if r.Abandoned != attempt {
					return "", fmt.Errorf("abandoned: %d", r.Abandoned)
				}
				return "", nil
			}, pgstore.WithWait(faultWait))
			return err
		})
		faultEventually(t, "some polls", func() bool { return polls(pool, store) > 2 })
		recordAge(t, f, key, lease)
		require.NoError(t, g.Wait())
	})
	t.Run("and stops with its context", func(t *testing.T) {
		t.Parallel()
		_, pool, store, _ := begun(t)
		ctx, cancel := context.WithCancel(t.Context())
		var g errgroup.Group
		g.Go(func() error {
			_, err := store.Do(ctx, key, fingerprint, doNever(t), pgstore.WithWait(faultWait))
			return err
		})
		faultEventually(t, "some polls", func() bool { return polls(pool, store) > 2 })
		cancel()
		require.ErrorIs(t, g.Wait(), context.Canceled)
	})
	t.Run("but not for another request", func(t *testing.T) {
		t.Parallel()
		_, pool, store, _ := begun(t)
		_, err := store.Do(t.Context(), key, "sha256:of another", doNever(t), pgstore.WithWait(faultWait))
		require.ErrorIs(t, err, pgstore.ErrConflict)
		require.Equal(t, 1, polls(pool, store))
	})
}

func TestResponseOverTheLimitDoesNotFreeTheKey(t *testing.T) {
	t.Parallel()
	f := setup(t, pgstore.WithMaxResponse(10))
	var runs atomic.Int64
	const response = "longer than ten bytes"
	outcome, err := f.Do(t.Context(), key, fingerprint, doReturns(&runs, response, nil))
	require.ErrorIs(t, err, pgstore.ErrResponseTooLarge)
	require.ErrorIs(t, err, pgstore.ErrNotRecorded)
	require.Equal(t, pgstore.Outcome{Response: response, Attempt: 1}, outcome, "the effect has happened, and the caller gets what came of it")
	_, err = f.Do(t.Context(), key, fingerprint, doNever(t))
	require.ErrorIs(t, err, pgstore.ErrInProgress)
	require.Equal(t, pgstore.StateInProgress, faultTheRow(t, f, key).State)
}

// The caller has gone; what it began is recorded all the same.
func TestDoRecordsTheEndingOfACallerWhoHasGone(t *testing.T) {
	t.Parallel()
	for name, ending := range map[string]struct {
		err   error
		state pgstore.State
	}{
		"a response": {nil, pgstore.StateDone},
		"retryable":  {pgstore.Retryable(errDo), pgstore.StateRetryable},
		"permanent":  {pgstore.Permanent(errDo), pgstore.StateFailed},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := setup(t)
			ctx, cancel := context.WithCancel(t.Context())
			_, err := f.Do(ctx, key, fingerprint, func(ctx context.Context, _ pgstore.Record) (string, error) {
				cancel()
				<-ctx.Done()
				require.ErrorIs(t, context.Cause(ctx), context.Canceled)
				return recordResponse, ending.err
			})
			require.ErrorIs(t, err, ending.err)
			require.Equal(t, ending.state, faultTheRow(t, f, key).State)
		})
	}
}

// doProxied returns a store whose connections go through a proxy.
func doProxied(t *testing.T, f *fixture, lease time.Duration) (*pgstore.Store, *pgtest.Proxy, *faultPool) {
	t.Helper()
	proxy := pgtest.NewProxy(t, pgtest.DSN(t))
	pool := newFaultPool(t, proxy.URL())
	return f.NewStore(t, pool, lease, retention), proxy, pool
}

func TestDoGoesOnRecordingUntilTheDatabaseIsBack(t *testing.T) {
	t.Parallel()
	for name, ending := range map[string]struct {
		err   error
		state pgstore.State
	}{
		"a response": {nil, pgstore.StateDone},
		"retryable":  {pgstore.Retryable(errDo), pgstore.StateRetryable},
		"permanent":  {pgstore.Permanent(errDo), pgstore.StateFailed},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := setup(t)
			store, proxy, pool := doProxied(t, f, lease)
			var g errgroup.Group
			returning := make(chan struct{})
			failures := make(chan struct{}, 1000)
			g.Go(func() error {
				_, err := store.Do(t.Context(), key, fingerprint, func(context.Context, pgstore.Record) (string, error) {
					pool.mu.Lock()
					pool.onFailure = func() { failures <- struct{}{} }
					pool.mu.Unlock()
					proxy.Down()
					close(returning)
					return recordResponse, ending.err
				}, pgstore.WithRecordTimeout(50*time.Millisecond))
				if !errors.Is(err, ending.err) || errors.Is(err, pgstore.ErrNotRecorded) {
					return fmt.Errorf("got %w", err)
				}
				return nil
			})
			<-returning
			require.NoError(t, doPause(t.Context(), 300*time.Millisecond)) // many tries, all in vain
			require.Equal(t, pgstore.StateInProgress, faultTheRow(t, f, key).State)
			proxy.Up()
			require.NoError(t, g.Wait())
			require.Equal(t, ending.state, faultTheRow(t, f, key).State)
		})
	}
}

func TestDoReturnsWhatItCouldNotRecord(t *testing.T) {
	t.Parallel()
	for name, fnErr := range map[string]error{
		"a response": nil, "retryable": pgstore.Retryable(errDo), "permanent": pgstore.Permanent(errDo), "an error of no class": errDo,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := setup(t)
			store, proxy, _ := doProxied(t, f, 2*time.Second)
			outcome, err := store.Do(t.Context(), key, fingerprint, func(context.Context, pgstore.Record) (string, error) {
				proxy.Down() // until the lease is over, and beyond
				return recordResponse, fnErr
			}, pgstore.WithRecordTimeout(50*time.Millisecond))
			require.True(t, fnErr == nil || errors.Is(err, errDo))
			require.NotErrorIs(t, err, pgstore.ErrFailed, "the failure is not recorded")
			require.Equal(t, name != "an error of no class", errors.Is(err, pgstore.ErrNotRecorded), err)
			if fnErr == nil {
				require.Equal(t, pgstore.Outcome{Response: recordResponse, Attempt: 1}, outcome)
			} else {
				require.Zero(t, outcome)
			}
			require.Equal(t, pgstore.StateInProgress, faultTheRow(t, f, key).State)
		})
	}
}

// Another attempt has taken over: its outcome stands, and the late one is told.
func TestDoOfAnOvertakenAttemptRecordsNothing(t *testing.T) {
	t.Parallel()
	for name, fnErr := range map[string]error{
		"a response": nil, "retryable": pgstore.Retryable(errDo), "permanent": pgstore.Permanent(errDo),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := setup(t)
			lapse := func() { recordAge(t, f, key, lease) }
			outcome, err := f.Do(t.Context(), key, fingerprint, func(ctx context.Context, r pgstore.Record) (string, error) {
				lapse()
				_, err := f.Do(ctx, key, fingerprint, func(_ context.Context, successor pgstore.Record) (string, error) {
					require.Equal(t, r.Attempt, successor.Abandoned)
					return "the successor's", nil
				})
				require.NoError(t, err)
				return "the late one's", fnErr
			})
			require.ErrorIs(t, err, pgstore.ErrStaleAttempt)
			require.ErrorIs(t, err, pgstore.ErrNotRecorded)
			require.True(t, fnErr == nil || errors.Is(err, errDo))
			if fnErr == nil {
				require.Equal(t, pgstore.Outcome{Response: "the late one's", Attempt: 1}, outcome)
			}
			outcome, err = f.Do(t.Context(), key, fingerprint, doNever(t))
			require.NoError(t, err)
			require.Equal(t, pgstore.Outcome{Response: "the successor's", Replayed: true, Attempt: 2}, outcome)
		})
	}
}

func TestDoRefusesWhatItCannotDoRight(t *testing.T) {
	t.Parallel()
	f := setup(t)
	txDo := func(ctx context.Context, s *pgstore.Store, fn func(context.Context, pgstore.Record) (string, error), opts ...pgstore.DoOption) error {
		var inTx func(context.Context, pgx.Tx, pgstore.Record) (string, error)
		if fn != nil {
			inTx = func(ctx context.Context, _ pgx.Tx, r pgstore.Record) (string, error) { return fn(ctx, r) }
		}
		_, err := s.DoTx(ctx, key, fingerprint, inTx, opts...)
		return err
	}
	do := func(ctx context.Context, s *pgstore.Store, fn func(context.Context, pgstore.Record) (string, error), opts ...pgstore.DoOption) error {
		_, err := s.Do(ctx, key, fingerprint, fn, opts...)
		return err
	}
	conn, err := f.Pool.Acquire(t.Context())
	require.NoError(t, err)
	t.Cleanup(conn.Release)
	single := recordConn(t, pgx.QueryExecModeCacheStatement)
	tx, err := single.Begin(t.Context())
	require.NoError(t, err)
	t.Cleanup(func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) })

	for name, call := range map[string]func(context.Context, *pgstore.Store, func(context.Context, pgstore.Record) (string, error), ...pgstore.DoOption) error{
		"Do": do, "DoTx": txDo,
	} {
		refused := func(s *pgstore.Store, fn func(context.Context, pgstore.Record) (string, error), says string, opts ...pgstore.DoOption) {
			t.Helper()
			require.ErrorContains(t, call(t.Context(), s, fn, opts...), says, name)
		}
		refused(f.Store, nil, "the function is nil")
		refused(f.WithTx(tx), doNever(t), "inside a transaction")
		refused(f.WithTx(nil), doNever(t), "nil transaction")
		refused(f.NewStore(t, single, lease, retention), doNever(t), "single connection")
		refused(f.NewStore(t, conn, lease, retention), doNever(t), "single connection")
		refused(f.Store, doNever(t), "an option is nil", nil)
		refused(f.Store, doNever(t), "the wait is -1ns", pgstore.WithWait(-1))
		refused(f.Store, doNever(t), "the wait is ", pgstore.WithWait(pgstore.MaxDuration+1))
		refused(f.Store, doNever(t), "the wait for a lock is 0s", pgstore.WithLockWait(0))
		refused(f.Store, doNever(t), "the wait for a lock is ", pgstore.WithLockWait(25*24*time.Hour))
		refused(f.Store, doNever(t), "the timeout for recording is 0s", pgstore.WithRecordTimeout(0))
		refused(f.Store, doNever(t), "the codec is nil", pgstore.WithCodec(nil))

		ended, cancel := context.WithCancel(t.Context())
		cancel()
		require.ErrorIs(t, call(ended, f.Store, doNever(t)), context.Canceled, name)
	}
	_, err = f.Do(t.Context(), pgstore.Key{Tenant: "t", Operation: "o"}, fingerprint, doNever(t))
	require.ErrorIs(t, err, pgstore.ErrKeyEmpty)
	_, err = f.Do(t.Context(), key, "", doNever(t))
	require.ErrorIs(t, err, pgstore.ErrFingerprintInvalid)
	require.Empty(t, faultRows(t, f, key))
}

// The store is down, read-only or not migrated: the function does not run.
func TestDoNeverRunsUnprotected(t *testing.T) {
	t.Parallel()
	f := setup(t)
	down, proxy, _ := doProxied(t, f, lease)
	proxy.Down()
	missing := f.NewStore(t, f.Pool, lease, retention, pgstore.WithSchema(pgtest.EmptySchema(t)))
	readOnly := f.NewStore(t, newFaultPool(t, pgtest.DSN(t), faultSetting("default_transaction_read_only", "on")), lease, retention)
	for name, store := range map[string]*pgstore.Store{"down": down, "not migrated": missing, "read-only": readOnly} {
		_, err := store.Do(t.Context(), key, fingerprint, doNever(t))
		require.Error(t, err, name)
		_, err = store.DoTx(t.Context(), key, fingerprint, func(context.Context, pgx.Tx, pgstore.Record) (string, error) {
			t.Error("the function ran")
			return "", nil
		})
		require.Error(t, err, name)
	}
	require.Empty(t, faultRows(t, f, key))
}

// Every way to have a statement sent: what Do and DoTx send is the same in all.
func TestDoAndDoTxWorkInEveryMode(t *testing.T) {
	t.Parallel()
	for _, mode := range recordModes {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			f := setup(t)
			pool := newFaultPool(t, pgtest.DSN(t), func(config *pgxpool.Config) { config.ConnConfig.DefaultQueryExecMode = mode },
				faultSetting("default_transaction_isolation", "serializable"), faultSetting("search_path", ""))
			store := f.NewStore(t, pool, lease, retention)
			own := faultOwn(t, f)
			var runs atomic.Int64
			response := "\x00\xff bytes"
			for range 2 {
				outcome, err := store.Do(t.Context(), recordKey("do"), fingerprint, doReturns(&runs, response, nil))
				require.NoError(t, err)
				require.Equal(t, response, outcome.Response)
				outcome, err = store.DoTx(t.Context(), recordKey("tx"), fingerprint, func(ctx context.Context, tx pgx.Tx, _ pgstore.Record) (string, error) {
					_, err := tx.Exec(ctx, `INSERT INTO `+own+` VALUES (1)`)
					return response, err
				})
				require.NoError(t, err)
				require.Equal(t, response, outcome.Response)
			}
			require.EqualValues(t, 1, runs.Load())
			require.Equal(t, 1, faultCount(t, f, own))
		})
	}
}
