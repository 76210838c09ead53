package pgstore_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/archlab/idempotency/internal/pgtest"
	"github.com/archlab/idempotency/pgstore"
)

// What Begin can answer.
const (
	beginCreated    = "created"
	beginStored     = "the stored record"
	beginInProgress = "ErrInProgress"
	beginConflict   = "ErrConflict"
)

func TestBeginFollowsItsTable(t *testing.T) {
	t.Parallel()
	f := setup(t)
	for _, test := range []struct {
		state       pgstore.State
		same, other string
	}{
		{"", beginCreated, beginCreated},
		{pgstore.StateInProgress, beginInProgress, beginConflict},
		{pgstore.StateDone, beginStored, beginConflict},
		{pgstore.StateFailed, beginStored, beginConflict},
		{pgstore.StateRetryable, beginCreated, beginConflict},
	} {
		for _, live := range []bool{true, false} {
			for asked, want := range map[string]string{fingerprint: test.same, "sha256:of another": test.other} {
				if !live {
					want = beginCreated
				}
				name := fmt.Sprintf("state=%s/live=%t/same=%t", test.state, live, asked == fingerprint)
				t.Run(name, func(t *testing.T) {
					t.Parallel()
					beginOnce(t, f, recordKey(name), test.state, live, asked, want)
				})
			}
		}
	}
}

// beginOnce brings k into the state and checks everything about one Begin.
func beginOnce(t *testing.T, f *fixture, k pgstore.Key, state pgstore.State, live bool, asked, want string) {
	t.Helper()
	var attempt uint64
	if state != "" {
		attempt = recordPut(t, f, k, state)
		if !live {
			recordAge(t, f, k, retention)
		}
	}
	before := recordRow(t, f, k)
	record, created, err := f.Begin(t.Context(), k, asked)

	require.Equal(t, want == beginCreated, created)
	switch want {
	case beginCreated:
		require.NoError(t, err)
		require.Equal(t, pgstore.StateInProgress, record.State)
		require.Equal(t, asked, record.Fingerprint)
		require.Empty(t, record.Response)
		require.Greater(t, record.Attempt, attempt)
		require.Positive(t, record.Remaining)
		require.LessOrEqual(t, record.Remaining, lease)
		abandoned := uint64(0)
		if state == pgstore.StateInProgress {
			abandoned = attempt
		}
		require.Equal(t, abandoned, record.Abandoned)
		after := recordRow(t, f, k)
		require.NotEqual(t, before, after)
		// The key belongs to this request from now on, whatever it belonged to before.
		_, _, err = f.Begin(t.Context(), k, "sha256:of a third")
		require.ErrorIs(t, err, pgstore.ErrConflict)
		require.ErrorIs(t, f.Complete(t.Context(), k, "sha256:of a third", record.Attempt, ""), pgstore.ErrConflict)
		require.Equal(t, after, recordRow(t, f, k))
		return
	case beginStored:
		require.NoError(t, err)
		require.Equal(t, state, record.State)
		require.Equal(t, fingerprint, record.Fingerprint)
		require.Equal(t, attempt, record.Attempt)
		require.Zero(t, record.Abandoned)
		require.Greater(t, record.Remaining, retention-time.Minute)
		require.LessOrEqual(t, record.Remaining, retention)
		response := ""
		if state == pgstore.StateDone {
			response = recordResponse
		}
		require.Equal(t, response, record.Response)
	case beginInProgress:
		require.ErrorIs(t, err, pgstore.ErrInProgress)
		inProgress, ok := errors.AsType[*pgstore.InProgressError](err)
		require.True(t, ok)
		require.Positive(t, inProgress.RetryAfter)
		require.LessOrEqual(t, inProgress.RetryAfter, lease)
		require.Greater(t, inProgress.RetryAfter, lease-30*time.Second)
		require.Zero(t, record)
	case beginConflict:
		require.ErrorIs(t, err, pgstore.ErrConflict)
		require.NotErrorIs(t, err, pgstore.ErrInProgress)
		require.Zero(t, record)
	}
	require.Equal(t, before, recordRow(t, f, k), "a Begin that was not created wrote")
}

