package pgstore_test

import (
	"context"
	"errors"
	"math"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/archlab/idempotency/internal/sqlgen"
	"github.com/archlab/idempotency/pgstore"
)

// The tests of this file play one interleaving each, step by step: a session is held at a known place, seen waiting there,
// and let go. They show what random races only show by luck, and every condition that no sequence of calls one after
// the other can reach.

// directedWait bounds each step. It is never waited for unless a test fails.
const directedWait = 10 * time.Second

// directedBegin is a Begin that runs beside the test.
type directedBegin struct {
	done    chan struct{} // closed when the rest may be read
	record  pgstore.Record
	created bool
	err     error
}

func goBegin(ctx context.Context, store *pgstore.Store, k pgstore.Key) *directedBegin {
	b := &directedBegin{done: make(chan struct{})}
	go func() {
		defer close(b.done)
		b.record, b.created, b.err = store.Begin(ctx, k, fingerprint)
	}()
	return b
}

// waitsFor returns when a session is seen to wait for a lock that the holder has.
func (b *directedBegin) waitsFor(t *testing.T, pool *pgxpool.Pool, holder pgx.Tx) {
	t.Helper()
	deadline := time.After(directedWait)
	for !directedBlocks(t, pool, holder) {
		select {
		case <-b.done:
			require.FailNow(t, "Begin should wait", "it returned %+v, created: %t, error: %v", b.record, b.created, b.err)
		case <-deadline:
			require.FailNow(t, "Begin neither waits nor returns")
		default:
		}
	}
}

// result returns what Begin returned.
func (b *directedBegin) result(t *testing.T) (pgstore.Record, bool, error) {
	t.Helper()
	select {
	case <-b.done:
	case <-time.After(directedWait):
		require.FailNow(t, "Begin does not return")
	}
	return b.record, b.created, b.err
}

// directedBlocks reports whether any session waits for a lock that the holder has.
func directedBlocks(t *testing.T, pool *pgxpool.Pool, holder pgx.Tx) bool {
	t.Helper()
	var blocks bool
	err := pool.QueryRow(t.Context(), `SELECT EXISTS (SELECT FROM pg_stat_activity
		WHERE wait_event_type = 'Lock' AND $1::int = ANY (pg_blocking_pids(pid)))`,
		int64(holder.Conn().PgConn().PID())).Scan(&blocks)
	require.NoError(t, err)
	return blocks
}

// directedTx opens a transaction that is rolled back at the end, if the test has not ended it.
func directedTx(t *testing.T, pool *pgxpool.Pool) pgx.Tx {
	t.Helper()
	tx, err := pool.Begin(t.Context())
	require.NoError(t, err)
	t.Cleanup(func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) })
	return tx
}

func (f *fixture) directedTable() string {
	return sqlgen.QuoteIdentifier(f.Schema) + "." + sqlgen.Table
}

// directedRow is a row that a test puts into the table by hand.
type directedRow struct {
	key                            pgstore.Key
	state                          pgstore.State
	attempt                        int64
	begunAt, expiresAt, purgeAfter time.Time
}

func (f *fixture) directedInsert(t *testing.T, db pgstore.DB, rows ...directedRow) {
	t.Helper()
	for _, r := range rows {
		_, err := db.Exec(t.Context(), `INSERT INTO `+f.directedTable()+`
			(tenant, operation, key, state, fingerprint, attempt, claim, begun_at, expires_at, purge_after)
			VALUES ($1, $2, $3, $4, $5, $6, 0, $7, $8, $9)`,
			r.key.Tenant, r.key.Operation, r.key.Value, string(r.state), []byte(fingerprint), r.attempt,
			r.begunAt, r.expiresAt, r.purgeAfter)
		require.NoError(t, err)
	}
}

