package pgstore

import "context"

// Fail ends the attempt without a response.
//
// With retryable it releases the key: the caller promises that the attempt had no effect, and the next Begin with the same
// fingerprint gets a new attempt at once. Without it the failure is final: every Begin with the same fingerprint gets a
// record in StateFailed. Either is remembered for the retention, counted from now.
//
// Who does not know whether there was an effect calls neither: the lease lapses, and the next attempt is told by
// Record.Abandoned.
//
// Errors are those of [Store.Complete]; a call repeated with the same retryable succeeds and changes nothing.
func (s *Store) Fail(ctx context.Context, k Key, fingerprint string, attempt uint64, retryable bool) error {
	state := StateFailed
	if retryable {
		state = StateRetryable
	}
	if err := s.fail(ctx, k, fingerprint, attempt, state); err != nil {
		return wrap("fail", k, err)
	}
	return nil
}

func (s *Store) fail(ctx context.Context, k Key, fingerprint string, attempt uint64, state State) error {
	return s.apply(ctx, transition{
		key: k, fingerprint: fingerprint, attempt: attempt, wanted: state, late: s.lateCompletion,
		update: func(ctx context.Context) (bool, error) {
			n, err := s.exec(ctx, s.sql.Fail, s.arguments(k.Tenant, k.Operation, k.Value, []byte(fingerprint),
				fencingToken(attempt), string(state), s.retention))
			return n > 0, err
		},
	})
}
