package pgstore_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/archlab/idempotency/internal/pgtest"
	"github.com/archlab/idempotency/pgstore"
)

// lostCut is a place in the protocol at which a connection breaks while a call is at work.
type lostCut struct {
	name string
	cold bool // only on a connection that is new, or has not prepared the statement yet
	set  func(p *pgtest.Proxy, sql string) *pgtest.Fault
}

// lostCuts are all such places, for statements that are prepared: the way in which pgx works by default. Those on a cold connection
// do not depend on the call; two calls shall do.
func lostCuts(call faultCall) (cuts []lostCut) {
	before := func(name string, cold bool, match func(sql string) func(pgtest.FrontendMessage) bool) {
		cuts = append(cuts, lostCut{"before " + name, cold, func(p *pgtest.Proxy, sql string) *pgtest.Fault {
			return p.CutBeforeSend(match(sql))
		}})
	}
	after := func(name string, cold bool, match func(sql string) func(pgtest.FrontendMessage) bool, within ...byte) {
		cuts = append(cuts, lostCut{"after " + name, cold, func(p *pgtest.Proxy, sql string) *pgtest.Fault {
			return p.CutAfterReply(match(sql))
		}})
		for _, last := range within {
			cuts = append(cuts, lostCut{fmt.Sprintf("within %s, after %c", name, last), cold, func(p *pgtest.Proxy, sql string) *pgtest.Fault {
				return p.CutWithinReply(match(sql), last)
			}})
		}
	}
	message := func(types string) func(sql string) func(pgtest.FrontendMessage) bool {
		return func(sql string) func(pgtest.FrontendMessage) bool { return pgtest.Sends(types, sql) }
	}
	before("Bind", false, message("B"))
	before("Describe of the portal", false, func(sql string) func(pgtest.FrontendMessage) bool {
		return func(m pgtest.FrontendMessage) bool { return m.Type == 'D' && m.SQL == sql && m.Body[0] == 'P' }
	})
	before("Execute", false, message("E"))
	before("Sync", false, message("S"))
	after("Execute", false, message("E"), '2', 'T', 'D', 'C')

	if call.name != "begin" && call.name != "complete" {
		return cuts
	}
	before("Parse", true, message("P"))
	before("Describe of the statement", true, func(sql string) func(pgtest.FrontendMessage) bool {
		return func(m pgtest.FrontendMessage) bool { return m.Type == 'D' && m.SQL == sql && m.Body[0] == 'S' }
	})
	before("the first Sync", true, func(string) func(pgtest.FrontendMessage) bool {
		return func(m pgtest.FrontendMessage) bool { return m.Type == 'S' && m.SQL == "" }
	})
	after("Parse", true, message("P"), '1', 't', 'T')

	startup := func(string) func(pgtest.FrontendMessage) bool {
		return func(m pgtest.FrontendMessage) bool { return m.Type == 0 }
	}
	before("the startup", true, startup)
	for n := range 2 {
		before(fmt.Sprintf("password message %d", n+1), true, func(string) func(pgtest.FrontendMessage) bool {
			return pgtest.Nth(n+1, pgtest.Sends("p", ""))
		})
	}
	after("the startup", true, startup, 'S', 'K')
	return cuts
}

