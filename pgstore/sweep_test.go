package pgstore_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/archlab/idempotency/pgstore"
)

// sweepFill adds n records whose time is over, named from first on, the oldest first. The tenant is the test key's.
func sweepFill(tb testing.TB, f *fixture, first, n int) {
	tb.Helper()
	require.EqualValues(tb, n, recordExec(tb, f, `INSERT INTO %s
			(tenant, operation, key, state, fingerprint, attempt, claim, begun_at, expires_at, purge_after)
		SELECT $1, $2, to_char(n, 'FM0000000'), 'failed', $3, nextval($6::text::regclass), n, at, at, at
		FROM (SELECT n, statement_timestamp() - interval '1 day' + n * interval '1 millisecond' AS at
			FROM generate_series($4::int, $4::int + $5::int - 1) AS n) AS numbered`,
		key.Tenant, key.Operation, []byte(fingerprint), first, n, recordSequence(f)))
}

// sweepName is the key of the n-th record of sweepFill.
func sweepName(n int) pgstore.Key { return recordKey(fmt.Sprintf("%07d", n)) }

// sweepRemaining lists the values of all keys in the table.
func sweepRemaining(tb testing.TB, f *fixture) []string {
	tb.Helper()
	return recordScalar[[]string](tb, f, `SELECT coalesce(array_agg(key ORDER BY key), '{}') FROM %s`)
}

// sweepPoison makes the deletion of the records fail for which the SQL condition on OLD holds.
func sweepPoison(tb testing.TB, f *fixture, condition string) {
	tb.Helper()
	schema := pgx.Identifier{f.Schema}.Sanitize()
	_, err := f.Pool.Exec(tb.Context(), `CREATE FUNCTION `+schema+`.refuse() RETURNS trigger LANGUAGE plpgsql AS $$
		BEGIN
			IF `+condition+` THEN
				RAISE EXCEPTION 'this one is needed as evidence';
			END IF;
			RETURN OLD;
		END $$`)
	require.NoError(tb, err)
	recordExec(tb, f, `CREATE TRIGGER refuse BEFORE DELETE ON %s FOR EACH ROW EXECUTE FUNCTION `+schema+`.refuse()`)
}

func TestSweepDeletesExactlyWhatMayBeForgotten(t *testing.T) {
	t.Parallel()
	clock := newClock()
	f := setup(t, pgstore.WithClock(clock.Now))
	var want []string
	for _, state := range recordStates {
		for _, expires := range []time.Duration{-time.Hour, -time.Microsecond, 0, time.Microsecond, time.Hour} {
			for _, purge := range []time.Duration{-time.Hour, -time.Microsecond, 0, time.Microsecond, time.Hour} {
				if purge < expires {
					continue // the table refuses it
				}
				k := recordKey(fmt.Sprintf("%s expires=%v purge=%v", state, expires, purge))
				recordPut(t, f, k, state)
				require.EqualValues(t, 1, recordExec(t, f, `UPDATE %s SET expires_at = $2, purge_after = $3 WHERE key = $1`,
					k.Value, clock.Now().Add(expires), clock.Now().Add(purge)))
				if purge > 0 {
					want = append(want, k.Value)
				}
			}
		}
	}
	all := len(sweepRemaining(t, f))
	deleted, err := f.Sweep(t.Context(), 1000)
	require.NoError(t, err)
	require.EqualValues(t, all-len(want), deleted)
	require.ElementsMatch(t, want, sweepRemaining(t, f))
	deleted, err = f.Sweep(t.Context(), 1000)
	require.NoError(t, err)
	require.Zero(t, deleted)
}

func TestSweepTakesTheOldestFirstAndNoMoreThanTheLimit(t *testing.T) {
	t.Parallel()
	f := setup(t)
	sweepFill(t, f, 0, 25)
	for _, left := range []int{15, 5, 0} {
		deleted, err := f.Sweep(t.Context(), 10)
		require.NoError(t, err)
		remaining := sweepRemaining(t, f)
		require.Len(t, remaining, left)
		if left > 0 {
			require.EqualValues(t, 10, deleted)
			require.Equal(t, sweepName(25-left).Value, remaining[0])
		} else {
			require.EqualValues(t, 5, deleted)
		}
	}
	deleted, err := f.Sweep(t.Context(), 10)
	require.NoError(t, err)
	require.Zero(t, deleted)
}

func TestEveryExpiredRecordGoes(t *testing.T) {
	t.Parallel()
	f := setup(t)
	sweepFill(t, f, 0, 5000)
	live := recordPut(t, f, key, pgstore.StateInProgress)
	var total int64
	for {
		deleted, err := f.Sweep(t.Context(), 1000)
		require.NoError(t, err)
		total += deleted
		if deleted < 1000 {
			break
		}
	}
	require.EqualValues(t, 5000, total)
	require.Equal(t, []string{key.Value}, sweepRemaining(t, f))
	require.NoError(t, f.Complete(t.Context(), key, fingerprint, live, recordResponse))
}

