package pgstore_test

import (
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/archlab/idempotency/internal/pgtest"
	"github.com/archlab/idempotency/pgstore"
)

// On a server that takes no writes, every call that could let somebody execute fails, says why, and is not tried again; what can
// be read is read. A standby answers in the same way, with the same SQLSTATE.
func TestReadOnlyServerIsAnErrorThatSaysSo(t *testing.T) {
	t.Parallel()
	f := setup(t)
	finished := pgstore.Key{Tenant: "t", Operation: "o", Value: "finished"}
	record, _, err := f.Begin(t.Context(), finished, fingerprint)
	require.NoError(t, err)
	require.NoError(t, f.Complete(t.Context(), finished, fingerprint, record.Attempt, "response"))
	held, _, err := f.Begin(t.Context(), key, fingerprint)
	require.NoError(t, err)

	config, err := pgxpool.ParseConfig(pgtest.DSN(t))
	require.NoError(t, err)
	config.ConnConfig.RuntimeParams["default_transaction_read_only"] = "on"
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	defer pool.Close()
	store := f.NewStore(t, pool, lease, retention)

	begin := func(k pgstore.Key) error {
		record, created, err := store.Begin(t.Context(), k, fingerprint)
		require.False(t, created)
		require.Zero(t, record, "no replay either: a standby may lag behind")
		return err
	}
	_, extendErr := store.Extend(t.Context(), key, fingerprint, held.Attempt)
	_, sweepErr := store.Sweep(t.Context(), 1)
	for call, err := range map[string]error{
		"begin a fresh key":    begin(pgstore.Key{Tenant: "t", Operation: "o", Value: "fresh"}),
		"begin a finished key": begin(finished),
		"begin a running key":  begin(key),
		"complete":             store.Complete(t.Context(), key, fingerprint, held.Attempt, "response"),
		"fail":                 store.Fail(t.Context(), key, fingerprint, held.Attempt, true),
		"extend":               extendErr,
		"sweep":                sweepErr,
	} {
		require.ErrorContains(t, err, "the database is read-only on this connection, connect to the primary", call)
		require.NotContains(t, err.Error(), "gave up", call)
		var pgErr *pgconn.PgError
		require.ErrorAs(t, err, &pgErr, call)
		require.Equal(t, "25006", pgErr.Code, call)
	}
	got, live, err := store.Get(t.Context(), finished)
	require.NoError(t, err)
	require.True(t, live)
	require.Equal(t, "response", got.Response)
	require.NoError(t, f.Complete(t.Context(), key, fingerprint, held.Attempt, "response"), "nothing was lost")
}

// The same in a read-only transaction of a caller's, which a write aborts as any other failure does.
func TestReadOnlyTransactionIsAnErrorThatSaysSo(t *testing.T) {
	t.Parallel()
	for _, call := range faultCalls() {
		t.Run(call.name, func(t *testing.T) {
			t.Parallel()
			f := setup(t)
			attempt := call.put(t, f, key)
			before := recordRow(t, f, key)
			tx, err := f.Pool.BeginTx(t.Context(), pgx.TxOptions{AccessMode: pgx.ReadOnly})
			require.NoError(t, err)
			defer tx.Rollback(t.Context()) //nolint:errcheck // nothing was written
			answer := call.do(t.Context(), f.WithTx(tx), key, attempt)
			if call.name == "get" {
				require.NoError(t, answer.err)
				call.isTrue(t, f, key, attempt, answer)
				require.Equal(t, byte('T'), tx.Conn().PgConn().TxStatus())
				return
			}
			require.Equal(t, "25006", faultCode(t, answer.err))
			require.ErrorContains(t, answer.err, "the database is read-only on this connection")
			call.isTrue(t, f, key, attempt, answer)
			require.Equal(t, byte('E'), tx.Conn().PgConn().TxStatus())
			require.Equal(t, before, recordRow(t, f, key))
		})
	}
}