// directedLapse lets the lease, or the retention, of the key end, as if time had passed.
func (f *fixture) directedLapse(t *testing.T, k pgstore.Key) {
	t.Helper()
	_, err := f.Pool.Exec(t.Context(), `UPDATE `+f.directedTable()+`
		SET begun_at = begun_at - interval '1 year', expires_at = statement_timestamp() - interval '1 second'
		WHERE tenant = $1 AND operation = $2 AND key = $3`, k.Tenant, k.Operation, k.Value)
	require.NoError(t, err)
}

// directedNow is the database's clock.
func directedNow(t *testing.T, db interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
},
) time.Time {
	t.Helper()
	var now time.Time
	require.NoError(t, db.QueryRow(t.Context(), `SELECT clock_timestamp()`).Scan(&now))
	return now
}

func TestBeginThatWaitedForAnotherSessionObeysWhatItLeft(t *testing.T) {
	t.Parallel()
	const other = "sha256:of another request"
	lapsed := func(t *testing.T, f *fixture) {
		t.Helper()
		_, _, err := f.Begin(t.Context(), key, fingerprint)
		require.NoError(t, err)
		f.directedLapse(t, key)
	}
	released := func(t *testing.T, f *fixture) {
		t.Helper()
		record, _, err := f.Begin(t.Context(), key, fingerprint)
		require.NoError(t, err)
		require.NoError(t, f.Fail(t.Context(), key, fingerprint, record.Attempt, true))
	}
	begins := func(fingerprint string) func(t *testing.T, store *pgstore.Store) uint64 {
		return func(t *testing.T, store *pgstore.Store) uint64 {
			t.Helper()
			record, created, err := store.Begin(t.Context(), key, fingerprint)
			require.NoError(t, err)
			require.True(t, created)
			return record.Attempt
		}
	}
	ends := func(fingerprint string, end func(store *pgstore.Store, attempt uint64) error) func(t *testing.T, store *pgstore.Store) uint64 {
		return func(t *testing.T, store *pgstore.Store) uint64 {
			t.Helper()
			attempt := begins(fingerprint)(t, store)
			require.NoError(t, end(store, attempt))
			return attempt
		}
	}
	completes := func(store *pgstore.Store, attempt uint64) error {
		return store.Complete(t.Context(), key, fingerprint, attempt, "response")
	}
	releases := func(fingerprint string) func(store *pgstore.Store, attempt uint64) error {
		return func(store *pgstore.Store, attempt uint64) error {
			return store.Fail(t.Context(), key, fingerprint, attempt, true)
		}
	}
	type want struct {
		created   bool
		state     pgstore.State
		abandoned uint64
		err       error
	}
	inProgress := want{err: pgstore.ErrInProgress}
	conflict := want{err: pgstore.ErrConflict}
	created := want{created: true, state: pgstore.StateInProgress}
	for name, c := range map[string]struct {
		before   func(t *testing.T, f *fixture)
		holder   func(t *testing.T, store *pgstore.Store) (attempt uint64)
		rollback bool
		want     want
	}{
		"a fresh key, begun":                       {holder: begins(fingerprint), want: inProgress},
		"a fresh key, begun and rolled back":       {holder: begins(fingerprint), rollback: true, want: created},
		"a fresh key, begun by another request":    {holder: begins(other), want: conflict},
		"a fresh key, completed":                   {holder: ends(fingerprint, completes), want: want{state: pgstore.StateDone}},
		"a fresh key, released":                    {holder: ends(fingerprint, releases(fingerprint)), want: created},
		"a fresh key, released by another request": {holder: ends(other, releases(other)), want: conflict},
		"a lapsed key, taken over":                 {before: lapsed, holder: begins(fingerprint), want: inProgress},
		"a lapsed key, taken over by another request": {
			before: lapsed, holder: begins(other), want: conflict,
		},
		"a lapsed key, taken over and rolled back": {
			before: lapsed, holder: begins(fingerprint), rollback: true,
			want: want{created: true, state: pgstore.StateInProgress, abandoned: 1},
		},
		"a lapsed key, released by another request": {before: lapsed, holder: ends(other, releases(other)), want: conflict},
		"a released key, begun again":               {before: released, holder: begins(fingerprint), want: inProgress},
		"a released key, begun again and rolled back": {
			before: released, holder: begins(fingerprint), rollback: true, want: created,
		},
		"a released key, completed": {
			before: released, holder: ends(fingerprint, completes), want: want{state: pgstore.StateDone},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := setup(t)
			if c.before != nil {
				c.before(t, f)
			}
			tx := directedTx(t, f.Pool)
			held := c.holder(t, f.WithTx(tx))
			begin := goBegin(t.Context(), f.Store, key)
			begin.waitsFor(t, f.Pool, tx)
			if c.rollback {
				require.NoError(t, tx.Rollback(t.Context()))
			} else {
				require.NoError(t, tx.Commit(t.Context()))
			}

			record, created, err := begin.result(t)

			require.ErrorIs(t, err, c.want.err)
			require.Equal(t, c.want.created, created)
			require.Equal(t, c.want.state, record.State)
			require.Equal(t, c.want.abandoned, record.Abandoned)
			if created {
				require.Greater(t, record.Attempt, held)
			}
			if inProgress, ok := errors.AsType[*pgstore.InProgressError](err); ok {
				require.Positive(t, inProgress.RetryAfter)
				require.LessOrEqual(t, inProgress.RetryAfter, lease)
			}
		})
	}
}