func TestSweepTakesNoLimitBelowOne(t *testing.T) {
	t.Parallel()
	f := setup(t)
	sweepFill(t, f, 0, 1)
	for _, limit := range []int{0, -1, -1 << 62} {
		deleted, err := f.Sweep(t.Context(), limit)
		require.EqualError(t, err, fmt.Sprintf("idempotency: sweep: the limit is %d: it must be at least 1", limit))
		require.Zero(t, deleted)
	}
	require.Len(t, sweepRemaining(t, f), 1)
	deleted, err := f.Sweep(t.Context(), 1<<62)
	require.NoError(t, err)
	require.EqualValues(t, 1, deleted)
}

// Four sweepers beside a transaction that holds an expired record: nobody waits, nobody counts a record twice.
func TestSweepersShareTheWorkAndWaitForNobody(t *testing.T) {
	t.Parallel()
	f := setup(t)
	const expired = 2000
	sweepFill(t, f, 0, expired)
	tx, err := recordConn(t, pgx.QueryExecModeCacheStatement).Begin(t.Context())
	require.NoError(t, err)
	held := sweepName(0) // the first that every sweep meets
	_, err = tx.Exec(t.Context(), `SELECT FROM `+recordTable(f)+` WHERE key = $1 FOR UPDATE`, held.Value)
	require.NoError(t, err)

	ctx, cancel := context.WithTimeout(t.Context(), time.Minute) // the transaction ends only after them
	defer cancel()
	var (
		sweepers sync.WaitGroup
		total    atomic.Int64
		errs     [4]error
	)
	for i := range errs {
		sweepers.Go(func() {
			for {
				deleted, err := f.Sweep(ctx, 20)
				total.Add(deleted)
				if err != nil || deleted == 0 {
					errs[i] = err
					return
				}
			}
		})
	}
	sweepers.Wait()
	require.NoError(t, errors.Join(errs[:]...))
	require.Equal(t, []string{held.Value}, sweepRemaining(t, f), "left behind")
	require.EqualValues(t, expired-1, total.Load())

	require.NoError(t, tx.Rollback(t.Context()))
	deleted, err := f.Sweep(t.Context(), 20)
	require.NoError(t, err)
	require.EqualValues(t, 1, deleted)
}

// Sweeps against a session that locks the same records in the opposite order: the classic deadlock of two batches. Each
// sweep is rolled back, so that all of them meet over the same records, and so that no retry hides a deadlock.
func TestSweepsDoNotDeadlockWithTheOppositeOrder(t *testing.T) {
	t.Parallel()
	f := setup(t)
	const rounds, batch = 500, 8
	sweepFill(t, f, 0, batch)
	rolledBack := func(work func(tx pgx.Tx) error) error {
		tx, err := f.Pool.Begin(t.Context())
		if err != nil {
			return err
		}
		return errors.Join(work(tx), tx.Rollback(t.Context()))
	}
	var (
		workers sync.WaitGroup
		errs    [3]error
		deleted atomic.Int64
	)
	for i, work := range [...]func(tx pgx.Tx) error{
		func(tx pgx.Tx) error {
			n, err := f.WithTx(tx).Sweep(t.Context(), batch)
			deleted.Add(n)
			return err
		},
		func(tx pgx.Tx) error {
			n, err := f.WithTx(tx).Sweep(t.Context(), batch)
			deleted.Add(n)
			return err
		},
		func(tx pgx.Tx) error {
			_, err := tx.Exec(t.Context(), `SELECT FROM `+recordTable(f)+` ORDER BY purge_after DESC FOR UPDATE`)
			return err
		},
	} {
		workers.Go(func() {
			for range rounds {
				if errs[i] = rolledBack(work); errs[i] != nil {
					return
				}
			}
		})
	}
	workers.Wait()
	require.NoError(t, errors.Join(errs[:]...))
	require.Positive(t, deleted.Load())
	require.Len(t, sweepRemaining(t, f), batch)
}

