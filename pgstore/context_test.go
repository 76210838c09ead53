package pgstore_test

import (
	"context"
	"errors"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/archlab/idempotency/internal/pgtest"
	"github.com/archlab/idempotency/internal/sqlgen"
	"github.com/archlab/idempotency/pgstore"
)

// cancelEndings are the ways in which a context ends, at the moment when the test calls end.
var cancelEndings = map[string]struct {
	err     error
	context func(ctx context.Context) (ending context.Context, end func())
}{
	"cancelled": {context.Canceled, func(ctx context.Context) (context.Context, func()) {
		ctx, cancel := context.WithCancel(ctx)
		return ctx, cancel
	}},
	"deadline": {context.DeadlineExceeded, func(ctx context.Context) (context.Context, func()) {
		d := &cancelDeadline{Context: ctx, over: make(chan struct{})}
		return d, sync.OnceFunc(func() { close(d.over) })
	}},
}

// cancelDeadline is a context whose deadline passes when a test says so.
type cancelDeadline struct {
	context.Context //nolint:containedctx // it is one

	over chan struct{}
}

// Done implements context.Context.
func (d *cancelDeadline) Done() <-chan struct{} { return d.over }

// Err implements context.Context.
func (d *cancelDeadline) Err() error {
	select {
	case <-d.over:
		return context.DeadlineExceeded
	default:
		return nil
	}
}

// A context that is over before the call does not even open a connection.
func TestContextThatIsOverReachesNoServer(t *testing.T) {
	t.Parallel()
	for name, ending := range cancelEndings {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := setup(t)
			pool := newFaultPool(t, pgtest.DSN(t))
			store := f.NewStore(t, pool, lease, retention)
			ctx, end := ending.context(t.Context())
			end()
			for _, call := range faultCalls() {
				k := recordKey(call.name)
				attempt := call.put(t, f, k)
				before := recordRow(t, f, k)
				answer := call.do(ctx, store, k, attempt)
				require.ErrorIs(t, answer.err, ending.err)
				require.ErrorContains(t, answer.err, "nothing was sent")
				call.isTrue(t, f, k, attempt, answer)
				require.Equal(t, before, recordRow(t, f, k))
			}
			require.Zero(t, pool.Stat().NewConnsCount())
		})
	}
}

// cancelStatement is a statement of the store, or the start of a connection, and a call that gets as far.
type cancelStatement struct {
	matches func(s *sqlgen.Statements) func(pgtest.FrontendMessage) bool
	put     func(t *testing.T, f *fixture, k pgstore.Key) uint64
	do      func(ctx context.Context, s *pgstore.Store, k pgstore.Key, attempt uint64) faultAnswer
}

func cancelStatements() map[string]cancelStatement {
	executes := func(text func(*sqlgen.Statements) string) func(*sqlgen.Statements) func(pgtest.FrontendMessage) bool {
		return func(s *sqlgen.Statements) func(pgtest.FrontendMessage) bool { return pgtest.Executes(text(s)) }
	}
	statements := map[string]cancelStatement{}
	for _, call := range faultCalls() {
		statements[call.name] = cancelStatement{executes(call.sql), call.put, call.do}
	}
	sweep := statements["sweep"]
	poisoned := func(t *testing.T, f *fixture, k pgstore.Key) uint64 {
		t.Helper()
		attempt := faultDue(t, f, k)
		sweepPoison(t, f, "true")
		return attempt
	}
	statements["purgeable"] = cancelStatement{executes(func(s *sqlgen.Statements) string { return s.Purgeable }), poisoned, sweep.do}
	statements["purge"] = cancelStatement{executes(func(s *sqlgen.Statements) string { return s.Purge }), poisoned, sweep.do}
	statements["inspect"] = cancelStatement{
		executes(func(s *sqlgen.Statements) string { return s.Inspect }), faultBegun,
		func(ctx context.Context, s *pgstore.Store, k pgstore.Key, attempt uint64) faultAnswer {
			return faultAnswer{err: s.Complete(ctx, k, fingerprint, attempt+1, recordResponse)}
		},
	}
	statements["connect"] = cancelStatement{
		func(*sqlgen.Statements) func(pgtest.FrontendMessage) bool {
			return func(m pgtest.FrontendMessage) bool { return m.Type == 0 }
		}, faultNothing, statements["begin"].do,
	}
	return statements
}

