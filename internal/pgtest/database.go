package pgtest

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// DatabaseOption configures [Database] and [CreateDatabase].
type DatabaseOption func(*databaseOptions)

type databaseOptions struct{ providers []Provider }

// Provider is where a database's collation comes from.
type Provider string

// The providers that every supported version knows.
const (
	ICU  Provider = "icu"
	Libc Provider = "libc"
)

// WithCollation asks for a database whose default collation is not the order of bytes: a language's, from the first of the
// providers that the server has one from. Defaults to ICU, then Libc. It is an error if there is none.
func WithCollation(providers ...Provider) DatabaseOption {
	if len(providers) == 0 {
		providers = []Provider{ICU, Libc}
	}
	return func(o *databaseOptions) { o.providers = providers }
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
		if err := drop(tb.Context()); err != nil {
			tb.Error(err)
		}
	})
	return address
}

// CreateDatabase is [Database] for examples, which have no testing.TB. The caller calls drop, which works also when its context has
// ended.
func CreateDatabase(ctx context.Context, opts ...DatabaseOption) (address string, drop func(context.Context) error, err error) {
	s, err := startShared()
	if err != nil {
		return "", nil, err
	}
	var o databaseOptions
	for _, opt := range opts {
		opt(&o)
	}
	clause := ""
	if o.providers != nil {
		if clause, err = collation(ctx, s.pool, o.providers); err != nil {
			return "", nil, err
		}
	}
	db := unusedName("test_")
	if _, err := s.pool.Exec(ctx, "CREATE DATABASE "+db+" TEMPLATE template0"+clause); err != nil {
		return "", nil, fmt.Errorf("pgtest: create a database: %w", err)
	}
	u, err := url.Parse(s.server.URL())
	if err != nil {
		return "", nil, fmt.Errorf("pgtest: %w", err)
	}
	u.Path = "/" + db
	return u.String(), func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTimeout)
		defer cancel()
		if _, err := s.pool.Exec(ctx, "DROP DATABASE "+db+" WITH (FORCE)"); err != nil {
			return fmt.Errorf("pgtest: drop the database: %w", err)
		}
		return nil
	}, nil
}

// languages are queries for a language that the server has a collation of, by provider.
var languages = map[Provider]string{
	ICU: `SELECT 'de-DE' FROM pg_catalog.pg_collation WHERE collprovider = 'i' AND collname = 'de-DE-x-icu'`,
	Libc: `SELECT collcollate FROM pg_catalog.pg_collation
WHERE collprovider = 'c' AND lower(collcollate) ~ '^[a-z]{2,3}_[a-z]{2}\.utf-?8$'
ORDER BY lower(collcollate) = 'en_us.utf8' DESC, collcollate LIMIT 1`,
}

// collation returns the clause of CREATE DATABASE for a language's order.
func collation(ctx context.Context, pool *pgxpool.Pool, providers []Provider) (string, error) {
	for _, provider := range providers {
		var locale string
		err := pool.QueryRow(ctx, languages[provider]).Scan(&locale)
		switch {
		case errors.Is(err, pgx.ErrNoRows):
			continue
		case err != nil:
			return "", fmt.Errorf("pgtest: look for a collation: %w", err)
		case provider == ICU:
			return " ENCODING 'UTF8' LOCALE 'C.UTF-8' LOCALE_PROVIDER icu ICU_LOCALE '" + locale + "'", nil
		}
		return " ENCODING 'UTF8' LOCALE_PROVIDER libc LOCALE '" + strings.ReplaceAll(locale, "'", "''") + "'", nil
	}
	return "", fmt.Errorf("pgtest: the server has no language's collation from %v", providers)
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
