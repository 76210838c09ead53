package pgstore

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// A statement is run at most maxTries times, with a pause before each further run that is drawn between nothing and a
// bound which doubles from minPause to maxPause: under half a second on average in all. Ten runs lose a race in which each
// has even odds once in a thousand times, and outlive up to nine dead connections that a server's restart left in a pool;
// more of them, and longer outages, belong to the caller, who knows what waiting is worth.
const (
	maxTries = 10
	minPause = 2 * time.Millisecond
	maxPause = 200 * time.Millisecond
)

// errLostRace says that a statement met a change by another session between its snapshot and its write, and wrote
// nothing. It is safe to run again anywhere, also inside a caller's transaction.
var errLostRace = errors.New("idempotency: lost a race with another session")

// retry runs try until it succeeds, fails for good, or has run maxTries times.
func (s *Store) retry(ctx context.Context, try func(ctx context.Context) error) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("nothing was sent: %w", err)
	}
	bound := minPause
	for run := 1; ; run++ {
		err := try(ctx)
		if err == nil || !s.worthRunningAgain(err) {
			return err
		}
		if run == maxTries {
			return fmt.Errorf("gave up after %d runs: %w", maxTries, err)
		}
		if !pause(ctx, jittered(bound)) {
			if errors.Is(err, ctx.Err()) {
				return err // it is what ended the run
			}
			return fmt.Errorf("%w: not run again after: %w", ctx.Err(), err)
		}
		bound = min(2*bound, maxPause)
	}
}

// worthRunningAgain reports whether running the same statement again can succeed and can do no harm. Every statement of
// the store is safe to repeat after a lost answer: Begin finds its own claim, the others find that their change is there.
// Inside a caller's transaction only a lost race is run again: any error of the server has already aborted it.
func (s *Store) worthRunningAgain(err error) bool {
	if errors.Is(err, errLostRace) {
		return true
	}
	if !s.autocommit() {
		return false
	}
	return serializationFault(err) || connectionLost(err)
}

// serializationFault reports whether the server gave way to another transaction: what it was doing is certainly undone.
func serializationFault(err error) bool {
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	return ok && (pgErr.Code == codeSerializationFailure || pgErr.Code == codeDeadlockDetected)
}

// connectionLost reports whether err says that the network or the server's process went away, before or after the
// statement was sent. In the simple protocol pgx says of a connection that broke in the middle only that it is closed. A
// connection that is in use by another goroutine ("conn busy") is a caller's bug and not among them.
func connectionLost(err error) bool {
	if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok {
		switch pgErr.Code {
		case codeAdminShutdown, codeCrashShutdown, codeCannotConnectNow, codeIdleSessionTimeout:
			return true
		}
		return strings.HasPrefix(pgErr.Code, codeConnectionException)
	}
	if _, ok := errors.AsType[net.Error](err); ok {
		return true
	}
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, net.ErrClosed) ||
		errors.Is(err, pgconn.ErrConnClosed)
}

// autocommit reports whether each statement commits by itself on a connection that still works: true for a pool, false
// inside a transaction that somebody else commits, and on a single connection that is closed.
func (s *Store) autocommit() bool {
	var conn *pgx.Conn
	switch db := s.db.(type) {
	case pgx.Tx:
		return false
	case *pgx.Conn:
		conn = db
	case *pgxpool.Conn:
		conn = db.Conn()
	default:
		return true
	}
	return !conn.IsClosed() && conn.PgConn().TxStatus() == 'I' // not 'I' where the caller has run BEGIN by hand
}

// jittered draws a pause between nothing and the bound, so that those who met once do not meet again.
func jittered(bound time.Duration) time.Duration {
	return rand.N(bound) //nolint:gosec // jitter needs no secret
}

// pause waits for d, or until ctx is done; then it returns false.
func pause(ctx context.Context, d time.Duration) bool {
	if ctx.Err() != nil {
		return false
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}