// Two sweeps and a takeover of each of the same records at once: a record is swept before its key is begun again, or it is
// taken over and stays. Many rounds, so that both happen.
func TestSweepNeverDeletesWhatIsBeingTakenOver(t *testing.T) {
	t.Parallel()
	f := setup(t)
	const rounds, batch = 250, 4
	var swept int64
	for round := range rounds {
		sweepFill(t, f, round*batch, batch) // no more, or the sweeps would run ahead
		var (
			workers sync.WaitGroup
			start   = make(chan struct{})
			deleted [2]int64
			records [batch]pgstore.Record
			created [batch]bool
			errs    [batch + 2]error
		)
		for i := range batch {
			workers.Go(func() {
				<-start
				records[i], created[i], errs[i] = f.Begin(t.Context(), sweepName(round*batch+i), fingerprint)
			})
		}
		for i := range deleted {
			workers.Go(func() {
				<-start
				deleted[i], errs[batch+i] = f.Sweep(t.Context(), batch/2)
			})
		}
		close(start)
		workers.Wait()
		require.NoError(t, errors.Join(errs[:]...))
		for i := range batch {
			require.True(t, created[i])
			require.NoError(t, f.Complete(t.Context(), sweepName(round*batch+i), fingerprint, records[i].Attempt, ""),
				"a live record was deleted")
		}
		swept += deleted[0] + deleted[1]
	}
	remaining := sweepRemaining(t, f)
	require.Len(t, remaining, rounds*batch)
	t.Logf("begun=%d swept_before=%d taken_over=%d live_deleted=0", rounds*batch, swept, rounds*batch-swept)
	require.Positive(t, swept, "no sweep met a takeover")
	require.Less(t, swept, int64(rounds*batch), "no takeover met a sweep")
}

func TestSweepGoesAroundARecordThatRefuses(t *testing.T) {
	t.Parallel()
	f := setup(t)
	sweepFill(t, f, 0, 10)
	sweepPoison(t, f, `OLD.key = '0000003'`)
	for run, want := range []int64{9, 0, 0} { // the next run has the same news, and is not stuck
		deleted, err := f.Sweep(t.Context(), 100)
		require.Equal(t, want, deleted, "run %d", run)
		require.EqualError(t, err, `idempotency: sweep: "tenant-a"/"order.create"/"0000003" stays: `+
			`ERROR: this one is needed as evidence (SQLSTATE P0001)`)
		_, ok := errors.AsType[*pgconn.PgError](err)
		require.True(t, ok)
		require.Equal(t, []string{"0000003"}, sweepRemaining(t, f))
	}
	sweepFill(t, f, 20, 10)
	deleted, err := f.Sweep(t.Context(), 100)
	require.ErrorContains(t, err, `"0000003" stays`)
	require.EqualValues(t, 10, deleted)
}

func TestSweepGoesAroundARecordThatIsReferenced(t *testing.T) {
	t.Parallel()
	f := setup(t)
	sweepFill(t, f, 0, 10)
	_, err := f.Pool.Exec(t.Context(), fmt.Sprintf(`
		CREATE TABLE %[1]s (tenant text COLLATE "C", operation text COLLATE "C", key text COLLATE "C",
			FOREIGN KEY (tenant, operation, key) REFERENCES %[2]s (tenant, operation, key));
		INSERT INTO %[1]s SELECT tenant, operation, key FROM %[2]s WHERE key IN ('0000000', '0000009')`,
		pgx.Identifier{f.Schema, "audit"}.Sanitize(), recordTable(f)))
	require.NoError(t, err)
	deleted, err := f.Sweep(t.Context(), 100)
	require.EqualValues(t, 8, deleted)
	require.ErrorContains(t, err, `"tenant-a"/"order.create"/"0000000" stays: ERROR: update or delete on table`)
	require.ErrorContains(t, err, `"tenant-a"/"order.create"/"0000009" stays: ERROR: update or delete on table`)
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	require.True(t, ok)
	require.Equal(t, "23503", pgErr.Code)
	require.Equal(t, []string{"0000000", "0000009"}, sweepRemaining(t, f))
}

// However many refuse in front, a sweep with a small limit gets to those behind, in their order, and no further than its limit.
func TestSweepGoesAroundMoreRefusalsThanItsLimit(t *testing.T) {
	t.Parallel()
	f := setup(t)
	const poisoned = 12
	sweepFill(t, f, 0, poisoned+7)
	sweepPoison(t, f, fmt.Sprintf(`OLD.key < '%07d'`, poisoned))
	for run, want := range []int64{5, 2, 0} {
		deleted, err := f.Sweep(t.Context(), 5)
		require.Equal(t, want, deleted, "run %d", run)
		require.ErrorContains(t, err, `"0000000" stays`)
		require.ErrorContains(t, err, `"0000009" stays`)
		require.NotContains(t, err.Error(), `"0000010"`)
		require.ErrorContains(t, err, "and 2 more stay")
		remaining := sweepRemaining(t, f)
		require.Equal(t, sweepName(0).Value, remaining[0])
		if run == 0 {
			require.Equal(t, []string{sweepName(poisoned + 5).Value, sweepName(poisoned + 6).Value}, remaining[poisoned:])
		} else {
			require.Len(t, remaining, poisoned)
		}
	}
}

