package pgstore_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/archlab/idempotency/pgstore"
)

// From the end of its lease to the end of its retention, to the microsecond, an attempt may end late.
func TestAttemptsEndLateUntilTheyAreForgotten(t *testing.T) {
	t.Parallel()
	for name, ending := range map[string]struct {
		end   func(s *pgstore.Store, fingerprint string, attempt uint64) error
		state pgstore.State
	}{
		"complete": {func(s *pgstore.Store, fingerprint string, attempt uint64) error {
			return s.Complete(t.Context(), key, fingerprint, attempt, recordResponse)
		}, pgstore.StateDone},
		"fail": {func(s *pgstore.Store, fingerprint string, attempt uint64) error {
			return s.Fail(t.Context(), key, fingerprint, attempt, false)
		}, pgstore.StateFailed},
		"release": {func(s *pgstore.Store, fingerprint string, attempt uint64) error {
			return s.Fail(t.Context(), key, fingerprint, attempt, true)
		}, pgstore.StateRetryable},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			begun := func(t *testing.T, late time.Duration) (*fixture, *clock, uint64) {
				t.Helper()
				clock := newClock()
				f := setup(t, pgstore.WithLateCompletion(), pgstore.WithClock(clock.Now))
				attempt := recordPut(t, f, key, pgstore.StateInProgress)
				clock.Advance(lease + late)
				return f, clock, attempt
			}
			for _, late := range []time.Duration{0, time.Hour, retention - time.Microsecond} {
				f, clock, attempt := begun(t, late)
				require.ErrorIs(t, ending.end(f.Store, "sha256:of another", attempt), pgstore.ErrConflict)
				require.ErrorIs(t, ending.end(f.Store, fingerprint, attempt+1), pgstore.ErrStaleAttempt)
				_, err := f.Extend(t.Context(), key, fingerprint, attempt)
				require.ErrorIs(t, err, pgstore.ErrLeaseExpired, "who lost the lease does not get it back")
				strict := f.NewStore(t, f.Pool, lease, retention, pgstore.WithClock(clock.Now))
				require.ErrorIs(t, ending.end(strict, fingerprint, attempt), pgstore.ErrLeaseExpired, "the default")
				for range 2 { // again, as after a lost answer
					require.NoError(t, ending.end(f.Store, fingerprint, attempt))
					row := faultTheRow(t, f, key)
					require.Equal(t, ending.state, row.State)
					require.Equal(t, clock.Now().Add(retention), row.ExpiresAt.UTC(), "the retention counts from now")
				}
			}
			f, _, attempt := begun(t, retention)
			require.ErrorIs(t, ending.end(f.Store, fingerprint, attempt), pgstore.ErrLeaseExpired, "it is forgotten")

			f, _, attempt = begun(t, 0)
			_, _, err := f.Begin(t.Context(), key, fingerprint)
			require.NoError(t, err)
			require.ErrorIs(t, ending.end(f.Store, fingerprint, attempt), pgstore.ErrStaleAttempt, "another attempt has begun")
		})
	}
}

// The heartbeat tells the function that the lease is lost; what it finishes all the same is kept, since nobody else has begun.
func TestDoRecordsALateResult(t *testing.T) {
	t.Parallel()
	f := setup(t)
	store := f.NewStore(t, f.Pool, 3*time.Second, retention, pgstore.WithLateCompletion())
	lapse := func() { recordAge(t, f, key, 3*time.Second) }
	outcome, err := store.Do(t.Context(), key, fingerprint, func(ctx context.Context, _ pgstore.Record) (string, error) {
		lapse()
		<-ctx.Done()
		return recordResponse, nil
	})
	require.NoError(t, err)
	require.Equal(t, pgstore.Outcome{Response: recordResponse, Attempt: 1}, outcome)
	require.Equal(t, pgstore.StateDone, faultTheRow(t, f, key).State)
}
