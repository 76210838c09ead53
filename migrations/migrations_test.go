package migrations_test

import (
	"context"
	"maps"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/archlab/idempotency/internal/pgtest"
	"github.com/archlab/idempotency/migrations"
)

func TestUpDownUp(t *testing.T) {
	t.Parallel()
	pool, schema := pgtest.Pool(t), pgtest.EmptySchema(t)
	in := migrations.WithSchema(schema)
	requireEmpty(t, pool, schema)

	up, err := migrations.Up(t.Context(), pool, in)
	require.NoError(t, err)
	require.Equal(t, []migrations.Migration{{Version: 1, Name: "00001_create_idempotency_keys.sql", Applied: true}}, up)
	requireMigrated(t, pool, schema)
	before := describe(t, pool, schema)
	require.EqualValues(t, 1, insert(t, pool, schema))
	require.EqualValues(t, 2, insert(t, pool, schema))

	again, err := migrations.Up(t.Context(), pool, in)
	require.NoError(t, err)
	require.Empty(t, again)
	require.Equal(t, everything, applied(t, pool, schema))

	down, err := migrations.Down(t.Context(), pool, in)
	require.NoError(t, err)
	require.Equal(t, []migrations.Migration{{Version: 1, Name: "00001_create_idempotency_keys.sql"}}, down)
	requireEmpty(t, pool, schema)
	require.Equal(t, []int64{0}, versions(t, pool, schema), "the version table stays")

	again, err = migrations.Down(t.Context(), pool, in)
	require.NoError(t, err)
	require.Empty(t, again)

	up, err = migrations.Up(t.Context(), pool, in)
	require.NoError(t, err)
	require.Equal(t, everything, numbers(up))
	requireMigrated(t, pool, schema)
	require.Equal(t, before, describe(t, pool, schema))
	require.EqualValues(t, 1, insert(t, pool, schema))
}

func TestDownOnNothingMakesNothing(t *testing.T) {
	t.Parallel()
	pool, schema := pgtest.Pool(t), pgtest.EmptySchema(t)
	down, err := migrations.Down(t.Context(), pool, migrations.WithSchema(schema))
	require.NoError(t, err)
	require.Empty(t, down)
	require.Zero(t, one[int](t, pool, `SELECT count(*) FROM pg_class WHERE relnamespace = (SELECT oid FROM pg_namespace WHERE nspname = $1::text)`, schema))
}

func TestStatusWritesNothing(t *testing.T) {
	t.Parallel()
	url := pgtest.Database(t)
	for _, readOnly := range []string{"on", "off"} {
		pool := openPool(t, url, withSettings(map[string]string{"default_transaction_read_only": readOnly}))
		for _, schema := range []string{migrations.SchemaDefault, "missing"} {
			require.Empty(t, applied(t, pool, schema))
		}
		require.Zero(t, one[int](t, pool, `SELECT count(*) FROM pg_namespace WHERE nspname = 'missing'`))
		require.Zero(t, one[int](t, pool, `SELECT count(*) FROM pg_class WHERE relname ^@ 'idempotency'`))
	}
}

func TestStatusTellsWhen(t *testing.T) {
	t.Parallel()
	url := pgtest.Database(t)
	before := one[time.Time](t, pgtest.Pool(t), `SELECT clock_timestamp()`)
	_, err := migrations.Up(t.Context(), openPool(t, url, withSettings(map[string]string{"TimeZone": "Asia/Kathmandu"})))
	require.NoError(t, err)
	after := one[time.Time](t, pgtest.Pool(t), `SELECT clock_timestamp()`)
	for _, zone := range []string{"UTC", "Asia/Kathmandu", "America/St_Johns"} {
		all, err := migrations.Status(t.Context(), openPool(t, url, withSettings(map[string]string{"TimeZone": zone})))
		require.NoError(t, err)
		require.Equal(t, time.UTC, all[0].AppliedAt.Location())
		require.WithinRange(t, all[0].AppliedAt, before, after, zone)
	}
}

func TestToStopsAtAVersion(t *testing.T) {
	t.Parallel()
	pool, schema := pgtest.Pool(t), pgtest.EmptySchema(t)
	in := migrations.WithSchema(schema)
	for _, step := range []struct {
		call    migrate
		to      int64
		changed []int64
		applied []int64
	}{
		{migrations.Up, 0, []int64{}, []int64{}},
		{migrations.Up, 1, []int64{1}, []int64{1}},
		{migrations.Up, 1, []int64{}, []int64{1}},
		{migrations.Up, 0, []int64{}, []int64{1}},
		{migrations.Down, 1, []int64{}, []int64{1}},
		{migrations.Down, 0, []int64{1}, []int64{}},
		{migrations.Down, 1, []int64{}, []int64{}},
	} {
		changed, err := step.call(t.Context(), pool, in, migrations.To(step.to))
		require.NoError(t, err)
		require.Equal(t, step.changed, numbers(changed))
		require.Equal(t, step.applied, applied(t, pool, schema))
	}
}