func TestLeaseExpiryAllowsTakeover(t *testing.T) {
	t.Parallel()
	f := setup(t)
	first := recordPut(t, f, key, pgstore.StateInProgress)
	recordAge(t, f, key, lease-10*time.Second)
	_, _, err := f.Begin(t.Context(), key, fingerprint)
	require.ErrorIs(t, err, pgstore.ErrInProgress, "before the lease is over")
	recordAge(t, f, key, 10*time.Second)

	record, created, err := f.Begin(t.Context(), key, fingerprint)
	require.NoError(t, err)
	require.True(t, created)
	require.Greater(t, record.Attempt, first)
	require.Equal(t, first, record.Abandoned)

	late := f.Complete(t.Context(), key, fingerprint, first, recordResponse)
	require.ErrorIs(t, late, pgstore.ErrStaleAttempt)
	t.Logf("after_lease_expiry attempt_old=%d attempt_new=%d created=%t late_complete=%v", first, record.Attempt, created, late)
}

// Nobody has swept: the row of the forgotten outcome still lies in the table when the key is begun again.
func TestRetentionExpiryForgetsKey(t *testing.T) {
	t.Parallel()
	f := setup(t)
	first := recordPut(t, f, key, pgstore.StateDone)
	recordAge(t, f, key, retention)
	require.Contains(t, recordRow(t, f, key), "done")

	record, created, err := f.Begin(t.Context(), key, "sha256:of another")
	require.NoError(t, err)
	require.True(t, created)
	require.Greater(t, record.Attempt, first)
	require.Empty(t, record.Response)
	require.Zero(t, record.Abandoned)
	require.True(t, recordScalar[bool](t, f, `SELECT response IS NULL FROM %s`), "the old response is still stored")

	_, _, err = f.Begin(t.Context(), key, fingerprint)
	require.ErrorIs(t, err, pgstore.ErrConflict, "the old fingerprint is still known")
	require.ErrorIs(t, f.Complete(t.Context(), key, fingerprint, first, recordResponse), pgstore.ErrConflict)
	t.Logf("after_retention created=%t", created)
}

func TestLeaseAndRetentionEndToTheMicrosecond(t *testing.T) {
	t.Parallel()
	clock := newClock()
	f := setup(t, pgstore.WithClock(clock.Now))
	first, created, err := f.Begin(t.Context(), key, fingerprint)
	require.NoError(t, err)
	require.True(t, created)
	require.Equal(t, clock.Now().Add(lease), first.ExpiresAt)
	require.Equal(t, lease, first.Remaining)

	clock.Advance(lease - time.Microsecond)
	_, _, err = f.Begin(t.Context(), key, fingerprint)
	inProgress, ok := errors.AsType[*pgstore.InProgressError](err)
	require.True(t, ok, "%v", err)
	require.Equal(t, time.Microsecond, inProgress.RetryAfter)

	clock.Advance(time.Microsecond)
	second, created, err := f.Begin(t.Context(), key, fingerprint)
	require.NoError(t, err)
	require.True(t, created)
	require.Equal(t, first.Attempt, second.Abandoned)

	clock.Advance(lease - time.Microsecond) // the last moment at which it can complete
	require.NoError(t, f.Complete(t.Context(), key, fingerprint, second.Attempt, recordResponse))
	clock.Advance(retention - time.Microsecond)
	replayed, created, err := f.Begin(t.Context(), key, fingerprint)
	require.NoError(t, err)
	require.False(t, created)
	require.Equal(t, recordResponse, replayed.Response)
	require.Equal(t, time.Microsecond, replayed.Remaining)

	clock.Advance(time.Microsecond)
	_, live, err := f.Get(t.Context(), key)
	require.NoError(t, err)
	require.False(t, live)
	_, created, err = f.Begin(t.Context(), key, fingerprint)
	require.NoError(t, err)
	require.True(t, created)
}

func TestLeaseAndRetentionAreTwoDurations(t *testing.T) {
	t.Parallel()
	clock := newClock()
	f := setup(t)
	store := f.NewStore(t, f.Pool, time.Second, retention, pgstore.WithClock(clock.Now))
	first, _, err := store.Begin(t.Context(), key, fingerprint)
	require.NoError(t, err)
	require.Equal(t, time.Second, first.Remaining)

	clock.Advance(time.Second)
	second, created, err := store.Begin(t.Context(), key, fingerprint)
	require.NoError(t, err)
	require.True(t, created, "a lapsed lease waited for the retention")

	clock.Advance(300 * time.Millisecond)
	require.NoError(t, store.Complete(t.Context(), key, fingerprint, second.Attempt, recordResponse))
	done, _, err := store.Get(t.Context(), key)
	require.NoError(t, err)
	require.Equal(t, clock.Now().Add(retention), done.ExpiresAt, "the retention counts from the completion")
}