// Wherever a connection breaks during a call, the answer is the truth or an error, and so is the next one. On a pool it is the
// truth: the store asks again.
func TestCutsLeaveNoFalseAnswer(t *testing.T) {
	t.Parallel()
	var cuts atomic.Int64
	t.Run("pool", func(t *testing.T) {
		t.Parallel()
		for _, call := range faultCalls() {
			t.Run(call.name, func(t *testing.T) {
				t.Parallel()
				f := setup(t)
				proxy := pgtest.NewProxy(t, pgtest.DSN(t))
				pool := newFaultPool(t, proxy.URL(), faultSingle)
				store := f.NewStore(t, pool, lease, retention)
				came := 0
				for _, cut := range lostCuts(call) {
					if cut.cold {
						pool.Reset()
					} else {
						lostWarm(t, f, store, call)
					}
					k := recordKey(cut.name)
					attempt := call.put(t, f, k)
					fault := cut.set(proxy, call.sql(f.Statements()))
					answer := call.do(t.Context(), store, k, attempt)
					if !lostStruck(t, fault) {
						continue // a server that asks for no password
					}
					came++
					require.NoError(t, answer.err, cut.name)
					call.isTrue(t, f, k, attempt, answer)
					require.True(t, call.done == nil || call.done(t, f, k, attempt), cut.name)
					require.ErrorIs(t, call.do(t.Context(), store, k, attempt).err, call.again, cut.name)
				}
				require.GreaterOrEqual(t, came, lostFewest)
				cuts.Add(int64(came))
			})
		}
	})
	t.Run("connection", func(t *testing.T) {
		t.Parallel()
		for _, call := range faultCalls() {
			t.Run(call.name, func(t *testing.T) {
				t.Parallel()
				f := setup(t)
				proxy := pgtest.NewProxy(t, pgtest.DSN(t))
				came := 0
				for _, cut := range lostCuts(call) {
					conn, err := pgx.Connect(t.Context(), proxy.URL())
					require.NoError(t, err)
					store := f.NewStore(t, conn, lease, retention)
					if !cut.cold {
						lostWarm(t, f, store, call)
					}
					k := recordKey(cut.name)
					attempt := call.put(t, f, k)
					fault := cut.set(proxy, call.sql(f.Statements()))
					answer := call.do(t.Context(), store, k, attempt)
					if !lostStruck(t, fault) { // the connection is there already
						require.NoError(t, conn.Close(t.Context()))
						continue
					}
					came++
					faultIsNoSentinel(t, answer.err)
					call.isTrue(t, f, k, attempt, answer)
					require.True(t, conn.IsClosed())
					again := call.do(t.Context(), store, k, attempt)
					faultIsNoSentinel(t, again.err)
					done := call.done != nil && call.done(t, f, k, attempt)

					// Another connection tells the truth.
					truth := call.do(t.Context(), f.Store, k, attempt)
					if done {
						require.ErrorIs(t, truth.err, call.again, cut.name)
					} else {
						require.NoError(t, truth.err, cut.name)
						call.isTrue(t, f, k, attempt, truth)
					}
				}
				require.GreaterOrEqual(t, came, lostFewest)
				cuts.Add(int64(came))
			})
		}
	})
	t.Cleanup(func() { t.Logf("cuts=%d", cuts.Load()) })
}

// lostFewest is how many cuts of a call must come about for a test of cuts to mean something.
const lostFewest = 8

// lostWarm has the store's only connection prepare the call's statement.
func lostWarm(t *testing.T, f *fixture, store *pgstore.Store, call faultCall) {
	t.Helper()
	k := recordKey(fmt.Sprint("warm ", rand.Uint64()))
	require.NoError(t, call.do(t.Context(), store, k, call.put(t, f, k)).err)
}

// lostStruck reports whether the fault came about, and waits until it is complete: the server has ended the session.
func lostStruck(t *testing.T, fault *pgtest.Fault) bool {
	t.Helper()
	if !fault.Struck() {
		fault.Release()
		return false
	}
	fault.Wait(t)
	return true
}