func TestUnknownVersionIsRefused(t *testing.T) {
	t.Parallel()
	pool, schema := pgtest.Pool(t), pgtest.EmptySchema(t)
	for _, to := range []int64{-1, 2, 1 << 40} {
		opts := []migrations.Option{migrations.WithSchema(schema), migrations.To(to)}
		for name, call := range calls(t, pool, opts...) {
			require.ErrorContains(t, call(), "this package knows 1 to 1, and 0 for none", "%s to %d", name, to)
		}
	}
	requireEmpty(t, pool, schema)
}

func TestSchemaNameIsValidated(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	for name, why := range map[string]string{
		"":                      "is empty",
		"a\x00b":                "NUL",
		"a\xffb":                "not valid UTF-8",
		strings.Repeat("é", 32): "64 bytes",
		"pg_mine":               "pg_",
	} {
		for call, f := range calls(t, pool, migrations.WithSchema(name)) {
			require.ErrorContains(t, f(), why, "%s %q", call, name)
		}
	}
}

// calls returns each call of the package.
func calls(tb testing.TB, pool *pgxpool.Pool, opts ...migrations.Option) map[string]func() error {
	tb.Helper()
	ctx := tb.Context()
	return map[string]func() error{
		"Up":      func() error { _, err := migrations.Up(ctx, pool, opts...); return err },
		"Down":    func() error { _, err := migrations.Down(ctx, pool, opts...); return err },
		"Status":  func() error { _, err := migrations.Status(ctx, pool, opts...); return err },
		"SQL":     func() error { _, err := migrations.SQL(opts...); return err },
		"DownSQL": func() error { _, err := migrations.DownSQL(opts...); return err },
	}
}

func TestPoolOfOneConnectionWillDoInEveryMode(t *testing.T) {
	t.Parallel()
	for _, mode := range []pgx.QueryExecMode{
		pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec, pgx.QueryExecModeExec,
		pgx.QueryExecModeSimpleProtocol,
	} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			schema := pgtest.EmptySchema(t)
			pool := openPool(t, pgtest.DSN(t), func(c *pgxpool.Config) {
				c.MaxConns, c.ConnConfig.DefaultQueryExecMode = 1, mode
			})
			pid := one[int](t, pool, `SELECT pg_backend_pid()`)
			for range 2 {
				up, err := migrations.Up(t.Context(), pool, migrations.WithSchema(schema))
				require.NoError(t, err)
				require.Equal(t, everything, numbers(up))
				requireMigrated(t, pool, schema)
				require.Equal(t, everything, applied(t, pool, schema))
				down, err := migrations.Down(t.Context(), pool, migrations.WithSchema(schema))
				require.NoError(t, err)
				require.Equal(t, everything, numbers(down))
			}
			require.Zero(t, pool.Stat().AcquiredConns())
			require.Equal(t, pid, one[int](t, pool, `SELECT pg_backend_pid()`), "no connection was thrown away")
			require.Zero(t, one[int](t, pool, `SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = $1`, pid))
		})
	}
}

// A role may have any settings, and the search path may lead to things of the same names, types among them.
func TestSettingsOfTheRoleDoNotMatter(t *testing.T) {
	t.Parallel()
	odd := map[string]string{
		"TimeZone": "Asia/Kathmandu", "DateStyle": "SQL, DMY", "standard_conforming_strings": "off", "bytea_output": "escape",
		"default_transaction_isolation": "serializable", "default_transaction_deferrable": "on", "lock_timeout": "1h",
		"quote_all_identifiers": "on", "extra_float_digits": "-15", "IntervalStyle": "sql_standard",
	}
	for name, path := range map[string]string{
		"empty":  "",
		"decoys": "decoys, pg_catalog, public",
		"theirs": "pg_temp, theirs, public",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			url := pgtest.Database(t)
			admin := openPool(t, url)
			for _, schema := range []string{"decoys", "theirs"} {
				execute(t, admin, strings.ReplaceAll(`CREATE SCHEMA decoys;
CREATE TABLE decoys.idempotency_keys (purge_after int); CREATE SEQUENCE decoys.idempotency_keys_attempt_seq;
CREATE TABLE decoys.idempotency_schema_migrations (version_id int);
CREATE DOMAIN decoys.text AS pg_catalog.text CHECK (false); CREATE DOMAIN decoys.bytea AS pg_catalog.bytea CHECK (false);
CREATE DOMAIN decoys.timestamptz AS pg_catalog.timestamptz CHECK (false);
CREATE FUNCTION decoys.now() RETURNS pg_catalog.timestamptz LANGUAGE sql AS $$ SELECT 'epoch'::pg_catalog.timestamptz $$;
CREATE COLLATION decoys."C" (provider = libc, locale = 'C.UTF-8')`, "decoys", schema))
			}
			settings := maps.Clone(odd)
			settings["search_path"] = path
			pool := openPool(t, url, withSettings(settings))
			require.Equal(t, path, one[string](t, pool, `SELECT pg_catalog.current_setting('search_path')`))
			for _, schema := range []string{migrations.SchemaDefault, `My "Schema"`} {
				up, err := migrations.Up(t.Context(), pool, migrations.WithSchema(schema))
				require.NoError(t, err)
				require.Equal(t, everything, numbers(up))
				requireMigrated(t, admin, schema)
				requireCatalog(t, admin, schema)
				all, err := migrations.Status(t.Context(), pool, migrations.WithSchema(schema))
				require.NoError(t, err)
				require.WithinDuration(t, one[time.Time](t, admin, `SELECT clock_timestamp()`), all[0].AppliedAt, awaitTimeout)
				_, err = migrations.Down(t.Context(), pool, migrations.WithSchema(schema))
				require.NoError(t, err)
				requireEmpty(t, admin, schema)
			}
			require.Equal(t, path, one[string](t, pool, `SELECT pg_catalog.current_setting('search_path')`), "the session is as it was")
			for _, schema := range []string{"decoys", "theirs"} {
				require.Equal(t, []string{"S idempotency_keys_attempt_seq", "r idempotency_keys"}, objects(t, admin, schema))
			}
		})
	}
}

