package pgtest_test

import (
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/archlab/idempotency/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

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

func TestDatabaseHasALanguagesOrder(t *testing.T) {
	t.Parallel()
	conn, err := pgx.Connect(t.Context(), pgtest.Database(t, pgtest.WithCollation()))
	require.NoError(t, err)
	var ordered bool
	require.NoError(t, conn.QueryRow(t.Context(), "SELECT 'a' < 'B'").Scan(&ordered))
	require.True(t, ordered, "in the order of bytes, capitals come first")
	require.NoError(t, conn.Close(t.Context()))
}

func TestServerComesBackWithItsData(t *testing.T) {
	t.Parallel()
	server := pgtest.NewServer(t, pgtest.Durable(), pgtest.WithSetting("max_connections", "17"))
	pool, err := pgxpool.New(t.Context(), server.URL())
	require.NoError(t, err)
	defer pool.Close()
	var max string
	require.NoError(t, pool.QueryRow(t.Context(), "SHOW max_connections").Scan(&max))
	require.Equal(t, "17", max)
	_, err = pool.Exec(t.Context(), "CREATE TABLE kept AS SELECT 1 AS n")
	require.NoError(t, err)

	for name, end := range map[string]func() error{
		"stopped": func() error { return server.Stop(t.Context()) },
		"killed":  func() error { return server.Kill(t.Context()) },
	} {
		require.NoError(t, end(), name)
		require.Error(t, pool.Ping(t.Context()), name)
		require.NoError(t, server.Start(t.Context()), name)
		var n int
		require.NoError(t, pool.QueryRow(t.Context(), "SELECT n FROM kept").Scan(&n), name)
		require.Equal(t, 1, n, name)
	}
}