func TestLeaseIsStoredToTheMicrosecond(t *testing.T) {
	t.Parallel()
	f := setup(t)
	for _, test := range []struct{ given, stored time.Duration }{
		{time.Millisecond, time.Millisecond},
		{time.Millisecond + 999, time.Millisecond}, // in nanoseconds
		{time.Millisecond + time.Microsecond, time.Millisecond + time.Microsecond},
		{1500 * time.Millisecond, 1500 * time.Millisecond},
		{30 * time.Second, 30 * time.Second},
		{36*time.Hour + time.Microsecond, 36*time.Hour + time.Microsecond},
		{pgstore.MaxDuration, pgstore.MaxDuration},
	} {
		t.Run(test.given.String(), func(t *testing.T) {
			t.Parallel()
			k := recordKey(test.given.String())
			where := ` WHERE key = $1`
			microseconds := func(expression string) time.Duration {
				return time.Duration(recordScalar[int64](t, f,
					`SELECT (extract(epoch FROM `+expression+`) * 1000000)::bigint FROM %s`+where, k.Value)) * time.Microsecond
			}

			// On the database's clock: what is stored, against the statement's own time.
			before := recordNow(t, f)
			record, created, err := f.NewStore(t, f.Pool, test.given, test.given).Begin(t.Context(), k, fingerprint)
			after := recordNow(t, f)
			if err == nil { // the shortest may be over before the answer arrives
				require.True(t, created)
				require.False(t, record.ExpiresAt.Before(before.Add(test.stored)))
				require.False(t, record.ExpiresAt.After(after.Add(test.stored)))
			}
			require.Equal(t, test.stored, microseconds("expires_at - begun_at"))
			require.Equal(t, 2*test.stored, microseconds("purge_after - begun_at"))

			// On a clock that stands: what the call returns, and what each further call stores.
			clock := newClock()
			k.Operation = "on a clock"
			where = ` WHERE key = $1 AND operation = 'on a clock'`
			store := f.NewStore(t, f.Pool, test.given, test.given, pgstore.WithClock(clock.Now))
			record, created, err = store.Begin(t.Context(), k, fingerprint)
			require.NoError(t, err)
			require.True(t, created)
			require.Equal(t, test.stored, record.Remaining)
			require.Equal(t, clock.Now().Add(test.stored), record.ExpiresAt)
			clock.Advance(time.Microsecond)
			record, err = store.Extend(t.Context(), k, fingerprint, record.Attempt)
			require.NoError(t, err)
			require.Equal(t, clock.Now().Add(test.stored), record.ExpiresAt)
			clock.Advance(time.Microsecond)
			require.NoError(t, store.Complete(t.Context(), k, fingerprint, record.Attempt, recordResponse))
			record, created, err = store.Begin(t.Context(), k, fingerprint)
			require.NoError(t, err)
			require.False(t, created)
			require.Equal(t, clock.Now().Add(test.stored), record.ExpiresAt)
		})
	}
}

// Whether a lease has lapsed is a matter of who holds it: neither a longer nor a shorter lease of the next store counts.
func TestTakeoverFollowsTheHoldersLease(t *testing.T) {
	t.Parallel()
	f := setup(t)
	for name, leases := range map[string]struct{ holder, taker time.Duration }{
		"taker shorter": {time.Second, 100 * time.Millisecond},
		"taker longer":  {time.Second, time.Hour},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			clock := newClock()
			k := recordKey(name)
			holder := f.NewStore(t, f.Pool, leases.holder, retention, pgstore.WithClock(clock.Now))
			taker := f.NewStore(t, f.Pool, leases.taker, retention, pgstore.WithClock(clock.Now))
			first, _, err := holder.Begin(t.Context(), k, fingerprint)
			require.NoError(t, err)

			clock.Advance(leases.holder - time.Microsecond)
			_, _, err = taker.Begin(t.Context(), k, fingerprint)
			require.ErrorIs(t, err, pgstore.ErrInProgress)
			clock.Advance(time.Microsecond)
			second, created, err := taker.Begin(t.Context(), k, fingerprint)
			require.NoError(t, err)
			require.True(t, created)
			require.Equal(t, first.Attempt, second.Abandoned)
			require.Equal(t, leases.taker, second.Remaining)
		})
	}
}

// One process, one Store value, two goroutines: the second is as much a stranger to the first as another process is.
func TestTakeoverWorksWithinOneProcess(t *testing.T) {
	t.Parallel()
	f := setup(t)
	begin := func() (record pgstore.Record, created bool, err error) {
		var done sync.WaitGroup
		done.Go(func() { record, created, err = f.Begin(t.Context(), key, fingerprint) })
		done.Wait()
		return record, created, err
	}
	first, created, err := begin()
	require.NoError(t, err)
	require.True(t, created)
	_, _, err = begin()
	require.ErrorIs(t, err, pgstore.ErrInProgress)
	recordAge(t, f, key, lease)
	second, created, err := begin()
	require.NoError(t, err)
	require.True(t, created)
	require.Equal(t, first.Attempt, second.Abandoned)
}