// A sweep lists what it goes around in pieces; around the end of a piece only the keys tell these records apart.
func TestSweepGoesAroundMoreRefusalsThanItListsAtATime(t *testing.T) {
	t.Parallel()
	f := setup(t)
	const poisoned = 1050
	sweepFill(t, f, 0, poisoned+7)
	sweepPoison(t, f, fmt.Sprintf(`OLD.key < '%07d'`, poisoned))
	recordExec(t, f, `UPDATE %[1]s SET expires_at = m.at, purge_after = m.at
		FROM (SELECT purge_after AS at FROM %[1]s WHERE key = '0000980') AS m WHERE key BETWEEN '0000980' AND '0001020'`)
	deleted, err := f.Sweep(t.Context(), poisoned)
	require.EqualValues(t, 7, deleted)
	require.ErrorContains(t, err, fmt.Sprintf("and %d more stay", poisoned-10))
	require.Len(t, sweepRemaining(t, f), poisoned)
}

// Two sweepers that both have to go around the same refusals still share the rest without waiting or double counting.
func TestSweepersGoAroundTheSameRefusalsAtOnce(t *testing.T) {
	t.Parallel()
	f := setup(t)
	const expired = 300
	sweepFill(t, f, 0, expired)
	sweepPoison(t, f, `OLD.key LIKE '%00'`) // 0, 100, 200
	tx, err := recordConn(t, pgx.QueryExecModeCacheStatement).Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), `SELECT FROM `+recordTable(f)+` WHERE key = $1 FOR UPDATE`, sweepName(1).Value)
	require.NoError(t, err)
	var (
		sweepers sync.WaitGroup
		deleted  [2]int64
		errs     [2]error
	)
	for i := range deleted {
		sweepers.Go(func() { deleted[i], errs[i] = f.Sweep(t.Context(), expired) })
	}
	sweepers.Wait()
	// One alone may report a refusal: the other skips what is locked for the attempt.
	for _, n := range []int{0, 100, 200} {
		require.ErrorContains(t, errors.Join(errs[:]...), sweepName(n).String()+" stays")
	}
	require.EqualValues(t, expired-4, deleted[0]+deleted[1])
	require.Equal(t, []string{"0000000", "0000001", "0000100", "0000200"}, sweepRemaining(t, f))
	require.NoError(t, tx.Rollback(t.Context()))
}

// In a caller's transaction the store cannot go around anything without ending what the caller has begun.
func TestRefusedSweepInATransactionAbortsIt(t *testing.T) {
	t.Parallel()
	f := setup(t)
	sweepFill(t, f, 0, 3)
	sweepPoison(t, f, `OLD.key = '0000002'`)
	tx, err := f.Pool.Begin(t.Context())
	require.NoError(t, err)
	deleted, err := f.WithTx(tx).Sweep(t.Context(), 10)
	require.EqualError(t, err, `idempotency: sweep: ERROR: this one is needed as evidence (SQLSTATE P0001)`)
	require.Zero(t, deleted)
	require.NoError(t, tx.Rollback(t.Context()))
	require.Len(t, sweepRemaining(t, f), 3)
}

// An error that is not about one record ends the sweep instead of being met once for each.
func TestSweepThatIsNotAllowedStopsAtOnce(t *testing.T) {
	t.Parallel()
	f := setup(t)
	sweepFill(t, f, 0, 3)
	conn := recordConn(t, pgx.QueryExecModeCacheStatement)
	_, err := conn.Exec(t.Context(), `SET default_transaction_read_only = on`)
	require.NoError(t, err)
	deleted, err := f.NewStore(t, conn, lease, retention).Sweep(t.Context(), 10)
	require.ErrorContains(t, err, "the database is read-only")
	require.NotContains(t, err.Error(), "stays")
	require.Zero(t, deleted)
	require.Len(t, sweepRemaining(t, f), 3)
}

// sweepCodeless answers like a proxy that reports an error without an SQLSTATE.
type sweepCodeless struct{ keyNoSQL }

func (*sweepCodeless) Exec(context.Context, string, ...any) (pgconn.CommandTag, error) {
	return pgconn.CommandTag{}, &pgconn.PgError{Severity: "ERROR", Message: "no idea"}
}

func TestSweepReturnsAnErrorThatHasNoCode(t *testing.T) {
	t.Parallel()
	store, err := pgstore.New(&sweepCodeless{}, lease, retention)
	require.NoError(t, err)
	deleted, err := store.Sweep(t.Context(), 10)
	require.ErrorContains(t, err, "idempotency: sweep: ERROR: no idea")
	require.Zero(t, deleted)
}
