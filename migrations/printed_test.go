package migrations_test

import (
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/archlab/idempotency/internal/pgtest"
	"github.com/archlab/idempotency/migrations"
)

// script runs a text of many statements in one go, as psql -f does with ON_ERROR_STOP.
func script(tb testing.TB, url, text string) error {
	tb.Helper()
	conn, err := pgconn.Connect(tb.Context(), url)
	require.NoError(tb, err)
	defer conn.Close(contextAfter(tb))
	_, err = conn.Exec(tb.Context(), text).ReadAll()
	return err
}

func printed(tb testing.TB, f func(...migrations.Option) (string, error), opts ...migrations.Option) string {
	tb.Helper()
	text, err := f(opts...)
	require.NoError(tb, err)
	require.Regexp(tb, `(?s)\ABEGIN;\n.*\nCOMMIT;\n\z`, text)
	return text
}

// Whoever runs the printed text instead of Up has the same database, and Up knows it.
func TestPrintedSQLDoesWhatUpAndDownDo(t *testing.T) {
	t.Parallel()
	for _, schema := range []string{migrations.SchemaDefault, `Their 'own' "schema"; -- public.x`} {
		t.Run(schema, func(t *testing.T) {
			t.Parallel()
			in := migrations.WithSchema(schema)
			url := pgtest.Database(t)
			pool := openPool(t, url)
			for range 2 {
				require.NoError(t, script(t, url, printed(t, migrations.SQL, in)))
				requireMigrated(t, pool, schema)
				requireCatalog(t, pool, schema)
				require.Equal(t, everything, applied(t, pool, schema))
				up, err := migrations.Up(t.Context(), pool, in)
				require.NoError(t, err)
				require.Empty(t, up)

				require.Error(t, script(t, url, printed(t, migrations.SQL, in)), "it is there already")
				requireMigrated(t, pool, schema)

				require.NoError(t, script(t, url, printed(t, migrations.DownSQL, in)))
				requireEmpty(t, pool, schema)
				require.Equal(t, []int64{0}, versions(t, pool, schema))
				require.Error(t, script(t, url, printed(t, migrations.DownSQL, in)), "there is nothing any more")
				require.Equal(t, []int64{0}, versions(t, pool, schema))
			}
			up, err := migrations.Up(t.Context(), pool, in)
			require.NoError(t, err)
			require.Equal(t, everything, numbers(up))
			require.NoError(t, script(t, url, printed(t, migrations.DownSQL, in)))
			requireEmpty(t, pool, schema)
		})
	}
}

// The version table's columns are the same, whoever made it.
func TestPrintedSQLMakesTheSameVersionTable(t *testing.T) {
	t.Parallel()
	columns := func(schema string) []string {
		return rows[string](t, pgtest.Pool(t), `SELECT format('%s %s %s %s %s', attname, format_type(atttypid, atttypmod), attnotnull, attidentity, pg_get_expr(adbin, adrelid))
FROM pg_attribute LEFT JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum
WHERE attrelid = $1::regclass AND attnum > 0 ORDER BY attnum`, qualified(schema, migrations.VersionTable))
	}
	byUp, byHand := pgtest.Schema(t), pgtest.EmptySchema(t)
	require.NoError(t, script(t, pgtest.DSN(t), printed(t, migrations.SQL, migrations.WithSchema(byHand))))
	require.Equal(t, columns(byUp), columns(byHand))
	require.Len(t, columns(byUp), 4)
}

func TestPrintedSQLStopsAtAVersion(t *testing.T) {
	t.Parallel()
	url, schema := pgtest.DSN(t), pgtest.EmptySchema(t)
	in, pool := migrations.WithSchema(schema), pgtest.Pool(t)
	require.NoError(t, script(t, url, printed(t, migrations.SQL, in, migrations.To(0))))
	requireEmpty(t, pool, schema)
	require.Equal(t, []int64{0}, versions(t, pool, schema))
	require.NoError(t, script(t, url, printed(t, migrations.SQL, in, migrations.To(1))))
	requireMigrated(t, pool, schema)
	require.NoError(t, script(t, url, printed(t, migrations.DownSQL, in, migrations.To(1))))
	requireMigrated(t, pool, schema)
}
