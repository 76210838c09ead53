package pgstore_test

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/archlab/idempotency/internal/pgtest"
	"github.com/archlab/idempotency/migrations"
	"github.com/archlab/idempotency/pgstore"
)

// outageBound is what a call may take that meets no server. The pauses between its runs add up to two thirds of a second.
const outageBound = 10 * time.Second

// outageWarm opens n connections of a pool, has each prepare the statement, and leaves them idle.
func outageWarm(t *testing.T, pool *faultPool, n int, sql string) {
	t.Helper()
	conns := make([]*pgxpool.Conn, n)
	var opening sync.WaitGroup
	for i := range conns {
		opening.Go(func() {
			conn, err := pool.Acquire(t.Context())
			if err != nil {
				t.Error(err)
				return
			}
			if _, err := conn.Conn().Prepare(t.Context(), sql, sql); err != nil {
				t.Error(err)
			}
			conns[i] = conn
		})
	}
	opening.Wait()
	for _, conn := range conns {
		conn.Release()
	}
	require.EqualValues(t, n, pool.Stat().IdleConns())
}

// The session of a call that waits for a lock is terminated. The call asks again in another, waits there, and gets its answer.
func TestCallWhoseSessionIsTerminatedAsksAgain(t *testing.T) {
	t.Parallel()
	for _, call := range retryWriters() {
		if call.name == "sweep" {
			continue // it waits for nobody
		}
		t.Run(call.name, func(t *testing.T) {
			t.Parallel()
			f := setup(t)
			pool := newFaultPool(t, pgtest.DSN(t))
			attempt := call.put(t, f, key)
			holder := retryHold(t, f, call, attempt)
			answered := make(chan faultAnswer, 1)
			store := f.NewStore(t, pool, lease, retention)
			go func() { answered <- call.do(t.Context(), store, key, attempt) }()
			for range 3 {
				faultEventually(t, "a call that waits", func() bool { return pool.sessions(t, f.Pool, faultWaiting) == 1 })
				var pid int
				require.NoError(t, f.Pool.QueryRow(t.Context(), `SELECT pid FROM pg_stat_activity WHERE application_name = $1 AND `+faultWaiting,
					pool.name).Scan(&pid))
				_, err := f.Pool.Exec(t.Context(), `SELECT pg_terminate_backend($1)`, pid)
				require.NoError(t, err)
				faultEventually(t, "the session's end", func() bool { return pool.sessions(t, f.Pool, `pid = `+strconv.Itoa(pid)) == 0 })
			}
			faultEventually(t, "a call that waits", func() bool { return pool.sessions(t, f.Pool, faultWaiting) == 1 })
			require.NoError(t, holder.Rollback(t.Context()))
			answer := <-answered
			require.NoError(t, answer.err)
			require.Equal(t, 3, pool.met("57P01"))
			call.isTrue(t, f, key, attempt, answer)
			require.True(t, call.done(t, f, key, attempt))
		})
	}
}

// A restart leaves dead connections in a pool. A pool that looks at idle connections before it hands them out, as pgxpool
// does with those that were idle for a second, gets rid of them by itself. In one that does not, each costs a run: nine of them
// are nobody's business, and with more a call may fail, but the next one works.
func TestDeadConnectionsOfAPoolAreOutlived(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		dead  int32
		fails bool
	}{{9, false}, {15, true}} {
		t.Run(fmt.Sprintf("dead=%d", test.dead), func(t *testing.T) {
			t.Parallel()
			f := setup(t)
			pool := newFaultPool(t, pgtest.DSN(t), faultNoPing, func(config *pgxpool.Config) { config.MaxConns = test.dead })
			store := f.NewStore(t, pool, lease, retention)
			outageWarm(t, pool, int(test.dead), f.Statements().Begin)
			_, err := f.Pool.Exec(t.Context(), `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = $1`, pool.name)
			require.NoError(t, err)
			faultEventually(t, "the sessions' end", func() bool { return pool.sessions(t, f.Pool, "true") == 0 })
			record, created, err := store.Begin(t.Context(), key, fingerprint)
			if test.fails {
				faultIsNoSentinel(t, err)
				require.False(t, created)
				require.Zero(t, record)
				require.Empty(t, faultRows(t, f, key))
				record, created, err = store.Begin(t.Context(), key, fingerprint)
			}
			require.NoError(t, err)
			require.True(t, created)
			require.Equal(t, faultTheRow(t, f, key).Attempt, record.Attempt)
		})
	}
}

