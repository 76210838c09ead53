package pgstore

import (
	"context"
	"errors"
	"time"
)

// Begin reserves the key for one execution, or says what stands in the way. [Store] has the whole table.
//
//   - (record, true, nil): the caller, and nobody else, executes now, as record.Attempt, and ends with Complete or Fail
//     before record.Remaining is over. If record.Abandoned is not 0, an attempt before it was lost in the middle.
//   - (record, false, nil): the operation has ended. record.State is StateDone, with its response, or StateFailed.
//   - ErrInProgress: another attempt holds the key; errors.As finds an [InProgressError] with the remaining lease.
//   - ErrConflict: the key belongs to a request with another fingerprint.
//
// The fingerprint is a digest of everything that makes the request what it is, 1 to [MaxFingerprintBytes] bytes of any
// value.
//
// With any other error Begin does not know, and the caller must not execute. Where the server's answer got lost, Begin
// asks again, on another connection, and recognises a record of its own; where it cannot (the context is over, the server
// stays away), the key may be held for one lease, and is free after it.
func (s *Store) Begin(ctx context.Context, k Key, fingerprint string) (Record, bool, error) {
	record, created, err := s.begin(ctx, k, fingerprint)
	if err != nil {
		return Record{}, false, wrap("begin", k, err)
	}
	return record, created, nil
}

func (s *Store) begin(ctx context.Context, k Key, fingerprint string) (Record, bool, error) {
	if err := k.validate(); err != nil {
		return Record{}, false, err
	}
	if err := validateFingerprint(fingerprint); err != nil {
		return Record{}, false, err
	}
	var (
		created, sameFingerprint bool
		r                        row
		claim                    = s.newClaim() // one for all runs, by which a later run knows an earlier one's record
	)
	err := s.retry(ctx, func(ctx context.Context) error {
		r = row{}
		found, err := s.queryRow(ctx, s.sql.Begin,
			s.arguments(k.Tenant, k.Operation, k.Value, []byte(fingerprint), claim, s.lease, s.retention),
			&created, &sameFingerprint, &r.state, &r.response, &r.attempt, &r.abandoned, &r.expiresAt, &r.remaining)
		if err != nil {
			return err
		}
		if !found || created && r.remaining <= 0 { // the latter where the statement waited out its own lease
			return errLostRace
		}
		return nil
	})
	switch {
	case errors.Is(err, errLostRace): // in every run; whoever won them has the key, or has just given it back
		return Record{}, false, &InProgressError{RetryAfter: unknownLeaseRetryAfter}
	case err != nil:
		return Record{}, false, err
	case !sameFingerprint:
		return Record{}, false, ErrConflict
	}
	r.fingerprint = byteString(fingerprint)
	record := r.record()
	if !created && record.State == StateInProgress {
		return Record{}, false, &InProgressError{RetryAfter: max(record.Remaining, time.Microsecond)}
	}
	return record, created, nil
}
