package pgstore_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
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

// dotxCommit matches COMMIT, and not the "read committed" of the BEGIN.
func dotxCommit(m pgtest.FrontendMessage) bool { return m.Type == 'Q' && m.SQL == "commit" }

// The server has committed, and nobody heard: the record tells.
func TestLostAnswerOfCommitIsReadFromTheRecord(t *testing.T) {
	t.Parallel()
	f := setup(t)
	own := faultOwn(t, f)
	store, proxy, _ := doProxied(t, f, lease)
	var runs atomic.Int64
	proxy.CutAfterReply(dotxCommit)
	outcome, err := store.DoTx(t.Context(), key, fingerprint, dotxInserts(own, &runs, recordResponse, nil))
	require.NoError(t, err)
	require.Equal(t, pgstore.Outcome{Response: recordResponse, Attempt: 1}, outcome, "it is this call's own, not a replay")
	require.EqualValues(t, 1, runs.Load())
	require.Equal(t, 1, faultCount(t, f, own))
}

// The server never got the COMMIT: the transaction is gone, and everything runs again.
func TestCommitThatDidNotArriveRunsAgain(t *testing.T) {
	t.Parallel()
	f := setup(t)
	own := faultOwn(t, f)
	store, proxy, _ := doProxied(t, f, lease)
	var runs atomic.Int64
	proxy.CutBeforeSend(dotxCommit)
	outcome, err := store.DoTx(t.Context(), key, fingerprint, dotxInserts(own, &runs, recordResponse, nil))
	require.NoError(t, err)
	require.False(t, outcome.Replayed)
	require.Equal(t, outcome.Attempt, faultTheRow(t, f, key).Attempt)
	require.EqualValues(t, 2, runs.Load())
	require.Equal(t, 1, faultCount(t, f, own))
}

// Both the COMMIT's answer and the way to the truth are lost: the error says so, and the next call tells.
func TestUnknownOutcomeIsCalledUnknownAndTheNextCallTells(t *testing.T) {
	t.Parallel()
	for name, committed := range map[string]bool{"committed": true, "not committed": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := setup(t)
			own := faultOwn(t, f)
			store, proxy, _ := doProxied(t, f, lease)
			var runs atomic.Int64
			cut := proxy.CutBeforeSend(dotxCommit)
			if committed {
				cut.Release()
				cut = proxy.CutAfterReply(dotxCommit)
			}
			var g errgroup.Group
			g.Go(func() error {
				<-cut.Reached()
				proxy.Down()
				return nil
			})
			again := proxy.HoldRequest(pgtest.Nth(2, pgtest.Executes(store.Statements().Begin))) // so that it cannot be faster than Down
			outcome, err := store.DoTx(t.Context(), key, fingerprint, dotxInserts(own, &runs, recordResponse, nil))
			again.Release()
			require.ErrorIs(t, err, pgstore.ErrOutcomeUnknown)
			require.Zero(t, outcome)
			require.NoError(t, g.Wait())
			require.EqualValues(t, 1, runs.Load())

			proxy.Up()
			outcome, err = store.DoTx(t.Context(), key, fingerprint, dotxInserts(own, &runs, recordResponse, nil))
			require.NoError(t, err)
			require.Equal(t, committed, outcome.Replayed)
			require.Equal(t, recordResponse, outcome.Response)
			require.Equal(t, 1, faultCount(t, f, own))
		})
	}
}