// Several connections break during one call, at places drawn by chance.
func TestSeveralCutsInOneCallLeaveNoFalseAnswer(t *testing.T) {
	t.Parallel()
	const (
		seed   = 20
		rounds = 8
		most   = 6 // fewer than the runs that a call makes
	)
	var cuts atomic.Int64
	for n, call := range faultCalls() {
		t.Run(call.name, func(t *testing.T) {
			t.Parallel()
			random := rand.New(rand.NewPCG(seed, uint64(n))) //nolint:gosec // an index
			f := setup(t)
			proxy := pgtest.NewProxy(t, pgtest.DSN(t))
			pool := newFaultPool(t, proxy.URL(), faultSingle)
			store := f.NewStore(t, pool, lease, retention)
			places, came := lostCuts(call), 0
			for round := range rounds {
				k := recordKey(fmt.Sprint("round ", round))
				attempt := call.put(t, f, k)
				var names []string
				var faults []*pgtest.Fault
				for range 1 + random.IntN(most) {
					cut := places[random.IntN(len(places))]
					names = append(names, cut.name)
					faults = append(faults, cut.set(proxy, call.sql(f.Statements())))
				}
				answer := call.do(t.Context(), store, k, attempt)
				require.NoError(t, answer.err, names)
				for _, fault := range faults {
					if lostStruck(t, fault) {
						came++
					}
				}
				call.isTrue(t, f, k, attempt, answer)
				require.True(t, call.done == nil || call.done(t, f, k, attempt), names)
				require.ErrorIs(t, call.do(t.Context(), store, k, attempt).err, call.again, names)
			}
			require.GreaterOrEqual(t, came, lostFewest)
			cuts.Add(int64(came))
		})
	}
	t.Cleanup(func() { t.Logf("seed=%d cuts=%d", seed, cuts.Load()) })
}

// The server has committed, and the client sees nothing of the answer or only a part: Begin finds its own record, and uses
// one attempt for both runs.
func TestBeginWhoseAnswerIsLostOwnsItsRecord(t *testing.T) {
	t.Parallel()
	for _, mode := range recordModes {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			f := setup(t)
			proxy := pgtest.NewProxy(t, pgtest.DSN(t))
			pool := newFaultPool(t, proxy.URL(), func(config *pgxpool.Config) { config.ConnConfig.DefaultQueryExecMode = mode })
			store := f.NewStore(t, pool, lease, retention)
			const claim = 4711
			store.SetClaims(func() int64 { return claim })
			var attempts uint64
			for name, cut := range map[string]func() *pgtest.Fault{
				"nothing of the answer":   func() *pgtest.Fault { return proxy.CutAfterReply(pgtest.Executes("INSERT INTO")) },
				"the row":                 func() *pgtest.Fault { return proxy.CutWithinReply(pgtest.Executes("INSERT INTO"), 'D') },
				"all but the very end":    func() *pgtest.Fault { return proxy.CutWithinReply(pgtest.Executes("INSERT INTO"), 'C') },
				"nothing, and not at all": func() *pgtest.Fault { return proxy.CutBeforeSend(pgtest.Executes("INSERT INTO")) },
			} {
				fault := cut()
				record, created, err := store.Begin(t.Context(), recordKey(name), fingerprint)
				require.NoError(t, err, name)
				require.True(t, created, name)
				fault.Wait(t)
				row := faultTheRow(t, f, recordKey(name))
				require.Equal(t, row.Attempt, record.Attempt, name)
				require.Equal(t, int64(claim), row.Claim, name)
				require.Zero(t, record.Abandoned, name)
				attempts++
				require.Equal(t, attempts, record.Attempt, name)
				require.Equal(t, attempts, recordScalar[uint64](t, f, `SELECT last_value FROM `+recordSequence(f)+` -- %s`), name)

				_, _, err = f.Begin(t.Context(), recordKey(name), fingerprint)
				require.ErrorIs(t, err, pgstore.ErrInProgress, "nobody else owns it")
				require.NoError(t, store.Complete(t.Context(), recordKey(name), fingerprint, record.Attempt, recordResponse))
			}
		})
	}
}

// A single connection that breaks cannot ask again: Begin says that it does not know, and the key is free after the lease, not
// after the retention. Meanwhile nobody owns it, and nobody is told that the operation has ended.
func TestBeginThatCannotAskAgainHoldsItsKeyForOneLease(t *testing.T) {
	t.Parallel()
	f := setup(t)
	proxy := pgtest.NewProxy(t, pgtest.DSN(t))
	conn, err := pgx.Connect(t.Context(), proxy.URL())
	require.NoError(t, err)
	fault := proxy.CutAfterReply(pgtest.Executes("INSERT INTO"))
	record, created, err := f.NewStore(t, conn, lease, retention).Begin(t.Context(), key, fingerprint)
	faultIsNoSentinel(t, err)
	require.False(t, created)
	require.Zero(t, record)
	fault.Wait(t)

	lost := faultTheRow(t, f, key)
	_, created, err = f.Begin(t.Context(), key, fingerprint)
	require.ErrorIs(t, err, pgstore.ErrInProgress)
	require.False(t, created)
	recordAge(t, f, key, lease)
	record, created, err = f.Begin(t.Context(), key, fingerprint)
	require.NoError(t, err)
	require.True(t, created)
	require.Equal(t, lost.Attempt, record.Abandoned, "nobody can tell it from an attempt that died at work")
	require.NoError(t, f.Complete(t.Context(), key, fingerprint, record.Attempt, recordResponse))
}

