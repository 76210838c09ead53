package pgstore

import (
	"context"
	"errors"
)

// Resolution is what became of an attempt, as found out afterwards: [AsDone], [AsFailed] or [AsRetryable].
type Resolution struct {
	state    State
	response string
}

// AsDone says that the effect has happened. Repeats get the response.
func AsDone(response string) Resolution { return Resolution{StateDone, response} }

// AsFailed says that the operation will never succeed. Repeats see the failure.
func AsFailed() Resolution { return Resolution{state: StateFailed} }

// AsRetryable says that the attempt has had no effect, and never will. The next Begin with the same fingerprint gets a new attempt.
func AsRetryable() Resolution { return Resolution{state: StateRetryable} }

// Resolve ends an attempt in the name of whoever found out what became of it: a person on call, or a program that has asked the
// system where the effect would be. The attempt may still hold the key or be lapsed, in any store; it is named by its number,
// which [Store.Get] shows. Resolve does not ask for the fingerprint.
//
// An attempt that is still at work is not stopped by it, but fenced off: its heartbeat cancels its context, and what it tries to
// record is refused with ErrStaleAttempt.
//
// Resolve returns ErrStaleAttempt when another attempt has begun, or this one has ended in another way; ErrLeaseExpired when the
// record has been forgotten; ErrResponseTooLarge as Complete does. A call repeated with the same resolution succeeds and changes
// nothing. The outcome is remembered for the retention, counted from now.
func (s *Store) Resolve(ctx context.Context, k Key, attempt uint64, resolution Resolution) error {
	if err := s.resolve(ctx, k, attempt, resolution); err != nil {
		return wrap("resolve", k, err)
	}
	return nil
}

func (s *Store) resolve(ctx context.Context, k Key, attempt uint64, resolution Resolution) error {
	if err := k.validate(); err != nil {
		return err
	}
	var response []byte // null unless done
	switch resolution.state {
	case StateDone:
		response = []byte(resolution.response)
	case StateFailed, StateRetryable:
	default:
		return errors.New("the resolution is empty: use AsDone, AsFailed or AsRetryable")
	}
	return s.change(ctx, transition{
		key: k, attempt: attempt, wanted: resolution.state, response: resolution.response, late: true,
		update: func(ctx context.Context) (bool, error) {
			n, err := s.exec(ctx, s.sql.Resolve, s.arguments(k.Tenant, k.Operation, k.Value, fencingToken(attempt),
				string(resolution.state), response, s.retention))
			return n > 0, err
		},
	})
}
