package pgstore_test

import (
	"fmt"
	"maps"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/archlab/idempotency/internal/pgtest"
	"github.com/archlab/idempotency/migrations"
	"github.com/archlab/idempotency/pgstore"
)

// sessionSettings are those of a role or a database that change how values read and what names mean.
var sessionSettings = map[string]string{
	"search_path":        "",
	"TimeZone":           "Asia/Kathmandu", // 5:45 ahead
	"DateStyle":          "German, DMY",
	"IntervalStyle":      "sql_standard",
	"extra_float_digits": "-15",
	"bytea_output":       "escape",
}

// sessionSchemas are names that quoting could get wrong.
var sessionSchemas = []string{
	`plain`,
	`Käufer's "Idem. Keys" \ $1 {now};--`,
	`.`,
	` `,
}

// sessionPool opens a pool whose sessions have the settings and send statements in the given mode.
func sessionPool(t *testing.T, address string, mode pgx.QueryExecMode, settings map[string]string) *pgxpool.Pool {
	t.Helper()
	config, err := pgxpool.ParseConfig(address)
	require.NoError(t, err)
	config.MaxConns = 2
	config.ConnConfig.DefaultQueryExecMode = mode
	maps.Copy(config.ConnConfig.RuntimeParams, settings)
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	return pool
}

// sessionLife takes a key through every call, and compares all that comes back.
func sessionLife(t *testing.T, f *fixture, response string) {
	t.Helper()
	k := pgstore.Key{Tenant: `O'Brien \ "x"`, Operation: "\u00e4\u20ac\U0001f600", Value: "$1::text; -- \t\n"}
	fingerprint := bytesAll()

	lost, created, err := f.Begin(t.Context(), k, fingerprint)
	require.NoError(t, err)
	require.True(t, created)
	require.Equal(t, fingerprint, lost.Fingerprint)
	require.Zero(t, lost.Abandoned)
	require.InDelta(t, lease, lost.Remaining, float64(lease)/2)
	_, _, err = f.Begin(t.Context(), k, fingerprint)
	require.ErrorIs(t, err, pgstore.ErrInProgress)
	_, _, err = f.Begin(t.Context(), k, "another")
	require.ErrorIs(t, err, pgstore.ErrConflict)
	recordAge(t, f, k, 2*lease)
	_, live, err := f.Get(t.Context(), k)
	require.NoError(t, err)
	require.False(t, live)
	require.ErrorIs(t, f.Complete(t.Context(), k, fingerprint, lost.Attempt, response), pgstore.ErrLeaseExpired)

	first, created, err := f.Begin(t.Context(), k, fingerprint)
	require.NoError(t, err)
	require.True(t, created)
	require.Equal(t, lost.Attempt, first.Abandoned)
	require.NoError(t, f.Fail(t.Context(), k, fingerprint, first.Attempt, true))

	second, created, err := f.Begin(t.Context(), k, fingerprint)
	require.NoError(t, err)
	require.True(t, created)
	require.Equal(t, lost.Attempt, second.Abandoned)
	require.ErrorIs(t, f.Complete(t.Context(), k, fingerprint, first.Attempt, response), pgstore.ErrStaleAttempt)
	extended, err := f.Extend(t.Context(), k, fingerprint, second.Attempt)
	require.NoError(t, err)
	require.Equal(t, lost.Attempt, extended.Abandoned)
	require.True(t, extended.ExpiresAt.After(second.ExpiresAt))
	require.NoError(t, f.Complete(t.Context(), k, fingerprint, second.Attempt, response))
	require.NoError(t, f.Complete(t.Context(), k, fingerprint, second.Attempt, response), "a repeat")

	replayed, created, err := f.Begin(t.Context(), k, fingerprint)
	require.NoError(t, err)
	require.False(t, created)
	got, live, err := f.Get(t.Context(), k)
	require.NoError(t, err)
	require.True(t, live)
	expiresAt := time.UnixMicro(recordScalar[int64](t, f, `SELECT (extract(epoch FROM expires_at) * 1000000)::bigint FROM %s`))
	for _, record := range []pgstore.Record{replayed, got} {
		require.Equal(t, pgstore.StateDone, record.State)
		require.Equal(t, second.Attempt, record.Attempt)
		require.Equal(t, lost.Attempt, record.Abandoned)
		require.True(t, expiresAt.Equal(record.ExpiresAt), "%v became %v", expiresAt, record.ExpiresAt)
		require.InDelta(t, retention, record.Remaining, float64(lease))
		require.Equal(t, fingerprint, record.Fingerprint)
		bytesSame(t, response, record.Response)
	}

	recordAge(t, f, k, 2*retention)
	deleted, err := f.Sweep(t.Context(), 10)
	require.NoError(t, err)
	require.EqualValues(t, 1, deleted)
	again, created, err := f.Begin(t.Context(), k, fingerprint)
	require.NoError(t, err)
	require.True(t, created)
	require.Zero(t, again.Abandoned)
	require.NoError(t, f.Fail(t.Context(), k, fingerprint, again.Attempt, false))
	recordAge(t, f, k, 2*retention)
	_, err = f.Sweep(t.Context(), 10)
	require.NoError(t, err)
}