// While a Begin that has lost its answer is on its way to ask again, the world goes on: it is told what is true by then.
func TestBeginWhoseAnswerIsLostLearnsWhatHappenedSince(t *testing.T) {
	t.Parallel()
	lapse := func(t *testing.T, f *fixture) {
		t.Helper()
		recordAge(t, f, key, lease)
	}
	takeOver := func(t *testing.T, f *fixture) uint64 {
		t.Helper()
		lapse(t, f)
		record, created, err := f.Begin(t.Context(), key, fingerprint)
		require.NoError(t, err)
		require.True(t, created)
		require.EqualValues(t, 1, record.Abandoned)
		return record.Attempt
	}
	for name, test := range map[string]struct {
		since   func(t *testing.T, f *fixture)
		created bool
		state   pgstore.State
		err     error
	}{
		"nothing":                  {since: func(*testing.T, *fixture) {}, created: true, state: pgstore.StateInProgress},
		"its lease lapsed":         {since: lapse, created: true, state: pgstore.StateInProgress},
		"its record was forgotten": {since: func(t *testing.T, f *fixture) { t.Helper(); recordAge(t, f, key, 3*retention) }, created: true, state: pgstore.StateInProgress},
		"its record was swept": {since: func(t *testing.T, f *fixture) {
			t.Helper()
			recordAge(t, f, key, 3*retention)
			n, err := f.Sweep(t.Context(), 1)
			require.NoError(t, err)
			require.EqualValues(t, 1, n)
		}, created: true, state: pgstore.StateInProgress},
		"another took over": {since: func(t *testing.T, f *fixture) { t.Helper(); takeOver(t, f) }, err: pgstore.ErrInProgress},
		"another completed": {since: func(t *testing.T, f *fixture) {
			t.Helper()
			require.NoError(t, f.Complete(t.Context(), key, fingerprint, takeOver(t, f), recordResponse))
		}, state: pgstore.StateDone},
		"another failed": {since: func(t *testing.T, f *fixture) {
			t.Helper()
			require.NoError(t, f.Fail(t.Context(), key, fingerprint, takeOver(t, f), false))
		}, state: pgstore.StateFailed},
		"another released": {since: func(t *testing.T, f *fixture) {
			t.Helper()
			require.NoError(t, f.Fail(t.Context(), key, fingerprint, takeOver(t, f), true))
		}, created: true, state: pgstore.StateInProgress},
		"another request took over": {since: func(t *testing.T, f *fixture) {
			t.Helper()
			lapse(t, f)
			_, created, err := f.Begin(t.Context(), key, "sha256:of another request")
			require.NoError(t, err)
			require.True(t, created)
		}, err: pgstore.ErrConflict},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := setup(t)
			proxy := pgtest.NewProxy(t, pgtest.DSN(t))
			store := f.NewStore(t, newFaultPool(t, proxy.URL()), lease, retention)
			lost := proxy.CutAfterReply(pgtest.Executes("INSERT INTO"))
			asks := proxy.HoldRequest(pgtest.Executes("INSERT INTO"))
			begin := goBegin(t.Context(), store, key)
			lost.Wait(t)
			asks.Wait(t)
			test.since(t, f)
			before := faultRows(t, f, key)
			asks.Release()

			record, created, err := begin.result(t)
			require.ErrorIs(t, err, test.err)
			require.Equal(t, test.created, created)
			require.Equal(t, test.state, record.State)
			row := faultTheRow(t, f, key)
			switch {
			case created:
				require.Equal(t, row.Attempt, record.Attempt)
				require.NoError(t, store.Complete(t.Context(), key, fingerprint, record.Attempt, recordResponse))
			default:
				require.Equal(t, []faultRow{row}, before, "it has changed nothing")
			}
			if created && name != "another released" { // which hands on what it was told
				require.Zero(t, record.Abandoned, "its own first run is no lost attempt")
			}
		})
	}
}

