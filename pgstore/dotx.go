package pgstore

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// maxBodies is how often DoTx runs its function at the most: again where the server gave way to another transaction (40001, 40P01),
// and where the connection got lost after the function had ended and the transaction turned out to be gone.
const maxBodies = 5

// DoTx runs fn in a transaction that begins the key, does what fn does on tx, and completes the key: one commit, so the effects in
// the database and the stored response are there together or not at all. Whatever dies at whatever moment, they are there exactly once.
//
//   - fn returns a response: it is stored, and everything is committed. Repeats get it, as of [Store.Do].
//   - fn returns an error marked by [Permanent]: its writes are rolled back, and then the failure is recorded. DoTx returns ErrFailed
//     and the error; repeats get ErrFailed.
//   - fn returns any other error, panics or calls Goexit, or the process dies: everything is rolled back. The key is free, as if
//     nobody had called. fn's effects outside of the database, if it has any, are not: use Do for those.
//
// The transaction is READ COMMITTED whatever the session's default is. fn must not end it. Where the server gives way to another
// transaction (40001, 40P01), everything runs again, fn included, five times at the most; and where the connection gets lost on the
// way to a COMMIT or back, DoTx begins again, and finds its own response, or that the transaction is certainly gone. If it can find neither, the error is
// ErrOutcomeUnknown with the reason, and the next call tells. With any other error nothing of this call has been committed.
//
// A second caller waits for the first one's transaction, for [WithLockWait] at the most, and then gets ErrInProgress; with
// [WithWait] it tries on. The lease plays no part: the transaction holds the key while it lasts.
//
// Beside those of fn, DoTx takes four round trips: BEGIN with its settings, Begin, Complete, COMMIT; a repeat takes three. The
// store has to be on a pool. Otherwise as Do.
func (s *Store) DoTx(
	ctx context.Context, k Key, fingerprint string, fn func(ctx context.Context, tx pgx.Tx, r Record) (string, error), opts ...DoOption,
) (Outcome, error) {
	outcome, err := s.doTx(ctx, k, fingerprint, fn, opts)
	if err != nil {
		return outcome, wrap("do in a transaction", k, err)
	}
	return outcome, nil
}

func (s *Store) doTx(
	ctx context.Context, k Key, fingerprint string, fn func(ctx context.Context, tx pgx.Tx, r Record) (string, error), opts []DoOption,
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
	db, ok := s.db.(txBeginner)
	if !ok {
		return Outcome{}, fmt.Errorf("the store's handle, a %T, has no BeginTx: it has to be a pool", s.db)
	}
	b := &txBody{store: s, db: db, key: k, fingerprint: fingerprint, fn: fn, options: o}
	var outcome Outcome
	polling := false
	err = waiting(ctx, o.wait, func(ctx context.Context) (err error) {
		if polling {
			if err := s.stillHeld(ctx, k); err != nil {
				return err
			}
		}
		polling = true
		outcome, err = b.run(ctx)
		return err
	})
	if err != nil {
		return outcome, b.settle(ctx, err)
	}
	return outcome, nil
}

// txBeginner is what DoTx needs of a handle beside DB.
type txBeginner interface {
	BeginTx(ctx context.Context, options pgx.TxOptions) (pgx.Tx, error)
}

// stillHeld returns ErrInProgress if a committed attempt holds the key. It is the one query of a poll; without it each would be a
// transaction.
func (s *Store) stillHeld(ctx context.Context, k Key) error {
	record, live, err := s.Get(ctx, k)
	if err != nil {
		return err
	}
	if live && record.State == StateInProgress && record.Remaining > 0 {
		return &InProgressError{RetryAfter: record.Remaining}
	}
	return nil
}

// txBody is one call of DoTx.
type txBody struct {
	store       *Store
	db          txBeginner
	key         Key
	fingerprint string
	fn          func(ctx context.Context, tx pgx.Tx, r Record) (string, error)
	options     *doOptions

	attempt uint64 // of the last transaction in which fn ran, or 0
	lost    error  // of a COMMIT whose answer got lost, until the truth is known
}

// run runs transactions until one has an outcome.
func (b *txBody) run(ctx context.Context) (Outcome, error) {
	bound := minPause
	for bodies, runs := 0, 1; ; runs++ {
		last := b.attempt
		outcome, again, err := b.once(ctx)
		if err == nil {
			// A record of the attempt whose COMMIT got lost is this call's own.
			outcome.Replayed = outcome.Replayed && outcome.Attempt != b.attempt
			return outcome, nil
		}
		if b.attempt != last {
			bodies++
		}
		if !again || bodies == maxBodies || runs == maxTries || !pause(ctx, jittered(bound)) {
			return outcome, err
		}
		bound = min(2*bound, maxPause)
	}
}