// The context ends while any one of the store's statements, or the opening of a connection, is on its way to the server or its
// answer on the way back. The call returns at once and says so, lets go of its connection, and the store works.
func TestEveryStatementObeysItsContext(t *testing.T) {
	t.Parallel()
	for name, statement := range cancelStatements() {
		for way, hold := range map[string]func(*pgtest.Proxy, func(pgtest.FrontendMessage) bool) *pgtest.Fault{
			"there": (*pgtest.Proxy).HoldRequest,
			"back":  (*pgtest.Proxy).HoldReply,
		} {
			for cause, ending := range cancelEndings {
				t.Run(name+" "+way+" "+cause, func(t *testing.T) {
					t.Parallel()
					f := setup(t)
					proxy := pgtest.NewProxy(t, pgtest.DSN(t))
					pool := newFaultPool(t, proxy.URL(), faultSingle)
					store := f.NewStore(t, pool, lease, retention)
					attempt := statement.put(t, f, key)
					fault := hold(proxy, statement.matches(f.Statements()))
					ctx, end := ending.context(t.Context())
					defer end()
					answered := make(chan faultAnswer, 1)
					go func() { answered <- statement.do(ctx, store, key, attempt) }()
					fault.Wait(t)
					require.Empty(t, answered)
					end()
					answer := <-answered
					require.ErrorIs(t, answer.err, ending.err)
					faultIsNoSentinel(t, answer.err)
					require.NotContains(t, answer.err.Error(), "gave up")
					require.NotContains(t, answer.err.Error(), "nothing was sent")
					require.False(t, answer.is)
					require.Zero(t, answer.record)

					fault.Release()
					faultEventually(t, "an idle pool", pool.isIdle)
					_, created, err := store.Begin(t.Context(), recordKey("another"), fingerprint)
					require.NoError(t, err)
					require.True(t, created)
				})
			}
		}
	}
}

// A call that waits for somebody's lock ends with its context. The server stops waiting too, nothing was changed, and once the
// lock is gone the call works.
func TestCancelledWaitLeavesNothing(t *testing.T) {
	t.Parallel()
	for _, call := range faultCalls() {
		for cause, ending := range cancelEndings {
			for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeCacheStatement, pgx.QueryExecModeSimpleProtocol} {
				t.Run(call.name+" "+cause+" "+mode.String(), func(t *testing.T) {
					t.Parallel()
					f := setup(t)
					pool := newFaultPool(t, pgtest.DSN(t), func(config *pgxpool.Config) { config.ConnConfig.DefaultQueryExecMode = mode })
					store := f.NewStore(t, pool, lease, retention)
					attempt := call.put(t, f, key)
					before := recordRow(t, f, key)
					holder := directedTx(t, f.Pool)
					_, err := holder.Exec(t.Context(), `LOCK TABLE `+recordTable(f)) // which even a reader waits for
					require.NoError(t, err)
					ctx, end := ending.context(t.Context())
					defer end()
					answered := make(chan faultAnswer, 1)
					go func() { answered <- call.do(ctx, store, key, attempt) }()
					faultEventually(t, "a call that waits", func() bool { return pool.sessions(t, f.Pool, faultWaiting) == 1 })
					end()
					answer := <-answered
					require.ErrorIs(t, answer.err, ending.err)
					require.False(t, answer.is)
					faultEventually(t, "an idle pool", pool.isIdle)
					faultEventually(t, "nobody who waits", func() bool { return pool.sessions(t, f.Pool, faultWaiting) == 0 })
					require.NoError(t, holder.Rollback(t.Context()))
					require.Equal(t, before, recordRow(t, f, key))

					answer = call.do(t.Context(), store, key, attempt)
					require.NoError(t, answer.err)
					call.isTrue(t, f, key, attempt, answer)
				})
			}
		}
	}
}

