package migrations_test

import (
	"fmt"
	"os"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/archlab/idempotency/internal/pgtest"
	"github.com/archlab/idempotency/migrations"
)

var roles atomic.Int64

// newRole creates a role without any right, dropped at the end, after the databases that were created later.
func newRole(tb testing.TB) string {
	tb.Helper()
	role := fmt.Sprintf("migrations_test_%d_%d", os.Getpid(), roles.Add(1))
	pool := pgtest.Pool(tb)
	execute(tb, pool, "CREATE ROLE "+role)
	tb.Cleanup(func() {
		_, err := pool.Exec(contextAfter(tb), "DROP ROLE "+role)
		require.NoError(tb, err)
	})
	return role
}

func requireDenied(tb testing.TB, err error, advice string) {
	tb.Helper()
	var pgErr *pgconn.PgError
	require.ErrorAs(tb, err, &pgErr)
	require.Equal(tb, "42501", pgErr.Code)
	require.ErrorContains(tb, err, advice)
}

const (
	adviceMigrate = "migrate as the owner of the schema, or let somebody who may apply what migrations.SQL prints"
	adviceStatus  = "grant it USAGE on the schema and SELECT on that table"
)

func TestRoleWithoutRightsMayAskForTheStatusButNotMigrate(t *testing.T) {
	t.Parallel()
	role := newRole(t)
	url := pgtest.Database(t)
	admin, service := openPool(t, url), openPool(t, url, asRole(role))

	for _, schema := range []string{migrations.SchemaDefault, "missing"} {
		require.Empty(t, applied(t, service, schema), "on an empty database")
		up, err := migrations.Up(t.Context(), service, migrations.WithSchema(schema))
		requireDenied(t, err, adviceMigrate)
		require.Empty(t, up)
	}
	require.Zero(t, one[int](t, admin, `SELECT count(*) FROM pg_namespace WHERE nspname = 'missing'`))
	requireEmpty(t, admin, migrations.SchemaDefault)
	require.Zero(t, advisoryLocks(t, admin))

	execute(t, admin, `CREATE SCHEMA theirs`)
	in := migrations.WithSchema("theirs")
	_, err := migrations.Up(t.Context(), admin, in)
	require.NoError(t, err)
	_, err = migrations.Status(t.Context(), service, in)
	requireDenied(t, err, adviceStatus)
	execute(t, admin, strings.ReplaceAll(`GRANT USAGE ON SCHEMA theirs TO service;
GRANT SELECT ON theirs.idempotency_schema_migrations TO service`, "service", role))
	require.Equal(t, everything, applied(t, service, "theirs"))
	up, err := migrations.Up(t.Context(), service, in)
	require.NoError(t, err, "there is nothing to do")
	require.Empty(t, up)
	_, err = migrations.Down(t.Context(), service, in)
	requireDenied(t, err, adviceMigrate)
	requireMigrated(t, admin, "theirs")

	_, err = migrations.Down(t.Context(), admin, in)
	require.NoError(t, err)
	_, err = migrations.Up(t.Context(), service, in)
	requireDenied(t, err, adviceMigrate)
	requireEmpty(t, admin, "theirs")
	require.Empty(t, applied(t, service, "theirs"))
}

func TestOwnerOfTheSchemaNeedsNoRightOnTheDatabase(t *testing.T) {
	t.Parallel()
	role := newRole(t)
	url := pgtest.Database(t)
	admin, owner := openPool(t, url), openPool(t, url, asRole(role))
	execute(t, admin, `CREATE SCHEMA "Their ""own""" AUTHORIZATION `+role)
	schema := `Their "own"`
	require.False(t, one[bool](t, owner, `SELECT has_database_privilege(current_database(), 'CREATE')`))

	for range 2 {
		up, err := migrations.Up(t.Context(), owner, migrations.WithSchema(schema))
		require.NoError(t, err)
		require.Equal(t, everything, numbers(up))
		requireMigrated(t, admin, schema)
		require.Equal(t, []string{role}, rows[string](t, admin, `SELECT DISTINCT relowner::regrole::text FROM pg_class
WHERE relnamespace = (SELECT oid FROM pg_namespace WHERE nspname = $1::text)`, schema))
		_, err = migrations.Down(t.Context(), owner, migrations.WithSchema(schema))
		require.NoError(t, err)
		requireEmpty(t, admin, schema)
	}
	_, err := migrations.Up(t.Context(), owner, migrations.WithSchema("another"))
	requireDenied(t, err, adviceMigrate)
}