func TestEveryComponentTellsKeysApart(t *testing.T) {
	t.Parallel()
	f := setup(t)
	keys := []pgstore.Key{
		{Tenant: "t", Operation: "bill", Value: "1"},
		{Tenant: "u", Operation: "bill", Value: "1"}, // another tenant
		{Tenant: "t", Operation: "mail", Value: "1"}, // another operation
		{Tenant: "t", Operation: "bill", Value: "2"}, // another value
		{Tenant: "a/b", Operation: "c", Value: "d"},  // the same letters, divided in other places
		{Tenant: "a", Operation: "b/c", Value: "d"},
		{Tenant: "a", Operation: "b", Value: "c/d"},
		{Tenant: "ab", Operation: "c", Value: "d"},
		{Tenant: "a", Operation: "bc", Value: "d"},
		{Tenant: "t", Operation: "bill", Value: "x"}, // white space, case and normal form count
		{Tenant: "t", Operation: "bill", Value: "x "},
		{Tenant: "t", Operation: "bill", Value: "X"},
		{Tenant: "t", Operation: "bill", Value: "\u00e9"},
		{Tenant: "t", Operation: "bill", Value: "e\u0301"},
		{Tenant: "t", Operation: "bill", Value: "1-1"},
		{Tenant: "t", Operation: "bill", Value: "11"},
	}
	attempts := map[uint64]pgstore.Key{}
	for _, k := range keys {
		record, created, err := f.Begin(t.Context(), k, fingerprint)
		require.NoError(t, err)
		require.True(t, created, "%s", k)
		require.NotContains(t, attempts, record.Attempt)
		attempts[record.Attempt] = k
	}
	for attempt, k := range attempts {
		require.NoError(t, f.Complete(t.Context(), k, fingerprint, attempt, k.String()))
	}
	for _, k := range keys {
		record, created, err := f.Begin(t.Context(), k, fingerprint)
		require.NoError(t, err)
		require.False(t, created)
		require.Equal(t, k.String(), record.Response)
	}
}

// A row that is gone, by a failover that lost it or by hand, must not let a handle from before it speak for the new attempt.
func TestAttemptsGoOnIncreasingAfterARowIsLost(t *testing.T) {
	t.Parallel()
	f := setup(t)
	var last uint64
	for _, state := range recordStates {
		lost := recordPut(t, f, key, state)
		require.Greater(t, lost, last)
		require.EqualValues(t, 1, recordExec(t, f, `DELETE FROM %s`))
		for call, err := range map[string]error{
			"complete": f.Complete(t.Context(), key, fingerprint, lost, recordResponse),
			"fail":     f.Fail(t.Context(), key, fingerprint, lost, true),
		} {
			require.ErrorIs(t, err, pgstore.ErrLeaseExpired, call)
		}

		record, created, err := f.Begin(t.Context(), key, fingerprint)
		require.NoError(t, err)
		require.True(t, created)
		require.Greater(t, record.Attempt, lost)
		before := recordRow(t, f, key)
		require.ErrorIs(t, f.Complete(t.Context(), key, fingerprint, lost, recordResponse), pgstore.ErrStaleAttempt)
		_, err = f.Extend(t.Context(), key, fingerprint, lost)
		require.ErrorIs(t, err, pgstore.ErrStaleAttempt)
		require.Equal(t, before, recordRow(t, f, key))
		last = record.Attempt
		require.EqualValues(t, 1, recordExec(t, f, `DELETE FROM %s`))
	}
}

