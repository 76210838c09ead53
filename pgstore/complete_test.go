package pgstore_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/archlab/idempotency/pgstore"
)

func TestCompletedResponseIsReplayedForTheRetention(t *testing.T) {
	t.Parallel()
	clock := newClock()
	f := setup(t, pgstore.WithClock(clock.Now))
	attempt := recordPut(t, f, key, pgstore.StateInProgress)
	clock.Advance(20 * time.Second)
	require.NoError(t, f.Complete(t.Context(), key, fingerprint, attempt, recordResponse))
	want := pgstore.Record{
		State: pgstore.StateDone, Fingerprint: fingerprint, Response: recordResponse, Attempt: attempt,
		ExpiresAt: clock.Now().Add(retention), Remaining: retention,
	}
	before := recordRow(t, f, key)
	for range 24 {
		record, created, err := f.Begin(t.Context(), key, fingerprint)
		require.NoError(t, err)
		require.False(t, created)
		require.Equal(t, want, record)
		clock.Advance(time.Hour)
		want.Remaining -= time.Hour
	}
	require.Equal(t, before, recordRow(t, f, key), "a replay wrote")
	_, created, err := f.Begin(t.Context(), key, fingerprint)
	require.NoError(t, err)
	require.True(t, created)
}

// The caller whose answer was lost asks again, any number of times and at any time within the retention.
func TestRepeatedCompleteChangesNothing(t *testing.T) {
	t.Parallel()
	for name, response := range map[string]string{"some bytes": recordResponse, "no bytes": ""} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			clock := newClock()
			f := setup(t, pgstore.WithClock(clock.Now))
			attempt := recordPut(t, f, key, pgstore.StateInProgress)
			require.NoError(t, f.Complete(t.Context(), key, fingerprint, attempt, response))
			before := recordRow(t, f, key)
			for range 3 {
				clock.Advance(retention / 4)
				require.NoError(t, f.Complete(t.Context(), key, fingerprint, attempt, response))
				for _, other := range []string{response + " ", "\x00", transitionOtherResponse} {
					require.ErrorIs(t, f.Complete(t.Context(), key, fingerprint, attempt, other), pgstore.ErrStaleAttempt)
				}
			}
			require.Equal(t, before, recordRow(t, f, key))
		})
	}
}

func TestResponseOverTheLimitLeavesTheAttemptItsKey(t *testing.T) {
	t.Parallel()
	f := setup(t, pgstore.WithMaxResponse(len(recordResponse)))
	attempt := recordPut(t, f, key, pgstore.StateInProgress)
	before := recordRow(t, f, key)
	require.ErrorIs(t, f.Complete(t.Context(), key, fingerprint, attempt, recordResponse+"!"), pgstore.ErrResponseTooLarge)
	require.Equal(t, before, recordRow(t, f, key))
	require.NoError(t, f.Complete(t.Context(), key, fingerprint, attempt, recordResponse))
}

// Where stores with different durations share a table, a row is never due for deletion before it has expired.
func TestOutcomeOfALongerRetentionIsNotPurgedEarly(t *testing.T) {
	t.Parallel()
	clock := newClock()
	f := setup(t, pgstore.WithClock(clock.Now))
	brief := f.NewStore(t, f.Pool, time.Second, time.Second, pgstore.WithClock(clock.Now))
	for name, end := range map[string]func(k pgstore.Key, attempt uint64) error{
		"complete": func(k pgstore.Key, attempt uint64) error {
			return f.Complete(t.Context(), k, fingerprint, attempt, recordResponse)
		},
		"fail": func(k pgstore.Key, attempt uint64) error {
			return f.Fail(t.Context(), k, fingerprint, attempt, false)
		},
	} {
		k := recordKey(name)
		record, created, err := brief.Begin(t.Context(), k, fingerprint)
		require.NoError(t, err)
		require.True(t, created)
		require.NoError(t, end(k, record.Attempt))
	}
	clock.Advance(retention - time.Microsecond)
	deleted, err := brief.Sweep(t.Context(), 10)
	require.NoError(t, err)
	require.Zero(t, deleted)
	clock.Advance(time.Microsecond)
	deleted, err = brief.Sweep(t.Context(), 10)
	require.NoError(t, err)
	require.EqualValues(t, 2, deleted)
}