func TestErrorsSayWhatToDo(t *testing.T) {
	t.Parallel()
	code := func(t *testing.T, err error) string {
		t.Helper()
		var pgErr *pgconn.PgError
		require.ErrorAs(t, err, &pgErr)
		return pgErr.Code
	}

	t.Run("read only", func(t *testing.T) {
		t.Parallel()
		pool := openPool(t, pgtest.DSN(t), withSettings(map[string]string{"default_transaction_read_only": "on"}))
		_, err := migrations.Up(t.Context(), pool, migrations.WithSchema(pgtest.EmptySchema(t)))
		require.ErrorContains(t, err, "connect to the primary")
		require.Equal(t, "25006", code(t, err))
	})
	t.Run("there already", func(t *testing.T) {
		t.Parallel()
		pool, schema := pgtest.Pool(t), pgtest.EmptySchema(t)
		execute(t, pool, "CREATE TABLE "+qualified(schema, "idempotency_keys")+" (theirs int)")
		_, err := migrations.Up(t.Context(), pool, migrations.WithSchema(schema))
		require.ErrorContains(t, err, "something of that name is there")
		require.Equal(t, "42P07", code(t, err))
		require.Equal(t, []string{"r idempotency_keys"}, objects(t, pool, schema), "nothing of a failed migration stays")
		require.Empty(t, applied(t, pool, schema))
	})
	t.Run("dropped by hand", func(t *testing.T) {
		t.Parallel()
		pool, schema := pgtest.Pool(t), pgtest.Schema(t)
		execute(t, pool, "DROP TABLE "+qualified(schema, "idempotency_keys"))
		_, err := migrations.Down(t.Context(), pool, migrations.WithSchema(schema))
		require.ErrorContains(t, err, "something is missing although")
		require.Equal(t, "42P01", code(t, err))
		require.Equal(t, everything, applied(t, pool, schema))
	})
	t.Run("a later version was here", func(t *testing.T) {
		t.Parallel()
		pool, schema := pgtest.Pool(t), pgtest.Schema(t)
		execute(t, pool, "INSERT INTO "+qualified(schema, migrations.VersionTable)+" (version_id, is_applied) VALUES (99, true)")
		up, err := migrations.Up(t.Context(), pool, migrations.WithSchema(schema))
		require.NoError(t, err, "an older service may start beside a newer one")
		require.Empty(t, up)
		_, err = migrations.Down(t.Context(), pool, migrations.WithSchema(schema))
		require.ErrorContains(t, err, "a later version of this package")
		require.Equal(t, allObjects, objects(t, pool, schema))
	})
	t.Run("no pool", func(t *testing.T) {
		t.Parallel()
		for _, name := range []string{"Up", "Down", "Status"} {
			require.ErrorContains(t, calls(t, nil)[name](), "the pool is nil", name)
		}
	})
	t.Run("closed pool", func(t *testing.T) {
		t.Parallel()
		pool := openPool(t, pgtest.DSN(t))
		pool.Close()
		for _, name := range []string{"Up", "Down", "Status"} {
			require.ErrorContains(t, calls(t, pool)[name](), "closed pool", name)
		}
	})
	t.Run("cancelled", func(t *testing.T) {
		t.Parallel()
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		schema := pgtest.EmptySchema(t)
		_, err := migrations.Up(ctx, pgtest.Pool(t), migrations.WithSchema(schema))
		require.ErrorIs(t, err, context.Canceled)
		requireEmpty(t, pgtest.Pool(t), schema)
	})
}
