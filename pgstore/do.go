package pgstore

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Outcome is what became of an operation.
type Outcome struct {
	// Response is what the function returned, in this call or in an earlier one: the same bytes for everyone.
	Response string

	// Replayed says that another attempt's outcome was found, and this call ran no function to get it.
	Replayed bool

	// Attempt is the execution that the outcome comes from.
	Attempt uint64
}

// Do runs fn at most once at a time, and not again once it has ended for good: it begins the key, keeps its lease alive with a
// heartbeat while fn runs, and records how fn ended. Whoever repeats the key gets the outcome.
//
//   - fn returns a response: it is stored. Repeats get it, for the retention, as an Outcome with Replayed.
//   - fn returns an error marked by [Retryable]: it has had no effect. The key is free at once. Do returns the error.
//   - fn returns an error marked by [Permanent]: the failure is final. Do returns ErrFailed and the error; repeats get ErrFailed.
//   - fn returns any other error (context.Canceled too), panics or calls runtime.Goexit, or the process dies: nobody knows. The
//     key is held until its lease lapses, and the next attempt sees Record.Abandoned. Panics and Goexit go on through Do.
//
// If fn is not run, the error is that of [Store.Begin]: ErrInProgress (see [WithWait]), ErrConflict, ErrAbandoned, or one that says
// nothing and means that the store is down. It is ErrLeaseExpired if the answer to Begin took as long as the lease.
//
// fn gets the record of its own attempt, Abandoned included, and a context that ends with ctx, and also when the lease is lost:
// context.Cause is then an error that is ErrStaleAttempt or ErrLeaseExpired. fn should stop then, since somebody else may be
// executing. While fn runs, Do holds no connection.
//
// How fn ended is recorded even if ctx has ended, and tried again until the lease is over. If it cannot be recorded, or is refused
// because the lease was lost, the error is ErrNotRecorded with the reason, and beside it Do returns what fn returned: the Outcome
// with the response, or fn's own error. The same goes for a response over the limit of [WithMaxResponse] (ErrResponseTooLarge): the
// effect has happened, so the key is not freed. Errors of fn are always found by errors.Is and errors.As.
//
// Do works on a pool. On a transaction, which would have to stay open while fn runs, and on a single connection, which fn and the
// heartbeat would have to share, it returns an error; see [Store.DoTx].
func (s *Store) Do(
	ctx context.Context, k Key, fingerprint string, fn func(ctx context.Context, r Record) (string, error), opts ...DoOption,
) (Outcome, error) {
	outcome, err := s.do(ctx, k, fingerprint, fn, opts)
	if err != nil {
		return outcome, wrap("do", k, err)
	}
	return outcome, nil
}

func (s *Store) do(
	ctx context.Context, k Key, fingerprint string, fn func(ctx context.Context, r Record) (string, error), opts []DoOption,
) (Outcome, error) {
	o, err := newDoOptions(opts)
	if err != nil {
		return Outcome{}, err
	}
	if fn == nil {
		return Outcome{}, errMissingFunction
	}
	if err := s.requirePool(); err != nil {
		return Outcome{}, err
	}
	var r reservation
	err = waiting(ctx, o.wait, func(ctx context.Context) (err error) {
		r, err = s.begin(ctx, k, fingerprint)
		return err
	})
	if err != nil {
		return Outcome{}, err
	}
	if !r.created {
		return replayed(r.record)
	}
	if time.Until(r.trusted) <= 0 {
		// The answer was under way for as long as the lease. Nobody has executed this attempt, and nobody shall suspect it.
		_ = s.resolve(ctx, k, r.record.Attempt, AsRetryable())
		return Outcome{}, fmt.Errorf("%w: the answer to Begin came too late, nothing was executed", ErrLeaseExpired)
	}
	response, trusted, err := s.underHeartbeat(ctx, k, fingerprint, r, fn)
	if err != nil {
		return Outcome{}, settle(ctx, o, trusted, err, func(ctx context.Context, state State) error {
			return s.fail(ctx, k, fingerprint, r.record.Attempt, state)
		})
	}
	outcome := Outcome{Response: response, Attempt: r.record.Attempt}
	err = record(ctx, o, trusted, func(ctx context.Context) error {
		return s.complete(ctx, s.sql.Complete, k, fingerprint, outcome.Attempt, response)
	})
	if err != nil {
		return outcome, notRecorded(err)
	}
	return outcome, nil
}

