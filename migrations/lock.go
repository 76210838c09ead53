package migrations

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"hash/fnv"
	"time"

	"github.com/pressly/goose/v3/lock"
)

const (
	// LockPoll is the time between two attempts to get the lock against other migrators.
	LockPoll = 100 * time.Millisecond
	// LockWait is the longest time that a migrator waits for others, where its context allows that much.
	LockWait = 5 * time.Minute
)

// releaseTimeout bounds what is done after a caller's context may have ended.
const releaseTimeout = 10 * time.Second

// sessionLocker lets one migrator at a time into a schema, by an advisory lock of the session. goose's own locker gives up after a
// number of attempts, polls by the second, and cannot say who holds the lock.
type sessionLocker struct{ schema string }

var _ lock.SessionLocker = sessionLocker{}

// id is the number of the lock. It stays as it is for ever, or an old and a new version of this package would not exclude each
// other.
func (l sessionLocker) id() int64 {
	h := fnv.New64a()
	_, _ = h.Write([]byte("idempotency\x00" + l.schema + "\x00" + VersionTable)) // never fails
	return int64(h.Sum64())                                                      //nolint:gosec // any bit pattern will do
}

// SessionLock implements lock.SessionLocker.
func (l sessionLocker) SessionLock(ctx context.Context, conn *sql.Conn) error {
	ctx, cancel := context.WithTimeoutCause(ctx, LockWait, fmt.Errorf("%w after %s", context.DeadlineExceeded, LockWait))
	defer cancel()
	again := time.NewTicker(LockPoll)
	defer again.Stop()
	for {
		var held bool
		err := conn.QueryRowContext(ctx, `SELECT pg_catalog.pg_try_advisory_lock($1::bigint)`, l.id()).Scan(&held)
		if err != nil {
			return fmt.Errorf("get the lock against other migrators: %w", err)
		}
		if held {
			return nil
		}
		select {
		case <-again.C:
		case <-ctx.Done():
			return fmt.Errorf("get the lock against other migrators%s: %w", l.holder(ctx, conn), context.Cause(ctx))
		}
	}
}

// holder says which session holds the lock, as far as can be found out.
func (l sessionLocker) holder(ctx context.Context, conn *sql.Conn) string {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseTimeout)
	defer cancel()
	var pid int64
	err := conn.QueryRowContext(ctx, `SELECT pid FROM pg_catalog.pg_locks
WHERE locktype = 'advisory' AND granted AND objsubid = 1
    AND database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database())
    AND (classid::bigint << 32) | objid::bigint = $1::bigint`, l.id()).Scan(&pid)
	if err != nil {
		return "" // it may have let go in this moment
	}
	return fmt.Sprintf(", held by pid %d in pg_stat_activity", pid)
}

// SessionUnlock implements lock.SessionLocker.
func (l sessionLocker) SessionUnlock(ctx context.Context, conn *sql.Conn) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseTimeout)
	defer cancel()
	var held bool
	if err := conn.QueryRowContext(ctx, `SELECT pg_catalog.pg_advisory_unlock($1::bigint)`, l.id()).Scan(&held); err != nil {
		// An error of the connection closes it, and the lock ends with it.
		return fmt.Errorf("let other migrators in: %w", err)
	}
	if !held {
		return errors.New("the lock against other migrators was not held by this session: " +
			"connect directly, or through a pooler in session mode")
	}
	return nil
}