// A call draws its attempt, stalls, and is overtaken by a whole life of the key under a later number.
func TestAttemptsOfAKeyNeverGoBackwards(t *testing.T) {
	t.Parallel()
	const stalls = 42 // the claim of the call that stalls between its draw and its write
	f := setup(t)
	table := f.directedTable()
	_, err := f.Pool.Exec(t.Context(), `
		CREATE FUNCTION `+table+`_stall() RETURNS trigger LANGUAGE plpgsql AS $$
		BEGIN
			IF NEW.claim = 42 THEN
				PERFORM pg_advisory_xact_lock(TG_RELID::bigint);
			END IF;
			RETURN NEW;
		END $$;
		CREATE TRIGGER stall BEFORE INSERT ON `+table+` FOR EACH ROW EXECUTE FUNCTION `+table+`_stall()`)
	require.NoError(t, err)
	holder := directedTx(t, f.Pool)
	_, err = holder.Exec(t.Context(), `SELECT pg_advisory_xact_lock($1::regclass::bigint)`, table)
	require.NoError(t, err)
	slow := f.NewStore(t, f.Pool, lease, retention)
	slow.SetClaims(func() int64 { return stalls })
	begin := goBegin(t.Context(), slow, key) // draws 1
	begin.waitsFor(t, f.Pool, holder)
	record, created, err := f.Begin(t.Context(), key, fingerprint)
	require.NoError(t, err)
	require.True(t, created)
	require.EqualValues(t, 2, record.Attempt)
	require.NoError(t, f.Fail(t.Context(), key, fingerprint, record.Attempt, true))
	require.NoError(t, holder.Commit(t.Context()))

	record, created, err = begin.result(t)

	require.NoError(t, err)
	require.True(t, created)
	require.EqualValues(t, 3, record.Attempt, "1 has been overtaken: a fence would refuse it")
}

// A standby that was promoted without its primary's last transactions hands out numbers again.
func TestAnAttemptThatIsDrawnAgainIsNotHandedOutAgain(t *testing.T) {
	t.Parallel()
	f := setup(t)
	record, _, err := f.Begin(t.Context(), key, fingerprint)
	require.NoError(t, err)
	require.EqualValues(t, 1, record.Attempt)
	require.NoError(t, f.Fail(t.Context(), key, fingerprint, record.Attempt, true))
	_, err = f.Pool.Exec(t.Context(), `SELECT setval($1::regclass, 1, false)`,
		sqlgen.QuoteIdentifier(f.Schema)+"."+sqlgen.Sequence)
	require.NoError(t, err)

	record, created, err := f.Begin(t.Context(), key, fingerprint)

	require.NoError(t, err)
	require.True(t, created)
	require.EqualValues(t, 2, record.Attempt)
}