// lostZombie is a Begin whose first run is stuck in the server, and whose client has gone to ask again.
type lostZombie struct {
	*fixture

	pool  *faultPool
	proxy *pgtest.Proxy
	begin *directedBegin
}

func newLostZombie(t *testing.T) *lostZombie {
	t.Helper()
	z := &lostZombie{fixture: setup(t), proxy: pgtest.NewProxy(t, pgtest.DSN(t))}
	z.pool = newFaultPool(t, z.proxy.URL())
	return z
}

// start starts the Begin.
func (z *lostZombie) start(t *testing.T, k pgstore.Key) {
	t.Helper()
	z.begin = goBegin(t.Context(), z.NewStore(t, z.pool, lease, retention), k)
}

// waiting returns when n of its runs wait for a lock.
func (z *lostZombie) waiting(t *testing.T, n int) {
	t.Helper()
	faultEventually(t, fmt.Sprint(n, " runs that wait"), func() bool {
		select {
		case <-z.begin.done:
			require.FailNow(t, "Begin should wait", "it returned %+v, created: %t, error: %v", z.begin.record, z.begin.created, z.begin.err)
		default:
		}
		return z.pool.sessions(t, z.Pool, faultWaiting) == n
	})
}

// owns checks that the Begin is the one owner of the key.
func (z *lostZombie) owns(t *testing.T, k pgstore.Key) {
	t.Helper()
	record, created, err := z.begin.result(t)
	require.NoError(t, err)
	require.True(t, created)
	require.Zero(t, record.Abandoned)
	row := faultTheRow(t, z.fixture, k)
	require.Equal(t, row.Attempt, record.Attempt)
	require.Equal(t, pgstore.StateInProgress, row.State)
	_, _, err = z.Begin(t.Context(), k, fingerprint)
	require.ErrorIs(t, err, pgstore.ErrInProgress)
	require.NoError(t, z.Complete(t.Context(), k, fingerprint, record.Attempt, recordResponse))
}

// The first run is alive in the server, waiting for somebody's transaction, when its client's connection breaks. It wins after
// all: the second run recognises its claim.
func TestRunThatLivesOnInTheServerMakesNoSecondOwner(t *testing.T) {
	t.Parallel()
	z := newLostZombie(t)
	holder := directedTx(t, z.Pool)
	_, created, err := z.WithTx(holder).Begin(t.Context(), key, fingerprint)
	require.NoError(t, err)
	require.True(t, created)
	z.start(t, key)
	z.waiting(t, 1)
	second := z.proxy.HoldRequest(pgtest.Executes("INSERT INTO"))
	z.pool.cable.cut()
	second.Wait(t)
	require.NoError(t, holder.Rollback(t.Context()))
	faultEventually(t, "the record of the first run", func() bool { return len(faultRows(t, z.fixture, key)) == 1 })
	second.Release()
	z.owns(t, key)
}

// Both runs wait in the server for the same transaction, and wake up together.
func TestTwoRunsOfOneBeginThatWaitTogetherMakeOneOwner(t *testing.T) {
	t.Parallel()
	const rounds = 10
	for _, committed := range []bool{false, true} {
		t.Run(fmt.Sprintf("committed=%t", committed), func(t *testing.T) {
			t.Parallel()
			z := newLostZombie(t)
			for n := range rounds {
				k := recordKey(strconv.Itoa(n))
				holder := directedTx(t, z.Pool)
				held, _, err := z.WithTx(holder).Begin(t.Context(), k, fingerprint)
				require.NoError(t, err)
				z.start(t, k)
				z.waiting(t, 1)
				z.pool.cable.cut()
				z.waiting(t, 2)
				if !committed {
					require.NoError(t, holder.Rollback(t.Context()))
					z.owns(t, k)
					continue
				}
				require.NoError(t, holder.Commit(t.Context()))
				_, created, err := z.begin.result(t)
				require.ErrorIs(t, err, pgstore.ErrInProgress)
				require.False(t, created)
				require.Equal(t, held.Attempt, faultTheRow(t, z.fixture, k).Attempt)
			}
		})
	}
}