// A caller's transaction whose context ends is rolled back, whichever call notices it, and leaves neither a connection in use nor
// a session idle in it.
func TestCancelledTransactionLeavesNothingOpen(t *testing.T) {
	t.Parallel()
	for _, call := range retryWriters() {
		t.Run(call.name, func(t *testing.T) {
			t.Parallel()
			f := setup(t)
			own := faultOwn(t, f)
			pool := newFaultPool(t, pgtest.DSN(t))
			attempt := call.put(t, f, key)
			before := recordRow(t, f, key)
			ctx, cancel := context.WithCancel(t.Context())
			tx, err := pool.Begin(ctx)
			require.NoError(t, err)
			_, err = tx.Exec(ctx, `INSERT INTO `+own+` VALUES (1)`)
			require.NoError(t, err)
			require.NoError(t, call.do(ctx, f.WithTx(tx), key, attempt).err)
			cancel()
			for _, again := range faultCalls() {
				require.ErrorIs(t, again.do(ctx, f.WithTx(tx), key, attempt).err, context.Canceled)
			}
			require.Error(t, errors.Join(tx.Commit(ctx), tx.Rollback(ctx)))
			faultEventually(t, "an idle pool", pool.isIdle)
			faultEventually(t, "no open transaction", func() bool {
				return pool.sessions(t, f.Pool, `state LIKE 'idle in transaction%'`) == 0
			})
			require.Zero(t, faultCount(t, f, own))
			require.Equal(t, before, recordRow(t, f, key))
		})
	}
}

// A statement that the server ends, because it takes too long or because somebody cancels it, is an error that says so. It is not
// run again: it would take as long.
func TestStatementThatTheServerEndsIsAnErrorThatSaysSo(t *testing.T) {
	t.Parallel()
	for _, call := range faultCalls() {
		for name, test := range map[string]struct{ setting, says string }{
			"statement_timeout": {"50ms", "canceling statement due to statement timeout"},
			"cancelled":         {"0", "canceling statement due to user request"},
		} {
			t.Run(call.name+" "+name, func(t *testing.T) {
				t.Parallel()
				f := setup(t)
				pool := newFaultPool(t, pgtest.DSN(t), faultSetting("statement_timeout", test.setting))
				store := f.NewStore(t, pool, lease, retention)
				attempt := call.put(t, f, key)
				before := recordRow(t, f, key)
				holder := directedTx(t, f.Pool)
				_, err := holder.Exec(t.Context(), `LOCK TABLE `+recordTable(f))
				require.NoError(t, err)
				answered := make(chan faultAnswer, 1)
				go func() { answered <- call.do(t.Context(), store, key, attempt) }()
				if name == "cancelled" {
					faultEventually(t, "a call that waits", func() bool { return pool.sessions(t, f.Pool, faultWaiting) == 1 })
					_, err := f.Pool.Exec(t.Context(), `SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE application_name = $1`, pool.name)
					require.NoError(t, err)
				}
				answer := <-answered
				faultIsNoSentinel(t, answer.err)
				require.Equal(t, "57014", faultCode(t, answer.err))
				require.ErrorContains(t, answer.err, test.says)
				require.Equal(t, 1, pool.met("57014"))
				require.False(t, answer.is)
				require.NoError(t, holder.Rollback(t.Context()))
				require.Equal(t, before, recordRow(t, f, key))
				require.True(t, pool.isIdle())

				answer = call.do(t.Context(), f.Store, key, attempt)
				require.NoError(t, answer.err)
				call.isTrue(t, f, key, attempt, answer)
			})
		}
	}
}