func TestAbandonedTellsOfTheLapsedAttempt(t *testing.T) {
	t.Parallel()
	begin := func(t *testing.T, f *fixture) pgstore.Record {
		t.Helper()
		record, created, err := f.Begin(t.Context(), key, fingerprint)
		require.NoError(t, err)
		require.True(t, created)
		return record
	}
	lapse := func(t *testing.T, f *fixture) (lapsed, successor pgstore.Record) {
		t.Helper()
		lapsed = begin(t, f)
		recordAge(t, f, key, lease)
		successor = begin(t, f)
		require.Equal(t, lapsed.Attempt, successor.Abandoned)
		return lapsed, successor
	}

	t.Run("the latest of several", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		_, second := lapse(t, f)
		recordAge(t, f, key, lease)
		require.Equal(t, second.Attempt, begin(t, f).Abandoned)
	})
	t.Run("outlives a release", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		lapsed, record := lapse(t, f)
		for range 3 {
			require.NoError(t, f.Fail(t.Context(), key, fingerprint, record.Attempt, true))
			record = begin(t, f)
			require.Equal(t, lapsed.Attempt, record.Abandoned)
		}
	})
	t.Run("is part of the outcome", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		lapsed, record := lapse(t, f)
		extended, err := f.Extend(t.Context(), key, fingerprint, record.Attempt)
		require.NoError(t, err)
		require.Equal(t, lapsed.Attempt, extended.Abandoned)
		require.NoError(t, f.Complete(t.Context(), key, fingerprint, record.Attempt, recordResponse))
		replayed, _, err := f.Begin(t.Context(), key, fingerprint)
		require.NoError(t, err)
		require.Equal(t, lapsed.Attempt, replayed.Abandoned)
	})
	t.Run("ends with an outcome", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		_, record := lapse(t, f)
		require.NoError(t, f.Complete(t.Context(), key, fingerprint, record.Attempt, recordResponse))
		recordAge(t, f, key, retention)
		require.Zero(t, begin(t, f).Abandoned)
	})
	t.Run("is told to another fingerprint too", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		lapsed := begin(t, f)
		recordAge(t, f, key, lease)
		record, created, err := f.Begin(t.Context(), key, "sha256:of another")
		require.NoError(t, err)
		require.True(t, created)
		require.Equal(t, lapsed.Attempt, record.Abandoned)
	})
	for name, swept := range map[string]bool{"ends with the retention, swept": true, "ends with the retention, not swept": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := setup(t)
			begin(t, f)
			recordAge(t, f, key, lease+retention-time.Minute)
			deleted, err := f.Sweep(t.Context(), 10)
			require.NoError(t, err)
			require.Zero(t, deleted, "a lapsed attempt was deleted before its retention")
			recordAge(t, f, key, time.Minute)
			if swept {
				deleted, err = f.Sweep(t.Context(), 10)
				require.NoError(t, err)
				require.EqualValues(t, 1, deleted)
			}
			require.Zero(t, begin(t, f).Abandoned)
		})
	}
}

// beginBlocked starts a Begin on a connection of its own and returns when the server says that it waits for a lock.
func beginBlocked(t *testing.T, f *fixture, k pgstore.Key, fingerprint string) func() (pgstore.Record, bool, error) {
	t.Helper()
	conn := recordConn(t, pgx.QueryExecModeCacheStatement)
	store := f.NewStore(t, conn, lease, retention)
	var (
		record  pgstore.Record
		created bool
		err     error
		done    = make(chan struct{})
	)
	go func() {
		defer close(done)
		record, created, err = store.Begin(t.Context(), k, fingerprint)
	}()
	pid := conn.PgConn().PID()
	require.Eventually(t, func() bool {
		var waits bool
		err := f.Pool.QueryRow(t.Context(), `SELECT cardinality(pg_blocking_pids($1)) > 0`, pid).Scan(&waits)
		return err == nil && waits
	}, 20*time.Second, 5*time.Millisecond, "Begin does not wait for the transaction that holds its key")
	return func() (pgstore.Record, bool, error) {
		<-done
		return record, created, err
	}
}