func TestBeginThatWaitedLongerThanItsLeaseGetsAFreshOne(t *testing.T) {
	t.Parallel()
	const short = 100 * time.Millisecond
	f := setup(t)
	tx := directedTx(t, f.Pool)
	_, _, err := f.WithTx(tx).Begin(t.Context(), key, fingerprint)
	require.NoError(t, err)
	begin := goBegin(t.Context(), f.NewStore(t, f.Pool, short, retention), key)
	begin.waitsFor(t, f.Pool, tx)
	lapses := directedNow(t, f.Pool).Add(short)
	require.Eventually(t, func() bool { return directedNow(t, f.Pool).After(lapses) }, directedWait, time.Millisecond)
	released := directedNow(t, f.Pool)
	require.NoError(t, tx.Rollback(t.Context()))

	record, created, err := begin.result(t)

	require.NoError(t, err)
	require.True(t, created)
	require.Positive(t, record.Remaining)
	require.LessOrEqual(t, record.Remaining, short)
	require.False(t, record.ExpiresAt.Before(released.Add(short)), "a lease that ended while Begin waited is not a lease")
	require.Zero(t, record.Abandoned, "nobody has executed before")
}

// The same claim again is what a Begin sends that has lost the answer to the first.
func TestBeginRecognisesItsOwnRecord(t *testing.T) {
	t.Parallel()
	f := setup(t)
	claimant := func(claim int64) *pgstore.Store {
		store := f.NewStore(t, f.Pool, lease, retention)
		store.SetClaims(func() int64 { return claim })
		return store
	}
	first, second := claimant(1), claimant(2)
	owns := func(store *pgstore.Store, attempt, abandoned uint64) {
		t.Helper()
		var expiresAt time.Time
		for range 2 {
			record, created, err := store.Begin(t.Context(), key, fingerprint)
			require.NoError(t, err)
			require.True(t, created)
			require.Equal(t, attempt, record.Attempt)
			require.Equal(t, abandoned, record.Abandoned)
			require.Equal(t, fingerprint, record.Fingerprint)
			if !expiresAt.IsZero() {
				require.Equal(t, expiresAt, record.ExpiresAt)
			}
			expiresAt = record.ExpiresAt
		}
		_, _, err := store.Begin(t.Context(), key, "sha256:of another request")
		require.ErrorIs(t, err, pgstore.ErrConflict)
	}
	owns(first, 1, 0)
	_, _, err := second.Begin(t.Context(), key, fingerprint)
	require.ErrorIs(t, err, pgstore.ErrInProgress)

	f.directedLapse(t, key)
	owns(second, 2, 1)
	_, _, err = first.Begin(t.Context(), key, fingerprint)
	require.ErrorIs(t, err, pgstore.ErrInProgress, "its record has been taken over")

	require.NoError(t, f.Complete(t.Context(), key, fingerprint, 2, "response"))
	record, created, err := second.Begin(t.Context(), key, fingerprint)
	require.NoError(t, err)
	require.False(t, created, "what has ended is not executed again")
	require.Equal(t, pgstore.StateDone, record.State)
	require.Equal(t, "response", record.Response)
}