var errMissingFunction = errors.New("the function is nil")

// requirePool returns an error if the store's handle is one on which calls that run at once get into each other's way, or cannot
// commit.
func (s *Store) requirePool() error {
	switch s.db.(type) {
	case pgx.Tx:
		return errors.New("the store is inside a transaction: use Begin and Complete there, or a store on a pool")
	case missingTx:
		return errMissingTx
	case *pgx.Conn, *pgxpool.Conn:
		return errors.New("the store is on a single connection: it has to be on a pool")
	}
	return nil
}

// replayed is the outcome that a record which is not in progress holds.
func replayed(r Record) (Outcome, error) {
	outcome := Outcome{Response: r.Response, Replayed: true, Attempt: r.Attempt}
	if r.State == StateFailed {
		return outcome, ErrFailed
	}
	return outcome, nil
}

// underHeartbeat runs fn while a heartbeat keeps the lease, and returns until when the lease can be trusted. If fn was told that
// the lease was lost and returns an error, that error says so. The heartbeat ends with fn, also where fn panics or calls Goexit.
func (s *Store) underHeartbeat(
	ctx context.Context, k Key, fingerprint string, r reservation, fn func(ctx context.Context, r Record) (string, error),
) (response string, trusted time.Time, err error) {
	working, lose := context.WithCancelCause(ctx)
	defer lose(nil)
	beats := s.startHeartbeat(ctx, k, fingerprint, r, lose)
	defer func() { trusted = beats.stop() }()

	response, err = fn(working, r.record)
	if cause := context.Cause(working); err != nil && isRefusal(cause) && !errors.Is(err, cause) {
		err = fmt.Errorf("%w: %w", err, cause)
	}
	return response, trusted, err
}

// settle records with end how a function ended that returned an error, and returns what the caller gets.
func settle(
	ctx context.Context, o *doOptions, trusted time.Time, err error, end func(ctx context.Context, state State) error,
) error {
	state := endingOf(err)
	err = &settledError{err}
	if state == StateInProgress {
		return err
	}
	refusal := record(ctx, o, trusted, func(ctx context.Context) error { return end(ctx, state) })
	switch {
	case refusal != nil:
		return fmt.Errorf("%w: %w", err, notRecorded(refusal))
	case state == StateFailed:
		return fmt.Errorf("%w: %w", ErrFailed, err)
	}
	return err
}

// record runs try, detached from the end of ctx and each time with a timeout, until it succeeds, is refused, or the lease is over;
// at least once.
func record(ctx context.Context, o *doOptions, trusted time.Time, try func(ctx context.Context) error) error {
	ctx = context.WithoutCancel(ctx)
	bound := minPollPause
	for {
		err := inTime(ctx, o.recordTimeout, try)
		if err == nil || isRefusal(err) || errors.Is(err, ErrResponseTooLarge) {
			return err
		}
		rest := time.Until(trusted)
		if rest <= 0 {
			return err
		}
		pause(ctx, min(jittered(bound), rest))
		bound = min(2*bound, maxPollPause)
	}
}

// inTime runs try with a timeout.
func inTime(ctx context.Context, timeout time.Duration, try func(ctx context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	return try(ctx)
}

// Pauses between polls, and between tries to record, are drawn below a bound that doubles from the one to the other.
const (
	minPollPause = 5 * time.Millisecond
	maxPollPause = 500 * time.Millisecond
)

// waiting runs try until it ends in something else than ErrInProgress, or the wait is over.
func waiting(ctx context.Context, wait time.Duration, try func(ctx context.Context) error) error {
	until := time.Now().Add(wait)
	bound := minPollPause
	for {
		err := try(ctx)
		held, ok := errors.AsType[*InProgressError](err)
		rest := time.Until(until)
		if !ok || rest <= 0 {
			return err
		}
		// A lease that lapses is not waited beyond: the key may be free then.
		if !pause(ctx, min(jittered(bound)+time.Millisecond, rest, held.RetryAfter)) {
			return fmt.Errorf("%w while waiting: %w", ctx.Err(), err)
		}
		bound = min(2*bound, maxPollPause)
	}
}
