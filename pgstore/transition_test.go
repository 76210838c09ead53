package pgstore_test

import (
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/archlab/idempotency/pgstore"
)

// transitionCall is one call of Complete, Fail or Extend, and the state that it asks for.
type transitionCall struct {
	name     string
	wants    pgstore.State
	response string
	call     func(t *testing.T, s *pgstore.Store, k pgstore.Key, fingerprint string, attempt uint64) error
}

const transitionOtherResponse = "202 Accepted"

var transitionCalls = []transitionCall{
	{"Complete", pgstore.StateDone, recordResponse, transitionComplete(recordResponse)},
	{"Complete with another response", pgstore.StateDone, transitionOtherResponse, transitionComplete(transitionOtherResponse)},
	{"Complete with an empty response", pgstore.StateDone, "", transitionComplete("")},
	{"Fail(final)", pgstore.StateFailed, "", transitionFail(false)},
	{"Fail(retryable)", pgstore.StateRetryable, "", transitionFail(true)},
	{"Extend", pgstore.StateInProgress, "", transitionExtend},
}

func transitionComplete(response string) func(*testing.T, *pgstore.Store, pgstore.Key, string, uint64) error {
	return func(t *testing.T, s *pgstore.Store, k pgstore.Key, fingerprint string, attempt uint64) error {
		t.Helper()
		return s.Complete(t.Context(), k, fingerprint, attempt, response)
	}
}

func transitionFail(retryable bool) func(*testing.T, *pgstore.Store, pgstore.Key, string, uint64) error {
	return func(t *testing.T, s *pgstore.Store, k pgstore.Key, fingerprint string, attempt uint64) error {
		t.Helper()
		return s.Fail(t.Context(), k, fingerprint, attempt, retryable)
	}
}

func transitionExtend(t *testing.T, s *pgstore.Store, k pgstore.Key, fingerprint string, attempt uint64) error {
	t.Helper()
	record, err := s.Extend(t.Context(), k, fingerprint, attempt)
	if err != nil {
		require.Zero(t, record)
		return err
	}
	require.Equal(t, pgstore.StateInProgress, record.State)
	require.Equal(t, fingerprint, record.Fingerprint)
	require.Empty(t, record.Response)
	require.Equal(t, attempt, record.Attempt)
	return nil
}

// transitionWant is the specification: what the call returns on a record, and whether it writes. The order of the cases is
// the order in which calls check.
func transitionWant(c transitionCall, state pgstore.State, live, sameFingerprint, sameAttempt bool) (writes bool, want error) {
	switch {
	case state == "", !live:
		return false, pgstore.ErrLeaseExpired
	case !sameFingerprint:
		return false, pgstore.ErrConflict
	case !sameAttempt:
		return false, pgstore.ErrStaleAttempt
	case state == pgstore.StateInProgress:
		return true, nil
	case state == c.wants && (state != pgstore.StateDone || c.response == recordResponse):
		return false, nil // a repeat
	}
	return false, pgstore.ErrStaleAttempt
}

// Every call on every record: in each state or none, live or not, by the same and another fingerprint, as the same and
// other attempts.
func TestTransitionsFollowTheirTable(t *testing.T) {
	t.Parallel()
	for _, state := range append([]pgstore.State{""}, recordStates...) {
		for _, live := range []bool{true, false} {
			if state == "" && !live {
				continue
			}
			t.Run(fmt.Sprintf("state=%s/live=%t", state, live), func(t *testing.T) {
				t.Parallel()
				f := setup(t)
				for _, c := range transitionCalls {
					for _, asked := range []string{fingerprint, "sha256:of another"} {
						for _, attempt := range []string{"same", "lower", "higher", "none", "impossible"} {
							name := fmt.Sprintf("%s fingerprint=%s attempt=%s", c.name, asked, attempt)
							transitionOnce(t, f, recordKey(name), c, state, live, asked, attempt)
						}
					}
				}
			})
		}
	}
}

