package pgstore_test

import (
	"context"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/archlab/idempotency/internal/pgtest"
	"github.com/archlab/idempotency/pgstore"
)

func TestNewSaysWhichRuleAnArgumentBreaks(t *testing.T) {
	t.Parallel()
	const between = ": it must be between 1ms and 876000h0m0s (100 years)"
	over := pgstore.MaxDuration + 1
	for name, test := range map[string]struct {
		lease, retention time.Duration
		opts             []pgstore.Option
		says             string
	}{
		"lease 0":              {0, retention, nil, "the lease is 0s" + between},
		"lease -1ns":           {-1, retention, nil, "the lease is -1ns" + between},
		"lease negative":       {math.MinInt64, retention, nil, "the lease is -2562047h47m16.854775808s" + between},
		"lease 1ns":            {1, retention, nil, "the lease is 1ns" + between},
		"lease 1ms-1ns":        {time.Millisecond - 1, retention, nil, "the lease is 999.999µs" + between},
		"lease 100 years+1ns":  {over, retention, nil, "the lease is " + over.String() + between},
		"lease without end":    {math.MaxInt64, retention, nil, "the lease is 2562047h47m16.854775807s" + between},
		"retention 0":          {lease, 0, nil, "the retention is 0s" + between},
		"retention -1ns":       {lease, -1, nil, "the retention is -1ns" + between},
		"retention 1ms-1ns":    {lease, time.Millisecond - 1, nil, "the retention is 999.999µs" + between},
		"retention 100y+1ns":   {lease, over, nil, "the retention is " + over.String() + between},
		"retention no end":     {lease, math.MaxInt64, nil, "the retention is 2562047h47m16.854775807s" + between},
		"response limit -1":    {lease, retention, []pgstore.Option{pgstore.WithMaxResponse(-1)}, "the response limit is -1 bytes: it must be between 0 and 268435456"},
		"response limit over":  {lease, retention, []pgstore.Option{pgstore.WithMaxResponse(pgstore.MaxResponseLimit + 1)}, "the response limit is 268435457 bytes: it must be between 0 and 268435456"},
		"schema empty":         {lease, retention, []pgstore.Option{pgstore.WithSchema("")}, "schema name is empty: leave it out to use the default schema"},
		"schema too long":      {lease, retention, []pgstore.Option{pgstore.WithSchema(strings.Repeat("é", 32))}, "schema name is 64 bytes long: PostgreSQL keeps 63 at most"},
		"schema invalid UTF-8": {lease, retention, []pgstore.Option{pgstore.WithSchema("a\xff")}, `schema name "a\xff" is not valid UTF-8`},
		"schema with NUL":      {lease, retention, []pgstore.Option{pgstore.WithSchema("a\x00b")}, `schema name "a\x00b" holds a NUL byte`},
		"schema reserved":      {lease, retention, []pgstore.Option{pgstore.WithSchema("pg_temp")}, `schema name "pg_temp" starts with pg_, which PostgreSQL reserves for itself`},
		"option nil":           {lease, retention, []pgstore.Option{nil}, "an option is nil"},
		"clock nil":            {lease, retention, []pgstore.Option{pgstore.WithClock(nil)}, "the clock is nil: leave WithClock out to use the database's clock"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := &keyNoSQL{}
			store, err := pgstore.New(db, test.lease, test.retention, test.opts...)
			require.EqualError(t, err, "idempotency: new store: "+test.says)
			require.Nil(t, store)
			require.Zero(t, db.sent)
		})
	}
}

func TestNewRefusesAHandleThatIsNil(t *testing.T) {
	t.Parallel()
	for name, db := range map[string]pgstore.DB{
		"no interface": nil, "pool": (*pgxpool.Pool)(nil), "connection": (*pgx.Conn)(nil),
		"pooled connection": (*pgxpool.Conn)(nil), "transaction": (*pgxpool.Tx)(nil),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			store, err := pgstore.New(db, lease, retention)
			require.EqualError(t, err, "idempotency: new store: the database handle is nil")
			require.Nil(t, store)
		})
	}
}