func TestBeginNeverReadsTheResponseToAnotherRequest(t *testing.T) {
	t.Parallel()
	f := setup(t)
	record, _, err := f.Begin(t.Context(), key, fingerprint)
	require.NoError(t, err)
	require.NoError(t, f.Complete(t.Context(), key, fingerprint, record.Attempt, "private"))
	read := func(fingerprint string) (created, same bool, response []byte) {
		t.Helper()
		var (
			state                        string
			attempt, expiresAt, remained int64
			abandoned                    *int64
		)
		err := f.Pool.QueryRow(t.Context(), f.Statements().Begin,
			key.Tenant, key.Operation, key.Value, []byte(fingerprint), int64(0), lease, retention).
			Scan(&created, &same, &state, &response, &attempt, &abandoned, &expiresAt, &remained)
		require.NoError(t, err)
		return created, same, response
	}

	created, same, response := read("sha256:of another request")
	require.False(t, created)
	require.False(t, same)
	require.Nil(t, response)

	created, same, response = read(fingerprint)
	require.False(t, created)
	require.True(t, same)
	require.Equal(t, "private", string(response))
}

// directedDue is a time at which rows are due for a sweep, long past on the database's clock.
var directedDue = time.Date(2020, 2, 3, 4, 5, 6, 789_012_000, time.UTC)

// directedDone returns a row that is due at purgeAfter.
func directedDone(k pgstore.Key, attempt int64, purgeAfter time.Time) directedRow {
	return directedRow{k, pgstore.StateFailed, attempt, purgeAfter.Add(-retention), purgeAfter, purgeAfter}
}

// directedWithoutWaiting runs call in a goroutine and fails as soon as it is seen to wait for the holder.
func directedWithoutWaiting(t *testing.T, pool *pgxpool.Pool, holder pgx.Tx, call func(ctx context.Context) (int64, error)) int64 {
	t.Helper()
	var (
		n    int64
		err  error
		done = make(chan struct{})
	)
	ctx, cancel := context.WithTimeout(t.Context(), directedWait)
	go func() {
		defer close(done)
		n, err = call(ctx)
	}()
	defer func() { cancel(); <-done }()
	for {
		select {
		case <-done:
			require.NoError(t, err)
			return n
		default:
			require.False(t, directedBlocks(t, pool, holder), "it waits for a session that holds a row")
		}
	}
}

func TestSweepSkipsRowsThatAnotherSessionHolds(t *testing.T) {
	t.Parallel()
	f := setup(t)
	held, free := pgstore.Key{Tenant: "t", Operation: "o", Value: "held"}, pgstore.Key{Tenant: "t", Operation: "o", Value: "free"}
	f.directedInsert(t, f.Pool, directedDone(held, 1, directedDue), directedDone(free, 2, directedDue))
	tx := directedTx(t, f.Pool)
	_, created, err := f.WithTx(tx).Begin(t.Context(), held, fingerprint)
	require.NoError(t, err)
	require.True(t, created)
	purge := func(ctx context.Context) (int64, error) {
		tag, err := f.Pool.Exec(ctx, f.Statements().Purge, held.Tenant, held.Operation, held.Value)
		return tag.RowsAffected(), err
	}

	require.Zero(t, directedWithoutWaiting(t, f.Pool, tx, purge))
	require.EqualValues(t, 1, directedWithoutWaiting(t, f.Pool, tx, func(ctx context.Context) (int64, error) {
		return f.Sweep(ctx, 10)
	}))

	require.NoError(t, tx.Commit(t.Context()))
	swept, err := f.Sweep(t.Context(), 10)
	require.NoError(t, err)
	require.Zero(t, swept)
	_, live, err := f.Get(t.Context(), held)
	require.NoError(t, err)
	require.True(t, live)
}

// directedPlain opens a transaction in which PostgreSQL reads the table as it lies, so that no index puts rows in order by
// accident.
func directedPlain(t *testing.T, pool *pgxpool.Pool) pgx.Tx {
	t.Helper()
	tx := directedTx(t, pool)
	for _, setting := range []string{"enable_indexscan", "enable_indexonlyscan", "enable_bitmapscan"} {
		_, err := tx.Exec(t.Context(), `SET LOCAL `+setting+` = off`)
		require.NoError(t, err)
	}
	return tx
}