// A request is held up in the network, its client gives up the connection and asks again on another, and the first request
// reaches the server late, whatever has become of the key. It makes nobody an owner, and takes nothing from anybody.
func TestRequestThatArrivesLateMakesNoOwner(t *testing.T) {
	t.Parallel()
	complete := func(t *testing.T, z *lostZombie, attempt uint64) {
		t.Helper()
		require.NoError(t, z.Complete(t.Context(), key, fingerprint, attempt, recordResponse))
	}
	release := func(t *testing.T, z *lostZombie, attempt uint64) {
		t.Helper()
		require.NoError(t, z.Fail(t.Context(), key, fingerprint, attempt, true))
	}
	for name, test := range map[string]struct {
		since func(t *testing.T, z *lostZombie, attempt uint64)
		holds bool // the late request begins an attempt that nobody knows of
	}{
		"at work":   {since: func(*testing.T, *lostZombie, uint64) {}},
		"completed": {since: complete},
		"failed": {since: func(t *testing.T, z *lostZombie, attempt uint64) {
			t.Helper()
			require.NoError(t, z.Fail(t.Context(), key, fingerprint, attempt, false))
		}},
		"released and begun again": {since: func(t *testing.T, z *lostZombie, attempt uint64) {
			t.Helper()
			release(t, z, attempt)
			_, created, err := z.Begin(t.Context(), key, fingerprint)
			require.NoError(t, err)
			require.True(t, created)
		}},
		"released": {since: release, holds: true},
		"lost": {since: func(t *testing.T, z *lostZombie, _ uint64) {
			t.Helper()
			recordAge(t, z.fixture, key, lease)
		}, holds: true},
		"forgotten": {since: func(t *testing.T, z *lostZombie, attempt uint64) {
			t.Helper()
			complete(t, z, attempt)
			recordAge(t, z.fixture, key, 3*retention)
			_, err := z.Sweep(t.Context(), 1)
			require.NoError(t, err)
		}, holds: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			z := newLostZombie(t)
			late := z.proxy.HoldRequest(pgtest.Executes("INSERT INTO"))
			z.start(t, key)
			late.Wait(t)
			z.pool.cable.cut()
			record, created, err := z.begin.result(t)
			require.NoError(t, err)
			require.True(t, created)
			require.EqualValues(t, 1, record.Attempt)
			test.since(t, z, record.Attempt)
			before := recordRow(t, z.fixture, key)
			late.Release()
			faultEventually(t, "the end of the late session", func() bool { return z.pool.sessions(t, z.Pool, "true") == 1 })

			if !test.holds {
				require.Equal(t, before, recordRow(t, z.fixture, key))
				return
			}
			// As after the death of its owner: the key is free after one lease, and whoever gets it is told.
			nobodys := faultTheRow(t, z.fixture, key)
			require.Equal(t, pgstore.StateInProgress, nobodys.State)
			require.Greater(t, nobodys.Attempt, record.Attempt)
			_, _, err = z.Begin(t.Context(), key, fingerprint)
			require.ErrorIs(t, err, pgstore.ErrInProgress)
			require.ErrorIs(t, z.Complete(t.Context(), key, fingerprint, record.Attempt, recordResponse), pgstore.ErrStaleAttempt)
			recordAge(t, z.fixture, key, lease)
			next, created, err := z.Begin(t.Context(), key, fingerprint)
			require.NoError(t, err)
			require.True(t, created)
			require.Equal(t, nobodys.Attempt, next.Abandoned)
		})
	}
}

