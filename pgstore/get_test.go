package pgstore_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/archlab/idempotency/pgstore"
)

func TestGetReturnsTheLiveRecordAndChangesNothing(t *testing.T) {
	t.Parallel()
	clock := newClock()
	f := setup(t, pgstore.WithClock(clock.Now))
	record, live, err := f.Get(t.Context(), key)
	require.NoError(t, err)
	require.False(t, live)
	require.Zero(t, record)
	for _, state := range recordStates {
		k := recordKey(string(state))
		want := pgstore.Record{
			State: state, Fingerprint: fingerprint, Attempt: recordPut(t, f, k, state),
			ExpiresAt: clock.Now().Add(retention), Remaining: retention - time.Second,
		}
		switch state {
		case pgstore.StateInProgress:
			want.ExpiresAt, want.Remaining = clock.Now().Add(lease), lease-time.Second
		case pgstore.StateDone:
			want.Response = recordResponse
		case pgstore.StateFailed, pgstore.StateRetryable:
		}
		before := recordRow(t, f, k)
		clock.Advance(time.Second)
		record, live, err = f.Get(t.Context(), k)
		require.NoError(t, err)
		require.True(t, live)
		require.Equal(t, want, record)

		clock.Advance(retention)
		record, live, err = f.Get(t.Context(), k)
		require.NoError(t, err)
		require.False(t, live, "%s outlived its time", state)
		require.Zero(t, record)
		require.Equal(t, before, recordRow(t, f, k))
	}
}

// A reader neither waits for the transaction that is changing the record, nor makes it wait.
func TestGetWaitsForNobody(t *testing.T) {
	t.Parallel()
	f := setup(t)
	attempt := recordPut(t, f, key, pgstore.StateInProgress)
	tx, err := recordConn(t, pgx.QueryExecModeCacheStatement).Begin(t.Context())
	require.NoError(t, err)
	require.NoError(t, f.WithTx(tx).Complete(t.Context(), key, fingerprint, attempt, recordResponse))

	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	record, live, err := f.Get(ctx, key)
	require.NoError(t, err)
	require.True(t, live)
	require.Equal(t, pgstore.StateInProgress, record.State, "read what is not committed")
	require.NoError(t, tx.Commit(t.Context()))
	record, _, err = f.Get(t.Context(), key)
	require.NoError(t, err)
	require.Equal(t, pgstore.StateDone, record.State)
}
