package pgstore_test

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/archlab/idempotency/internal/pgtest"
	"github.com/archlab/idempotency/migrations"
	"github.com/archlab/idempotency/pgstore"
)

// A standby may lag behind its primary: only the primary decides. Begin fails there, whatever the standby knows of the key, and
// says where to go; Get reads what has arrived. After the standby's promotion everything is as it was on the primary.
func TestStandbyDecidesNothingUntilItIsPromoted(t *testing.T) {
	t.Parallel()
	server := pgtest.NewServer(t)
	pool := newFaultPool(t, server.URL())
	_, err := migrations.Up(t.Context(), pool.Pool)
	require.NoError(t, err)
	f := &fixture{Pool: pool.Pool, Schema: pgstore.SchemaDefault}
	f.Store = f.NewStore(t, pool, time.Hour, retention)
	attempts := map[string]uint64{}
	records := map[pgstore.State]pgstore.Record{}
	for _, call := range faultCalls() {
		attempts[call.name] = call.put(t, f, recordKey(call.name))
	}
	for _, state := range recordStates {
		recordPut(t, f, recordKey(string(state)), state)
		record, live, err := f.Get(t.Context(), recordKey(string(state)))
		require.NoError(t, err)
		require.True(t, live)
		records[state] = record
	}

	// A server that finds this file follows a primary, and this one has heard all that its primary said.
	var folder string
	require.NoError(t, pool.QueryRow(t.Context(), `SHOW data_directory`).Scan(&folder))
	_, err = pool.Exec(t.Context(), `COPY (SELECT) TO '`+strings.ReplaceAll(folder, `'`, `''`)+`/standby.signal'`)
	require.NoError(t, err)
	require.NoError(t, server.Restart(t.Context()))
	pool.Reset()
	follows := func() (follows bool) {
		require.NoError(t, pool.QueryRow(t.Context(), `SELECT pg_is_in_recovery()`).Scan(&follows))
		return follows
	}
	require.True(t, follows())

	refused := func(a faultAnswer) {
		t.Helper()
		require.Equal(t, "25006", faultCode(t, a.err))
		require.ErrorContains(t, a.err, "the database is read-only on this connection, connect to the primary")
		require.NotContains(t, a.err.Error(), "gave up")
		require.False(t, a.is)
		require.Zero(t, a.record)
	}
	for _, call := range faultCalls() {
		answer := call.do(t.Context(), f.Store, recordKey(call.name), attempts[call.name])
		if call.name == "get" {
			require.NoError(t, answer.err)
			call.isTrue(t, f, recordKey(call.name), attempts[call.name], answer)
			continue
		}
		refused(answer)
	}
	begin := faultCalls()[0]
	for state, record := range records {
		refused(begin.do(t.Context(), f.Store, recordKey(string(state)), 0))
		got, live, err := f.Get(t.Context(), recordKey(string(state)))
		require.NoError(t, err)
		require.True(t, live)
		got.Remaining = record.Remaining
		require.Equal(t, record, got)
	}

	var promoted bool
	require.NoError(t, pool.QueryRow(t.Context(), `SELECT pg_promote()`).Scan(&promoted))
	require.True(t, promoted)
	require.False(t, follows())
	for _, call := range faultCalls() {
		k := recordKey(call.name)
		answer := call.do(t.Context(), f.Store, k, attempts[call.name])
		require.NoError(t, answer.err, call.name)
		call.isTrue(t, f, k, attempts[call.name], answer)
	}
	for state, record := range records {
		next, created, err := f.Begin(t.Context(), recordKey(string(state)), fingerprint)
		require.Equal(t, state == pgstore.StateRetryable, created)
		switch state {
		case pgstore.StateInProgress:
			require.ErrorIs(t, err, pgstore.ErrInProgress)
		case pgstore.StateRetryable:
			require.NoError(t, err)
			for _, known := range records {
				require.Greater(t, next.Attempt, known.Attempt)
			}
		default:
			require.NoError(t, err)
			require.Equal(t, record.Response, next.Response)
			require.Equal(t, state, next.State)
		}
	}
}
