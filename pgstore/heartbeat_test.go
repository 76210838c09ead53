package pgstore_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/archlab/idempotency/internal/pgtest"
	"github.com/archlab/idempotency/pgstore"
)

// beatPasses waits until d has passed on the database's clock, or ctx is done.
func beatPasses(ctx context.Context, f *fixture, d time.Duration) error {
	var until time.Time
	if err := f.Pool.QueryRow(ctx, `SELECT clock_timestamp() + $1::interval`, d).Scan(&until); err != nil {
		return err
	}
	for passed := false; !passed; {
		if err := doPause(ctx, 20*time.Millisecond); err != nil {
			return err
		}
		if err := f.Pool.QueryRow(ctx, `SELECT clock_timestamp() >= $1`, until).Scan(&passed); err != nil {
			return err
		}
	}
	return nil
}

func TestHeartbeatKeepsTheKeyOfWorkThatIsTenLeasesLong(t *testing.T) {
	t.Parallel()
	const lease = 2 * time.Second
	f := setup(t)
	pool := newFaultPool(t, pgtest.DSN(t), faultSingle)
	store := f.NewStore(t, pool, lease, retention)
	outcome, err := store.Do(t.Context(), key, fingerprint, func(ctx context.Context, _ pgstore.Record) (string, error) {
		for range 10 {
			if err := beatPasses(ctx, f, lease); err != nil {
				return "", err
			}
			if _, _, err := f.Begin(ctx, key, fingerprint); !errors.Is(err, pgstore.ErrInProgress) {
				return "", fmt.Errorf("the key is not held: %w", err)
			}
		}
		return "done", nil
	})
	require.NoError(t, err)
	require.Equal(t, pgstore.Outcome{Response: "done", Attempt: 1}, outcome)
	beats := pool.ran(store.Statements().Extend)
	require.Greater(t, beats, 10)
	require.Less(t, beats, 70, "a beat every third of the lease, and no more")
}

func TestHeartbeatTellsTheWorkThatTheKeyIsLost(t *testing.T) {
	t.Parallel()
	for name, lost := range map[string]struct {
		lose func(f *fixture, attempt uint64) error
		want error
	}{
		"to another attempt": {func(f *fixture, _ uint64) error {
			recordAge(t, f, key, lease)
			_, _, err := f.Begin(t.Context(), key, fingerprint)
			return err
		}, pgstore.ErrStaleAttempt},
		"to another attempt of another request": {func(f *fixture, _ uint64) error {
			recordAge(t, f, key, lease)
			_, _, err := f.Begin(t.Context(), key, "sha256:of another")
			return err
		}, pgstore.ErrConflict},
		"because the lease lapsed": {func(f *fixture, _ uint64) error {
			recordAge(t, f, key, lease)
			return nil
		}, pgstore.ErrLeaseExpired},
		"because the row is gone": {func(f *fixture, _ uint64) error {
			recordExec(t, f, `DELETE FROM %s`)
			return nil
		}, pgstore.ErrLeaseExpired},
		"to who resolved it": {func(f *fixture, attempt uint64) error {
			return f.Resolve(t.Context(), key, attempt, pgstore.AsFailed())
		}, pgstore.ErrStaleAttempt},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := setup(t)
			store := f.NewStore(t, f.Pool, 3*time.Second, retention) // a beat each second
			_, err := store.Do(t.Context(), key, fingerprint, func(ctx context.Context, r pgstore.Record) (string, error) {
				if err := lost.lose(f, r.Attempt); err != nil {
					return "", err
				}
				select {
				case <-ctx.Done():
				case <-time.After(faultWait):
					return "", errors.New("it was never told")
				}
				if cause := context.Cause(ctx); !errors.Is(cause, lost.want) {
					return "", fmt.Errorf("the cause is %w", cause)
				}
				return "", errors.Join(errDo, ctx.Err())
			})
			require.ErrorIs(t, err, errDo)
			require.ErrorIs(t, err, lost.want, "what Do returns says why the work was cancelled")
			require.NotErrorIs(t, err, pgstore.ErrNotRecorded)
		})
	}
}

// A beat is lost, then another; the lease outlives both.
func TestFailedBeatsChangeNothingWhileTheLeaseLasts(t *testing.T) {
	t.Parallel()
	f := setup(t)
	store, proxy, pool := doProxied(t, f, 3*time.Second)
	beat := pgtest.Executes(store.Statements().Extend)
	_, err := store.Do(t.Context(), key, fingerprint, func(ctx context.Context, _ pgstore.Record) (string, error) {
		cuts := []*pgtest.Fault{proxy.CutBeforeSend(beat), proxy.CutAfterReply(beat), proxy.CutBeforeSend(beat)}
		for _, cut := range cuts {
			select {
			case <-cut.Reached():
			case <-ctx.Done():
				return "", context.Cause(ctx)
			}
		}
		before := pool.ran(store.Statements().Extend)
		for pool.ran(store.Statements().Extend) < before+3 {
			if err := doPause(ctx, 10*time.Millisecond); err != nil {
				return "", err
			}
		}
		return "done", nil
	})
	require.NoError(t, err)
	require.Equal(t, pgstore.StateDone, faultTheRow(t, f, key).State)
}