func TestBeginWaitsForAnUncommittedOneAndThenTellsTheTruth(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name string
		asks string
		end  func(t *testing.T, f *fixture, tx pgx.Tx, attempt uint64)
		want string
	}{
		{"committed in progress", fingerprint, func(t *testing.T, _ *fixture, tx pgx.Tx, _ uint64) {
			t.Helper()
			require.NoError(t, tx.Commit(t.Context()))
		}, beginInProgress},
		{"committed done", fingerprint, func(t *testing.T, f *fixture, tx pgx.Tx, attempt uint64) {
			t.Helper()
			require.NoError(t, f.WithTx(tx).Complete(t.Context(), key, fingerprint, attempt, recordResponse))
			require.NoError(t, tx.Commit(t.Context()))
		}, beginStored},
		{"committed for another request", "sha256:of another", func(t *testing.T, _ *fixture, tx pgx.Tx, _ uint64) {
			t.Helper()
			require.NoError(t, tx.Commit(t.Context()))
		}, beginConflict},
		{"committed and released", fingerprint, func(t *testing.T, f *fixture, tx pgx.Tx, attempt uint64) {
			t.Helper()
			require.NoError(t, f.WithTx(tx).Fail(t.Context(), key, fingerprint, attempt, true))
			require.NoError(t, tx.Commit(t.Context()))
		}, beginCreated},
		{"rolled back", fingerprint, func(t *testing.T, _ *fixture, tx pgx.Tx, _ uint64) {
			t.Helper()
			require.NoError(t, tx.Rollback(t.Context()))
		}, beginCreated},
		{"deleted before it is read", fingerprint, func(t *testing.T, f *fixture, tx pgx.Tx, _ uint64) {
			t.Helper()
			_, err := tx.Exec(t.Context(), `DELETE FROM `+recordTable(f))
			require.NoError(t, err)
			require.NoError(t, tx.Commit(t.Context()))
		}, beginCreated},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			f := setup(t)
			tx, err := recordConn(t, pgx.QueryExecModeCacheStatement).Begin(t.Context())
			require.NoError(t, err)
			holder, created, err := f.WithTx(tx).Begin(t.Context(), key, fingerprint)
			require.NoError(t, err)
			require.True(t, created)

			wait := beginBlocked(t, f, key, test.asks)
			test.end(t, f, tx, holder.Attempt)
			record, created, err := wait()
			require.Equal(t, test.want == beginCreated, created)
			switch test.want {
			case beginCreated:
				require.NoError(t, err)
				require.NotEqual(t, holder.Attempt, record.Attempt)
				require.NoError(t, f.Complete(t.Context(), key, fingerprint, record.Attempt, recordResponse))
			case beginStored:
				require.NoError(t, err)
				require.Equal(t, recordResponse, record.Response)
				require.Equal(t, holder.Attempt, record.Attempt)
			case beginInProgress:
				require.ErrorIs(t, err, pgstore.ErrInProgress)
			case beginConflict:
				require.ErrorIs(t, err, pgstore.ErrConflict)
			}
		})
	}
}

// Whatever makes every run lose, it ends, and not in ownership.
func TestBeginWithoutARowIsNoOwnership(t *testing.T) {
	t.Parallel()
	f := setup(t)
	statements := *f.Statements()
	statements.Begin = `
		SELECT true, true, 'in_progress', NULL::bytea, 1::bigint, NULL::bigint, 1::bigint, 1::bigint
		WHERE ($1::text, $2::text, $3::text, $4::bytea, $5::bigint, $6::interval, $7::interval) IS NULL`
	record, created, err := f.WithStatements(&statements).Begin(t.Context(), key, fingerprint)
	require.False(t, created)
	require.Zero(t, record)
	inProgress, ok := errors.AsType[*pgstore.InProgressError](err)
	require.True(t, ok, "%v", err)
	require.Positive(t, inProgress.RetryAfter)
	require.LessOrEqual(t, inProgress.RetryAfter, time.Second)
}

// A created record whose lease is over before it is returned belongs to nobody: the next caller may have it already.
func TestBeginThatOutwaitsItsLeaseDoesNotPromiseIt(t *testing.T) {
	t.Parallel()
	f := setup(t)
	tx, err := recordConn(t, pgx.QueryExecModeCacheStatement).Begin(t.Context())
	require.NoError(t, err)
	_, _, err = f.WithTx(tx).Begin(t.Context(), key, fingerprint)
	require.NoError(t, err)

	const short = 50 * time.Millisecond
	conn := recordConn(t, pgx.QueryExecModeCacheStatement)
	store := f.NewStore(t, conn, short, retention)
	type answer struct {
		record  pgstore.Record
		created bool
		err     error
	}
	answers := make(chan answer, 1)
	go func() {
		record, created, err := store.Begin(t.Context(), key, fingerprint)
		answers <- answer{record, created, err}
	}()
	require.Eventually(t, func() bool { // it waits for longer than the lease that it asks for
		var outwaited bool
		err := f.Pool.QueryRow(t.Context(), `SELECT cardinality(pg_blocking_pids(pid)) > 0
			AND clock_timestamp() > query_start + $2::interval FROM pg_stat_activity WHERE pid = $1`,
			conn.PgConn().PID(), 2*short).Scan(&outwaited)
		return err == nil && outwaited
	}, 20*time.Second, 5*time.Millisecond)
	require.NoError(t, tx.Rollback(t.Context()))

	got := <-answers
	if got.err != nil { // only where the machine stalls so long that every further lease is over at once, too
		require.ErrorIs(t, got.err, pgstore.ErrInProgress)
		return
	}
	require.True(t, got.created)
	require.Positive(t, got.record.Remaining)
	require.Zero(t, got.record.Abandoned, "a call took its own lapsed record for somebody's lost attempt")
}

