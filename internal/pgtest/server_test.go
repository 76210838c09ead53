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

var durability = []string{"fsync", "synchronous_commit", "full_page_writes"}

func TestServersAreFastAndForgetful(t *testing.T) {
	t.Parallel()
	for _, demand := range started {
		t.Run(demand, func(t *testing.T) {
			t.Parallel()
			c := startChild(t, "start", demand)
			for _, setting := range durability {
				require.Equal(t, "off", show(t, c.url, setting), setting)
			}
			for setting, value := range map[string]string{
				"max_connections": "200", "TimeZone": "UTC", "max_prepared_transactions": "0", "wal_level": "replica",
				"listen_addresses": map[string]string{demandContainer: "*", demandBinaries: "127.0.0.1"}[demand],
			} {
				require.Equal(t, value, show(t, c.url, setting), setting)
			}
			c.end(t)
		})
	}
}

func TestServersAreDurableOnDemand(t *testing.T) {
	t.Parallel()
	c := startChild(t, "start", pgtest.EnvDurable+"=1")
	url := pgtest.NewServer(t, pgtest.Durable()).URL()
	for _, setting := range durability {
		require.Equal(t, "on", show(t, c.url, setting), setting)
		require.Equal(t, "on", show(t, url, setting), setting)
	}
	c.end(t)
}

func TestSettingsComeThroughUnchanged(t *testing.T) {
	t.Parallel()
	odd := `%m 'quoted' "twice" \ [%p] `
	url := pgtest.NewServer(t, pgtest.WithSetting("log_line_prefix", odd), pgtest.WithSetting("max_connections", "17")).URL()
	require.Equal(t, odd, show(t, url, "log_line_prefix"))
	require.Equal(t, "17", show(t, url, "max_connections"))
}
