package pgtest

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"go.uber.org/goleak"

	"github.com/archlab/idempotency/internal/sqlgen"
	"github.com/archlab/idempotency/migrations"
)

// maxConns is the size of the pool that a test binary shares. With it, `go test -p 2 -parallel 4` keeps two cores busy, and
// leaves the server's connections to tests that need many.
const maxConns = 15

// cleanupTimeout bounds each removal at a test's end.
const cleanupTimeout = 30 * time.Second

// shared is the one server and pool of a test binary.
type shared struct {
	server *Server
	pool   *pgxpool.Pool
}

var (
	startShared = sync.OnceValues(newShared)
	wasStarted  atomic.Bool
)

func newShared() (*shared, error) {
	wasStarted.Store(true)
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
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
	if wasStarted.Load() {
		if s, err := startShared(); err == nil { // otherwise each test that wanted it has said so
			s.pool.Close()
			if err := s.server.Close(context.Background()); err != nil {
				fmt.Fprintln(os.Stderr, "pgtest:", err)
				code = max(code, 1)
			}
		}
	}
	if code == 0 {
		if err := goleak.Find(
			// Idle connections of the client of the Docker engine, in a pool that testcontainers does not close.
			goleak.IgnoreAnyFunction("net/http.(*persistConn).readLoop"),
			goleak.IgnoreAnyFunction("net/http.(*persistConn).writeLoop"),
		); err != nil {
			fmt.Fprintln(os.Stderr, "pgtest: goroutines were left behind:", err)
			code = 1
		}
	}
	os.Exit(code)
}

func sharedServer(tb testing.TB) *shared {
	tb.Helper()
	s, err := startShared()
	if err != nil {
		tb.Fatal(err)
	}
	return s
}

// Pool returns the pool that all tests of the binary share, on the one server that is started for the first of them.
func Pool(tb testing.TB) *pgxpool.Pool {
	tb.Helper()
	return sharedServer(tb).pool
}

// DSN returns the URL of the shared server's test database, for connections of one's own.
func DSN(tb testing.TB) string {
	tb.Helper()
	return sharedServer(tb).server.URL()
}

var counter atomic.Int64

// name returns a name that no other test uses, also not one of another process on the same server.
func name(prefix string) string {
	return fmt.Sprintf("%s%d_%x_%d", prefix, os.Getpid(), time.Now().UnixNano()&0xffffff, counter.Add(1))
}

// EmptySchema creates a schema without anything in it, dropped when the test ends. Its name needs quotes, so that a statement
// which forgets them fails everywhere.
func EmptySchema(tb testing.TB) string {
	tb.Helper()
	pool := Pool(tb)
	schema := name(`Test "É' `)
	quoted := sqlgen.QuoteIdentifier(schema)
	if _, err := pool.Exec(tb.Context(), "CREATE SCHEMA "+quoted); err != nil {
		tb.Fatalf("create a schema: %v", err)
	}
	tb.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), cleanupTimeout)
		defer cancel()
		if _, err := pool.Exec(ctx, "DROP SCHEMA IF EXISTS "+quoted+" CASCADE"); err != nil {
			tb.Errorf("drop the schema: %v", err)
		}
	})
	return schema
}

// Schema creates a schema with the real migrations, dropped when the test ends.
func Schema(tb testing.TB) string {
	tb.Helper()
	schema := EmptySchema(tb)
	if _, err := migrations.Up(tb.Context(), Pool(tb), migrations.WithSchema(schema)); err != nil {
		tb.Fatal(err)
	}
	return schema
}

// NewServer starts a server of the test's own, one that may be stopped and killed, removed when the test ends.
func NewServer(tb testing.TB, opts ...ServerOption) *Server {
	tb.Helper()
	server, err := Start(tb.Context(), append(opts, Own())...)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := server.Close(context.Background()); err != nil {
			tb.Error(err)
		}
	})
	return server
}

// DatabaseOption configures [Database] and [CreateDatabase].
type DatabaseOption func(*databaseOptions)

type databaseOptions struct{ collation bool }

// WithCollation asks for a database whose default collation is not the order of bytes: a language's, by ICU or by the system's
// library, whichever the server has.
func WithCollation() DatabaseOption {
	return func(o *databaseOptions) { o.collation = true }
}

// Database creates a database on the shared server, dropped when the test ends, and returns its URL.
func Database(tb testing.TB, opts ...DatabaseOption) string {
	tb.Helper()
	sharedServer(tb)
	address, drop, err := CreateDatabase(tb.Context(), opts...)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := drop(); err != nil {
			tb.Error(err)
		}
	})
	return address
}

// CreateDatabase is [Database] for examples, which have no testing.TB. The caller calls drop.
func CreateDatabase(ctx context.Context, opts ...DatabaseOption) (address string, drop func() error, err error) {
	s, err := startShared()
	if err != nil {
		return "", nil, err
	}
	var o databaseOptions
	for _, opt := range opts {
		opt(&o)
	}
	clause := ""
	if o.collation {
		if clause, err = collation(ctx, s.pool); err != nil {
			return "", nil, err
		}
	}
	db := name("test_")
	if _, err := s.pool.Exec(ctx, "CREATE DATABASE "+db+" TEMPLATE template0"+clause); err != nil {
		return "", nil, fmt.Errorf("pgtest: create a database: %w", err)
	}
	u, err := url.Parse(s.server.URL())
	if err != nil {
		return "", nil, fmt.Errorf("pgtest: %w", err)
	}
	u.Path = "/" + db
	return u.String(), func() error {
		ctx, cancel := context.WithTimeout(context.Background(), cleanupTimeout)
		defer cancel()
		if _, err := s.pool.Exec(ctx, "DROP DATABASE "+db+" WITH (FORCE)"); err != nil {
			return fmt.Errorf("pgtest: drop the database: %w", err)
		}
		return nil
	}, nil
}

// collation returns the clause of CREATE DATABASE for a language's order.
func collation(ctx context.Context, pool *pgxpool.Pool) (string, error) {
	var provider, locale string
	err := pool.QueryRow(ctx, `
SELECT collprovider::text, CASE collprovider WHEN 'i' THEN 'de-DE' ELSE collcollate END
FROM pg_catalog.pg_collation
WHERE collprovider = 'i' AND collname = 'de-DE-x-icu' OR collprovider = 'c' AND lower(collcollate) LIKE 'en_us.utf%8'
ORDER BY collprovider = 'i' DESC LIMIT 1`).Scan(&provider, &locale)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return "", errors.New("pgtest: the server has neither ICU nor the locale en_US.UTF-8")
	case err != nil:
		return "", fmt.Errorf("pgtest: look for a collation: %w", err)
	case provider == "i":
		return " ENCODING 'UTF8' LOCALE 'C.UTF-8' LOCALE_PROVIDER icu ICU_LOCALE '" + locale + "'", nil
	}
	return " ENCODING 'UTF8' LOCALE '" + strings.ReplaceAll(locale, "'", "''") + "'", nil
}

// execute runs one statement on a connection of its own.
func execute(ctx context.Context, address, statement string) error {
	conn, err := pgx.Connect(ctx, address)
	if err != nil {
		return fmt.Errorf("connect: %w", err)
	}
	defer conn.Close(ctx) //nolint:errcheck // the statement has been answered
	if _, err := conn.Exec(ctx, statement); err != nil {
		return fmt.Errorf("%s: %w", statement, err)
	}
	return nil
}