func TestNewSaysEveryRuleThatIsBroken(t *testing.T) {
	t.Parallel()
	_, err := pgstore.New(nil, 0, -time.Second, pgstore.WithSchema(""), pgstore.WithMaxResponse(-5), pgstore.WithClock(nil))
	require.EqualError(t, err, strings.Join([]string{
		"idempotency: new store: the database handle is nil",
		"the lease is 0s: it must be between 1ms and 876000h0m0s (100 years)",
		"the retention is -1s: it must be between 1ms and 876000h0m0s (100 years)",
		"schema name is empty: leave it out to use the default schema",
		"the response limit is -5 bytes: it must be between 0 and 268435456",
		"the clock is nil: leave WithClock out to use the database's clock",
	}, "\n"))
}

func TestLastOfTwoEqualOptionsCounts(t *testing.T) {
	t.Parallel()
	store, db := keyStore(t, pgstore.WithMaxResponse(-1), pgstore.WithMaxResponse(1), pgstore.WithSchema(""), pgstore.WithSchema("s"))
	require.ErrorIs(t, store.Complete(t.Context(), key, fingerprint, 1, "xx"), pgstore.ErrResponseTooLarge)
	require.Zero(t, db.sent)
	require.Contains(t, store.Statements().Get, `"s".idempotency_keys`)
}

func TestExtremeDurationsWork(t *testing.T) {
	t.Parallel()
	f := setup(t)
	for _, d := range []time.Duration{pgstore.MinDuration, pgstore.MaxDuration} {
		clock := newClock()
		store := f.NewStore(t, f.Pool, d, d, pgstore.WithClock(clock.Now))
		k := recordKey(d.String())
		first, created, err := store.Begin(t.Context(), k, fingerprint)
		require.NoError(t, err)
		require.True(t, created)
		clock.Advance(d - time.Microsecond)
		_, _, err = store.Begin(t.Context(), k, fingerprint)
		require.ErrorIs(t, err, pgstore.ErrInProgress)
		clock.Advance(time.Microsecond)
		second, created, err := store.Begin(t.Context(), k, fingerprint)
		require.NoError(t, err)
		require.True(t, created)
		require.Equal(t, first.Attempt, second.Abandoned)
		require.NoError(t, store.Complete(t.Context(), k, fingerprint, second.Attempt, recordResponse))
		clock.Advance(d)
		_, live, err := store.Get(t.Context(), k)
		require.NoError(t, err)
		require.False(t, live)
	}
}

// What is missing is said by every call, and no call panics.
func TestStoreWithoutItsTransactionFailsEveryCall(t *testing.T) {
	t.Parallel()
	store, db := keyStore(t)
	for name, tx := range map[string]pgx.Tx{"no interface": nil, "a nil pointer": (*pgxpool.Tx)(nil)} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			missing := store.WithTx(tx)
			for call, do := range keyCalls {
				require.EqualError(t, do(t.Context(), missing, key),
					"idempotency: "+call+` "tenant-a"/"order.create"/"req-1001": WithTx was given a nil transaction`)
			}
			deleted, err := missing.Sweep(t.Context(), 1)
			require.EqualError(t, err, "idempotency: sweep: WithTx was given a nil transaction")
			require.Zero(t, deleted)
			_, created, err := missing.Begin(t.Context(), key, fingerprint)
			require.Error(t, err)
			require.False(t, created)
		})
	}
	t.Cleanup(func() { // a require here would end the binary before it could say which test failed
		if db.sent != 0 {
			t.Errorf("the store around the transaction was used instead, %d times", db.sent)
		}
	})
}

// A store is made before anything is there: on a pool that has never connected, and for a table that is still to come.
func TestNewConnectsToNothing(t *testing.T) {
	t.Parallel()
	config, err := pgxpool.ParseConfig(pgtest.DSN(t))
	require.NoError(t, err)
	config.BeforeConnect = func(context.Context, *pgx.ConnConfig) error {
		t.Error("New connected")
		return nil
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	_, err = pgstore.New(pool, lease, retention, pgstore.WithSchema("not there"))
	require.NoError(t, err)
	require.Zero(t, pool.Stat().NewConnsCount())
}
