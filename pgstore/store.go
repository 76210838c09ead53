package pgstore

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"reflect"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/archlab/idempotency/internal/sqlgen"
)

// DB is what a [Store] needs of a database handle: *pgxpool.Pool, *pgx.Conn, *pgxpool.Conn and pgx.Tx satisfy it.
//
// A wrapper around one of them, for tracing say, counts as a handle on which every statement commits by itself, unless it
// implements pgx.Tx.
type DB interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

// Store is the state machine of idempotent operations, kept in one table of PostgreSQL, so that every process which
// uses the same table agrees.
//
// A record is live while its expires_at lies in the future on the database's clock. A record that is not live does not
// exist, whether or not [Store.Sweep] has deleted it yet.
//
// [Store.Begin] looks at the live record of the key:
//
//   - none: created, a new attempt in progress;
//   - in progress, same fingerprint: ErrInProgress with the remaining lease;
//   - done or failed, same fingerprint: the stored record, not created, no error;
//   - retryable, same fingerprint: created, a new attempt;
//   - in any state with another fingerprint: ErrConflict.
//
// [Store.Complete], [Store.Fail] and [Store.Extend] check in this order and stop at the first that holds: no live record,
// ErrLeaseExpired; another fingerprint, ErrConflict; another attempt, ErrStaleAttempt. Then, if the attempt is in
// progress, they change the record. If it is already in the state that the call asks for (for Complete, with the same
// response), they return nil and change nothing: the call was repeated because its answer got lost. Anything else is
// ErrStaleAttempt: an outcome that someone may have seen never changes, and an attempt that released its key no longer
// owns it.
//
// Validation comes before any SQL and leaves a caller's transaction usable, and so does every sentinel except an
// ErrInProgress and an ErrNotMigrated that stand for an error of the server: those carry a *pgconn.PgError.
//
// A Store holds no connection and starts no goroutine. Its methods may be called concurrently as far as its DB may: freely
// on a pool, one at a time on a connection or a transaction.
type Store struct {
	db          DB
	sql         *sqlgen.Statements
	schema      string
	lease       time.Duration
	retention   time.Duration
	maxResponse int

	noTakeover     bool
	lateCompletion bool
	now            func() time.Time // only with clockGiven
	clockGiven     bool
	newClaim       func() int64
}

// New returns a store on db. An attempt holds its key for lease unless it extends; an outcome can be replayed for
// retention, counted from its completion. Both are between [MinDuration] and [MaxDuration] and cut to microseconds, the
// database's resolution. Stores with different durations can share a table: each record follows the store that wrote it.
//
// New neither connects nor checks the table; the first call says ErrNotMigrated if it is missing. If db is a pgx.Tx, the
// store works inside that transaction, as with [Store.WithTx].
//
// Choose the lease longer than the operation usually takes and extend it for the rest: within it a repeat waits for a
// crashed attempt in vain, after it a slow attempt is overtaken. Choose the retention longer than any client retries.
func New(db DB, lease, retention time.Duration, opts ...Option) (*Store, error) {
	s := &Store{
		db:          db,
		schema:      SchemaDefault,
		lease:       lease,
		retention:   retention,
		maxResponse: MaxResponseDefault,
		newClaim:    randomClaim,
	}
	var err error
	if isNil(db) {
		err = errors.New("the database handle is nil")
	}
	for _, opt := range opts {
		if opt == nil {
			err = errors.Join(err, errors.New("an option is nil"))
			continue
		}
		opt(s)
	}
	err = errors.Join(err, s.validate())
	if err != nil {
		return nil, fmt.Errorf("idempotency: new store: %w", err)
	}
	s.lease = lease.Truncate(time.Microsecond)
	s.retention = retention.Truncate(time.Microsecond)
	s.sql = sqlgen.Render(sqlgen.Config{
		Schema: s.schema, Clock: s.clockGiven, NoTakeover: s.noTakeover, LateCompletion: s.lateCompletion,
	})
	return s, nil
}

// WithTx returns a store whose methods run inside the caller's transaction: what they record commits or rolls back with
// the caller's own writes. They never commit, roll back or retry; an error of the server aborts the transaction as any
// other would, and is reachable with errors.As as a *pgconn.PgError.
//
// A Begin inside a transaction holds its key against every other session until the transaction ends: others wait. Keep
// such transactions short, or Begin before them and Complete inside.
func (s *Store) WithTx(tx pgx.Tx) *Store {
	inTx := *s
	inTx.db = tx
	if isNil(tx) {
		inTx.db = missingTx{}
	}
	return &inTx
}

// arguments appends the clock's time to args where the statements were rendered to take it.
func (s *Store) arguments(args ...any) []any {
	if s.clockGiven {
		args = append(args, s.now().Truncate(time.Microsecond))
	}
	return args
}

// queryRow runs a statement that returns one row or none, scans the row into dest, and reads the statement's end: only
// then has a row that RETURNING streamed been committed.
func (s *Store) queryRow(ctx context.Context, sql string, args []any, dest ...any) (found bool, err error) {
	rows, err := s.db.Query(ctx, sql, args...)
	if err != nil {
		return false, s.interpret(err)
	}
	defer rows.Close()
	if found = rows.Next(); found {
		if err := rows.Scan(dest...); err != nil {
			return false, s.interpret(err)
		}
	}
	rows.Close()
	if err := rows.Err(); err != nil {
		return false, s.interpret(err)
	}
	return found, nil
}

// exec runs a statement and returns the number of rows that it changed.
func (s *Store) exec(ctx context.Context, sql string, args []any) (int64, error) {
	tag, err := s.db.Exec(ctx, sql, args...)
	if err != nil {
		return 0, s.interpret(err)
	}
	return tag.RowsAffected(), nil
}

// randomClaim draws the number by which one Begin call recognises its own record. It is random, not counted, so that no
// two calls of any processes share one.
func randomClaim() int64 {
	var b [8]byte
	_, _ = rand.Read(b[:])                         // never fails: crypto/rand ends the program first
	return int64(binary.NativeEndian.Uint64(b[:])) //nolint:gosec // any bit pattern will do
}

// isNil reports whether v is nil or an interface that holds a nil pointer.
func isNil(v any) bool {
	if v == nil {
		return true
	}
	r := reflect.ValueOf(v)
	return r.Kind() == reflect.Pointer && r.IsNil()
}

// missingTx answers for the nil that somebody gave to WithTx: with an error, not with a panic in the middle of a payment.
type missingTx struct{}

var errMissingTx = errors.New("WithTx was given a nil transaction")

func (missingTx) Exec(context.Context, string, ...any) (pgconn.CommandTag, error) {
	return pgconn.CommandTag{}, errMissingTx
}

func (missingTx) Query(context.Context, string, ...any) (pgx.Rows, error) {
	return nil, errMissingTx
}
