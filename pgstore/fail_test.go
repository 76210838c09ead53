package pgstore_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/archlab/idempotency/pgstore"
)

func TestFinalFailureIsReplayedForTheRetention(t *testing.T) {
	t.Parallel()
	clock := newClock()
	f := setup(t, pgstore.WithClock(clock.Now))
	attempt := recordPut(t, f, key, pgstore.StateInProgress)
	clock.Advance(20 * time.Second)
	require.NoError(t, f.Fail(t.Context(), key, fingerprint, attempt, false))
	record, created, err := f.Begin(t.Context(), key, fingerprint)
	require.NoError(t, err)
	require.False(t, created)
	require.Equal(t, pgstore.Record{
		State: pgstore.StateFailed, Fingerprint: fingerprint, Attempt: attempt,
		ExpiresAt: clock.Now().Add(retention), Remaining: retention,
	}, record)
	clock.Advance(retention)
	_, created, err = f.Begin(t.Context(), key, fingerprint)
	require.NoError(t, err)
	require.True(t, created)
}

func TestReleasedKeyIsFreeAtOnceForTheSameRequestOnly(t *testing.T) {
	t.Parallel()
	clock := newClock()
	f := setup(t, pgstore.WithClock(clock.Now))
	attempt := recordPut(t, f, key, pgstore.StateRetryable)
	_, _, err := f.Begin(t.Context(), key, "sha256:of another")
	require.ErrorIs(t, err, pgstore.ErrConflict)
	for range 5 {
		record, created, err := f.Begin(t.Context(), key, fingerprint)
		require.NoError(t, err)
		require.True(t, created)
		require.Greater(t, record.Attempt, attempt)
		require.Zero(t, record.Abandoned, "a promise of no effect is no lost attempt")
		attempt = record.Attempt
		require.NoError(t, f.Fail(t.Context(), key, fingerprint, attempt, true))
	}
	clock.Advance(retention)
	record, created, err := f.Begin(t.Context(), key, "sha256:of another")
	require.NoError(t, err)
	require.True(t, created, "the release outlived its retention")
	require.Zero(t, record.Abandoned)
}

func TestRepeatedFailChangesNothing(t *testing.T) {
	t.Parallel()
	for _, retryable := range []bool{true, false} {
		t.Run(fmt.Sprintf("retryable=%t", retryable), func(t *testing.T) {
			t.Parallel()
			clock := newClock()
			f := setup(t, pgstore.WithClock(clock.Now))
			attempt := recordPut(t, f, key, pgstore.StateInProgress)
			require.NoError(t, f.Fail(t.Context(), key, fingerprint, attempt, retryable))
			before := recordRow(t, f, key)
			for range 3 {
				clock.Advance(retention / 4)
				require.NoError(t, f.Fail(t.Context(), key, fingerprint, attempt, retryable))
				require.ErrorIs(t, f.Fail(t.Context(), key, fingerprint, attempt, !retryable), pgstore.ErrStaleAttempt)
				require.ErrorIs(t, f.Complete(t.Context(), key, fingerprint, attempt, recordResponse), pgstore.ErrStaleAttempt)
				require.ErrorIs(t, f.Complete(t.Context(), key, fingerprint, attempt, ""), pgstore.ErrStaleAttempt)
			}
			require.Equal(t, before, recordRow(t, f, key))
		})
	}
}

// A release that has been used is no longer there to be repeated: the key belongs to the next attempt.
func TestRepeatedReleaseAfterTheNextBeginIsStale(t *testing.T) {
	t.Parallel()
	f := setup(t)
	attempt := recordPut(t, f, key, pgstore.StateRetryable)
	_, created, err := f.Begin(t.Context(), key, fingerprint)
	require.NoError(t, err)
	require.True(t, created)
	before := recordRow(t, f, key)
	require.ErrorIs(t, f.Fail(t.Context(), key, fingerprint, attempt, true), pgstore.ErrStaleAttempt)
	require.Equal(t, before, recordRow(t, f, key))
}
