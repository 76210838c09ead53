package pgstore

import (
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

// What a caller branches on, with errors.Is. Methods return them wrapped as
// "idempotency: <call> <quoted key>: <sentinel>", some with a reason behind.
var (
	// ErrConflict is returned by every call that takes a fingerprint when the key's live record has another one: the client
	// used one key for two requests. It is a caller's bug and never a repeat; answer it with 422 or so, not with a retry.
	ErrConflict = errors.New("idempotency: key reused with different payload")

	// ErrInProgress is returned by Begin while another attempt holds the key; errors.As finds an [InProgressError].
	ErrInProgress = errors.New("idempotency: request already in progress")

	// ErrLeaseExpired is returned by Complete, Fail and Extend when the key has no live record: the lease lapsed and nobody
	// has begun again, or the outcome has been forgotten. Nothing was recorded. It is also the cause with which Do cancels its
	// function's context when the lease could not be extended in time, and what Resolve returns for a record that is forgotten.
	ErrLeaseExpired = errors.New("idempotency: lease expired before completion")

	// ErrStaleAttempt is returned by Complete, Fail and Extend when the attempt no longer owns the key: another one took
	// over, or it has already ended in another way than the call asks for. It is also the cause with which Do cancels its
	// function's context. This call recorded nothing; a release whose answer
	// got lost may have been recorded before, and been followed by another attempt.
	ErrStaleAttempt = errors.New("idempotency: attempt no longer owns the key")

	// ErrAbandoned is returned by Begin, Do and DoTx of a store made with [WithoutTakeover] when the lease of the key's attempt
	// has lapsed: nobody knows whether its effect happened. [Store.Get] shows the record, [Store.Resolve] ends it.
	ErrAbandoned = errors.New("idempotency: attempt was abandoned and awaits resolution")

	// ErrFailed is returned by Do and DoTx when the operation has failed for good: to the caller whose function returned
	// [Permanent], once that is recorded, and to everyone who repeats the key until the retention is over.
	ErrFailed = errors.New("idempotency: operation failed for good")

	// ErrNotRecorded is returned by Do and DoTx, together with the reason, when the function has ended but its ending could not be
	// recorded. Of Do: if the function returned a response, its effect has happened, Outcome.Response is that response, and the
	// next attempt will not know of it unless it reconciles.
	ErrNotRecorded = errors.New("idempotency: the ending was not recorded")

	// ErrOutcomeUnknown is returned by DoTx, together with the reason, when the answer to COMMIT got lost and the truth could not be
	// read afterwards: either everything has happened or nothing has. Call again: the next call tells.
	ErrOutcomeUnknown = errors.New("idempotency: it is unknown whether the transaction committed")

	// ErrKeyEmpty is returned by every call whose key has an empty component.
	ErrKeyEmpty = errors.New("idempotency: empty key component")

	// ErrKeyInvalid is returned by every call whose key has a component that is too long, not UTF-8, or holds NUL.
	ErrKeyInvalid = errors.New("idempotency: invalid key component")

	// ErrFingerprintInvalid is returned by every call whose fingerprint is empty or longer than [MaxFingerprintBytes].
	ErrFingerprintInvalid = errors.New("idempotency: invalid fingerprint")

	// ErrResponseTooLarge is returned by Complete for a response over the limit; see [WithMaxResponse]. Nothing was
	// recorded, and the attempt still holds the key.
	ErrResponseTooLarge = errors.New("idempotency: response too large")

	// ErrNotMigrated is returned by every call when the store's table, or a column of it, does not exist.
	ErrNotMigrated = errors.New("idempotency: database not migrated")
)

// InProgressError is the form in which ErrInProgress comes: errors.As finds it, errors.Is finds the sentinel.
type InProgressError struct {
	// RetryAfter is how long the other attempt's lease still runs: the longest time after which a repeat can get through,
	// if that attempt does not end before and does not extend. Always positive. Where the call gave up before it could
	// read the lease, it is a moment to wait before the next call.
	RetryAfter time.Duration

	cause error
}

// Error returns the text of ErrInProgress.
func (e *InProgressError) Error() string { return ErrInProgress.Error() }

// Unwrap returns ErrInProgress, and the driver's error where there is one.
func (e *InProgressError) Unwrap() []error {
	if e.cause == nil {
		return []error{ErrInProgress}
	}
	return []error{ErrInProgress, e.cause}
}

// unknownLeaseRetryAfter is InProgressError's RetryAfter where no lease could be read: long enough not to hammer the
// database, short beside any lease.
const unknownLeaseRetryAfter = 100 * time.Millisecond

// SQLSTATE codes that mean something to the store. Names as in PostgreSQL's appendix of error codes.
const (
	codeConnectionException        = "08" // the class
	codeReadOnlyTransaction        = "25006"
	codeInvalidSchemaName          = "3F000"
	codeSerializationFailure       = "40001"
	codeDeadlockDetected           = "40P01"
	codeStatementCompletionUnknown = "40003"
	codeUndefinedTable             = "42P01"
	codeUndefinedColumn            = "42703"
	codeLockNotAvailable           = "55P03"
	codeAdminShutdown              = "57P01"
	codeCrashShutdown              = "57P02"
	codeCannotConnectNow           = "57P03"
	codeIdleSessionTimeout         = "57P05"
)

// interpret translates an error of the driver into what the store's callers know. Every error of pgx passes here once.
// It adds no text of the server beyond the primary message: PgError.Detail may repeat a row.
func (s *Store) interpret(err error) error {
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	if !ok {
		return err
	}
	switch pgErr.Code {
	case codeUndefinedTable, codeUndefinedColumn, codeInvalidSchemaName:
		return fmt.Errorf("%w: run migrations.Up, or the SQL that migrations.SQL prints, for schema %q: %w",
			ErrNotMigrated, s.schema, err)
	case codeLockNotAvailable:
		return &InProgressError{RetryAfter: unknownLeaseRetryAfter, cause: err}
	case codeReadOnlyTransaction:
		return fmt.Errorf("the database is read-only on this connection, connect to the primary: %w", err)
	}
	return err
}

// wrap gives an error its place: the call and the quoted key.
func wrap(call string, k Key, err error) error {
	return fmt.Errorf("idempotency: %s %s: %w", call, k, err)
}
