package pgstore_test

import (
	"context"
	"crypto/rand"
	"errors"
	"maps"
	"net/url"
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

// modesSessions are ways in which a session may be set up, by its role, its database or its connection string. Each setting
// changes how the server reads or writes some text, or what a name means, or how statements are planned.
var modesSessions = map[string]map[string]string{
	"normal": nil,
	"odd": {
		"search_path":                   "",
		"TimeZone":                      "Asia/Kathmandu", // 5:45 h from UTC
		"DateStyle":                     "SQL, DMY",
		"IntervalStyle":                 "sql_standard",
		"bytea_output":                  "escape",
		"extra_float_digits":            "-15",
		"default_transaction_isolation": "serializable",
		"plan_cache_mode":               "force_generic_plan",
		"transform_null_equals":         "on",
		"array_nulls":                   "off",
		"quote_all_identifiers":         "on",
	},
	"odd in another way": {
		"search_path":                    `pg_temp, "$user"`,
		"TimeZone":                       "<+13>-13",
		"DateStyle":                      "German, MDY",
		"IntervalStyle":                  "postgres_verbose",
		"bytea_output":                   "hex",
		"extra_float_digits":             "3",
		"default_transaction_isolation":  "repeatable read",
		"default_transaction_deferrable": "on",
		"plan_cache_mode":                "force_custom_plan",
		"enable_seqscan":                 "off",
		"backslash_quote":                "off",
		"cursor_tuple_fraction":          "1",
	},
}

// modesConn opens a connection to the database at url that is set up like the session and sends statements in the mode.
func modesConn(tb testing.TB, url string, mode pgx.QueryExecMode, session map[string]string) *pgx.Conn {
	tb.Helper()
	config, err := pgx.ParseConfig(url)
	require.NoError(tb, err)
	config.DefaultQueryExecMode = mode
	maps.Copy(config.RuntimeParams, session)
	conn, err := pgx.ConnectConfig(tb.Context(), config)
	require.NoError(tb, err)
	tb.Cleanup(func() { _ = conn.Close(context.WithoutCancel(tb.Context())) })
	for name, want := range session { // without bytea, which pgx reads in one format only
		var got string
		require.NoError(tb, conn.QueryRow(tb.Context(), `SELECT pg_catalog.current_setting($1::text)`, name).Scan(&got))
		require.Equal(tb, want, got, name)
	}
	return conn
}

// modesKeys are keys that a driver which puts values into an SQL text has to quote, and neighbours in some collation.
var modesKeys = []pgstore.Key{
	{Tenant: "tenant-a", Operation: "order.create", Value: "1-1"},
	{Tenant: "tenant-a", Operation: "order.create", Value: "11"},
	{Tenant: "tenant-a", Operation: "order.create", Value: "1-1 "},
	{Tenant: "TENANT-A", Operation: "order.create", Value: "1-1"},
	{Tenant: "a/b", Operation: "c", Value: "d"},
	{Tenant: "a", Operation: "b/c", Value: "d"},
	{Tenant: "caf\u00e9", Operation: "\u00e4", Value: "\U0001f9fe"},
	{Tenant: "cafe\u0301", Operation: "a\u0308", Value: "\U0001f9fe"},
	{Tenant: `'`, Operation: `''; DROP TABLE idempotency_keys; --`, Value: `\'`},
	{Tenant: `\`, Operation: `\\x41`, Value: `E'\x41'`},
	{Tenant: "$1", Operation: "$1::text $$ %s ? :name", Value: "/* "},
	{Tenant: "NULL", Operation: "null", Value: "\x01\t\r\n\x7f\u2028"},
	{Tenant: strings.Repeat("\u20ac", 170), Operation: strings.Repeat("o", 512), Value: strings.Repeat("'", 512)},
}

// modesWorld is where a scenario plays: a table, and a connection under test to it. The fixture's own pool is set up as usual.
type modesWorld struct {
	f  *fixture
	db *pgx.Conn
}

func (w modesWorld) store(t *testing.T, opts ...pgstore.Option) *pgstore.Store {
	t.Helper()
	return w.f.NewStore(t, w.db, lease, retention, opts...)
}

// modesScenarios together make every call of a store, each with every answer that it has.
var modesScenarios = []struct {
	name string
	play func(t *testing.T, w modesWorld)
}{
	{"begin, extend, complete, replay", modesReplay},
	{"fail", modesFail},
	{"large response", modesLarge},
	{"takeover", modesTakeover},
	{"takeover by a test's clock", modesClock},
	{"sweep", modesSweep},
	{"longest durations", modesLongest},
	{"transaction", modesTransaction},
}

// modesPlay plays all scenarios, each with a table of its own content.
func modesPlay(t *testing.T, w modesWorld) {
	t.Helper()
	for _, s := range modesScenarios {
		t.Run(s.name, func(t *testing.T) {
			s.play(t, w)
			recordExec(t, w.f, `DELETE FROM %s`)
		})
	}
}

func modesBegin(t *testing.T, store *pgstore.Store, k pgstore.Key, fingerprint string) pgstore.Record {
	t.Helper()
	record, created, err := store.Begin(t.Context(), k, fingerprint)
	require.NoError(t, err, "%s", k)
	require.True(t, created, "%s", k)
	require.Equal(t, pgstore.StateInProgress, record.State)
	require.Equal(t, fingerprint, record.Fingerprint)
	require.Empty(t, record.Response)
	return record
}

func modesInProgress(t *testing.T, store *pgstore.Store, k pgstore.Key, fingerprint string) {
	t.Helper()
	_, _, err := store.Begin(t.Context(), k, fingerprint)
	inProgress, ok := errors.AsType[*pgstore.InProgressError](err)
	require.True(t, ok, "%s: %v", k, err)
	require.Positive(t, inProgress.RetryAfter)
	require.LessOrEqual(t, inProgress.RetryAfter, lease)
	_, _, err = store.Begin(t.Context(), k, fingerprint+"other")
	require.ErrorIs(t, err, pgstore.ErrConflict)
}

func modesReplay(t *testing.T, w modesWorld) {
	t.Helper()
	store := w.store(t)
	fingerprints := []string{"\x00", "\xff\xfe", `\x41`, `\101`, `'; --`, bytesAll(), strings.Repeat(`\`, 1000)}
	responses := []string{"", "\x00", bytesAll(), `\x4142`, `\\x`, `\101\`, `{"a":1.0,"a":2,"n":"\u0000"}`, "\xed\xa0\x80'"}
	want := map[pgstore.Key]pgstore.Record{}
	for i, k := range modesKeys {
		fingerprint, response := fingerprints[i%len(fingerprints)], responses[i%len(responses)]
		record := modesBegin(t, store, k, fingerprint)
		require.Zero(t, record.Abandoned)
		require.Positive(t, record.Remaining)
		require.LessOrEqual(t, record.Remaining, lease)
		modesInProgress(t, store, k, fingerprint)
		extended, err := store.Extend(t.Context(), k, fingerprint, record.Attempt)
		require.NoError(t, err)
		require.False(t, extended.ExpiresAt.Before(record.ExpiresAt))
		held, live, err := store.Get(t.Context(), k)
		require.NoError(t, err)
		require.True(t, live)
		require.Equal(t, extended.ExpiresAt, held.ExpiresAt)
		require.Equal(t, fingerprint, held.Fingerprint)
		require.Empty(t, held.Response)

		require.ErrorIs(t, store.Complete(t.Context(), k, fingerprint+"other", record.Attempt, response), pgstore.ErrConflict)
		require.ErrorIs(t, store.Complete(t.Context(), k, fingerprint, record.Attempt+1000, response), pgstore.ErrStaleAttempt)
		require.NoError(t, store.Complete(t.Context(), k, fingerprint, record.Attempt, response))
		require.NoError(t, store.Complete(t.Context(), k, fingerprint, record.Attempt, response), "a repeat")
		require.ErrorIs(t, store.Complete(t.Context(), k, fingerprint, record.Attempt, response+"x"), pgstore.ErrStaleAttempt)
		require.ErrorIs(t, store.Fail(t.Context(), k, fingerprint, record.Attempt, true), pgstore.ErrStaleAttempt)
		_, err = store.Extend(t.Context(), k, fingerprint, record.Attempt)
		require.ErrorIs(t, err, pgstore.ErrStaleAttempt)
		want[k] = pgstore.Record{State: pgstore.StateDone, Fingerprint: fingerprint, Response: response, Attempt: record.Attempt}
	}
	require.Equal(t, len(modesKeys), recordScalar[int](t, w.f, `SELECT count(*) FROM %s`))
	for k, record := range want { // when all are there: none is taken for another
		replayed, created, err := store.Begin(t.Context(), k, record.Fingerprint)
		require.NoError(t, err)
		require.False(t, created)
		require.Equal(t, recordScalar[time.Time](t, w.f, `SELECT expires_at FROM %s WHERE attempt = $1`, int64(record.Attempt)).UTC(), //nolint:gosec // small
			replayed.ExpiresAt)
		require.Greater(t, replayed.Remaining, retention-time.Hour)
		require.LessOrEqual(t, replayed.Remaining, retention)
		got, live, err := store.Get(t.Context(), k)
		require.NoError(t, err)
		require.True(t, live)
		require.Equal(t, replayed.ExpiresAt, got.ExpiresAt)
		for _, found := range []pgstore.Record{replayed, got} {
			found.ExpiresAt, found.Remaining = time.Time{}, 0
			require.Equal(t, record, found)
		}
		_, _, err = store.Begin(t.Context(), k, record.Fingerprint+"other")
		require.ErrorIs(t, err, pgstore.ErrConflict)
	}
}

func modesFail(t *testing.T, w modesWorld) {
	t.Helper()
	store := w.store(t)
	for _, k := range modesKeys {
		first := modesBegin(t, store, k, fingerprint)
		require.NoError(t, store.Fail(t.Context(), k, fingerprint, first.Attempt, true))
		require.NoError(t, store.Fail(t.Context(), k, fingerprint, first.Attempt, true), "a repeat")
		require.ErrorIs(t, store.Complete(t.Context(), k, fingerprint, first.Attempt, ""), pgstore.ErrStaleAttempt)
		_, _, err := store.Begin(t.Context(), k, "other")
		require.ErrorIs(t, err, pgstore.ErrConflict)
		second := modesBegin(t, store, k, fingerprint)
		require.Greater(t, second.Attempt, first.Attempt)
		require.NoError(t, store.Fail(t.Context(), k, fingerprint, second.Attempt, false))
		failed, created, err := store.Begin(t.Context(), k, fingerprint)
		require.NoError(t, err)
		require.False(t, created)
		require.Equal(t, pgstore.StateFailed, failed.State)
		require.Equal(t, second.Attempt, failed.Attempt)
	}
}

func modesLarge(t *testing.T, w modesWorld) {
	t.Helper()
	store := w.store(t)
	for name, response := range map[string]string{
		"noise":       string(bytesRandom(t, 300_000)),
		"backslashes": strings.Repeat(`\`, 300_000),
		"zeros":       strings.Repeat("\x00", 300_000),
		"a page":      strings.Repeat("x", 8192),
	} {
		k := recordKey(name)
		record := modesBegin(t, store, k, fingerprint)
		require.NoError(t, store.Complete(t.Context(), k, fingerprint, record.Attempt, response))
		require.NoError(t, store.Complete(t.Context(), k, fingerprint, record.Attempt, response), "a repeat")
		replayed, created, err := store.Begin(t.Context(), k, fingerprint)
		require.NoError(t, err)
		require.False(t, created)
		bytesSame(t, response, replayed.Response)
	}
}

// modesLapsed checks what an attempt meets whose record is not live any more, or another's.
func modesLapsed(t *testing.T, store *pgstore.Store, k pgstore.Key, attempt uint64, want error) {
	t.Helper()
	_, err := store.Extend(t.Context(), k, fingerprint, attempt)
	require.ErrorIs(t, err, want)
	require.ErrorIs(t, store.Fail(t.Context(), k, fingerprint, attempt, false), want)
	require.ErrorIs(t, store.Complete(t.Context(), k, fingerprint, attempt, recordResponse), want)
}

// modesTakeOver takes a key through a lapsed lease, a takeover, and a retention that ends. Time passes by pass.
func modesTakeOver(t *testing.T, w modesWorld, store *pgstore.Store, pass func(d time.Duration)) {
	t.Helper()
	first := modesBegin(t, store, key, fingerprint)
	pass(lease - 10*time.Second)
	modesInProgress(t, store, key, fingerprint)
	pass(10 * time.Second)
	_, live, err := store.Get(t.Context(), key)
	require.NoError(t, err)
	require.False(t, live)
	modesLapsed(t, store, key, first.Attempt, pgstore.ErrLeaseExpired)

	second := modesBegin(t, store, key, "of another request")
	require.Greater(t, second.Attempt, first.Attempt)
	require.Equal(t, first.Attempt, second.Abandoned)
	modesLapsed(t, store, key, first.Attempt, pgstore.ErrConflict)
	pass(lease)
	third := modesBegin(t, store, key, fingerprint)
	require.Equal(t, second.Attempt, third.Abandoned)
	modesLapsed(t, store, key, first.Attempt, pgstore.ErrStaleAttempt)
	extended, err := store.Extend(t.Context(), key, fingerprint, third.Attempt)
	require.NoError(t, err)
	require.Equal(t, second.Attempt, extended.Abandoned)
	require.NoError(t, store.Complete(t.Context(), key, fingerprint, third.Attempt, recordResponse))
	got, live, err := store.Get(t.Context(), key)
	require.NoError(t, err)
	require.True(t, live)
	require.Equal(t, second.Attempt, got.Abandoned)

	pass(retention)
	_, live, err = store.Get(t.Context(), key)
	require.NoError(t, err)
	require.False(t, live)
	modesLapsed(t, store, key, third.Attempt, pgstore.ErrLeaseExpired)
	pass(lease) // until purge_after, too
	require.Zero(t, modesBegin(t, store, key, "of a third request").Abandoned)
	require.True(t, recordScalar[bool](t, w.f, `SELECT response IS NULL FROM %s`), "the old response is still stored")
}

func modesTakeover(t *testing.T, w modesWorld) {
	t.Helper()
	modesTakeOver(t, w, w.store(t), func(d time.Duration) { recordAge(t, w.f, key, d) })
}

func modesClock(t *testing.T, w modesWorld) {
	t.Helper()
	c := newClock()
	store := w.store(t, pgstore.WithClock(c.Now))
	modesTakeOver(t, w, store, c.Advance)
	record, live, err := store.Get(t.Context(), key)
	require.NoError(t, err)
	require.True(t, live)
	require.Equal(t, c.Now().Add(lease), record.ExpiresAt)
	require.Equal(t, lease, record.Remaining)
	c.Advance(lease + retention)
	deleted, err := store.Sweep(t.Context(), 1)
	require.NoError(t, err)
	require.EqualValues(t, 1, deleted)
}

func modesSweep(t *testing.T, w modesWorld) {
	t.Helper()
	store := w.store(t)
	for _, k := range modesKeys {
		modesBegin(t, store, k, fingerprint)
		recordAge(t, w.f, k, lease+retention)
	}
	live := modesBegin(t, store, key, fingerprint)
	// One refuses, so the sweep has to list the others and to delete them one by one.
	refuses := pgstore.Key{Tenant: "tenant-a", Operation: "order.create", Value: "11"}
	require.Contains(t, modesKeys, refuses)
	sweepPoison(t, w.f, `OLD.key = '11'`)
	deleted, err := store.Sweep(t.Context(), 1000)
	require.ErrorContains(t, err, refuses.String()+" stays: ")
	require.EqualValues(t, len(modesKeys)-1, deleted)

	recordExec(t, w.f, `DROP TRIGGER refuse ON %s`)
	_, err = w.f.Pool.Exec(t.Context(), `DROP FUNCTION `+pgx.Identifier{w.f.Schema, "refuse"}.Sanitize())
	require.NoError(t, err)
	for _, want := range []int64{1, 0} {
		deleted, err = store.Sweep(t.Context(), 1000)
		require.NoError(t, err)
		require.Equal(t, want, deleted)
	}
	require.NoError(t, store.Complete(t.Context(), key, fingerprint, live.Attempt, ""))
}

func modesLongest(t *testing.T, w modesWorld) {
	t.Helper()
	for _, d := range []time.Duration{pgstore.MinDuration, 36*time.Hour + time.Microsecond, pgstore.MaxDuration} {
		c := newClock()
		store := w.f.NewStore(t, w.db, d, d, pgstore.WithClock(c.Now))
		k := recordKey(d.String())
		record := modesBegin(t, store, k, fingerprint)
		require.Equal(t, d, record.Remaining)
		require.Equal(t, c.Now().Add(d), record.ExpiresAt)
		c.Advance(d - time.Microsecond)
		require.NoError(t, store.Complete(t.Context(), k, fingerprint, record.Attempt, ""))
		replayed, created, err := store.Begin(t.Context(), k, fingerprint)
		require.NoError(t, err)
		require.False(t, created)
		require.Equal(t, c.Now().Add(d), replayed.ExpiresAt)
	}
}

func modesTransaction(t *testing.T, w modesWorld) {
	t.Helper()
	tx, err := w.db.Begin(t.Context())
	require.NoError(t, err)
	store := w.store(t).WithTx(tx)
	record := modesBegin(t, store, key, fingerprint)
	modesInProgress(t, store, key, fingerprint)
	require.NoError(t, store.Complete(t.Context(), key, fingerprint, record.Attempt, bytesAll()))
	require.NoError(t, tx.Rollback(t.Context()))
	require.Zero(t, recordScalar[int](t, w.f, `SELECT count(*) FROM %s`))

	tx, err = w.db.Begin(t.Context())
	require.NoError(t, err)
	store = w.store(t).WithTx(tx)
	record = modesBegin(t, store, key, fingerprint)
	require.NoError(t, store.Complete(t.Context(), key, fingerprint, record.Attempt, bytesAll()))
	require.NoError(t, tx.Commit(t.Context()))
	replayed, created, err := w.store(t).Begin(t.Context(), key, fingerprint)
	require.NoError(t, err)
	require.False(t, created)
	require.Equal(t, bytesAll(), replayed.Response)
}

func TestEveryModeAnswersTheSameInEverySession(t *testing.T) {
	t.Parallel()
	for _, mode := range recordModes {
		for name, session := range modesSessions {
			t.Run(mode.String()+"/"+name, func(t *testing.T) {
				t.Parallel()
				modesPlay(t, modesWorld{setup(t), modesConn(t, pgtest.DSN(t), mode, session)})
			})
		}
	}
}

// modesLocales returns the clause of CREATE DATABASE for a language's order, from each library that the server has.
func modesLocales(t *testing.T) map[string]string {
	t.Helper()
	var libc *string
	var icu bool
	require.NoError(t, pgtest.Pool(t).QueryRow(t.Context(), `
		SELECT min(collcollate) FILTER (WHERE collprovider = 'c' AND collcollate NOT LIKE 'C.%' AND collcollate NOT IN ('C', 'POSIX')
				AND collencoding = pg_char_to_encoding('UTF8')),
			count(*) FILTER (WHERE collname = 'tr-TR-x-icu') > 0
		FROM pg_collation`).Scan(&libc, &icu))
	clauses := map[string]string{}
	if libc != nil {
		clauses["libc"] = `LOCALE_PROVIDER libc LOCALE '` + *libc + `'`
	}
	if icu {
		clauses["ICU"] = `LOCALE_PROVIDER icu LOCALE 'C.UTF-8' ICU_LOCALE 'tr-TR'`
	}
	return clauses
}

// modesDatabase creates a database with the clause, dropped when the test ends, and returns its URL.
func modesDatabase(t *testing.T, clause string) string {
	t.Helper()
	pool, name := pgtest.Pool(t), "modes_"+strings.ToLower(rand.Text())
	_, err := pool.Exec(t.Context(), `CREATE DATABASE `+name+` TEMPLATE template0 ENCODING 'UTF8' `+clause)
	require.NoError(t, err)
	t.Cleanup(func() {
		_, err := pool.Exec(context.WithoutCancel(t.Context()), `DROP DATABASE `+name+` WITH (FORCE)`)
		require.NoError(t, err)
	})
	address, err := url.Parse(pgtest.DSN(t))
	require.NoError(t, err)
	address.Path = "/" + name
	return address.String()
}

// The order and the letters of a language change nothing, whichever library they come from, and in a schema with any name.
func TestEveryDatabaseAnswersTheSame(t *testing.T) {
	t.Parallel()
	locales := modesLocales(t)
	require.NotEmpty(t, locales, "the server has the order of bytes only, and cannot show it")
	for name, clause := range locales {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			address := modesDatabase(t, clause)
			pool, err := pgxpool.New(t.Context(), address)
			require.NoError(t, err)
			t.Cleanup(pool.Close)
			f := &fixture{Pool: pool, Schema: `Modes "İı" \ '.'`}
			_, err = migrations.Up(t.Context(), pool, migrations.WithSchema(f.Schema))
			require.NoError(t, err)
			require.True(t, recordScalar[bool](t, f, `SELECT 'a' < 'B' FROM (SELECT count(*) FROM %s) AS one`), "it is the order of bytes")
			for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeCacheStatement, pgx.QueryExecModeSimpleProtocol} {
				modesPlay(t, modesWorld{f, modesConn(t, address, mode, modesSessions["odd"])})
			}
		})
	}
}
