package pgtest_test

import (
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/archlab/idempotency/internal/pgtest"
)

func TestSchemaIsMigratedAndItsOwn(t *testing.T) {
	t.Parallel()
	a, b := pgtest.Schema(t), pgtest.Schema(t)
	require.NotEqual(t, a, b)
	for _, schema := range []string{a, b} {
		var n int
		table := pgx.Identifier{schema, "idempotency_keys"}.Sanitize()
		require.NoError(t, pgtest.Pool(t).QueryRow(t.Context(), "SELECT count(*) FROM "+table).Scan(&n))
		require.Zero(t, n)
	}
}

// exists reports whether the shared server has a schema or a database of the name.
func exists(t *testing.T, name string) bool {
	t.Helper()
	var found bool
	require.NoError(t, pgtest.Pool(t).QueryRow(t.Context(), `
SELECT EXISTS (SELECT 1 FROM pg_namespace WHERE nspname = $1) OR EXISTS (SELECT 1 FROM pg_database WHERE datname = $1)`, name).Scan(&found))
	return found
}

func TestSchemasAndDatabasesGoWithTheirTest(t *testing.T) { //nolint:tparallel // the subtest's end is what is looked at
	t.Parallel()
	var names []string
	t.Run("test", func(t *testing.T) {
		schema := pgtest.Schema(t)
		names = append(names, schema, pgtest.EmptySchema(t))
		_, err := pgtest.Pool(t).Exec(t.Context(), "CREATE TABLE "+pgx.Identifier{schema, "more"}.Sanitize()+" ()")
		require.NoError(t, err)
		conn := connect(t, pgtest.Database(t), pgx.QueryExecModeExec) // it is dropped all the same
		names = append(names, conn.Config().Database)
		for _, name := range names {
			require.True(t, exists(t, name), name)
		}
	})
	require.Len(t, names, 3)
	for _, name := range names {
		require.False(t, exists(t, name), name)
	}
}

func BenchmarkSchema(b *testing.B) {
	pgtest.Pool(b)
	for b.Loop() {
		pgtest.Schema(b)
	}
}
