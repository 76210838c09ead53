package migrations_test

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/archlab/idempotency/internal/pgtest"
	"github.com/archlab/idempotency/migrations"
	"github.com/archlab/idempotency/pgstore"
)

// wholeLife takes a key through every call of the store, each with the answer that it must have.
func wholeLife(tb testing.TB, store *pgstore.Store, value string) {
	tb.Helper()
	ctx := tb.Context()
	key := func(operation string) pgstore.Key {
		return pgstore.Key{Tenant: "t", Operation: operation, Value: value}
	}
	for _, operation := range []string{"complete", "fail", "release"} {
		record, created, err := store.Begin(ctx, key(operation), "f")
		require.NoError(tb, err)
		require.True(tb, created)
		_, _, err = store.Begin(ctx, key(operation), "f")
		require.ErrorIs(tb, err, pgstore.ErrInProgress)
		_, _, err = store.Begin(ctx, key(operation), "another")
		require.ErrorIs(tb, err, pgstore.ErrConflict)
		_, err = store.Extend(ctx, key(operation), "f", record.Attempt)
		require.NoError(tb, err)
		state := pgstore.State("done")
		switch operation {
		case "complete":
			err = store.Complete(ctx, key(operation), "f", record.Attempt, "response")
		case "fail":
			state, err = "failed", store.Fail(ctx, key(operation), "f", record.Attempt, false)
		case "release":
			state, err = "retryable", store.Fail(ctx, key(operation), "f", record.Attempt, true)
		}
		require.NoError(tb, err)
		record, found, err := store.Get(ctx, key(operation))
		require.NoError(tb, err)
		require.True(tb, found)
		require.Equal(tb, state, record.State)
	}
	_, created, err := store.Begin(ctx, key("complete"), "f")
	require.NoError(tb, err)
	require.False(tb, created)
	_, err = store.Sweep(ctx, 10)
	require.NoError(tb, err)
}

// A database of any age has what the store's statements name, once it is migrated to the latest version, and is then the same as a
// new one.
func TestStoreWorksOnADatabaseOfEachAge(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	for _, age := range append([]int64{0}, everything...) {
		schema := pgtest.EmptySchema(t)
		_, err := migrations.Up(t.Context(), pool, migrations.WithSchema(schema), migrations.To(age))
		require.NoError(t, err)
		_, err = migrations.Up(t.Context(), pool, migrations.WithSchema(schema))
		require.NoError(t, err)
		requireCatalog(t, pool, schema)
		store, err := pgstore.New(pool, time.Minute, time.Hour, pgstore.WithSchema(schema))
		require.NoError(t, err)
		wholeLife(t, store, "k")
	}
}

// A service goes on working while a later migration changes the table under its connections, whose statements are prepared: what the
// server says of a cached plan never reaches a caller outside a transaction.
func TestServiceSurvivesALaterMigration(t *testing.T) {
	t.Parallel()
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			schema := pgtest.Schema(t)
			table := qualified(schema, "idempotency_keys")
			const conns = 3
			pool := openPool(t, pgtest.DSN(t), func(c *pgxpool.Config) {
				c.MaxConns, c.ConnConfig.DefaultQueryExecMode = conns, mode
			})
			store, err := pgstore.New(pool, time.Minute, time.Hour, pgstore.WithSchema(schema))
			require.NoError(t, err)
			onEachConnection := func(value string) {
				t.Helper()
				held := make([]*pgxpool.Conn, conns)
				for i := range held {
					held[i], err = pool.Acquire(t.Context())
					require.NoError(t, err)
					defer held[i].Release()
				}
				for i, conn := range held {
					on, err := pgstore.New(conn.Conn(), time.Minute, time.Hour, pgstore.WithSchema(schema))
					require.NoError(t, err)
					wholeLife(t, on, value+string(rune('a'+i)))
				}
			}
			onEachConnection("warm")
			onEachConnection("warmer")
			old, created, err := store.Begin(t.Context(), pgstore.Key{Tenant: "t", Operation: "o", Value: "old"}, "f")
			require.NoError(t, err)
			require.True(t, created)
			for i, change := range []string{
				"ADD COLUMN note text", "ADD COLUMN tag text NOT NULL DEFAULT 'x'", "DROP COLUMN note",
				"ALTER COLUMN response SET STORAGE EXTERNAL", "SET (fillfactor = 60)", "ADD CONSTRAINT tag_check CHECK (tag <> '')",
			} {
				execute(t, pgtest.Pool(t), "ALTER TABLE "+table+" "+change)
				execute(t, pgtest.Pool(t), "CREATE INDEX ON "+table+" (begun_at)")
				onEachConnection("changed" + string(rune('a'+i)))
			}
			require.NoError(t, store.Complete(t.Context(), pgstore.Key{Tenant: "t", Operation: "o", Value: "old"}, "f", old.Attempt, "r"))
			record, found, err := store.Get(t.Context(), pgstore.Key{Tenant: "t", Operation: "o", Value: "old"})
			require.NoError(t, err)
			require.True(t, found)
			require.Equal(t, "r", record.Response)
		})
	}
}