// The database extends the lease, but nobody learns of it: trust does not grow by what was not heard.
func TestTrustRunsOutWhereAnswersDoNotArrive(t *testing.T) {
	t.Parallel()
	const lease = 2 * time.Second
	f := setup(t)
	store, proxy, _ := doProxied(t, f, lease)
	beat := pgtest.Executes(store.Statements().Extend)
	_, err := store.Do(t.Context(), key, fingerprint, func(ctx context.Context, _ pgstore.Record) (string, error) {
		for range 20 {
			defer proxy.HoldReply(beat).Release()
		}
		select {
		case <-ctx.Done():
		case <-time.After(faultWait):
			return "", errors.New("it was never told")
		}
		if cause := context.Cause(ctx); !errors.Is(cause, pgstore.ErrLeaseExpired) {
			return "", fmt.Errorf("the cause is %w", cause)
		}
		return "", errDo
	})
	require.ErrorIs(t, err, errDo)
	require.ErrorIs(t, err, pgstore.ErrLeaseExpired)
	require.ErrorContains(t, err, "could not be extended in time")
}

// An answer that arrives late promises what was left when the database gave it, counted from before it was asked.
func TestTrustCountsFromBeforeTheCallAndOnAClockThatDoesNotJump(t *testing.T) {
	t.Parallel()
	f := setup(t)
	store, proxy, _ := doProxied(t, f, lease)
	call := func(statement string, do func() (time.Time, error)) {
		t.Helper()
		held := proxy.HoldReply(pgtest.Executes(statement))
		before := time.Now()
		var trusted, answered time.Time
		var g errgroup.Group
		g.Go(func() (err error) {
			trusted, err = do()
			answered = time.Now()
			return err
		})
		held.Wait(t)
		require.NoError(t, beatPasses(t.Context(), f, 200*time.Millisecond))
		held.Release()
		require.NoError(t, g.Wait())
		require.False(t, trusted.Before(before), "trusted until %v", trusted)
		require.True(t, trusted.Before(answered.Add(lease-200*time.Millisecond)), "the answer's way is not the lease's time")
		require.Contains(t, trusted.String(), " m=", "comparisons go by the monotonic clock, whatever happens to the wall's")
	}
	call(store.Statements().Begin, func() (time.Time, error) { return store.TrustedBegin(t.Context(), key, fingerprint) })
	attempt := faultTheRow(t, f, key).Attempt
	call(store.Statements().Extend, func() (time.Time, error) { return store.TrustedExtend(t.Context(), key, fingerprint, attempt) })
}

// Fifty keys, and somebody locks the row of one: only its own beats wait.
func TestOneBlockedBeatDoesNotKeepTheOthersFromTheirs(t *testing.T) {
	t.Parallel()
	const keys, lease = 50, 3 * time.Second
	f := setup(t)
	pool := newFaultPool(t, pgtest.DSN(t)) // of four connections
	store := f.NewStore(t, pool, lease, retention)
	var begun, lost atomic.Int64
	release := make(chan struct{})
	var g errgroup.Group
	for i := range keys {
		g.Go(func() error {
			_, err := store.Do(t.Context(), recordKey(fmt.Sprint("key ", i)), fingerprint, func(ctx context.Context, _ pgstore.Record) (string, error) {
				begun.Add(1)
				select {
				case <-release:
				case <-ctx.Done():
					lost.Add(1)
				}
				return "", context.Cause(ctx)
			}, pgstore.WithRecordTimeout(time.Second))
			if i > 0 { // the other one may have lost its lease
				return err
			}
			return nil
		})
	}
	faultEventually(t, "all at work", func() bool { return begun.Load() == keys })
	tx, err := f.Pool.Begin(t.Context())
	require.NoError(t, err)
	defer tx.Rollback(context.WithoutCancel(t.Context())) //nolint:errcheck // it ends either way
	_, err = tx.Exec(t.Context(), `SELECT FROM `+recordTable(f)+` WHERE key = 'key 0' FOR UPDATE`)
	require.NoError(t, err)
	faultEventually(t, "a beat that waits", func() bool { return pool.sessions(t, f.Pool, faultWaiting) == 1 })
	require.NoError(t, beatPasses(t.Context(), f, 2*lease))
	require.LessOrEqual(t, lost.Load(), int64(1))
	require.Equal(t, keys-1, recordScalar[int](t, f, `SELECT count(*) FROM %s WHERE expires_at > clock_timestamp() AND key <> 'key 0'`))
	require.NoError(t, tx.Rollback(t.Context()))
	close(release)
	require.NoError(t, g.Wait())
}

