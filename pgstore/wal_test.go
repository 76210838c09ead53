package pgstore_test

import (
	"context"
	"encoding/json"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/archlab/idempotency/pgstore"
)

// walWait bounds a call that must not wait for another session. It never passes unless the call does wait.
const walWait = 20 * time.Second

// walRepeat is a Begin that finds the key taken.
type walRepeat struct {
	state       pgstore.State
	fingerprint string
	want        error
}

// walRepeats are all Begins that something stands in the way of.
func walRepeats() map[string]walRepeat {
	const other = "sha256:of another request"
	return map[string]walRepeat{
		"running":                {pgstore.StateInProgress, fingerprint, pgstore.ErrInProgress},
		"finished":               {pgstore.StateDone, fingerprint, nil},
		"failed":                 {pgstore.StateFailed, fingerprint, nil},
		"running, conflicting":   {pgstore.StateInProgress, other, pgstore.ErrConflict},
		"finished, conflicting":  {pgstore.StateDone, other, pgstore.ErrConflict},
		"failed, conflicting":    {pgstore.StateFailed, other, pgstore.ErrConflict},
		"retryable, conflicting": {pgstore.StateRetryable, other, pgstore.ErrConflict},
	}
}

// check runs the repeat on the store.
func (r walRepeat) check(ctx context.Context, t *testing.T, store *pgstore.Store) {
	t.Helper()
	record, created, err := store.Begin(ctx, key, r.fingerprint)
	require.ErrorIs(t, err, r.want)
	require.False(t, created)
	if r.want == nil {
		require.Equal(t, r.state, record.State)
	}
}

// walCosts is what EXPLAIN (ANALYZE, WAL, BUFFERS) says of the top node of a plan, which counts for all below it.
type walCosts struct {
	Records int64 `json:"WAL Records"`
	Pages   int64 `json:"WAL FPI"`
	Bytes   int64 `json:"WAL Bytes"`
	Dirtied int64 `json:"Shared Dirtied Blocks"`
	Written int64 `json:"Shared Written Blocks"`
}

// walExplain runs Begin as the store does, inside EXPLAIN, which counts what this one statement did, whatever else goes on in
// the server.
func walExplain(t *testing.T, db pgstore.DB, f *fixture, fingerprint string) walCosts {
	t.Helper()
	rows, err := db.Query(t.Context(), `EXPLAIN (ANALYZE, WAL, BUFFERS, FORMAT JSON) `+f.Statements().Begin,
		key.Tenant, key.Operation, key.Value, []byte(fingerprint), int64(1), lease, retention)
	require.NoError(t, err)
	text, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[string])
	require.NoError(t, err)
	var plans []struct {
		Plan walCosts `json:"Plan"`
	}
	require.NoError(t, json.Unmarshal([]byte(text), &plans))
	require.Len(t, plans, 1)
	return plans[0].Plan
}

func TestRepeatWritesNothing(t *testing.T) {
	t.Parallel()
	for name, repeat := range walRepeats() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := setup(t)
			recordPut(t, f, key, repeat.state)
			whole := func() string {
				return recordScalar[string](t, f, `SELECT ROW(r.ctid, r.xmin, r.xmax, r)::text FROM %s AS r`)
			}
			sequence := func() (state string) {
				require.NoError(t, f.Pool.QueryRow(t.Context(),
					`SELECT ROW(last_value, is_called)::text FROM `+recordSequence(f)).Scan(&state))
				return state
			}
			row, drawn := whole(), sequence()
			// The first reader of a committed row notes on it that it is committed. That is no change, but a server with
			// checksums logs the page of the first such note after a checkpoint.
			repeat.check(t.Context(), t, f.Store)

			conn := recordConn(t, pgx.QueryExecModeCacheStatement)
			for range 3 {
				require.Equal(t, walCosts{}, walExplain(t, conn, f, repeat.fingerprint))
				repeat.check(t.Context(), t, f.Store)
			}
			require.Equal(t, row, whole(), "the row has been written or locked")
			require.Equal(t, drawn, sequence(), "an attempt has been drawn")
		})
	}
}

// The counter has a use only if it shows what is there: the same statement where it does write.
func TestFirstBeginIsSeenToWrite(t *testing.T) {
	t.Parallel()
	f := setup(t)
	costs := walExplain(t, recordConn(t, pgx.QueryExecModeCacheStatement), f, fingerprint)
	require.Positive(t, costs.Records)
	require.Positive(t, costs.Bytes)
}

// Without a transaction ID nothing can be written and no row be locked.
func TestRepeatGivesItsTransactionNoID(t *testing.T) {
	t.Parallel()
	for name, repeat := range walRepeats() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := setup(t)
			recordPut(t, f, key, repeat.state)
			for _, mode := range recordModes {
				tx, err := recordConn(t, mode).Begin(t.Context())
				require.NoError(t, err)
				repeat.check(t.Context(), t, f.WithTx(tx))
				var id *string
				var locks int
				require.NoError(t, tx.QueryRow(t.Context(), `SELECT pg_current_xact_id_if_assigned()::text, (SELECT count(*)
					FROM pg_locks WHERE pid = pg_backend_pid() AND locktype NOT IN ('relation', 'virtualxid'))`).Scan(&id, &locks))
				require.Nil(t, id, mode)
				require.Zero(t, locks, mode)
				require.NoError(t, tx.Rollback(t.Context()))
			}
		})
	}
}

func TestRepeatDoesNotWaitForWhoeverHoldsTheRow(t *testing.T) {
	t.Parallel()
	holds := map[string]string{
		"lock":    `SELECT FROM %s FOR UPDATE`,
		"update":  `UPDATE %s SET claim = claim + 1`,
		"rewrite": `UPDATE %s SET key = 'another', state = 'failed', response = NULL`,
		"delete":  `DELETE FROM %s`,
	}
	for name, repeat := range walRepeats() {
		for hold, format := range holds {
			t.Run(name+"/"+hold, func(t *testing.T) {
				t.Parallel()
				f := setup(t)
				recordPut(t, f, key, repeat.state)
				holder := directedTx(t, f.Pool)
				tag, err := holder.Exec(t.Context(), fmt.Sprintf(format, recordTable(f)))
				require.NoError(t, err)
				require.EqualValues(t, 1, tag.RowsAffected())
				ctx, cancel := context.WithTimeout(t.Context(), walWait)
				defer cancel()
				repeat.check(ctx, t, f.Store)
				conn := recordConn(t, pgx.QueryExecModeCacheStatement)
				_, err = conn.Exec(t.Context(), `SET lock_timeout = '1ms'`) // any wait for a row becomes an error of the server
				require.NoError(t, err)
				repeat.check(ctx, t, f.NewStore(t, conn, lease, retention))
				require.NoError(t, holder.Rollback(t.Context()))
			})
		}
	}
}
