package pgstore_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/archlab/idempotency/internal/sqlgen"
	"github.com/archlab/idempotency/pgstore"
)

// What the tests of faults share: handles whose sessions can be found and cut, and every call together with what its answer may
// say of the record.

// faultWait bounds each wait for what must come about. It never passes unless a test fails.
const faultWait = 30 * time.Second

// faultEventually waits until what can be seen is so.
func faultEventually(t *testing.T, what string, isSo func() bool) {
	t.Helper()
	deadline := time.After(faultWait)
	for !isSo() {
		select {
		case <-deadline:
			require.FailNow(t, "it never came about", what)
		case <-time.After(2 * time.Millisecond):
		}
	}
}

// faultPool is a pool of the test's own.
type faultPool struct {
	*pgxpool.Pool
	*faultTrace

	name  string // application_name of its sessions
	cable *faultCable
}

// newFaultPool opens a pool of at most four connections, unless configure says otherwise. When the test ends, no connection may
// be in use.
func newFaultPool(t *testing.T, address string, configure ...func(*pgxpool.Config)) *faultPool {
	t.Helper()
	p := &faultPool{faultTrace: &faultTrace{runs: map[string]int{}}, name: fmt.Sprintf("fault %x", rand.Uint64())}
	config, err := pgxpool.ParseConfig(address)
	require.NoError(t, err)
	p.cable = &faultCable{dial: config.ConnConfig.DialFunc}
	config.ConnConfig.DialFunc = p.cable.connect
	config.ConnConfig.RuntimeParams["application_name"] = p.name
	config.ConnConfig.Tracer = p.faultTrace
	config.MaxConns = 4
	for _, c := range configure {
		c(config)
	}
	p.Pool, err = pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(func() {
		p.Close() // which waits for connections in use, and counts the last of them as such a moment longer
		for deadline := time.Now().Add(faultWait); !p.isIdle(); runtime.Gosched() {
			if time.Now().After(deadline) {
				t.Errorf("%d connections are still in use", p.Stat().AcquiredConns())
				return
			}
		}
	})
	return p
}

// faultSingle limits a pool to one connection.
func faultSingle(config *pgxpool.Config) { config.MaxConns = 1 }

// faultNoPing makes a pool hand out idle connections without looking whether they are alive.
func faultNoPing(config *pgxpool.Config) {
	config.ShouldPing = func(context.Context, pgxpool.ShouldPingParams) bool { return false }
}

// faultSetting sets a parameter in each session of a pool.
func faultSetting(name, value string) func(*pgxpool.Config) {
	return func(config *pgxpool.Config) { config.ConnConfig.RuntimeParams[name] = value }
}

// isIdle reports whether no connection is in use. Those that are closed are let go of a moment after the call.
func (p *faultPool) isIdle() bool { return p.Stat().AcquiredConns() == 0 }

// sessions counts the server's sessions of the pool that satisfy a condition on pg_stat_activity.
func (p *faultPool) sessions(t *testing.T, db interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}, condition string,
) (n int) {
	t.Helper()
	require.NoError(t, db.QueryRow(t.Context(), `SELECT count(*) FROM pg_stat_activity
		WHERE application_name = $1 AND (`+condition+`)`, p.name).Scan(&n))
	return n
}

const faultWaiting = `wait_event_type = 'Lock'`

// faultTrace notes what a pool's connections ran.
type faultTrace struct {
	mu    sync.Mutex
	runs  map[string]int // by SQL text
	codes []string       // SQLSTATEs of the errors

	onFailure func() // called for each, if set
}

var _ pgx.QueryTracer = (*faultTrace)(nil)

// TraceQueryStart implements pgx.QueryTracer.
func (tr *faultTrace) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	tr.mu.Lock()
	defer tr.mu.Unlock()
	tr.runs[data.SQL]++
	return ctx
}

// TraceQueryEnd implements pgx.QueryTracer.
func (tr *faultTrace) TraceQueryEnd(_ context.Context, _ *pgx.Conn, data pgx.TraceQueryEndData) {
	if data.Err == nil {
		return
	}
	tr.mu.Lock()
	defer tr.mu.Unlock()
	if pgErr, ok := errors.AsType[*pgconn.PgError](data.Err); ok {
		tr.codes = append(tr.codes, pgErr.Code)
	}
	if tr.onFailure != nil {
		tr.onFailure()
	}
}

