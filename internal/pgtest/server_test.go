package pgtest_test

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/archlab/idempotency/internal/pgtest"
)

func TestServerComesBackWithItsDataAtItsAddress(t *testing.T) {
	t.Parallel()
	server := pgtest.NewServer(t, pgtest.Durable())
	url := server.URL()
	kept := func() int {
		var n int
		require.NoError(t, connect(t, url, pgx.QueryExecModeExec).QueryRow(t.Context(), "UPDATE kept SET n = n + 1 RETURNING n").Scan(&n))
		return n
	}
	_, err := connect(t, url, pgx.QueryExecModeExec).Exec(t.Context(), "CREATE TABLE kept AS SELECT 0 AS n")
	require.NoError(t, err)
	require.Equal(t, 1, kept())
	for n, end := range []func(context.Context) error{server.Stop, server.Kill} {
		session := connect(t, url, pgx.QueryExecModeExec)
		require.NoError(t, end(t.Context()))
		require.Error(t, session.Ping(t.Context()))
		_, err := pgx.Connect(t.Context(), url)
		require.Error(t, err)
		require.NoError(t, server.Start(t.Context()))
		require.Equal(t, n+2, kept())
	}
	require.NoError(t, server.Restart(t.Context()))
	require.Equal(t, 4, kept())
	require.Equal(t, url, server.URL())
}

func TestKilledServerRecoversFromItsLog(t *testing.T) {
	t.Parallel()
	server := pgtest.NewServer(t, pgtest.Durable())
	conn := connect(t, server.URL(), pgx.QueryExecModeExec)
	_, err := conn.Exec(t.Context(), "CREATE UNLOGGED TABLE emptied_by_recovery AS SELECT 1 AS n")
	require.NoError(t, err)
	count := func() (n int) {
		conn := connect(t, server.URL(), pgx.QueryExecModeExec)
		require.NoError(t, conn.QueryRow(t.Context(), "SELECT count(*) FROM emptied_by_recovery").Scan(&n))
		return n
	}
	require.NoError(t, server.Restart(t.Context()))
	require.Equal(t, 1, count())
	require.NoError(t, server.Kill(t.Context()))
	require.NoError(t, server.Start(t.Context()))
	require.Zero(t, count())
}

func TestServersAreFastAndForgetfulUnlessAsked(t *testing.T) {
	t.Parallel()
	odd := `%m 'quoted' \ [%p] `
	for name, c := range map[string]struct {
		opts   []pgtest.ServerOption
		fsync  string
		prefix string
	}{
		"by default": {[]pgtest.ServerOption{pgtest.WithSetting("fsync", "off")}, "off", "%m [%p] "},
		"durable":    {[]pgtest.ServerOption{pgtest.Durable(), pgtest.WithSetting("log_line_prefix", odd)}, "on", odd},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			url := pgtest.NewServer(t, c.opts...).URL()
			for _, setting := range []string{"fsync", "full_page_writes"} {
				require.Equal(t, c.fsync, show(t, url, setting), setting)
			}
			require.Equal(t, c.prefix, show(t, url, "log_line_prefix"))
			require.Equal(t, "200", show(t, url, "max_connections"))
			require.Equal(t, "UTC", show(t, url, "TimeZone"))
			require.Equal(t, "0", show(t, url, "max_prepared_transactions"))
		})
	}
}

func TestAVariableMakesEveryServerDurable(t *testing.T) {
	t.Parallel()
	c := startChild(t, "start", pgtest.EnvDurable+"=1")
	for _, setting := range []string{"fsync", "synchronous_commit", "full_page_writes"} {
		require.Equal(t, "on", show(t, c.url, setting), setting)
	}
	c.end(t)
}