// The same for the other calls: a request that arrives after its repeat was answered, and after the key has gone on, changes
// nothing.
func TestEndingThatArrivesLateChangesNothing(t *testing.T) {
	t.Parallel()
	for _, call := range faultCalls() {
		if call.name == "begin" || call.name == "get" || call.name == "sweep" {
			continue
		}
		t.Run(call.name, func(t *testing.T) {
			t.Parallel()
			f := setup(t)
			proxy := pgtest.NewProxy(t, pgtest.DSN(t))
			pool := newFaultPool(t, proxy.URL())
			store := f.NewStore(t, pool, lease, retention)
			attempt := call.put(t, f, key)
			late := proxy.HoldRequest(pgtest.Executes(call.sql(f.Statements())))
			answered := make(chan faultAnswer, 1)
			go func() { answered <- call.do(t.Context(), store, key, attempt) }()
			late.Wait(t)
			pool.cable.cut()
			require.NoError(t, (<-answered).err)
			require.True(t, call.done(t, f, key, attempt))
			recordAge(t, f, key, 2*retention)
			record, created, err := f.Begin(t.Context(), key, fingerprint)
			require.NoError(t, err)
			require.True(t, created)
			require.NotEqual(t, attempt, record.Attempt)
			before := recordRow(t, f, key)
			late.Release()
			faultEventually(t, "the end of the late session", func() bool { return pool.sessions(t, f.Pool, "true") == 1 })
			require.Equal(t, before, recordRow(t, f, key))
		})
	}
}

// A caller whose Complete failed by a lost connection calls again, here on another connection: with the same response it
// succeeds, whether or not the first one did, and with another it is told that the outcome stands.
func TestCompleteWhoseAnswerIsLostMayBeRepeated(t *testing.T) {
	t.Parallel()
	for name, cut := range map[string]func(*pgtest.Proxy) *pgtest.Fault{
		"recorded":     func(p *pgtest.Proxy) *pgtest.Fault { return p.CutAfterReply(pgtest.Executes("'done'")) },
		"not recorded": func(p *pgtest.Proxy) *pgtest.Fault { return p.CutBeforeSend(pgtest.Executes("'done'")) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := setup(t)
			proxy := pgtest.NewProxy(t, pgtest.DSN(t))
			conn, err := pgx.Connect(t.Context(), proxy.URL())
			require.NoError(t, err)
			attempt := recordPut(t, f, key, pgstore.StateInProgress)
			fault := cut(proxy)
			faultIsNoSentinel(t, f.NewStore(t, conn, lease, retention).Complete(t.Context(), key, fingerprint, attempt, recordResponse))
			fault.Wait(t)
			recorded := faultTheRow(t, f, key).State == pgstore.StateDone
			require.Equal(t, name == "recorded", recorded)
			if recorded {
				require.ErrorIs(t, f.Complete(t.Context(), key, fingerprint, attempt, "another"), pgstore.ErrStaleAttempt)
			}
			for range 2 {
				require.NoError(t, f.Complete(t.Context(), key, fingerprint, attempt, recordResponse))
			}
			require.ErrorIs(t, f.Complete(t.Context(), key, fingerprint, attempt, "another"), pgstore.ErrStaleAttempt)
			record, created, err := f.Begin(t.Context(), key, fingerprint)
			require.NoError(t, err)
			require.False(t, created)
			require.Equal(t, recordResponse, record.Response)
		})
	}
}

// A release whose answer is lost frees the key at once. If somebody has it before the store asks again, the answer is that the
// attempt no longer owns the key: true, and nothing that a caller could do about it would be different.
func TestReleaseWhoseAnswerIsLostIsStaleOnceAnotherHasBegun(t *testing.T) {
	t.Parallel()
	f := setup(t)
	proxy := pgtest.NewProxy(t, pgtest.DSN(t))
	store := f.NewStore(t, newFaultPool(t, proxy.URL()), lease, retention)
	attempt := recordPut(t, f, key, pgstore.StateInProgress)
	sql := f.Statements().Fail
	lost, asks := proxy.CutAfterReply(pgtest.Executes(sql)), proxy.HoldRequest(pgtest.Executes(sql))
	released := make(chan error, 1)
	go func() { released <- store.Fail(t.Context(), key, fingerprint, attempt, true) }()
	lost.Wait(t)
	asks.Wait(t)
	next, created, err := f.Begin(t.Context(), key, fingerprint)
	require.NoError(t, err)
	require.True(t, created)
	before := recordRow(t, f, key)
	asks.Release()
	require.ErrorIs(t, <-released, pgstore.ErrStaleAttempt)
	require.Equal(t, before, recordRow(t, f, key))
	require.NoError(t, f.Complete(t.Context(), key, fingerprint, next.Attempt, recordResponse))
}