// ran returns how often the SQL text was run.
func (tr *faultTrace) ran(sql string) int {
	tr.mu.Lock()
	defer tr.mu.Unlock()
	return tr.runs[sql]
}

// met counts the errors with an SQLSTATE.
func (tr *faultTrace) met(code string) (n int) {
	tr.mu.Lock()
	defer tr.mu.Unlock()
	for _, c := range tr.codes {
		if c == code {
			n++
		}
	}
	return n
}

// faultCable is what connects a pool with its server. It can be cut at the client's end, so that the server does not notice.
type faultCable struct {
	dial  pgconn.DialFunc
	mu    sync.Mutex
	lines []*faultLine
	bad   bool // it has been cut before, and lets no request to cancel a statement through
}

func (c *faultCable) connect(ctx context.Context, network, address string) (net.Conn, error) {
	conn, err := c.dial(ctx, network, address)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	line := &faultLine{conn, c}
	c.lines = append(c.lines, line)
	return line, nil
}

// cut cuts all connections of so far. pgx asks the server then to cancel what it was waiting for; where the network is broken,
// that cannot be relied on, and here it never gets there.
func (c *faultCable) cut() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.bad = true
	for _, line := range c.lines {
		_ = line.Close()
	}
	c.lines = nil
}

// isBad reports whether the cable has been cut.
func (c *faultCable) isBad() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.bad
}

// faultLine is one connection of a cable.
type faultLine struct {
	net.Conn

	cable *faultCable
}

// Write implements net.Conn.
func (l *faultLine) Write(b []byte) (int, error) {
	const length, code = 16, 80877102 // of a request to cancel
	if len(b) == length && binary.BigEndian.Uint32(b[4:]) == code && l.cable.isBad() {
		return 0, net.ErrClosed
	}
	return l.Conn.Write(b)
}

// faultRow is what another pool sees of a record.
type faultRow struct {
	State     pgstore.State
	Attempt   uint64
	Claim     int64
	Abandoned *int64
	Response  []byte
	ExpiresAt time.Time
}

// faultRows returns the rows of a key: one, or none.
func faultRows(t *testing.T, f *fixture, k pgstore.Key) []faultRow {
	t.Helper()
	rows, err := f.Pool.Query(t.Context(), `SELECT state, attempt, claim, abandoned, response, expires_at FROM `+recordTable(f)+`
		WHERE tenant = $1 AND operation = $2 AND key = $3`, k.Tenant, k.Operation, k.Value)
	require.NoError(t, err)
	found, err := pgx.CollectRows(rows, pgx.RowToStructByPos[faultRow])
	require.NoError(t, err)
	return found
}

// faultTheRow returns the one row of a key.
func faultTheRow(t *testing.T, f *fixture, k pgstore.Key) faultRow {
	t.Helper()
	rows := faultRows(t, f, k)
	require.Len(t, rows, 1)
	return rows[0]
}

// faultAnswer is what a call returned, as far as it returns it.
type faultAnswer struct {
	record pgstore.Record
	is     bool // created, or live
	n      int64
	err    error
}

// faultCall is one of the store's calls.
type faultCall struct {
	name string
	sql  func(*sqlgen.Statements) string // what it sends, and in the usual case all that it sends

	// put brings a key into the state in which the call has something to do, and returns the attempt to call with.
	put func(t *testing.T, f *fixture, k pgstore.Key) uint64

	do func(ctx context.Context, s *pgstore.Store, k pgstore.Key, attempt uint64) faultAnswer

	// isTrue fails the test if an answer to the call after put does not agree with the record, whatever was cut.
	isTrue func(t *testing.T, f *fixture, k pgstore.Key, attempt uint64, a faultAnswer)

	// done reports whether the record is as the call should leave it. It is nil for a call that leaves nothing.
	done func(t *testing.T, f *fixture, k pgstore.Key, attempt uint64) bool

	again error // what the call returns if it is done once more after a success
}

func faultNothing(*testing.T, *fixture, pgstore.Key) uint64 { return 0 }

func faultBegun(t *testing.T, f *fixture, k pgstore.Key) uint64 {
	t.Helper()
	return recordPut(t, f, k, pgstore.StateInProgress)
}

// faultDue puts a record that a sweep deletes.
func faultDue(t *testing.T, f *fixture, k pgstore.Key) uint64 {
	t.Helper()
	attempt := recordPut(t, f, k, pgstore.StateDone)
	recordAge(t, f, k, 3*retention)
	return attempt
}

