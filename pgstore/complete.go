package pgstore

import "context"

// Complete ends the attempt with success and stores its response, any bytes up to the limit of [WithMaxResponse]. Every
// Begin with the same fingerprint gets them back, byte for byte, for the retention, counted from now.
//
// It returns ErrLeaseExpired, ErrConflict or ErrStaleAttempt, as [Store] says, when the attempt does not hold the key:
// then nothing was recorded, and somebody else may be executing. A call repeated with the same response succeeds and
// changes nothing, so after an error that leaves the outcome open (a lost connection, a context that ended) it is safe to
// call again.
func (s *Store) Complete(ctx context.Context, k Key, fingerprint string, attempt uint64, response string) error {
	if err := s.complete(ctx, s.sql.Complete, k, fingerprint, attempt, response); err != nil {
		return wrap("complete", k, err)
	}
	return nil
}

// complete runs Complete's statement, or CompleteHeld, which takes the same arguments.
func (s *Store) complete(ctx context.Context, sql string, k Key, fingerprint string, attempt uint64, response string) error {
	return s.apply(ctx, transition{
		key: k, fingerprint: fingerprint, attempt: attempt, wanted: StateDone, response: response, late: s.lateCompletion,
		update: func(ctx context.Context) (bool, error) {
			n, err := s.exec(ctx, sql, s.arguments(k.Tenant, k.Operation, k.Value, []byte(fingerprint),
				fencingToken(attempt), []byte(response), s.retention))
			return n > 0, err
		},
	})
}