// The connection breaks at the COMMIT of a caller's transaction that completes a key. The caller does not know, nothing is run
// again, and the next Begin tells: the caller's own write is there if, and only if, the key is done.
func TestCommitWhoseAnswerIsLostIsToldByTheNextBegin(t *testing.T) {
	t.Parallel()
	for name, cut := range map[string]func(*pgtest.Proxy) *pgtest.Fault{
		"committed":     func(p *pgtest.Proxy) *pgtest.Fault { return p.CutAfterReply(pgtest.Executes("commit")) },
		"not committed": func(p *pgtest.Proxy) *pgtest.Fault { return p.CutBeforeSend(pgtest.Executes("commit")) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := setup(t)
			own := faultOwn(t, f)
			proxy := pgtest.NewProxy(t, pgtest.DSN(t))
			pool := newFaultPool(t, proxy.URL())
			attempt := recordPut(t, f, key, pgstore.StateInProgress)
			pay := func() error {
				return pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
					return errors.Join(
						func() error { _, err := tx.Exec(t.Context(), `INSERT INTO `+own+` VALUES (1)`); return err }(),
						f.WithTx(tx).Complete(t.Context(), key, fingerprint, attempt, recordResponse),
					)
				})
			}
			fault := cut(proxy)
			faultIsNoSentinel(t, pay())
			fault.Wait(t)
			require.Equal(t, 1, pool.ran(f.Statements().Complete), "nothing is run again")

			record, created, err := f.Begin(t.Context(), key, fingerprint)
			require.False(t, created)
			if name == "committed" {
				require.NoError(t, err)
				require.Equal(t, recordResponse, record.Response)
				require.Equal(t, 1, faultCount(t, f, own))
				return
			}
			require.ErrorIs(t, err, pgstore.ErrInProgress, "the attempt still holds its key")
			require.Zero(t, faultCount(t, f, own))
			require.NoError(t, pay(), "and may do it again")
			require.Equal(t, 1, faultCount(t, f, own))
		})
	}
}

// A connection that breaks inside a caller's transaction ends it: no statement is run on another connection, outside of it.
func TestBrokenTransactionIsNotContinuedElsewhere(t *testing.T) {
	t.Parallel()
	for _, call := range faultCalls() {
		t.Run(call.name, func(t *testing.T) {
			t.Parallel()
			f := setup(t)
			proxy := pgtest.NewProxy(t, pgtest.DSN(t))
			for name, cut := range map[string]func() *pgtest.Fault{
				"before": func() *pgtest.Fault { return proxy.CutBeforeSend(pgtest.Executes(call.sql(f.Statements()))) },
				"after":  func() *pgtest.Fault { return proxy.CutAfterReply(pgtest.Executes(call.sql(f.Statements()))) },
			} {
				pool := newFaultPool(t, proxy.URL())
				k := recordKey(name)
				attempt := call.put(t, f, k)
				rows := recordRow(t, f, k)
				tx, err := pool.Begin(t.Context())
				require.NoError(t, err)
				fault := cut()
				answer := call.do(t.Context(), f.WithTx(tx), k, attempt)
				faultIsNoSentinel(t, answer.err)
				fault.Wait(t)
				require.Equal(t, 1, pool.ran(call.sql(f.Statements())), name)
				require.Equal(t, rows, recordRow(t, f, k), name)
				require.Error(t, tx.Commit(t.Context()))
				require.Equal(t, rows, recordRow(t, f, k), name)
				faultEventually(t, "an idle pool", pool.isIdle)
			}
		})
	}
}