// faultEnding is the half of a call of Complete or Fail that looks at the record.
func faultEnding(state pgstore.State, response []byte) (
	isTrue func(*testing.T, *fixture, pgstore.Key, uint64, faultAnswer), done func(*testing.T, *fixture, pgstore.Key, uint64) bool,
) {
	done = func(t *testing.T, f *fixture, k pgstore.Key, attempt uint64) bool {
		t.Helper()
		row := faultTheRow(t, f, k)
		require.Equal(t, attempt, row.Attempt)
		if row.State == pgstore.StateInProgress {
			require.Nil(t, row.Response)
			return false
		}
		require.Equal(t, state, row.State)
		require.Equal(t, response, row.Response)
		return true
	}
	isTrue = func(t *testing.T, f *fixture, k pgstore.Key, attempt uint64, a faultAnswer) {
		t.Helper()
		require.True(t, done(t, f, k, attempt) || a.err != nil, "it returned nil, and nothing is recorded")
	}
	return isTrue, done
}

// faultCalls returns all calls.
func faultCalls() []faultCall {
	completeIsTrue, completeDone := faultEnding(pgstore.StateDone, []byte(recordResponse))
	releaseIsTrue, releaseDone := faultEnding(pgstore.StateRetryable, nil)
	failIsTrue, failDone := faultEnding(pgstore.StateFailed, nil)
	return []faultCall{
		{
			name: "begin",
			sql:  func(s *sqlgen.Statements) string { return s.Begin },
			put:  faultNothing,
			do: func(ctx context.Context, s *pgstore.Store, k pgstore.Key, _ uint64) (a faultAnswer) {
				a.record, a.is, a.err = s.Begin(ctx, k, fingerprint)
				return a
			},
			isTrue: func(t *testing.T, f *fixture, k pgstore.Key, _ uint64, a faultAnswer) {
				t.Helper()
				rows := faultRows(t, f, k)
				if a.err != nil {
					require.False(t, a.is)
					require.Zero(t, a.record)
					return
				}
				require.True(t, a.is, "nobody else has begun")
				require.Len(t, rows, 1)
				require.Equal(t, pgstore.StateInProgress, rows[0].State)
				require.Equal(t, rows[0].Attempt, a.record.Attempt)
				require.Equal(t, rows[0].ExpiresAt.UTC(), a.record.ExpiresAt)
				require.Nil(t, rows[0].Abandoned)
				require.Zero(t, a.record.Abandoned)
				require.Positive(t, a.record.Remaining)
			},
			done: func(t *testing.T, f *fixture, k pgstore.Key, _ uint64) bool {
				t.Helper()
				return len(faultRows(t, f, k)) == 1
			},
			again: pgstore.ErrInProgress,
		},
		{
			name: "complete",
			sql:  func(s *sqlgen.Statements) string { return s.Complete },
			put:  faultBegun,
			do: func(ctx context.Context, s *pgstore.Store, k pgstore.Key, attempt uint64) faultAnswer {
				return faultAnswer{err: s.Complete(ctx, k, fingerprint, attempt, recordResponse)}
			},
			isTrue: completeIsTrue,
			done:   completeDone,
		},
		{
			name: "release",
			sql:  func(s *sqlgen.Statements) string { return s.Fail },
			put:  faultBegun,
			do: func(ctx context.Context, s *pgstore.Store, k pgstore.Key, attempt uint64) faultAnswer {
				return faultAnswer{err: s.Fail(ctx, k, fingerprint, attempt, true)}
			},
			isTrue: releaseIsTrue,
			done:   releaseDone,
		},
		{
			name: "fail",
			sql:  func(s *sqlgen.Statements) string { return s.Fail },
			put:  faultBegun,
			do: func(ctx context.Context, s *pgstore.Store, k pgstore.Key, attempt uint64) faultAnswer {
				return faultAnswer{err: s.Fail(ctx, k, fingerprint, attempt, false)}
			},
			isTrue: failIsTrue,
			done:   failDone,
		},
		{
			name: "extend",
			sql:  func(s *sqlgen.Statements) string { return s.Extend },
			put: func(t *testing.T, f *fixture, k pgstore.Key) uint64 {
				t.Helper()
				attempt := faultBegun(t, f, k)
				recordAge(t, f, k, lease/2)
				return attempt
			},
			do: func(ctx context.Context, s *pgstore.Store, k pgstore.Key, attempt uint64) (a faultAnswer) {
				a.record, a.err = s.Extend(ctx, k, fingerprint, attempt)
				return a
			},
			isTrue: func(t *testing.T, f *fixture, k pgstore.Key, attempt uint64, a faultAnswer) {
				t.Helper()
				row := faultTheRow(t, f, k)
				require.Equal(t, pgstore.StateInProgress, row.State)
				require.Equal(t, attempt, row.Attempt)
				if a.err != nil {
					require.Zero(t, a.record)
					return
				}
				require.Equal(t, row.ExpiresAt.UTC(), a.record.ExpiresAt)
			},
			done: func(t *testing.T, f *fixture, k pgstore.Key, _ uint64) bool {
				t.Helper()
				return recordScalar[bool](t, f, `SELECT expires_at > clock_timestamp() + $1::interval * 3 / 4 FROM %s WHERE key = $2`, lease, k.Value)
			},
		},
		{
			name: "get",
			sql:  func(s *sqlgen.Statements) string { return s.Get },
			put: func(t *testing.T, f *fixture, k pgstore.Key) uint64 {
				t.Helper()
				return recordPut(t, f, k, pgstore.StateDone)
			},
			do: func(ctx context.Context, s *pgstore.Store, k pgstore.Key, _ uint64) (a faultAnswer) {
				a.record, a.is, a.err = s.Get(ctx, k)
				return a
			},
			isTrue: func(t *testing.T, f *fixture, k pgstore.Key, attempt uint64, a faultAnswer) {
				t.Helper()
				if a.err != nil {
					require.Zero(t, a.record)
					require.False(t, a.is)
					return
				}
				require.True(t, a.is)
				require.Equal(t, pgstore.Record{
					State: pgstore.StateDone, Fingerprint: fingerprint, Response: recordResponse, Attempt: attempt,
					ExpiresAt: faultTheRow(t, f, k).ExpiresAt.UTC(), Remaining: a.record.Remaining,
				}, a.record)
			},
		},
		{
			name: "sweep",
			sql:  func(s *sqlgen.Statements) string { return s.Sweep },
			put:  faultDue,
			do: func(ctx context.Context, s *pgstore.Store, _ pgstore.Key, _ uint64) (a faultAnswer) {
				a.n, a.err = s.Sweep(ctx, 100)
				return a
			},
			isTrue: func(t *testing.T, f *fixture, k pgstore.Key, _ uint64, a faultAnswer) {
				t.Helper()
				if a.err == nil {
					require.Empty(t, faultRows(t, f, k))
					require.LessOrEqual(t, a.n, int64(1))
				}
			},
			done: func(t *testing.T, f *fixture, k pgstore.Key, _ uint64) bool {
				t.Helper()
				return len(faultRows(t, f, k)) == 0
			},
		},
	}
}