// A server may end sessions that are idle for too long, and says so on the way.
func TestEndedIdleSessionIsReplaced(t *testing.T) {
	t.Parallel()
	for _, call := range faultCalls() {
		t.Run(call.name, func(t *testing.T) {
			t.Parallel()
			f := setup(t)
			pool := newFaultPool(t, pgtest.DSN(t), faultNoPing, faultSingle)
			attempt := call.put(t, f, key)
			_, err := pool.Exec(t.Context(), `SET idle_session_timeout = 1`)
			require.NoError(t, err)
			faultEventually(t, "the session's end", func() bool { return pool.sessions(t, f.Pool, "true") == 0 })
			answer := call.do(t.Context(), f.NewStore(t, pool, lease, retention), key, attempt)
			require.NoError(t, answer.err)
			require.Equal(t, 1, pool.met("57P05"))
			call.isTrue(t, f, key, attempt, answer)
		})
	}
}

// While nothing reaches the server every call fails within a bounded time, and nobody executes. When it is reached again, the
// first call finds the truth: no error is remembered.
func TestUnreachableServerIsAnErrorAndNoMemory(t *testing.T) {
	t.Parallel()
	for _, call := range faultCalls() {
		t.Run(call.name, func(t *testing.T) {
			t.Parallel()
			f := setup(t)
			proxy := pgtest.NewProxy(t, pgtest.DSN(t))
			store := f.NewStore(t, newFaultPool(t, proxy.URL()), lease, retention)
			lostWarm(t, f, store, call)
			attempt := call.put(t, f, key)
			before := recordRow(t, f, key)
			proxy.Down()
			for range 2 {
				started := time.Now()
				answer := call.do(t.Context(), store, key, attempt)
				require.Less(t, time.Since(started), outageBound)
				faultIsNoSentinel(t, answer.err)
				require.ErrorContains(t, answer.err, "gave up after 10 runs")
				call.isTrue(t, f, key, attempt, answer)
				require.Equal(t, before, recordRow(t, f, key))
			}
			proxy.Up()
			answer := call.do(t.Context(), store, key, attempt)
			require.NoError(t, answer.err)
			call.isTrue(t, f, key, attempt, answer)
			require.True(t, call.done == nil || call.done(t, f, key, attempt))
		})
	}
}

// outageServer is a server that is stopped and killed, with a pool of ten connections.
type outageServer struct {
	*fixture

	server *pgtest.Server
	pool   *faultPool
	store  *pgstore.Store // on that pool
}

func newOutageServer(t *testing.T) *outageServer {
	t.Helper()
	server := pgtest.NewServer(t, pgtest.Durable())
	s := &outageServer{server: server, fixture: &fixture{Pool: newFaultPool(t, server.URL()).Pool, Schema: pgstore.SchemaDefault}}
	_, err := migrations.Up(t.Context(), s.Pool)
	require.NoError(t, err)
	s.Store = s.NewStore(t, s.Pool, time.Hour, retention) // a lease that outlives slow machines
	s.pool = newFaultPool(t, server.URL(), func(config *pgxpool.Config) { config.MaxConns = 10 })
	s.store = s.NewStore(t, s.pool, time.Hour, retention)
	return s
}

// restart starts the server again.
func (s *outageServer) restart(t *testing.T) {
	t.Helper()
	require.NoError(t, s.server.Start(t.Context()))
	s.Pool.Reset()
}

