package pgstore

import (
	"errors"
	"fmt"
)

// Retryable marks an error that the function of [Store.Do] or [Store.DoTx] returns: the attempt has had no effect, and the caller
// promises it. The key is free at once, for the same fingerprint. errors.Is and errors.As still find err, and the mark counts
// through any wrapping.
//
// Around one error, or in one tree of joined errors, [Permanent] wins over Retryable: of two statements that contradict each other
// the one counts that runs nothing again. A mark around nil is a mistake that says nothing about effects: it becomes an error that
// says so, without a mark.
func Retryable(err error) error {
	if err == nil {
		return fmt.Errorf("%w around nothing", errEmptyMark)
	}
	return &retryableError{err}
}

// Permanent marks an error that the function of [Store.Do] or [Store.DoTx] returns: the operation will never succeed. The failure
// is recorded, and everyone who repeats the key gets [ErrFailed] until the retention is over. See [Retryable] for what else holds.
func Permanent(err error) error {
	if err == nil {
		return fmt.Errorf("%w around nothing", errEmptyMark)
	}
	return &permanentError{err}
}

var errEmptyMark = errors.New("idempotency: Retryable or Permanent")

type retryableError struct{ err error }

func (e *retryableError) Error() string { return e.err.Error() }
func (e *retryableError) Unwrap() error { return e.err }

type permanentError struct{ err error }

func (e *permanentError) Error() string { return e.err.Error() }
func (e *permanentError) Unwrap() error { return e.err }

// endingOf returns the state in which an error of a caller's function leaves the key, or StateInProgress if it says nothing of
// effects: then the key is held until its lease lapses, as after a crash.
func endingOf(err error) State {
	if _, ok := errors.AsType[*permanentError](err); ok {
		return StateFailed
	}
	if _, ok := errors.AsType[*retryableError](err); ok {
		return StateRetryable
	}
	return StateInProgress
}

// settledError is an error of a caller's function on its way out of Do or DoTx. Its mark has had its effect and must have no other:
// a function may call Do in turn, and what the inner function promised says nothing about the outer one's effects.
type settledError struct{ err error }

func (e *settledError) Error() string        { return e.err.Error() }
func (e *settledError) Is(target error) bool { return errors.Is(e.err, target) }

func (e *settledError) As(target any) bool {
	switch target.(type) {
	case **retryableError, **permanentError:
		return false
	}
	return errors.As(e.err, target)
}

// notRecorded joins ErrNotRecorded and the reason.
func notRecorded(reason error) error { return fmt.Errorf("%w: %w", ErrNotRecorded, reason) }