// once runs one transaction, and reports whether another one may do better.
func (b *txBody) once(ctx context.Context) (_ Outcome, again bool, _ error) {
	tx, err := b.db.BeginTx(ctx, pgx.TxOptions{BeginQuery: fmt.Sprintf(
		"begin isolation level read committed; set local lock_timeout = %d", b.options.lockWait.Milliseconds())})
	if err != nil {
		return Outcome{}, connectionLost(err), b.store.interpret(err)
	}
	defer b.rollback(ctx, tx)
	store := b.store.WithTx(tx)
	r, err := store.begin(ctx, b.key, b.fingerprint)
	if err != nil {
		return Outcome{}, serializationFault(err) || connectionLost(err), err
	}
	b.lost = nil // it is there for Begin to find, or certainly gone
	if !r.created {
		outcome, err := replayed(r.record)
		return outcome, false, err
	}
	b.attempt = r.record.Attempt
	response, err := b.fn(ctx, bodyTx{tx}, r.record)
	if err != nil {
		return Outcome{}, serializationFault(err) && endingOf(err) != StateFailed, &bodyError{err}
	}
	return b.finish(ctx, tx, response)
}

// finish completes the key and commits, detached from the end of ctx: fn has done its work.
func (b *txBody) finish(ctx context.Context, tx pgx.Tx, response string) (_ Outcome, again bool, _ error) {
	ctx = context.WithoutCancel(ctx)
	store := b.store.WithTx(tx)
	err := inTime(ctx, b.options.recordTimeout, func(ctx context.Context) error {
		return store.complete(ctx, store.sql.CompleteHeld, b.key, b.fingerprint, b.attempt, response)
	})
	if err != nil {
		return Outcome{}, serializationFault(err) || connectionLost(err), err // without COMMIT it is certainly gone
	}
	err = inTime(ctx, b.options.recordTimeout, tx.Commit)
	switch {
	case err == nil:
		return Outcome{Response: response, Attempt: b.attempt}, false, nil
	case serializationFault(err):
		return Outcome{}, true, err
	case certainlyUndone(err):
		return Outcome{}, false, err
	}
	b.lost = err
	return Outcome{}, true, err
}

// certainlyUndone reports whether the error of a COMMIT says that nothing has been committed. A server that goes away in the middle
// says nothing of the kind, not even in its last words: it may have been waiting for a standby, with everything committed.
func certainlyUndone(err error) bool {
	if errors.Is(err, pgx.ErrTxCommitRollback) {
		return true
	}
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	return ok && !connectionLost(err) && pgErr.Code != codeStatementCompletionUnknown
}

// rollback ends what has not been committed, detached from the end of ctx. Where it fails, pgx closes the connection, and the
// server rolls back.
func (b *txBody) rollback(ctx context.Context, tx pgx.Tx) {
	_ = inTime(context.WithoutCancel(ctx), b.options.recordTimeout, tx.Rollback)
}

// settle makes of the last transaction's error what DoTx returns.
func (b *txBody) settle(ctx context.Context, err error) error {
	if b.lost != nil {
		return fmt.Errorf("%w: %w", ErrOutcomeUnknown, err)
	}
	body, ok := errors.AsType[*bodyError](err)
	if !ok {
		return err
	}
	// There is no lease to end the tries; the key may be held for a moment by a twin that records the same.
	return settle(ctx, b.options, time.Now().Add(b.options.recordTimeout), body.err, func(ctx context.Context, state State) error {
		if state == StateRetryable {
			return nil // the rollback has freed the key
		}
		return b.fail(ctx)
	})
}

// fail records that the operation has failed for good, now that the transaction is gone in which fn found out.
func (b *txBody) fail(ctx context.Context) error {
	r, err := b.store.begin(ctx, b.key, b.fingerprint)
	switch {
	case err != nil:
		return err
	case r.created:
		return b.store.fail(ctx, b.key, b.fingerprint, r.record.Attempt, StateFailed)
	case r.record.State == StateFailed:
		return nil
	}
	return ErrStaleAttempt // another caller has got it done meanwhile
}

// bodyError is an error of fn, closed: an ErrInProgress or the like inside it speaks of another key.
type bodyError struct{ err error }

func (e *bodyError) Error() string { return e.err.Error() }

// bodyTx is the transaction as fn sees it: it cannot be ended, so that no effect is committed without its record. A habitual
// "defer tx.Rollback(ctx)" does nothing.
type bodyTx struct{ pgx.Tx }

var errEndsTransaction = errors.New("idempotency: DoTx ends the transaction, its function must not")

// Commit implements pgx.Tx.
func (bodyTx) Commit(context.Context) error { return errEndsTransaction }

// Rollback implements pgx.Tx.
func (bodyTx) Rollback(context.Context) error { return errEndsTransaction }