func TestBeginTouchesOnlyItsOwnKey(t *testing.T) {
	t.Parallel()
	f := setup(t)
	const expired = 10_000
	require.EqualValues(t, expired, recordExec(t, f, `INSERT INTO %s
			(tenant, operation, key, state, fingerprint, attempt, claim, begun_at, expires_at, purge_after)
		SELECT 'old', 'old', n::text, 'failed', 'x', n, n, now() - interval '3 days', now() - interval '2 days', now() - interval '1 day'
		FROM generate_series(1, $1::int) AS n`, expired))
	sum := func() string {
		return recordScalar[string](t, f, `SELECT count(*) || ' ' || md5(string_agg(ROW(r.ctid, r.xmin, r)::text, '' ORDER BY key))
			FROM %s AS r WHERE tenant = 'old'`)
	}
	before := sum()
	attempt := recordPut(t, f, key, pgstore.StateInProgress)
	require.NoError(t, f.Complete(t.Context(), key, fingerprint, attempt, recordResponse))
	_, created, err := f.Begin(t.Context(), key, fingerprint)
	require.NoError(t, err)
	require.False(t, created)
	require.Equal(t, before, sum())
}

// A store that remembered a key of its own accord would skip the execution that never happened.
func TestNothingIsRememberedOfAFailedBegin(t *testing.T) {
	t.Parallel()
	f := setup(t)
	config, err := pgxpool.ParseConfig(pgtest.DSN(t))
	require.NoError(t, err)
	config.MaxConns = 2
	var (
		down atomic.Bool
		dial = config.ConnConfig.DialFunc
	)
	config.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
		if down.Load() {
			return nil, errors.New("the network is down")
		}
		return dial(ctx, network, address)
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	store := f.NewStore(t, pool, lease, retention)
	require.NoError(t, pool.Ping(t.Context()))

	down.Store(true)
	pool.Reset()
	for range 2 {
		record, created, err := store.Begin(t.Context(), key, fingerprint)
		require.ErrorContains(t, err, "the network is down")
		require.False(t, created)
		require.Zero(t, record)
	}
	down.Store(false)
	_, created, err := store.Begin(t.Context(), key, fingerprint)
	require.NoError(t, err)
	require.True(t, created)

	down.Store(true)
	pool.Reset()
	_, _, err = store.Begin(t.Context(), key, fingerprint)
	require.ErrorContains(t, err, "the network is down")
	down.Store(false)
	_, _, err = store.Begin(t.Context(), key, fingerprint)
	require.ErrorIs(t, err, pgstore.ErrInProgress)
}

// Keys cannot block each other by a hash that they share, and a pooler that lends out sessions cannot strand a lock.
func TestNoCallTakesAnAdvisoryLock(t *testing.T) {
	t.Parallel()
	f := setup(t)
	conn := recordConn(t, pgx.QueryExecModeCacheStatement)
	tx, err := conn.Begin(t.Context())
	require.NoError(t, err)
	store := f.WithTx(tx)
	first, _, err := store.Begin(t.Context(), key, fingerprint)
	require.NoError(t, err)
	_, err = store.Extend(t.Context(), key, fingerprint, first.Attempt)
	require.NoError(t, err)
	require.NoError(t, store.Fail(t.Context(), key, fingerprint, first.Attempt, true))
	second, _, err := store.Begin(t.Context(), key, fingerprint)
	require.NoError(t, err)
	require.NoError(t, store.Complete(t.Context(), key, fingerprint, second.Attempt, recordResponse))
	_, _, err = store.Get(t.Context(), key)
	require.NoError(t, err)
	_, err = store.Sweep(t.Context(), 10)
	require.NoError(t, err)
	var advisory, all int
	require.NoError(t, tx.QueryRow(t.Context(), `SELECT count(*) FILTER (WHERE locktype = 'advisory'), count(*)
		FROM pg_locks WHERE pid = pg_backend_pid()`).Scan(&advisory, &all))
	require.Positive(t, all)
	require.Zero(t, advisory)
	require.NoError(t, tx.Rollback(t.Context()))
}

// Neither an attempt nor a claim is unique in the table, so equal ones on different keys are no error.
func TestEqualClaimsAndAttemptsOnDifferentKeysDoNotCollide(t *testing.T) {
	t.Parallel()
	f := setup(t)
	f.SetClaims(func() int64 { return 7 })
	first, created, err := f.Begin(t.Context(), recordKey("one"), fingerprint)
	require.NoError(t, err)
	require.True(t, created)
	beginSetSequence(t, f, first.Attempt, false)
	second, created, err := f.Begin(t.Context(), recordKey("two"), fingerprint)
	require.NoError(t, err)
	require.True(t, created)
	require.Equal(t, first.Attempt, second.Attempt)
	require.NoError(t, f.Complete(t.Context(), recordKey("one"), fingerprint, first.Attempt, "1"))
	require.NoError(t, f.Complete(t.Context(), recordKey("two"), fingerprint, second.Attempt, "2"))
}

