package pgstore_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/archlab/idempotency/pgstore"
)

func TestExtendGivesAFreshLeaseCountedFromNow(t *testing.T) {
	t.Parallel()
	clock := newClock()
	f := setup(t, pgstore.WithClock(clock.Now))
	attempt := recordPut(t, f, key, pgstore.StateInProgress)
	for range 100 {
		clock.Advance(lease - time.Microsecond)
		record, err := f.Extend(t.Context(), key, fingerprint, attempt)
		require.NoError(t, err)
		require.Equal(t, pgstore.Record{
			State: pgstore.StateInProgress, Fingerprint: fingerprint, Attempt: attempt,
			ExpiresAt: clock.Now().Add(lease), Remaining: lease,
		}, record)
		stored, live, err := f.Get(t.Context(), key)
		require.NoError(t, err)
		require.True(t, live)
		require.Equal(t, record, stored)
		_, _, err = f.Begin(t.Context(), key, fingerprint)
		require.ErrorIs(t, err, pgstore.ErrInProgress)
	}
	clock.Advance(lease)
	_, err := f.Extend(t.Context(), key, fingerprint, attempt)
	require.ErrorIs(t, err, pgstore.ErrLeaseExpired)
}

// Nothing adds up: what was left of the old lease is gone, also where the new one is shorter.
func TestExtendReplacesWhatWasLeft(t *testing.T) {
	t.Parallel()
	clock := newClock()
	f := setup(t, pgstore.WithClock(clock.Now))
	brief := f.NewStore(t, f.Pool, time.Second, time.Second, pgstore.WithClock(clock.Now))
	attempt := recordPut(t, f, key, pgstore.StateInProgress)
	for range 3 {
		record, err := f.Extend(t.Context(), key, fingerprint, attempt)
		require.NoError(t, err)
		require.Equal(t, lease, record.Remaining)
	}
	record, err := brief.Extend(t.Context(), key, fingerprint, attempt)
	require.NoError(t, err)
	require.Equal(t, time.Second, record.Remaining)
	clock.Advance(time.Second)
	next, created, err := f.Begin(t.Context(), key, fingerprint)
	require.NoError(t, err)
	require.True(t, created)
	require.Equal(t, attempt, next.Abandoned)
}

func TestExtendedAttemptIsRememberedForAWholeRetention(t *testing.T) {
	t.Parallel()
	clock := newClock()
	f := setup(t, pgstore.WithClock(clock.Now))
	attempt := recordPut(t, f, key, pgstore.StateInProgress)
	for range 3 {
		clock.Advance(lease - time.Second)
		_, err := f.Extend(t.Context(), key, fingerprint, attempt)
		require.NoError(t, err)
	}
	clock.Advance(lease + retention - time.Microsecond)
	deleted, err := f.Sweep(t.Context(), 10)
	require.NoError(t, err)
	require.Zero(t, deleted)
	record, created, err := f.Begin(t.Context(), key, fingerprint)
	require.NoError(t, err)
	require.True(t, created)
	require.Equal(t, attempt, record.Abandoned)
}

// The memory of a lapsed attempt, once promised, does not become shorter by a store with a shorter retention.
func TestExtendByABrieferStoreForgetsNoEarlier(t *testing.T) {
	t.Parallel()
	clock := newClock()
	f := setup(t, pgstore.WithClock(clock.Now))
	brief := f.NewStore(t, f.Pool, time.Second, time.Second, pgstore.WithClock(clock.Now))
	attempt := recordPut(t, f, key, pgstore.StateInProgress)
	_, err := brief.Extend(t.Context(), key, fingerprint, attempt)
	require.NoError(t, err)
	clock.Advance(lease + retention - time.Microsecond)
	deleted, err := brief.Sweep(t.Context(), 10)
	require.NoError(t, err)
	require.Zero(t, deleted)
}