func TestCallsDoNotDependOnSettingsOfTheSession(t *testing.T) {
	t.Parallel()
	address := pgtest.Database(t, pgtest.WithCollation())
	admin := sessionPool(t, address, pgx.QueryExecModeExec, nil)
	for _, schema := range sessionSchemas {
		_, err := admin.Exec(t.Context(), `CREATE SCHEMA `+pgx.Identifier{schema}.Sanitize())
		require.NoError(t, err)
		_, err = migrations.Up(t.Context(), admin, migrations.WithSchema(schema))
		require.NoError(t, err)
	}
	noise := string(bytesRandom(t, 300_000))
	for _, schema := range sessionSchemas {
		t.Run(schema, func(t *testing.T) {
			t.Parallel()
			for _, mode := range recordModes {
				f := &fixture{Pool: sessionPool(t, address, mode, sessionSettings), Schema: schema}
				f.Store = f.NewStore(t, f.Pool, lease, retention)
				for _, response := range []string{"", bytesAll(), `\x41`, `\101\\'`, strings.Repeat("\x00", 10_000), noise} {
					sessionLife(t, f, response)
				}
				f.Pool.Close()
			}
		})
	}
}

// The driver reads the text form of bytea in one notation only, the default. The store reads both.
func TestResponsesComeBackInEitherNotation(t *testing.T) {
	t.Parallel()
	f := setup(t)
	for _, mode := range recordModes {
		for _, notation := range []string{"hex", "escape"} {
			pool := sessionPool(t, pgtest.DSN(t), mode, map[string]string{"bytea_output": notation})
			store := f.NewStore(t, pool, lease, retention)
			for i, response := range []string{"", "a", bytesAll(), `\x41`, `x41`, `\\x41`, `\101`, "\x00"} {
				k := recordKey(fmt.Sprintf("%s %s %d", mode, notation, i))
				record, created, err := store.Begin(t.Context(), k, response+"fingerprint")
				require.NoError(t, err)
				require.True(t, created)
				require.NoError(t, store.Complete(t.Context(), k, response+"fingerprint", record.Attempt, response))
				replayed, created, err := store.Begin(t.Context(), k, response+"fingerprint")
				require.NoError(t, err)
				require.False(t, created)
				bytesSame(t, response, replayed.Response)
				got, live, err := store.Get(t.Context(), k)
				require.NoError(t, err)
				require.True(t, live)
				bytesSame(t, response, got.Response)
				require.Equal(t, response+"fingerprint", got.Fingerprint)
			}
		}
	}
}

// A server that is not quite PostgreSQL may send something else: an error, which repeats nothing of it, and never other bytes.
func TestResponseInNoNotationIsAnError(t *testing.T) {
	t.Parallel()
	f := setup(t)
	store := f.NewStore(t, recordConn(t, pgx.QueryExecModeSimpleProtocol), lease, retention)
	for _, sent := range []string{`\x4`, `\x4g`, `\xé`, `\`, `\1`, `\12`, `\400`, `\8aa`, `\+12`, `\ 12`, `4d\`} {
		statements := *f.Statements()
		statements.Get = `SELECT 'done', '\x66', '` + sent + `', 1::bigint, NULL::bigint, 1::bigint, 1::bigint
			WHERE ($1::text, $2::text, $3::text) IS NOT NULL`
		record, live, err := store.WithStatements(&statements).Get(t.Context(), key)
		require.ErrorContains(t, err, "a bytea in neither of its formats", sent)
		require.NotContains(t, err.Error(), sent)
		require.False(t, live)
		require.Zero(t, record)
	}
}