func TestSweepTakesTheEarliestFirst(t *testing.T) {
	t.Parallel()
	f := setup(t)
	values := []string{"3", "1", "2", "4", "0"}
	for i, value := range values {
		k := pgstore.Key{Tenant: "t", Operation: "o", Value: value}
		f.directedInsert(t, f.Pool, directedDone(k, int64(i+1), directedDue.Add(time.Duration(value[0])*time.Second)))
	}
	tx := directedPlain(t, f.Pool)
	swept, err := f.WithTx(tx).Sweep(t.Context(), 3)
	require.NoError(t, err)
	require.EqualValues(t, 3, swept)
	rows, err := tx.Query(t.Context(), `SELECT key FROM `+f.directedTable()+` ORDER BY key`)
	require.NoError(t, err)
	left, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	require.Equal(t, []string{"3", "4"}, left)
}

func TestPurgeableListsInOrderWhatIsDueBehindAPosition(t *testing.T) {
	t.Parallel()
	f := setup(t)
	type position struct {
		PurgeAfter int64
		Key        pgstore.Key
	}
	var (
		due  []position
		rows []directedRow
		now  = directedDue.Add(time.Second)
	)
	for i, purgeAfter := range []time.Time{directedDue, now} { // the second is due this very moment
		for _, tenant := range []string{"a", "b"} {
			for _, operation := range []string{"a", "b"} {
				for _, value := range []string{"a", "b"} {
					k := pgstore.Key{Tenant: tenant, Operation: operation, Value: value + []string{"1", "2"}[i]}
					due = append(due, position{purgeAfter.UnixMicro(), k})
					rows = append(rows, directedDone(k, int64(len(due)), purgeAfter))
				}
			}
		}
	}
	rows = append(rows, directedDone(key, 100, now.Add(time.Microsecond)))
	for _, row := range slices.Backward(rows) {
		f.directedInsert(t, f.Pool, row)
	}
	tx := directedPlain(t, f.Pool)
	statement := f.NewStore(t, f.Pool, lease, retention, pgstore.WithClock(func() time.Time { return now })).Statements().Purgeable
	list := func(from position, limit int64) []position {
		t.Helper()
		rows, err := tx.Query(t.Context(), statement,
			from.PurgeAfter, from.Key.Tenant, from.Key.Operation, from.Key.Value, limit, now)
		require.NoError(t, err)
		listed, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (p position, err error) {
			err = row.Scan(&p.PurgeAfter, &p.Key.Tenant, &p.Key.Operation, &p.Key.Value)
			return p, err
		})
		require.NoError(t, err)
		return listed
	}

	require.Equal(t, due, list(position{PurgeAfter: -1 << 53}, math.MaxInt64))
	require.Equal(t, due[:3], list(position{PurgeAfter: -1 << 53}, 3))
	for i, from := range due {
		require.ElementsMatch(t, due[i+1:], list(from, 1000), "behind %v", from)
	}
}

func TestPurgeDeletesOneKeyAndOnlyWhenItIsDue(t *testing.T) {
	t.Parallel()
	f := setup(t)
	due := []pgstore.Key{
		{Tenant: "a", Operation: "a", Value: "a"}, {Tenant: "b", Operation: "a", Value: "a"},
		{Tenant: "a", Operation: "b", Value: "a"}, {Tenant: "a", Operation: "a", Value: "b"},
	}
	for i, k := range due {
		f.directedInsert(t, f.Pool, directedDone(k, int64(i+1), directedDue))
	}
	f.directedInsert(t, f.Pool, directedDone(key, 100, directedDue.Add(time.Microsecond)))
	statement := f.NewStore(t, f.Pool, lease, retention, pgstore.WithClock(time.Now)).Statements().Purge
	purge := func(k pgstore.Key) int64 {
		t.Helper()
		tag, err := f.Pool.Exec(t.Context(), statement, k.Tenant, k.Operation, k.Value, directedDue)
		require.NoError(t, err)
		return tag.RowsAffected()
	}

	require.Zero(t, purge(key), "it is due a microsecond later")
	require.EqualValues(t, 1, purge(due[0]))
	require.Zero(t, purge(due[0]))
	rows, err := f.Pool.Query(t.Context(), `SELECT tenant, operation, key FROM `+f.directedTable())
	require.NoError(t, err)
	left, err := pgx.CollectRows(rows, pgx.RowToStructByPos[pgstore.Key])
	require.NoError(t, err)
	require.ElementsMatch(t, append(due[1:], key), left)
}