// beginSetSequence makes attempt the sequence's last value, drawn already or the next to be drawn.
func beginSetSequence(t *testing.T, f *fixture, attempt uint64, drawn bool) {
	t.Helper()
	_, err := f.Pool.Exec(t.Context(), `SELECT setval($1::text::regclass, $2, $3)`,
		recordSequence(f), int64(attempt), drawn) //nolint:gosec // the test's own
	require.NoError(t, err)
}

// A sequence can fall behind its table: by a restore from a backup of the sequence alone, or by an ill-advised setval.
func TestSequenceBehindTheTableNeverLowersAnAttempt(t *testing.T) {
	t.Parallel()
	f := setup(t)
	beginSetSequence(t, f, 25, false)
	first := recordPut(t, f, key, pgstore.StateRetryable)
	require.EqualValues(t, 25, first)
	beginSetSequence(t, f, 1, false)
	for range 10 {
		record, created, err := f.Begin(t.Context(), key, fingerprint)
		if err == nil {
			require.True(t, created)
			require.Greater(t, record.Attempt, first)
			return
		}
		require.ErrorIs(t, err, pgstore.ErrInProgress)
	}
	require.Fail(t, "the key never became free")
}

func TestAttemptsReachTheEndOfInt64(t *testing.T) {
	t.Parallel()
	for _, next := range []uint64{math.MaxInt32, math.MaxInt32 + 1, math.MaxUint32, 1 << 53, 1<<53 + 1, math.MaxInt64 - 1, math.MaxInt64} {
		t.Run(strconv.FormatUint(next, 10), func(t *testing.T) {
			t.Parallel()
			f := setup(t)
			beginSetSequence(t, f, next, false)
			record, created, err := f.Begin(t.Context(), key, fingerprint)
			require.NoError(t, err)
			require.True(t, created)
			require.Equal(t, next, record.Attempt)
			record, err = f.Extend(t.Context(), key, fingerprint, next)
			require.NoError(t, err)
			require.Equal(t, next, record.Attempt)
			for _, other := range []uint64{0, next - 1, next + 1, 1 << 63, math.MaxUint64} {
				require.ErrorIs(t, f.Complete(t.Context(), key, fingerprint, other, recordResponse), pgstore.ErrStaleAttempt)
			}
			require.NoError(t, f.Complete(t.Context(), key, fingerprint, next, recordResponse))
			record, created, err = f.Begin(t.Context(), key, fingerprint)
			require.NoError(t, err)
			require.False(t, created)
			require.Equal(t, next, record.Attempt)
		})
	}
	t.Run("beyond", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		beginSetSequence(t, f, math.MaxInt64, true)
		_, created, err := f.Begin(t.Context(), key, fingerprint)
		require.False(t, created)
		pgErr, ok := errors.AsType[*pgconn.PgError](err)
		require.True(t, ok, "%v", err)
		require.Equal(t, "2200H", pgErr.Code) // sequence generator limit exceeded
		require.Empty(t, recordRow(t, f, key))
	})
}

func BenchmarkBegin(b *testing.B) {
	f := setup(b)
	b.ReportAllocs()
	n := 0
	for b.Loop() {
		n++
		_, created, err := f.Begin(b.Context(), recordKey(strconv.Itoa(n)), fingerprint)
		require.NoError(b, err)
		require.True(b, created)
	}
}

func BenchmarkBeginComplete(b *testing.B) {
	f := setup(b)
	b.ReportAllocs()
	n := 0
	for b.Loop() {
		n++
		k := recordKey(strconv.Itoa(n))
		record, created, err := f.Begin(b.Context(), k, fingerprint)
		require.NoError(b, err)
		require.True(b, created)
		require.NoError(b, f.Complete(b.Context(), k, fingerprint, record.Attempt, recordResponse))
	}
}

func BenchmarkReplay(b *testing.B) {
	f := setup(b)
	record, _, err := f.Begin(b.Context(), key, fingerprint)
	require.NoError(b, err)
	require.NoError(b, f.Complete(b.Context(), key, fingerprint, record.Attempt, recordResponse))
	b.ReportAllocs()
	for b.Loop() {
		_, created, err := f.Begin(b.Context(), key, fingerprint)
		require.NoError(b, err)
		require.False(b, created)
	}
}
