package migrations_test

import (
	"context"
	"maps"
	"os"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/archlab/idempotency/internal/pgtest"
	"github.com/archlab/idempotency/migrations"
)

func TestMain(m *testing.M) {
	if os.Getenv(envProcess) != "" {
		os.Exit(beProcess())
	}
	pgtest.Main(m)
}

// awaitTimeout is how long a test waits for what must come.
const awaitTimeout = time.Minute

// openPool returns a small pool of the test's own on the database at url.
func openPool(tb testing.TB, url string, configure ...func(*pgxpool.Config)) *pgxpool.Pool {
	tb.Helper()
	config, err := pgxpool.ParseConfig(url)
	require.NoError(tb, err)
	config.MaxConns = 2
	for _, f := range configure {
		f(config)
	}
	pool, err := pgxpool.NewWithConfig(tb.Context(), config)
	require.NoError(tb, err)
	tb.Cleanup(pool.Close)
	return pool
}

// withSettings gives each connection settings as if its role had them.
func withSettings(settings map[string]string) func(*pgxpool.Config) {
	return func(c *pgxpool.Config) {
		maps.Copy(c.ConnConfig.RuntimeParams, settings)
	}
}

// asRole makes each connection one of a role that may not log in.
func asRole(role string) func(*pgxpool.Config) {
	return func(c *pgxpool.Config) {
		c.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
			_, err := conn.Exec(ctx, "SET ROLE "+role)
			return err
		}
	}
}

// database is what the test's own statements need of a pool, a connection or a transaction.
type database interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

func execute(tb testing.TB, db database, sql string, args ...any) {
	tb.Helper()
	_, err := db.Exec(tb.Context(), sql, args...)
	require.NoError(tb, err, sql)
}

// rows returns the values of a query's only column.
func rows[T any](tb testing.TB, db database, sql string, args ...any) []T {
	tb.Helper()
	found, err := db.Query(tb.Context(), sql, args...)
	require.NoError(tb, err, sql)
	values, err := pgx.CollectRows(found, pgx.RowTo[T])
	require.NoError(tb, err, sql)
	return values
}

// one returns the only value of a query.
func one[T any](tb testing.TB, db database, sql string, args ...any) T {
	tb.Helper()
	values := rows[T](tb, db, sql, args...)
	require.Len(tb, values, 1, sql)
	return values[0]
}

// await waits until a condition holds.
func await(tb testing.TB, what string, holds func() bool) {
	tb.Helper()
	again := time.NewTicker(5 * time.Millisecond)
	defer again.Stop()
	for deadline := time.Now().Add(awaitTimeout); !holds(); <-again.C {
		require.True(tb, time.Now().Before(deadline), "waited in vain: %s", what)
	}
}

// qualified quotes the name of something in a schema.
func qualified(schema, name string) string { return pgx.Identifier{schema, name}.Sanitize() }

// numbers returns the versions of migrations.
func numbers(list []migrations.Migration) []int64 {
	found := make([]int64, 0, len(list))
	for _, m := range list {
		found = append(found, m.Version)
	}
	return found
}

// applied returns the versions that Status says have been applied.
func applied(tb testing.TB, pool *pgxpool.Pool, schema string) []int64 {
	tb.Helper()
	all, err := migrations.Status(tb.Context(), pool, migrations.WithSchema(schema))
	require.NoError(tb, err)
	require.Equal(tb, everything, numbers(all), "status lists every migration")
	found := []int64{}
	for _, m := range all {
		require.Equal(tb, m.Applied, !m.AppliedAt.IsZero(), m.Name)
		if m.Applied {
			found = append(found, m.Version)
		}
	}
	return found
}

// objects lists what a schema holds, but for the version table's own.
func objects(tb testing.TB, db database, schema string) []string {
	tb.Helper()
	return rows[string](tb, db, `SELECT c.relkind::text || ' ' || c.relname FROM pg_class c
JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = $1::text AND c.relkind <> 't' AND NOT c.relname ^@ 'idempotency_schema_migrations' ORDER BY 1`, schema)
}

// What the package's own files make.
var (
	everything  = []int64{1}
	allObjects  = []string{"S idempotency_keys_attempt_seq", "i idempotency_keys_pkey", "i idempotency_keys_purge_after_idx", "r idempotency_keys"}
	versionRows = []int64{0, 1}
)

// versions returns the version table's rows in the order in which they were written.
func versions(tb testing.TB, db database, schema string) []int64 {
	tb.Helper()
	return rows[int64](tb, db, "SELECT version_id FROM "+qualified(schema, migrations.VersionTable)+" WHERE is_applied ORDER BY id")
}

// requireMigrated checks that a schema has everything, once.
func requireMigrated(tb testing.TB, db database, schema string) {
	tb.Helper()
	require.Equal(tb, allObjects, objects(tb, db, schema))
	require.Equal(tb, versionRows, versions(tb, db, schema))
}

// requireEmpty checks that a schema has nothing, and records nothing as applied.
func requireEmpty(tb testing.TB, pool *pgxpool.Pool, schema string) {
	tb.Helper()
	require.Empty(tb, objects(tb, pool, schema))
	require.Empty(tb, applied(tb, pool, schema))
}

// insert writes a row as a service would, and returns its fencing token.
func insert(tb testing.TB, db database, schema string) int64 {
	tb.Helper()
	return one[int64](tb, db, "INSERT INTO "+qualified(schema, "idempotency_keys")+`
(tenant, operation, key, state, fingerprint, attempt, claim, begun_at, expires_at, purge_after)
VALUES ('t', 'o', gen_random_uuid()::text, 'in_progress', 'f', nextval($1::regclass), 1, now(), now(), now()) RETURNING attempt`,
		qualified(schema, "idempotency_keys_attempt_seq"))
}

// contextAfter is for what a test cleans up when its own context has ended.
func contextAfter(tb testing.TB) context.Context {
	tb.Helper()
	return context.WithoutCancel(tb.Context())
}

// quoted quotes the name of a schema.
func quoted(schema string) string { return pgx.Identifier{schema}.Sanitize() }