// COMMIT is on its way while the caller gives up on it: whoever asks meanwhile waits for the transaction, and nobody guesses.
func TestCommitThatArrivesLateIsNotOvertaken(t *testing.T) {
	t.Parallel()
	f := setup(t)
	own := faultOwn(t, f)
	store, proxy, pool := doProxied(t, f, lease)
	var runs atomic.Int64
	late := proxy.HoldRequest(dotxCommit)
	_, err := store.DoTx(t.Context(), key, fingerprint, dotxInserts(own, &runs, recordResponse, nil),
		pgstore.WithRecordTimeout(100*time.Millisecond), pgstore.WithLockWait(100*time.Millisecond))
	require.ErrorIs(t, err, pgstore.ErrOutcomeUnknown)
	require.ErrorIs(t, err, pgstore.ErrInProgress, "its transaction is still open")
	var g errgroup.Group
	g.Go(func() error {
		outcome, err := store.DoTx(t.Context(), key, fingerprint, dotxNever(t), pgstore.WithLockWait(faultWait))
		if err == nil && (!outcome.Replayed || outcome.Response != recordResponse) {
			return fmt.Errorf("got %v", outcome)
		}
		return err
	})
	faultEventually(t, "the next caller waiting", func() bool { return pool.sessions(t, f.Pool, faultWaiting) >= 1 })
	late.Release()
	require.NoError(t, g.Wait())
	require.EqualValues(t, 1, runs.Load())
	require.Equal(t, 1, faultCount(t, f, own))
}

// The session is ended from outside in the middle of the function.
func TestDoTxWhoseSessionIsTerminated(t *testing.T) {
	t.Parallel()
	f := setup(t)
	own := faultOwn(t, f)
	var runs atomic.Int64
	_, err := f.DoTx(t.Context(), key, fingerprint, func(ctx context.Context, tx pgx.Tx, r pgstore.Record) (string, error) {
		if _, err := dotxInserts(own, &runs, "", nil)(ctx, tx, r); err != nil {
			return "", err
		}
		if _, err := f.Pool.Exec(ctx, `SELECT pg_terminate_backend($1, 10000)`, tx.Conn().PgConn().PID()); err != nil {
			return "", err
		}
		return "all is well", nil // it has not noticed
	})
	require.Error(t, err)
	require.NotErrorIs(t, err, pgstore.ErrOutcomeUnknown, "COMMIT was never sent")
	require.Zero(t, faultCount(t, f, own))
	require.Empty(t, faultRows(t, f, key))
}

// Every message of a DoTx is cut, before it is sent and after it is answered, on connections that are new and that are not, in
// every mode; then at random, two at a time. Whatever it was: the effect is there exactly once in the end, and each answer told the truth.
func TestDoTxTellsTheTruthWhereverItIsCut(t *testing.T) {
	t.Parallel()
	c := &dotxCuts{counts: map[string]int{}}
	t.Cleanup(func() { t.Logf("calls that were cut: %v", c.counts) })
	anything := func(pgtest.FrontendMessage) bool { return true }
	kinds := map[string]func(proxy *pgtest.Proxy, n int) *pgtest.Fault{
		"before": func(proxy *pgtest.Proxy, n int) *pgtest.Fault { return proxy.CutBeforeSend(pgtest.Nth(n, anything)) },
		"after":  func(proxy *pgtest.Proxy, n int) *pgtest.Fault { return proxy.CutAfterReply(pgtest.Nth(n, anything)) },
		"within": func(proxy *pgtest.Proxy, n int) *pgtest.Fault {
			return proxy.CutWithinReply(pgtest.Nth(n, anything), 'C')
		},
	}
	for _, mode := range recordModes {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			f, proxy, store, own := c.setup(t, mode)
			for kind, cut := range kinds {
				missed := 0
				for n := 1; missed < 2; n++ { // cold, then warm: neither has an n-th message any more
					k := recordKey(fmt.Sprint(kind, n))
					fault := cut(proxy, n)
					c.check(t, f, store, own, k, fault)
					if fault.Struck() {
						missed = 0
					} else {
						missed++
					}
				}
			}
		})
	}
	const seeds = 300
	for i, mode := range recordModes {
		t.Run(fmt.Sprint("at random, ", mode), func(t *testing.T) {
			t.Parallel()
			f, proxy, store, own := c.setup(t, mode)
			for seed := i; seed < seeds; seed += len(recordModes) {
				random := rand.New(rand.NewPCG(uint64(seed), 1)) //nolint:gosec // an index
				var faults []*pgtest.Fault
				for range 2 { // the second counts from when the first has struck
					kind := []string{"before", "after", "within"}[random.IntN(3)]
					faults = append(faults, kinds[kind](proxy, 1+random.IntN(18)))
				}
				c.check(t, f, store, own, recordKey(fmt.Sprint("seed ", seed)), faults...)
			}
		})
	}
}