// A server that is stopped, restarted or killed loses nothing that was answered, and gives no attempt out again. While it is down,
// every call fails; when it is up again, those on a pool full of dead connections fail or tell the truth.
func TestServerThatGoesAwayLosesNothing(t *testing.T) { //nolint:tparallel // one server, and one ending after the other
	t.Parallel()
	s := newOutageServer(t)
	var attempts []uint64
	for _, ending := range []struct {
		name  string
		end   func(ctx context.Context) error
		calls bool // while it is down
	}{
		{"restarted", s.server.Stop, false},
		{"stopped", s.server.Stop, true},
		{"killed", s.server.Kill, true},
		{"killed and restarted", s.server.Kill, false},
	} {
		before := map[pgstore.State]pgstore.Record{}
		k := func(state string) pgstore.Key { return recordKey(ending.name + " " + state) }
		for _, state := range recordStates {
			attempt := recordPut(t, s.fixture, k(string(state)), state)
			attempts = append(attempts, attempt)
			record, live, err := s.Get(t.Context(), k(string(state)))
			require.NoError(t, err)
			require.True(t, live)
			before[state] = record
		}
		outageWarm(t, s.pool, 10, s.Statements().Begin)
		require.NoError(t, ending.end(t.Context()))
		if ending.calls {
			var calling sync.WaitGroup
			for _, call := range faultCalls() {
				calling.Go(func() {
					started := time.Now()
					answer := call.do(t.Context(), s.store, k("in_progress"), before[pgstore.StateInProgress].Attempt)
					if answer.err == nil || answer.is || answer.record != (pgstore.Record{}) || time.Since(started) > outageBound {
						t.Errorf("%s: %s: %+v after %v", ending.name, call.name, answer, time.Since(started))
					}
				})
			}
			calling.Wait()
		}
		s.restart(t)

		// The very next calls, as many as there were connections.
		var calling sync.WaitGroup
		answers := make([]faultAnswer, 10)
		for n := range answers {
			calling.Go(func() {
				begin := faultCalls()[0]
				switch n % 5 {
				case 0:
					answers[n] = begin.do(t.Context(), s.store, k("done"), 0)
				case 1:
					answers[n] = begin.do(t.Context(), s.store, k("in_progress"), 0)
				default:
					answers[n] = begin.do(t.Context(), s.store, k(fmt.Sprint("fresh ", n)), 0)
				}
			})
		}
		calling.Wait()
		failed := 0
		for n, a := range answers {
			switch {
			case n%5 == 1 && a.err != nil:
				require.False(t, a.is)
			case n%5 == 1:
				require.Fail(t, "somebody else is at it")
			case a.err != nil:
				failed++
				faultIsNoSentinel(t, a.err)
				require.False(t, a.is)
			case n%5 == 0:
				require.False(t, a.is)
				require.Equal(t, recordResponse, a.record.Response)
			default:
				require.True(t, a.is)
				require.Equal(t, faultTheRow(t, s.fixture, k(fmt.Sprint("fresh ", n))).Attempt, a.record.Attempt)
				attempts = append(attempts, a.record.Attempt)
			}
		}
		t.Logf("%s: %d of the next 10 calls failed", ending.name, failed)

		// Nothing is lost, and the store works.
		for state, record := range before {
			got, live, err := s.store.Get(t.Context(), k(string(state)))
			require.NoError(t, err, state)
			require.True(t, live, state)
			got.Remaining = record.Remaining
			require.Equal(t, record, got, ending.name)
		}
		record := before[pgstore.StateInProgress]
		require.NoError(t, s.store.Complete(t.Context(), k("in_progress"), fingerprint, record.Attempt, recordResponse))
		record, created, err := s.store.Begin(t.Context(), k("retryable"), fingerprint)
		require.NoError(t, err)
		require.True(t, created)
		require.Greater(t, record.Attempt, slices.Max(attempts))
	}
	distinct := slices.Clone(attempts)
	slices.Sort(distinct)
	require.Len(t, slices.Compact(distinct), len(attempts))

	t.Run("killed at work", s.killedAtWork)
}

// killedAtWork kills the server under a dozen workers. Whatever one of them was told is there afterwards.
func (s *outageServer) killedAtWork(t *testing.T) {
	const workers, enough = 12, 100
	type told struct {
		key       pgstore.Key
		attempt   uint64
		completed bool
	}
	var (
		mu      sync.Mutex
		all     []told
		reached = make(chan struct{})
		working sync.WaitGroup
	)
	for w := range workers {
		working.Go(func() {
			for n := 0; ; n++ {
				k := recordKey(fmt.Sprintf("worker %d, %d", w, n))
				record, created, err := s.store.Begin(t.Context(), k, fingerprint)
				if err == nil && !created {
					t.Errorf("%v was replayed, and nobody else began it", k)
				}
				if err != nil {
					return
				}
				err = s.store.Complete(t.Context(), k, fingerprint, record.Attempt, strconv.FormatUint(record.Attempt, 10))
				mu.Lock()
				all = append(all, told{k, record.Attempt, err == nil})
				if len(all) == enough {
					close(reached)
				}
				mu.Unlock()
				if err != nil {
					return
				}
			}
		})
	}
	select {
	case <-reached:
	case <-time.After(faultWait):
		require.FailNow(t, "the workers do not work")
	}
	require.NoError(t, s.server.Kill(t.Context()))
	working.Wait()
	s.restart(t)
	attempts := map[uint64]bool{}
	for _, work := range all {
		require.False(t, attempts[work.attempt], "an attempt was given out twice")
		attempts[work.attempt] = true
		row := faultTheRow(t, s.fixture, work.key)
		require.Equal(t, work.attempt, row.Attempt)
		if work.completed {
			require.Equal(t, pgstore.StateDone, row.State)
			require.Equal(t, strconv.FormatUint(work.attempt, 10), string(row.Response))
		}
	}
	t.Logf("%d operations were told of before the server was killed, all are there", len(all))
}