// transitionOnce brings k into the state and checks everything about one call.
func transitionOnce(t *testing.T, f *fixture, k pgstore.Key, c transitionCall, state pgstore.State, live bool, asked, which string) {
	t.Helper()
	const elapsed = 10 * time.Second // between Begin and the call
	var own uint64
	if state != "" {
		own = recordPut(t, f, k, state)
		if live {
			recordAge(t, f, k, elapsed)
		} else {
			recordAge(t, f, k, retention)
		}
	}
	attempt := map[string]uint64{
		"same": own, "lower": max(own, 1) - 1, "higher": own + 1, "none": 0, "impossible": math.MaxUint64,
	}[which]
	writes, want := transitionWant(c, state, live, asked == fingerprint, attempt == own)

	before := recordRow(t, f, k)
	err := c.call(t, f.Store, k, asked, attempt)
	if want != nil {
		require.ErrorIs(t, err, want, k.Value)
	} else {
		require.NoError(t, err, k.Value)
	}
	if !writes {
		require.Equal(t, before, recordRow(t, f, k), "%s wrote", k.Value)
		return
	}
	record, found, err := f.Get(t.Context(), k)
	require.NoError(t, err)
	require.True(t, found)
	require.Equal(t, c.wants, record.State, k.Value)
	require.Equal(t, c.response, record.Response)
	require.Equal(t, fingerprint, record.Fingerprint)
	require.Equal(t, attempt, record.Attempt)
	until := retention
	if c.wants == pgstore.StateInProgress {
		until = lease
	}
	require.Greater(t, record.Remaining, until-elapsed, "%s: counted from Begin, not from the call", k.Value)
	require.LessOrEqual(t, record.Remaining, until)
}

// The slow owner of the textbooks: it comes back after its lease, when another has the key, has finished, has failed, has
// released it, or has been overtaken in turn.
func TestLateCallsOfAnOvertakenAttemptChangeNothing(t *testing.T) {
	t.Parallel()
	for name, after := range map[string]func(t *testing.T, f *fixture, successor uint64){
		"successor runs": func(*testing.T, *fixture, uint64) {},
		"successor extended": func(t *testing.T, f *fixture, successor uint64) {
			t.Helper()
			_, err := f.Extend(t.Context(), key, fingerprint, successor)
			require.NoError(t, err)
		},
		"successor completed": func(t *testing.T, f *fixture, successor uint64) {
			t.Helper()
			require.NoError(t, f.Complete(t.Context(), key, fingerprint, successor, "of the successor"))
		},
		"successor failed": func(t *testing.T, f *fixture, successor uint64) {
			t.Helper()
			require.NoError(t, f.Fail(t.Context(), key, fingerprint, successor, false))
		},
		"successor released": func(t *testing.T, f *fixture, successor uint64) {
			t.Helper()
			require.NoError(t, f.Fail(t.Context(), key, fingerprint, successor, true))
		},
		"successor overtaken": func(t *testing.T, f *fixture, _ uint64) {
			t.Helper()
			recordAge(t, f, key, lease)
			_, created, err := f.Begin(t.Context(), key, fingerprint)
			require.NoError(t, err)
			require.True(t, created)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := setup(t)
			slow := recordPut(t, f, key, pgstore.StateInProgress)
			recordAge(t, f, key, lease)
			successor, created, err := f.Begin(t.Context(), key, fingerprint)
			require.NoError(t, err)
			require.True(t, created)
			after(t, f, successor.Attempt)

			before := recordRow(t, f, key)
			for _, c := range transitionCalls {
				require.ErrorIs(t, c.call(t, f.Store, key, fingerprint, slow), pgstore.ErrStaleAttempt, c.name)
			}
			// The response that the successor stored does not make the late one a repeat.
			require.ErrorIs(t, f.Complete(t.Context(), key, fingerprint, slow, "of the successor"), pgstore.ErrStaleAttempt)
			require.Equal(t, before, recordRow(t, f, key))
			if name == "successor completed" {
				record, created, err := f.Begin(t.Context(), key, fingerprint)
				require.NoError(t, err)
				require.False(t, created)
				require.Equal(t, "of the successor", record.Response)
			}
		})
	}
}

// The same answer whether nobody has come, a sweep has come, or the lapsed record is old enough to be forgotten.
func TestLapsedLeaseRefusesEveryCall(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		age     time.Duration
		deletes int64
	}{
		"a microsecond late":  {lease, 0},
		"a retention late":    {lease + retention - time.Microsecond, 0},
		"forgotten and swept": {lease + retention, 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			clock := newClock()
			f := setup(t, pgstore.WithClock(clock.Now))
			attempt := recordPut(t, f, key, pgstore.StateInProgress)
			clock.Advance(test.age)
			for _, c := range transitionCalls {
				require.ErrorIs(t, c.call(t, f.Store, key, fingerprint, attempt), pgstore.ErrLeaseExpired, c.name)
			}
			deleted, err := f.Sweep(t.Context(), 10)
			require.NoError(t, err)
			require.Equal(t, test.deletes, deleted)
			before := recordRow(t, f, key)
			for _, c := range transitionCalls {
				require.ErrorIs(t, c.call(t, f.Store, key, fingerprint, attempt), pgstore.ErrLeaseExpired, c.name)
			}
			require.Equal(t, before, recordRow(t, f, key))
		})
	}
}
