package pgstore

import "context"

// Extend gives the attempt a fresh lease, counted from now, whatever was left of the old one, and returns the record with
// it. Errors are those of [Store.Complete]; after any of them the caller cannot rely on more than the lease that it knew
// of before.
func (s *Store) Extend(ctx context.Context, k Key, fingerprint string, attempt uint64) (Record, error) {
	var r row
	err := s.apply(ctx, transition{
		key: k, fingerprint: fingerprint, attempt: attempt, wanted: StateInProgress,
		update: func(ctx context.Context) (bool, error) {
			r = row{state: string(StateInProgress), fingerprint: byteString(fingerprint), attempt: fencingToken(attempt)}
			return s.queryRow(ctx, s.sql.Extend, s.arguments(k.Tenant, k.Operation, k.Value, []byte(fingerprint),
				fencingToken(attempt), s.lease, s.retention),
				&r.abandoned, &r.expiresAt, &r.remaining)
		},
	})
	if err != nil {
		return Record{}, wrap("extend", k, err)
	}
	return r.record(), nil
}
