package pgstore_test

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/archlab/idempotency/internal/pgtest"
	"github.com/archlab/idempotency/pgstore"
)

// poolOf returns a pool of its own with as many connections.
func poolOf(t *testing.T, size int32) *pgxpool.Pool {
	t.Helper()
	config, err := pgxpool.ParseConfig(pgtest.DSN(t))
	require.NoError(t, err)
	config.MaxConns = size
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	return pool
}

// No call holds one connection while it waits for another: a pool of one serves any number of callers.
func TestPoolOfOneServesManyCallers(t *testing.T) {
	t.Parallel()
	f := setup(t)
	pool := poolOf(t, 1)
	store := f.NewStore(t, pool, lease, retention)
	var owners atomic.Int64
	var wg sync.WaitGroup
	for n := range 50 {
		wg.Go(func() {
			k := pgstore.Key{Tenant: "t", Operation: "o", Value: strconv.Itoa(n % 10)}
			record, created, err := store.Begin(t.Context(), k, fingerprint)
			if created {
				owners.Add(1)
				err = store.Complete(t.Context(), k, fingerprint, record.Attempt, "done")
			}
			if err != nil && !errors.Is(err, pgstore.ErrInProgress) {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	require.EqualValues(t, 10, owners.Load())
	require.Zero(t, pool.Stat().AcquiredConns())
}

// A pool that is exhausted makes a call wait as long as its context allows, then it says so and has sent nothing.
func TestExhaustedPoolIsAnErrorWhenTheContextEnds(t *testing.T) {
	t.Parallel()
	f := setup(t)
	pool := poolOf(t, 1)
	store := f.NewStore(t, pool, lease, retention)
	taken, err := pool.Acquire(t.Context())
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	_, created, err := store.Begin(ctx, key, fingerprint)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.False(t, created)
	taken.Release()
	_, live, err := f.Get(t.Context(), key)
	require.NoError(t, err)
	require.False(t, live)
	_, created, err = store.Begin(t.Context(), key, fingerprint)
	require.NoError(t, err)
	require.True(t, created, "the store is usable again")
}

// Two goroutines on one connection are a bug of the caller's. It comes back at once, and is not tried again until it happens
// to work.
func TestBusyConnectionIsNotTriedAgain(t *testing.T) {
	t.Parallel()
	f := setup(t)
	conn, err := pgx.Connect(t.Context(), pgtest.DSN(t))
	require.NoError(t, err)
	defer conn.Close(t.Context())
	rows, err := conn.Query(t.Context(), `SELECT generate_series(1, 10)`) // busy until the rows are read
	require.NoError(t, err)
	_, created, err := f.NewStore(t, conn, lease, retention).Begin(t.Context(), key, fingerprint)
	require.ErrorContains(t, err, "conn busy")
	require.NotContains(t, err.Error(), "gave up")
	require.False(t, created)
	rows.Close()
	require.NoError(t, rows.Err())
}

// poolAlternating sends each statement to the next of its connections, as a pooler in transaction mode may.
type poolAlternating struct {
	conns []*pgx.Conn
	sent  int
}

func (p *poolAlternating) next() *pgx.Conn {
	p.sent++
	return p.conns[p.sent%len(p.conns)]
}

func (p *poolAlternating) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	return p.next().Exec(ctx, sql, args...)
}

func (p *poolAlternating) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	return p.next().Query(ctx, sql, args...)
}

// The store keeps nothing in a session: each statement may go to another one.
func TestEachStatementMayGoToAnotherSession(t *testing.T) {
	t.Parallel()
	for _, mode := range recordModes {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			f := setup(t)
			db := &poolAlternating{conns: []*pgx.Conn{recordConn(t, mode), recordConn(t, mode), recordConn(t, mode)}}
			store := f.NewStore(t, db, lease, retention)
			for n := range 8 {
				compatWhole(t, store, strconv.Itoa(n))
			}
			var locks int
			require.NoError(t, f.Pool.QueryRow(t.Context(), `SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = ANY ($1)`,
				[]int64{int64(db.conns[0].PgConn().PID()), int64(db.conns[1].PgConn().PID()), int64(db.conns[2].PgConn().PID())}).Scan(&locks))
			require.Zero(t, locks)
		})
	}
}

