package pgstore

import (
	"context"
	"time"
)

// Extend gives the attempt a fresh lease, counted from now, whatever was left of the old one, and returns the record with
// it. Errors are those of [Store.Complete]; after any of them the caller cannot rely on more than the lease that it knew
// of before.
func (s *Store) Extend(ctx context.Context, k Key, fingerprint string, attempt uint64) (Record, error) {
	record, _, err := s.extend(ctx, k, fingerprint, attempt)
	if err != nil {
		return Record{}, wrap("extend", k, err)
	}
	return record, nil
}

// extend also returns until when the lease can be trusted; see reservation.
func (s *Store) extend(ctx context.Context, k Key, fingerprint string, attempt uint64) (Record, time.Time, error) {
	var (
		r    row
		sent time.Time
	)
	err := s.apply(ctx, transition{
		key: k, fingerprint: fingerprint, attempt: attempt, wanted: StateInProgress,
		update: func(ctx context.Context) (bool, error) {
			r = row{state: string(StateInProgress), fingerprint: byteString(fingerprint), attempt: fencingToken(attempt)}
			sent = time.Now()
			return s.queryRow(ctx, s.sql.Extend, s.arguments(k.Tenant, k.Operation, k.Value, []byte(fingerprint),
				fencingToken(attempt), s.lease, s.retention),
				&r.abandoned, &r.expiresAt, &r.remaining)
		},
	})
	if err != nil {
		return Record{}, time.Time{}, err
	}
	record := r.record()
	return record, sent.Add(record.Remaining), nil
}