func TestBeatsOfAThousandCallsShareAPoolOfEight(t *testing.T) {
	t.Parallel()
	const calls, lease = 1000, 10 * time.Second
	f := setup(t)
	pool := newFaultPool(t, pgtest.DSN(t), func(config *pgxpool.Config) { config.MaxConns = 8 })
	store := f.NewStore(t, pool, lease, retention)
	var begun atomic.Int64
	release := make(chan struct{})
	var g errgroup.Group
	for i := range calls {
		g.Go(func() error {
			_, err := store.Do(t.Context(), recordKey(fmt.Sprint("key ", i)), fingerprint, func(ctx context.Context, _ pgstore.Record) (string, error) {
				begun.Add(1)
				select {
				case <-release:
				case <-ctx.Done():
				}
				return "", context.Cause(ctx)
			})
			return err
		})
	}
	faultEventually(t, "all at work", func() bool { return begun.Load() == calls })
	require.NoError(t, beatPasses(t.Context(), f, lease+lease/5))
	require.Equal(t, calls, recordScalar[int](t, f, `SELECT count(*) FROM %s WHERE expires_at > clock_timestamp()`), "leases that live")
	close(release)
	require.NoError(t, g.Wait(), "not one has missed its lease")
	require.LessOrEqual(t, pool.Stat().TotalConns(), int32(8))
}

// beatChildVariable tells the process of TestBeatChild whose key it works on.
const beatChildVariable = "IDEMPOTENCY_BEAT_CHILD"

// A process is frozen for longer than its lease, and goes on as if nothing had happened.
func TestFrozenProcessIsToldAndCannotComplete(t *testing.T) {
	t.Parallel()
	f := setup(t)
	command := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestBeatChild$") //nolint:gosec // this very program
	command.Env = append(os.Environ(), beatChildVariable+"="+f.Schema, pgtest.EnvURL+"="+pgtest.DSN(t), pgtest.EnvRequire+"=url")
	command.Stderr = os.Stderr
	output, err := command.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, command.Start())
	t.Cleanup(func() { _ = command.Process.Kill() })
	lines := bufio.NewScanner(output)
	next := func() string {
		t.Helper()
		for lines.Scan() {
			if said, ok := strings.CutPrefix(lines.Text(), "child: "); ok {
				return said
			}
		}
		require.Fail(t, "the child said no more", lines.Err())
		return ""
	}
	require.Equal(t, "working", next())
	require.NoError(t, command.Process.Signal(syscall.SIGSTOP))
	outcome, err := f.Do(t.Context(), key, fingerprint, func(_ context.Context, r pgstore.Record) (string, error) {
		require.EqualValues(t, 1, r.Abandoned)
		return "the successor's", nil
	}, pgstore.WithWait(faultWait))
	require.NoError(t, err)
	require.EqualValues(t, 2, outcome.Attempt)
	require.NoError(t, command.Process.Signal(syscall.SIGCONT))

	require.Equal(t, "cancelled, because the lease is lost", next())
	require.Equal(t, `refused, with "the late one's"`, next())
	require.NoError(t, command.Wait())
	record, live, err := f.Get(t.Context(), key)
	require.NoError(t, err)
	require.True(t, live)
	require.Equal(t, "the successor's", record.Response)
}

// TestBeatChild is the process that another test freezes.
func TestBeatChild(t *testing.T) {
	t.Parallel()
	schema := os.Getenv(beatChildVariable)
	if schema == "" {
		return
	}
	store, err := pgstore.New(pgtest.Pool(t), 2*time.Second, retention, pgstore.WithSchema(schema))
	require.NoError(t, err)
	say := func(format string, args ...any) { fmt.Fprintf(os.Stdout, "child: "+format+"\n", args...) } //nolint:errcheck // the parent will miss it
	outcome, err := store.Do(t.Context(), key, fingerprint, func(ctx context.Context, _ pgstore.Record) (string, error) {
		say("working")
		<-ctx.Done()
		if cause := context.Cause(ctx); errors.Is(cause, pgstore.ErrLeaseExpired) || errors.Is(cause, pgstore.ErrStaleAttempt) {
			say("cancelled, because the lease is lost")
		}
		return "the late one's", nil
	})
	if errors.Is(err, pgstore.ErrNotRecorded) && errors.Is(err, pgstore.ErrStaleAttempt) {
		say("refused, with %q", outcome.Response)
	}
}
