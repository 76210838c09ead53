package pgtest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"go.uber.org/goleak"
)

// maxConns is the size of the pool that a test binary shares. With it, `go test -p 2 -parallel 4` keeps two cores busy, and
// leaves the server's connections to tests that need many.
const maxConns = 15

// sharedTimeout bounds the start of the shared server, a pull or a download included.
const sharedTimeout = 4 * time.Minute

// shared is the one server and pool of a test binary.
type shared struct {
	server *Server
	pool   *pgxpool.Pool
}

// Once, also when it fails: every test that wanted it fails with the same error.
var (
	startShared = sync.OnceValues(newShared)
	wasStarted  atomic.Bool
)

func newShared() (*shared, error) {
	wasStarted.Store(true)
	ctx, cancel := context.WithTimeout(context.Background(), sharedTimeout)
	defer cancel()
	server, err := Start(ctx)
	if err != nil {
		return nil, err
	}
	fmt.Fprintln(os.Stderr, "pgtest:", server.Description())
	config, err := pgxpool.ParseConfig(server.URL())
	if err != nil {
		return nil, errors.Join(fmt.Errorf("pgtest: %w", err), server.Close(ctx))
	}
	config.MaxConns = maxConns
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("pgtest: %w", err), server.Close(ctx))
	}
	return &shared{server, pool}, nil
}

// Main is the body of TestMain: it runs the tests, removes the server if one was started, fails if a goroutine was left
// behind, and exits.
func Main(m *testing.M) {
	code := m.Run()
	if err := closeShared(); err != nil {
		fmt.Fprintln(os.Stderr, "pgtest:", err)
		code = max(code, 1)
	}
	if code == 0 {
		if err := goleak.Find(
			// testcontainers' own, to its reaper, where that is used: it ends with the process.
			goleak.IgnoreTopFunction("github.com/testcontainers/testcontainers-go.(*Reaper).connect.func1"),
		); err != nil {
			fmt.Fprintln(os.Stderr, "pgtest: goroutines were left behind:", err)
			code = 1
		}
	}
	os.Exit(code)
}

func closeShared() error {
	if !wasStarted.Load() {
		return nil
	}
	s, err := startShared()
	if err != nil {
		return nil //nolint:nilerr // each test that wanted it has said so
	}
	s.pool.Close()
	return s.server.Close(context.Background())
}

func sharedServer(tb testing.TB) *shared {
	tb.Helper()
	s, err := startShared()
	if err != nil {
		tb.Fatal(err)
	}
	return s
}

// Pool returns the pool that all tests of the binary share, on the one server that is started for the first of them. Nobody closes
// it, and nobody keeps a connection longer than its test.
func Pool(tb testing.TB) *pgxpool.Pool {
	tb.Helper()
	return sharedServer(tb).pool
}

// DSN returns the URL of the shared server's test database, for connections of one's own.
func DSN(tb testing.TB) string {
	tb.Helper()
	return sharedServer(tb).server.URL()
}

// NewServer starts a server of the test's own, one that may be stopped and killed, removed when the test ends. TEST_DATABASE_URL does
// not apply to it.
func NewServer(tb testing.TB, opts ...ServerOption) *Server {
	tb.Helper()
	server, err := Start(tb.Context(), append(opts, Own())...)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := server.Close(tb.Context()); err != nil {
			tb.Error(err)
		}
	})
	return server
}
