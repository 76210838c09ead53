package pgstore

import (
	"context"
	"crypto/sha256"
	"fmt"
	"math"
)

// transition is one call of Complete, Fail, Extend or Resolve: a conditional update of the record that an attempt holds.
type transition struct {
	key         Key
	fingerprint string // empty: whatever it is
	attempt     uint64
	wanted      State  // the state after which a repeat of the call succeeds and changes nothing
	response    string // that a repeat must bring again; only with StateDone
	late        bool   // an attempt whose lease has lapsed counts as well

	// update runs the statement and reports whether it changed the record.
	update func(ctx context.Context) (bool, error)
}

// apply runs the update. If it changes nothing, apply reads in a second statement, which sees what the first one met,
// why, and returns the sentinel for it, or nil for a repeat of a call that has succeeded before.
func (s *Store) apply(ctx context.Context, t transition) error {
	if err := t.key.validate(); err != nil {
		return err
	}
	if err := validateFingerprint(t.fingerprint); err != nil {
		return err
	}
	return s.change(ctx, t)
}

// change is apply without the validation of key and fingerprint.
func (s *Store) change(ctx context.Context, t transition) error {
	if len(t.response) > s.maxResponse {
		return fmt.Errorf("%w: it is %d bytes long, the limit is %d", ErrResponseTooLarge, len(t.response), s.maxResponse)
	}
	return s.retry(ctx, func(ctx context.Context) error {
		changed, err := t.update(ctx)
		if err != nil || changed {
			return err
		}
		return s.explain(ctx, t)
	})
}

// explain says why the update of t changed nothing.
func (s *Store) explain(ctx context.Context, t transition) error {
	var (
		live, sameFingerprint, sameAttempt, sameResponse bool
		state                                            string
		digest                                           = sha256.Sum256([]byte(t.response))
	)
	found, err := s.queryRow(ctx, s.sql.Inspect,
		s.arguments(t.key.Tenant, t.key.Operation, t.key.Value, []byte(t.fingerprint), fencingToken(t.attempt), digest[:]),
		&live, &sameFingerprint, &sameAttempt, &state, &sameResponse)
	switch {
	case err != nil:
		return err
	case !found || !live && !t.late:
		return ErrLeaseExpired
	case !sameFingerprint && t.fingerprint != "":
		return ErrConflict
	case !sameAttempt:
		return ErrStaleAttempt
	case State(state) == StateInProgress: // the update should have worked, and will
		return errLostRace
	case State(state) == t.wanted && (t.wanted != StateDone || sameResponse):
		return nil
	}
	return ErrStaleAttempt
}

// fencingToken converts an attempt for the database. A number that no attempt can have becomes 0, which none has.
func fencingToken(attempt uint64) int64 {
	if attempt > math.MaxInt64 {
		return 0
	}
	return int64(attempt)
}