// faultSentinels are the errors by which a call says that it knows.
var faultSentinels = []error{
	pgstore.ErrConflict, pgstore.ErrInProgress, pgstore.ErrLeaseExpired, pgstore.ErrStaleAttempt, pgstore.ErrNotMigrated,
}

// faultIsNoSentinel fails the test if err claims to know what it cannot.
func faultIsNoSentinel(t *testing.T, err error) {
	t.Helper()
	require.Error(t, err)
	require.False(t, slices.ContainsFunc(faultSentinels, func(s error) bool { return errors.Is(err, s) }), err)
}

// faultCode returns the SQLSTATE that an error carries.
func faultCode(t *testing.T, err error) string {
	t.Helper()
	pgErr := new(pgconn.PgError)
	require.ErrorAs(t, err, &pgErr)
	return pgErr.Code
}

// faultOwn creates a table of the caller's own and returns its name.
func faultOwn(t *testing.T, f *fixture) string {
	t.Helper()
	table := pgx.Identifier{f.Schema, "own"}.Sanitize()
	_, err := f.Pool.Exec(t.Context(), `CREATE TABLE `+table+` (n int)`)
	require.NoError(t, err)
	return table
}

func faultCount(t *testing.T, f *fixture, table string) (n int) {
	t.Helper()
	require.NoError(t, f.Pool.QueryRow(t.Context(), `SELECT count(*) FROM `+table).Scan(&n))
	return n
}
