package migrations_test

import (
	"testing"
	"testing/fstest"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3"
	"github.com/stretchr/testify/require"

	"github.com/archlab/idempotency/internal/pgtest"
	"github.com/archlab/idempotency/migrations"
)

// host is an application with migrations of its own, numbered up to 42, in goose's default table.
func host(tb testing.TB, pool *pgxpool.Pool) *goose.Provider {
	tb.Helper()
	db := stdlib.OpenDBFromPool(pool)
	tb.Cleanup(func() { require.NoError(tb, db.Close()) })
	provider, err := goose.NewProvider(goose.DialectPostgres, db, fstest.MapFS{
		"00001_theirs.sql":      {Data: []byte("-- +goose Up\nCREATE TABLE theirs ();\n-- +goose Down\nDROP TABLE theirs;\n")},
		"00042_more_theirs.sql": {Data: []byte("-- +goose Up\nCREATE TABLE more_theirs ();\n-- +goose Down\nDROP TABLE more_theirs;\n")},
	}, goose.WithDisableGlobalRegistry(true))
	require.NoError(tb, err)
	return provider
}

func TestApplicationsOwnVersionsAreLeftAlone(t *testing.T) {
	t.Parallel()
	hostUp := func(t *testing.T, pool *pgxpool.Pool) {
		t.Helper()
		done, err := host(t, pool).Up(t.Context())
		require.NoError(t, err)
		require.Len(t, done, 2)
	}
	ourUp := func(t *testing.T, pool *pgxpool.Pool) {
		t.Helper()
		done, err := migrations.Up(t.Context(), pool)
		require.NoError(t, err)
		require.Equal(t, everything, numbers(done))
	}
	for name, order := range map[string][]func(*testing.T, *pgxpool.Pool){
		"theirs first": {hostUp, ourUp},
		"ours first":   {ourUp, hostUp},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := openPool(t, pgtest.Database(t))
			for _, up := range order {
				up(t, pool)
			}
			theirs := func() []int64 {
				return rows[int64](t, pool, `SELECT version_id FROM goose_db_version WHERE is_applied ORDER BY id`)
			}
			require.Equal(t, []int64{0, 1, 42}, theirs())
			requireCatalog(t, pool, migrations.SchemaDefault)
			require.Equal(t, versionRows, versions(t, pool, migrations.SchemaDefault))

			_, err := migrations.Down(t.Context(), pool)
			require.NoError(t, err)
			require.Equal(t, []int64{0, 1, 42}, theirs())
			ourUp(t, pool)
			done, err := host(t, pool).DownTo(t.Context(), 0)
			require.NoError(t, err)
			require.Len(t, done, 2)
			requireCatalog(t, pool, migrations.SchemaDefault)
			require.Equal(t, versionRows, versions(t, pool, migrations.SchemaDefault))
			require.Equal(t, everything, applied(t, pool, migrations.SchemaDefault))
		})
	}
}

// A database may be migrated now by the goose program, on the files as they lie here, and now by this package.
func TestGooseProgramAgrees(t *testing.T) {
	t.Parallel()
	schema := migrations.SchemaDefault
	pool := openPool(t, pgtest.Database(t))
	url := pool.Config().ConnString()
	program := startProcess(t)
	run := func(command ...string) {
		t.Helper()
		program.prepare(t, job{URL: url, Goose: command})
		program.start(t)
		require.Empty(t, program.answer(t).Err, command)
	}
	ourUp := func(want []int64) {
		t.Helper()
		done, err := migrations.Up(t.Context(), pool)
		require.NoError(t, err)
		require.Equal(t, want, numbers(done))
	}
	requireTheirs := func(want ...int64) {
		t.Helper()
		require.Equal(t, want, versions(t, pool, schema))
		require.Zero(t, one[int](t, pool, `SELECT count(*) FROM pg_class WHERE relname = 'goose_db_version'`))
	}

	run("up")
	requireMigrated(t, pool, schema)
	requireCatalog(t, pool, schema)
	require.Equal(t, everything, applied(t, pool, schema))
	ourUp([]int64{})
	run("status")

	done, err := migrations.Down(t.Context(), pool)
	require.NoError(t, err)
	require.Equal(t, everything, numbers(done))
	requireEmpty(t, pool, schema)
	requireTheirs(0)
	run("up")
	requireMigrated(t, pool, schema)
	run("down")
	requireEmpty(t, pool, schema)
	ourUp(everything)
	requireMigrated(t, pool, schema)

	// And from the beginning with our version table.
	execute(t, pool, "DROP TABLE public.idempotency_keys, public.idempotency_schema_migrations; DROP SEQUENCE public.idempotency_keys_attempt_seq")
	ourUp(everything)
	run("status")
	run("version")
	run("up")
	requireMigrated(t, pool, schema)
	run("redo")
	requireMigrated(t, pool, schema)
	run("reset")
	requireEmpty(t, pool, schema)
	requireTheirs(0)
	run("up-to", "1")
	require.Equal(t, everything, applied(t, pool, schema))
	ourUp([]int64{})
}

// So does goose's Provider with its own store, which is what later programs may use.
func TestGooseProviderAgrees(t *testing.T) {
	t.Parallel()
	for _, first := range []string{"theirs", "ours"} {
		t.Run(first+" first", func(t *testing.T) {
			t.Parallel()
			schema := migrations.SchemaDefault
			pool := openPool(t, pgtest.Database(t))
			db := stdlib.OpenDBFromPool(pool)
			defer db.Close()
			provider, err := goose.NewProvider(goose.DialectPostgres, db, onDisk(t),
				goose.WithTableName("public."+migrations.VersionTable), goose.WithDisableGlobalRegistry(true))
			require.NoError(t, err)
			if first == "theirs" {
				done, err := provider.Up(t.Context())
				require.NoError(t, err)
				require.Len(t, done, 1)
				ours, err := migrations.Up(t.Context(), pool)
				require.NoError(t, err)
				require.Empty(t, ours)
			} else {
				ours, err := migrations.Up(t.Context(), pool)
				require.NoError(t, err)
				require.Equal(t, everything, numbers(ours))
				pending, err := provider.HasPending(t.Context())
				require.NoError(t, err)
				require.False(t, pending)
			}
			requireMigrated(t, pool, schema)
			require.Equal(t, everything, applied(t, pool, schema))
			status, err := provider.Status(t.Context())
			require.NoError(t, err)
			require.Equal(t, goose.StateApplied, status[0].State)
			require.WithinDuration(t, one[time.Time](t, pool, `SELECT clock_timestamp()`), status[0].AppliedAt, awaitTimeout)
			_, err = provider.DownTo(t.Context(), 0)
			require.NoError(t, err)
			requireEmpty(t, pool, schema)
		})
	}
}
