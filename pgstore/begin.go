package pgstore

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// Begin reserves the key for one execution, or says what stands in the way. [Store] has the whole table.
//
//   - (record, true, nil): the caller, and nobody else, executes now, as record.Attempt, and ends with Complete or Fail
//     before record.Remaining is over. If record.Abandoned is not 0, an attempt before it was lost in the middle.
//   - (record, false, nil): the operation has ended. record.State is StateDone, with its response, or StateFailed.
//   - ErrInProgress: another attempt holds the key; errors.As finds an [InProgressError] with the remaining lease.
//   - ErrConflict: the key belongs to a request with another fingerprint.
//   - ErrAbandoned, of a store made with [WithoutTakeover] only: the lease of the key's attempt has lapsed, and somebody has to say
//     what became of it; see [Store.Resolve].
//
// The fingerprint is a digest of everything that makes the request what it is, 1 to [MaxFingerprintBytes] bytes of any
// value.
//
// With any other error Begin does not know, and the caller must not execute. Where the server's answer got lost, Begin
// asks again, on another connection, and recognises a record of its own; where it cannot (the context is over, the server
// stays away), the key may be held for one lease, and is free after it.
func (s *Store) Begin(ctx context.Context, k Key, fingerprint string) (Record, bool, error) {
	r, err := s.begin(ctx, k, fingerprint)
	if err != nil {
		return Record{}, false, wrap("begin", k, err)
	}
	return r.record, r.created, nil
}

// reservation is what begin got: the attempt that the caller now is, or the outcome of another.
type reservation struct {
	record  Record
	created bool

	// trusted is until when, on the local monotonic clock, nobody else can own the key: what the database said was left of
	// the lease, counted from the moment before the statement was sent. Answers that come late make it no later.
	trusted time.Time
}

func (s *Store) begin(ctx context.Context, k Key, fingerprint string) (reservation, error) {
	if err := k.validate(); err != nil {
		return reservation{}, err
	}
	if err := validateFingerprint(fingerprint); err != nil {
		return reservation{}, err
	}
	var (
		created, sameFingerprint bool
		r                        row
		sent                     time.Time
		claim                    = s.newClaim() // one for all runs, by which a later run knows an earlier one's record
	)
	err := s.retry(ctx, func(ctx context.Context) error {
		r, sent = row{}, time.Now()
		found, err := s.queryRow(ctx, s.sql.Begin,
			s.arguments(k.Tenant, k.Operation, k.Value, []byte(fingerprint), claim, s.lease, s.retention),
			&created, &sameFingerprint, &r.state, &r.response, &r.attempt, &r.abandoned, &r.expiresAt, &r.remaining)
		switch {
		case err != nil:
			return err
		case !found:
			return errLostRace
		case created && r.remaining <= 0: // the statement waited out its own lease
			return s.beginAfresh(ctx, k, r.attempt)
		}
		return nil
	})
	switch {
	case errors.Is(err, errLostRace): // in every run; whoever won them has the key, or has just given it back
		return reservation{}, &InProgressError{RetryAfter: unknownLeaseRetryAfter}
	case err != nil:
		return reservation{}, err
	case !sameFingerprint:
		return reservation{}, ErrConflict
	}
	if !created && State(r.state) == StateInProgress {
		if r.remaining <= 0 {
			return reservation{}, fmt.Errorf("%w: attempt %d", ErrAbandoned, r.attempt)
		}
		return reservation{}, &InProgressError{RetryAfter: time.Duration(r.remaining) * time.Microsecond}
	}
	r.fingerprint = byteString(fingerprint)
	record := r.record()
	return reservation{record: record, created: created, trusted: sent.Add(record.Remaining)}, nil
}

// beginAfresh has begin run again after an attempt that nobody has executed and whose lease has lapsed already. The next run
// takes it over, by its claim without a trace; where nothing is taken over, it has to be released first.
func (s *Store) beginAfresh(ctx context.Context, k Key, attempt int64) error {
	if s.noTakeover {
		if _, err := s.exec(ctx, s.sql.Resolve, s.arguments(k.Tenant, k.Operation, k.Value, attempt, string(StateRetryable),
			[]byte(nil), s.retention)); err != nil {
			return err
		}
	}
	return errLostRace
}
