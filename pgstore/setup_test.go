package pgstore_test

import (
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/archlab/idempotency/internal/pgtest"
	"github.com/archlab/idempotency/pgstore"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// What tests use where they do not care.
const (
	lease       = time.Minute
	retention   = 24 * time.Hour
	fingerprint = "sha256:of the request"
)

var key = pgstore.Key{Tenant: "tenant-a", Operation: "order.create", Value: "req-1001"}

// setup returns a store on a fresh schema of the shared server.
func setup(tb testing.TB, opts ...pgstore.Option) *fixture {
	tb.Helper()
	f := &fixture{Pool: pgtest.Pool(tb), Schema: pgtest.Schema(tb)}
	f.Store = f.NewStore(tb, f.Pool, lease, retention, opts...)
	return f
}

// fixture is a migrated schema of its own and a store on it.
type fixture struct {
	*pgstore.Store
	Pool   *pgxpool.Pool
	Schema string
}

// NewStore returns one more store on the fixture's schema.
func (f *fixture) NewStore(tb testing.TB, db pgstore.DB, lease, retention time.Duration, opts ...pgstore.Option) *pgstore.Store {
	tb.Helper()
	store, err := pgstore.New(db, lease, retention, append([]pgstore.Option{pgstore.WithSchema(f.Schema)}, opts...)...)
	require.NoError(tb, err)
	return mutated(store)
}

// clock is the time that a test sets.
type clock struct {
	mu  sync.Mutex
	now time.Time
}

// newClock returns a clock that stands at a moment with microseconds in it.
func newClock() *clock {
	return &clock{now: time.Date(2031, 2, 3, 4, 5, 6, 789_012_000, time.UTC)}
}

func (c *clock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

func (c *clock) Advance(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = c.now.Add(d)
}