// now() stands still in a transaction: a statement that used it would take a lease that has lapsed since for live, and
// write leases that have already begun to run.
func TestInsideAnOldTransactionEveryStatementReadsItsOwnTime(t *testing.T) {
	t.Parallel()
	f := setup(t)
	tx := directedTx(t, f.Pool)
	var opened time.Time
	require.NoError(t, tx.QueryRow(t.Context(), `SELECT now()`).Scan(&opened))
	lapsed := opened.Add(time.Millisecond) // after the transaction began, and before each of its further statements
	require.Eventually(t, func() bool { return directedNow(t, tx).After(lapsed) }, directedWait, time.Millisecond)
	store := f.WithTx(tx)
	long := f.NewStore(t, tx, lease, 2*retention) // its endings reach further than what Begin set aside
	value := func(v string) pgstore.Key { return pgstore.Key{Tenant: "t", Operation: "o", Value: v} }
	row := func(v string, attempt int64) directedRow {
		return directedRow{value(v), pgstore.StateInProgress, attempt, opened.Add(-lease), lapsed, lapsed.Add(retention)}
	}
	// The record's own instants say when the statement read the clock: between the two readings around the call.
	during := func(call func() pgstore.Record) {
		t.Helper()
		before := directedNow(t, tx)
		record := call()
		readAt := record.ExpiresAt.Add(-record.Remaining)
		require.False(t, readAt.Before(before.Truncate(time.Microsecond)), "%v is before %v", readAt, before)
		require.False(t, readAt.After(directedNow(t, tx)))
	}
	instants := func(k pgstore.Key) (begunAt, expiresAt, purgeAfter time.Time) {
		t.Helper()
		require.NoError(t, tx.QueryRow(t.Context(), `SELECT begun_at, expires_at, purge_after FROM `+f.directedTable()+`
			WHERE tenant = $1 AND operation = $2 AND key = $3`, k.Tenant, k.Operation, k.Value).
			Scan(&begunAt, &expiresAt, &purgeAfter))
		return begunAt, expiresAt, purgeAfter
	}

	// What lapsed since the transaction began is gone.
	f.directedInsert(t, tx, row("lapsed", 1001))
	_, live, err := store.Get(t.Context(), value("lapsed"))
	require.NoError(t, err)
	require.False(t, live)
	require.ErrorIs(t, store.Complete(t.Context(), value("lapsed"), fingerprint, 1001, ""), pgstore.ErrLeaseExpired)
	require.ErrorIs(t, store.Fail(t.Context(), value("lapsed"), fingerprint, 1001, true), pgstore.ErrLeaseExpired)
	_, err = store.Extend(t.Context(), value("lapsed"), fingerprint, 1001)
	require.ErrorIs(t, err, pgstore.ErrLeaseExpired)

	// What is written counts from the statement.
	begin := func(k pgstore.Key) (record pgstore.Record) {
		t.Helper()
		during(func() pgstore.Record {
			var created bool
			record, created, err = store.Begin(t.Context(), k, fingerprint)
			require.NoError(t, err)
			require.True(t, created)
			return record
		})
		begunAt, expiresAt, purgeAfter := instants(k)
		require.Equal(t, lease, expiresAt.Sub(begunAt))
		require.Equal(t, lease+retention, purgeAfter.Sub(begunAt))
		return record
	}
	record := begin(value("1"))
	during(func() pgstore.Record {
		_, _, err := store.Begin(t.Context(), value("1"), fingerprint)
		inProgress, ok := errors.AsType[*pgstore.InProgressError](err)
		require.True(t, ok, "%v", err)
		return pgstore.Record{ExpiresAt: record.ExpiresAt, Remaining: inProgress.RetryAfter}
	})
	before := directedNow(t, tx)
	during(func() pgstore.Record {
		record, err = store.Extend(t.Context(), value("1"), fingerprint, record.Attempt)
		require.NoError(t, err)
		return record
	})
	_, expiresAt, purgeAfter := instants(value("1"))
	require.False(t, expiresAt.Before(before.Add(lease)))
	require.Equal(t, retention, purgeAfter.Sub(expiresAt))
	during(func() pgstore.Record {
		record, live, err = store.Get(t.Context(), value("1"))
		require.NoError(t, err)
		require.True(t, live)
		return record
	})
	before = directedNow(t, tx)
	require.NoError(t, long.Complete(t.Context(), value("1"), fingerprint, record.Attempt, ""))
	_, expiresAt, purgeAfter = instants(value("1"))
	require.False(t, expiresAt.Before(before.Add(2*retention)))
	require.Equal(t, expiresAt, purgeAfter)
	record = begin(value("2"))
	before = directedNow(t, tx)
	require.NoError(t, long.Fail(t.Context(), value("2"), fingerprint, record.Attempt, false))
	_, expiresAt, purgeAfter = instants(value("2"))
	require.False(t, expiresAt.Before(before.Add(2*retention)))
	require.Equal(t, expiresAt, purgeAfter)

	record = begin(value("3"))
	before = directedNow(t, tx)
	require.NoError(t, long.Resolve(t.Context(), value("3"), record.Attempt, pgstore.AsDone("")))
	_, expiresAt, purgeAfter = instants(value("3"))
	require.False(t, expiresAt.Before(before.Add(2*retention)))
	require.Equal(t, expiresAt, purgeAfter)
	require.ErrorIs(t, store.Resolve(t.Context(), value("3"), record.Attempt, pgstore.AsFailed()), pgstore.ErrStaleAttempt)

	// A lapsed attempt that was due since is forgotten, whether a sweep has come by or not.
	_, err = tx.Exec(t.Context(), `SELECT setval($1::regclass, 5000)`, sqlgen.QuoteIdentifier(f.Schema)+"."+sqlgen.Sequence)
	require.NoError(t, err)
	due := row("due", 2001)
	due.purgeAfter = lapsed
	f.directedInsert(t, tx, due)
	record = begin(value("due"))
	require.Zero(t, record.Abandoned)
	require.EqualValues(t, 1001, begin(value("lapsed")).Abandoned)

	// What became due since is swept.
	f.directedInsert(t, tx, directedDone(value("swept"), 3001, lapsed))
	swept, err := store.Sweep(t.Context(), 10)
	require.NoError(t, err)
	require.EqualValues(t, 1, swept)
	f.directedInsert(t, tx, directedDone(value("purged"), 3002, lapsed))
	tag, err := tx.Exec(t.Context(), f.Statements().Purgeable, int64(-1<<53), "", "", "", int64(10))
	require.NoError(t, err)
	require.EqualValues(t, 1, tag.RowsAffected())
	purged := value("purged")
	tag, err = tx.Exec(t.Context(), f.Statements().Purge, purged.Tenant, purged.Operation, purged.Value)
	require.NoError(t, err)
	require.EqualValues(t, 1, tag.RowsAffected())

	// An attempt that was forgotten since cannot be resolved.
	forgotten := row("forgotten", 1002)
	forgotten.purgeAfter = lapsed
	f.directedInsert(t, tx, forgotten)
	require.ErrorIs(t, store.Resolve(t.Context(), value("forgotten"), 1002, pgstore.AsFailed()), pgstore.ErrLeaseExpired)
}