// Every connection of a pool has prepared every statement when a later migration adds a column. None of them minds.
func TestEveryPooledConnectionSurvivesANewColumn(t *testing.T) {
	t.Parallel()
	const size = 4
	f := setup(t)
	pool := newFaultPool(t, pgtest.DSN(t), func(config *pgxpool.Config) { config.MaxConns = size })
	conns := make([]*pgxpool.Conn, size)
	for i := range conns {
		var err error
		conns[i], err = pool.Acquire(t.Context())
		require.NoError(t, err)
	}
	every := func(round string) {
		t.Helper()
		for i, conn := range conns {
			store := f.NewStore(t, conn, lease, retention)
			for _, call := range faultCalls() {
				k := recordKey(fmt.Sprint(round, i, call.name))
				attempt := call.put(t, f, k)
				answer := call.do(t.Context(), store, k, attempt)
				require.NoError(t, answer.err, call.name)
				call.isTrue(t, f, k, attempt, answer)
			}
		}
	}
	for n := range 3 {
		every(fmt.Sprint("before ", n))
	}
	recordExec(t, f, `ALTER TABLE %s ADD COLUMN added text, ADD COLUMN counted int NOT NULL DEFAULT 7`)
	every("after")
	require.Empty(t, pool.codes, "no error, and none that was run again")
	for _, conn := range conns {
		conn.Release()
	}
}

// The store leaves a session as it was: no setting, prepared statement (in the modes that name none), cursor, channel, temporary
// table or lock stays behind, and no advisory lock is taken in the middle of a call either.
func TestCallsLeaveTheSessionAsItWas(t *testing.T) {
	t.Parallel()
	for _, mode := range recordModes {
		if mode == pgx.QueryExecModeCacheStatement {
			continue // pgx names its statements
		}
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			f := setup(t)
			conn := recordConn(t, mode)
			pid := int64(conn.PgConn().PID())
			session := func() (state string) {
				require.NoError(t, conn.QueryRow(t.Context(), `SELECT json_build_object(
					'settings', (SELECT json_agg((name, setting) ORDER BY name) FROM pg_settings),
					'statements', (SELECT count(*) FROM pg_prepared_statements),
					'cursors', (SELECT count(*) FROM pg_cursors WHERE NOT name = ''),
					'channels', (SELECT count(*) FROM pg_listening_channels()),
					'temporary', pg_my_temp_schema()::text)::text`, pgx.QueryExecModeSimpleProtocol).Scan(&state))
				return state
			}
			locks := func() (kinds []string) {
				require.NoError(t, f.Pool.QueryRow(t.Context(), `SELECT coalesce(array_agg(DISTINCT locktype), '{}')
					FROM pg_locks WHERE pid = $1`, pid).Scan(&kinds))
				return kinds
			}
			before := session()
			store := f.NewStore(t, conn, lease, retention)
			for _, call := range faultCalls() {
				k := recordKey(call.name)
				require.NoError(t, call.do(t.Context(), store, k, call.put(t, f, k)).err)
			}
			holder := directedTx(t, f.Pool)
			_, _, err := f.WithTx(holder).Begin(t.Context(), key, fingerprint)
			require.NoError(t, err)
			begin := goBegin(t.Context(), store, key)
			begin.waitsFor(t, f.Pool, holder)
			require.NotContains(t, locks(), "advisory")
			require.Contains(t, locks(), "transactionid")
			require.NoError(t, holder.Rollback(t.Context()))
			_, created, err := begin.result(t)
			require.NoError(t, err)
			require.True(t, created)
			require.Equal(t, before, session())
			require.Empty(t, locks())
		})
	}
}