// dotxCuts counts what the cuts of a test led to.
type dotxCuts struct {
	mu     sync.Mutex
	counts map[string]int
}

func (c *dotxCuts) add(what string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.counts[what]++
}

// setup returns a store behind a proxy, on a pool of two connections, and a table for effects.
func (c *dotxCuts) setup(t *testing.T, mode pgx.QueryExecMode) (*fixture, *pgtest.Proxy, *pgstore.Store, string) {
	t.Helper()
	f := setup(t)
	proxy := pgtest.NewProxy(t, pgtest.DSN(t))
	pool := newFaultPool(t, proxy.URL(), func(config *pgxpool.Config) {
		config.MaxConns = 2
		config.ConnConfig.DefaultQueryExecMode = mode
	})
	own := pgx.Identifier{f.Schema, "effects"}.Sanitize()
	_, err := f.Pool.Exec(t.Context(), `CREATE TABLE `+own+` (tag text NOT NULL)`)
	require.NoError(t, err)
	return f, proxy, f.NewStore(t, pool, lease, retention), own
}

// check calls DoTx while faults strike, and holds its answer against the truth; then it calls again, with nothing in the way.
func (c *dotxCuts) check(t *testing.T, f *fixture, store *pgstore.Store, own string, k pgstore.Key, faults ...*pgtest.Fault) {
	t.Helper()
	runs := 0
	call := func() (pgstore.Outcome, error) {
		return store.DoTx(t.Context(), k, fingerprint, func(ctx context.Context, tx pgx.Tx, _ pgstore.Record) (string, error) {
			runs++
			_, err := tx.Exec(ctx, `INSERT INTO `+own+` VALUES ($1)`, k.Value)
			return recordResponse, err
		}, pgstore.WithLockWait(faultWait))
	}
	effects := func() (n int) {
		t.Helper()
		require.NoError(t, f.Pool.QueryRow(t.Context(), `SELECT count(*) FROM `+own+` WHERE tag = $1`, k.Value).Scan(&n))
		return n
	}
	outcome, err := call()
	struck := 0
	for _, fault := range faults {
		fault.Release()
		if fault.Struck() {
			fault.Wait(t) // until the server's side has come to its end as well
			struck++
		}
	}
	switch {
	case err == nil:
		require.Equal(t, recordResponse, outcome.Response)
		require.False(t, outcome.Replayed, "nobody else has called")
		row := faultTheRow(t, f, k)
		require.Equal(t, pgstore.StateDone, row.State)
		require.Equal(t, outcome.Attempt, row.Attempt)
		require.Equal(t, 1, effects())
		c.add(fmt.Sprintf("%d cuts, done after %d runs", struck, runs))
	case errors.Is(err, pgstore.ErrOutcomeUnknown):
		require.LessOrEqual(t, effects(), 1)
		c.add(fmt.Sprintf("%d cuts, unknown", struck))
	default:
		faultIsNoSentinel(t, err)
		require.Zero(t, effects())
		require.Empty(t, faultRows(t, f, k))
		c.add(fmt.Sprintf("%d cuts, nothing done after %d runs", struck, runs))
	}
	before := effects()
	outcome, err = call()
	require.NoError(t, err)
	require.Equal(t, recordResponse, outcome.Response)
	require.Equal(t, before == 1, outcome.Replayed)
	require.Equal(t, 1, effects(), "exactly once")
}