// outageNotMigrated checks that an error says what is missing and what to run.
func outageNotMigrated(t *testing.T, schema string, a faultAnswer) {
	t.Helper()
	require.ErrorIs(t, a.err, pgstore.ErrNotMigrated)
	require.ErrorContains(t, a.err, "idempotency: database not migrated: run migrations.Up, or the SQL that migrations.SQL prints, for schema "+
		strconv.Quote(schema)+": ")
	require.NotContains(t, a.err.Error(), "gave up")
	require.False(t, a.is)
	require.Zero(t, a.record)
	require.Zero(t, a.n)
}

func TestDatabaseThatIsNotMigratedSaysWhatToRun(t *testing.T) {
	t.Parallel()
	for name, schema := range map[string]func(t *testing.T) string{
		"no table":  func(t *testing.T) string { t.Helper(); return pgtest.EmptySchema(t) },
		"no schema": func(t *testing.T) string { t.Helper(); return `nobody's "schema"` },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := &fixture{Pool: pgtest.Pool(t), Schema: schema(t)}
			store := f.NewStore(t, f.Pool, lease, retention)
			for _, call := range faultCalls() {
				outageNotMigrated(t, f.Schema, call.do(t.Context(), store, key, 1))
			}
		})
	}
}

// A table that an older migration left, without a column that the library needs, is as good as none to the calls that need it.
// Begin needs them all.
func TestTableWithoutANeededColumnIsNotMigrated(t *testing.T) {
	t.Parallel()
	const all = "begin complete release fail extend get"
	for column, needs := range map[string]string{
		"tenant":      all,
		"operation":   all,
		"key":         all,
		"state":       all,
		"fingerprint": all,
		"response":    "begin complete get",
		"attempt":     all,
		"claim":       "begin",
		"abandoned":   "begin extend get",
		"begun_at":    "begin",
		"expires_at":  all,
		"purge_after": "begin complete release fail extend sweep",
	} {
		t.Run(column, func(t *testing.T) {
			t.Parallel()
			f := setup(t)
			attempts := map[string]uint64{}
			for _, call := range faultCalls() {
				attempts[call.name] = call.put(t, f, recordKey(call.name))
				k := recordKey(call.name + " before") // which has the statement prepared
				require.NoError(t, call.do(t.Context(), f.Store, k, call.put(t, f, k)).err)
			}
			recordExec(t, f, `ALTER TABLE %s DROP COLUMN `+column+` CASCADE`)
			for _, call := range faultCalls() {
				answer := call.do(t.Context(), f.Store, recordKey(call.name), attempts[call.name])
				if slices.Contains(strings.Fields(needs), call.name) {
					outageNotMigrated(t, f.Schema, answer)
				} else {
					require.NoError(t, answer.err, call.name)
				}
			}
		})
	}
}

// What stands in the table's place but does not keep keys apart is refused, and nothing runs without its key.
func TestTableWithoutItsUniqueKeyTakesNoKeys(t *testing.T) {
	t.Parallel()
	f := setup(t)
	recordExec(t, f, `ALTER TABLE %s DROP CONSTRAINT idempotency_keys_pkey`)
	record, created, err := f.Begin(t.Context(), key, fingerprint)
	require.Equal(t, "42P10", faultCode(t, err))
	require.False(t, created)
	require.Zero(t, record)
}

// The table is dropped and created again under a running service, whose connections have prepared its statements.
func TestStoreSurvivesADownAndUpOfItsTable(t *testing.T) {
	t.Parallel()
	for _, mode := range recordModes {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			f := setup(t)
			pool := newFaultPool(t, pgtest.DSN(t), faultSingle, func(config *pgxpool.Config) { config.ConnConfig.DefaultQueryExecMode = mode })
			store := f.NewStore(t, pool, lease, retention)
			every := func(round string) {
				t.Helper()
				for _, call := range faultCalls() {
					k := recordKey(call.name + round)
					attempt := call.put(t, f, k)
					answer := call.do(t.Context(), store, k, attempt)
					require.NoError(t, answer.err, call.name+round)
					call.isTrue(t, f, k, attempt, answer)
				}
			}
			every("")
			_, err := migrations.Down(t.Context(), f.Pool, migrations.WithSchema(f.Schema))
			require.NoError(t, err)
			for _, call := range faultCalls() {
				outageNotMigrated(t, f.Schema, call.do(t.Context(), store, key, 1))
			}
			_, err = migrations.Up(t.Context(), f.Pool, migrations.WithSchema(f.Schema))
			require.NoError(t, err)
			every(" again")
		})
	}
}
