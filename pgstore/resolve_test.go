package pgstore_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/archlab/idempotency/pgstore"
)

func TestResolveEndsTheAttemptItNames(t *testing.T) {
	t.Parallel()
	for name, resolution := range map[string]struct {
		as    pgstore.Resolution
		state pgstore.State
		bytes []byte
	}{
		"done":            {pgstore.AsDone(recordResponse), pgstore.StateDone, []byte(recordResponse)},
		"done, no answer": {pgstore.AsDone(""), pgstore.StateDone, []byte{}},
		"failed":          {pgstore.AsFailed(), pgstore.StateFailed, nil},
		"retryable":       {pgstore.AsRetryable(), pgstore.StateRetryable, nil},
	} {
		// Since it began; the last moment of its lease, the first after it, the last before it is forgotten.
		for _, after := range []time.Duration{0, lease - time.Microsecond, lease, lease + retention - time.Microsecond} {
			t.Run(fmt.Sprint(name, " after ", after), func(t *testing.T) {
				t.Parallel()
				clock := newClock()
				f := setup(t, pgstore.WithClock(clock.Now))
				attempt := recordPut(t, f, key, pgstore.StateInProgress)
				clock.Advance(after)
				require.ErrorIs(t, f.Resolve(t.Context(), key, attempt+1, resolution.as), pgstore.ErrStaleAttempt)
				for range 2 { // again, as after a lost answer
					require.NoError(t, f.Resolve(t.Context(), key, attempt, resolution.as))
					row := faultTheRow(t, f, key)
					require.Equal(t, resolution.state, row.State)
					require.Equal(t, resolution.bytes, row.Response)
					require.Equal(t, clock.Now().Add(retention), row.ExpiresAt.UTC())
				}
				require.GreaterOrEqual(t, recordScalar[time.Duration](t, f, `SELECT purge_after - expires_at FROM %s`), time.Duration(0))
				require.ErrorIs(t, f.Resolve(t.Context(), key, attempt, pgstore.AsDone("another")), pgstore.ErrStaleAttempt)
				if name != "failed" {
					require.ErrorIs(t, f.Resolve(t.Context(), key, attempt, pgstore.AsFailed()), pgstore.ErrStaleAttempt)
				}
				clock.Advance(retention)
				require.ErrorIs(t, f.Resolve(t.Context(), key, attempt, resolution.as), pgstore.ErrLeaseExpired, "it is forgotten")
			})
		}
	}
}

func TestResolveIsFencedByTheAttempt(t *testing.T) {
	t.Parallel()
	f := setup(t)
	require.ErrorIs(t, f.Resolve(t.Context(), key, 1, pgstore.AsFailed()), pgstore.ErrLeaseExpired, "there is nothing")
	first := recordPut(t, f, key, pgstore.StateInProgress)
	recordAge(t, f, key, lease)
	second, _, err := f.Begin(t.Context(), key, fingerprint)
	require.NoError(t, err)
	require.ErrorIs(t, f.Resolve(t.Context(), key, first, pgstore.AsRetryable()), pgstore.ErrStaleAttempt, "somebody took over")
	require.NoError(t, f.Resolve(t.Context(), key, second.Attempt, pgstore.AsRetryable()))
	third, _, err := f.Begin(t.Context(), key, fingerprint)
	require.NoError(t, err)
	require.Equal(t, first, third.Abandoned, "the second promised for itself; nobody knows of the first")
	recordAge(t, f, key, lease+retention)
	require.ErrorIs(t, f.Resolve(t.Context(), key, third.Attempt, pgstore.AsRetryable()), pgstore.ErrLeaseExpired, "it is forgotten")
}

func TestResolveRefusesWhatIsNoResolution(t *testing.T) {
	t.Parallel()
	f := setup(t, pgstore.WithMaxResponse(10))
	attempt := recordPut(t, f, key, pgstore.StateInProgress)
	before := recordRow(t, f, key)
	require.ErrorContains(t, f.Resolve(t.Context(), key, attempt, pgstore.Resolution{}), "the resolution is empty")
	require.ErrorIs(t, f.Resolve(t.Context(), key, attempt, pgstore.AsDone("longer than ten bytes")), pgstore.ErrResponseTooLarge)
	require.ErrorIs(t, f.Resolve(t.Context(), pgstore.Key{}, attempt, pgstore.AsFailed()), pgstore.ErrKeyEmpty)
	require.ErrorIs(t, f.Resolve(t.Context(), key, 0, pgstore.AsFailed()), pgstore.ErrStaleAttempt)
	require.ErrorIs(t, f.Resolve(t.Context(), key, 1<<63+attempt, pgstore.AsFailed()), pgstore.ErrStaleAttempt)
	require.Equal(t, before, recordRow(t, f, key))
}

func TestResolveInACallersTransactionIsTheCallersToCommit(t *testing.T) {
	t.Parallel()
	f := setup(t)
	attempt := recordPut(t, f, key, pgstore.StateInProgress)
	tx, err := f.Pool.Begin(t.Context())
	require.NoError(t, err)
	require.NoError(t, f.WithTx(tx).Resolve(t.Context(), key, attempt, pgstore.AsFailed()))
	require.NoError(t, tx.Rollback(t.Context()))
	require.Equal(t, pgstore.StateInProgress, faultTheRow(t, f, key).State)
}

// Somebody resolves an attempt that is still at work: it is told, and cannot record another ending.
func TestResolutionStandsAgainstWorkThatIsStillRunning(t *testing.T) {
	t.Parallel()
	f := setup(t)
	store := f.NewStore(t, f.Pool, 3*time.Second, retention) // a beat each second
	outcome, err := store.Do(t.Context(), key, fingerprint, func(ctx context.Context, r pgstore.Record) (string, error) {
		if err := f.Resolve(ctx, key, r.Attempt, pgstore.AsDone("the resolution")); err != nil {
			return "", err
		}
		<-ctx.Done()
		if !errors.Is(context.Cause(ctx), pgstore.ErrStaleAttempt) {
			return "", context.Cause(ctx)
		}
		return "the work's", nil
	})
	require.ErrorIs(t, err, pgstore.ErrNotRecorded)
	require.ErrorIs(t, err, pgstore.ErrStaleAttempt)
	require.Equal(t, "the work's", outcome.Response)
	outcome, err = store.Do(t.Context(), key, fingerprint, doNever(t))
	require.NoError(t, err)
	require.Equal(t, "the resolution", outcome.Response)
}

// DoTx completes the record that it began, and no other, in each column; what its function did to the record itself is respected.
func TestDoTxCompletesWhatItBeganAndNothingElse(t *testing.T) {
	t.Parallel()
	run := func(t *testing.T, f *fixture, within func(tx pgx.Tx, s *pgstore.Store, r pgstore.Record) error) error {
		t.Helper()
		_, err := f.DoTx(t.Context(), key, fingerprint, func(_ context.Context, tx pgx.Tx, r pgstore.Record) (string, error) {
			return recordResponse, within(tx, f.WithTx(tx), r)
		})
		return err
	}
	execute := func(tx pgx.Tx, f *fixture, format string) error {
		_, err := tx.Exec(t.Context(), fmt.Sprintf(format, recordTable(f)))
		return err
	}
	t.Run("with the instants of its end", func(t *testing.T) {
		t.Parallel()
		for work, purge := range map[time.Duration]time.Duration{lease / 2: lease + retention, 2 * lease: 2*lease + retention} {
			clock := newClock()
			f := setup(t, pgstore.WithClock(clock.Now))
			begun := clock.Now()
			require.NoError(t, run(t, f, func(pgx.Tx, *pgstore.Store, pgstore.Record) error { clock.Advance(work); return nil }))
			row := faultTheRow(t, f, key)
			require.Equal(t, pgstore.StateDone, row.State)
			require.Equal(t, recordResponse, string(row.Response))
			require.Equal(t, clock.Now().Add(retention), row.ExpiresAt.UTC())
			require.Equal(t, begun.Add(purge), recordScalar[time.Time](t, f, `SELECT purge_after FROM %s`).UTC())
		}
	})
	t.Run("by the time of its statement, not of its transaction", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		var worked time.Time
		require.NoError(t, run(t, f, func(tx pgx.Tx, _ *pgstore.Store, _ pgstore.Record) error {
			return tx.QueryRow(t.Context(), `SELECT clock_timestamp() + lease FROM pg_sleep(0.01), (SELECT $1::interval) AS of (lease)`, retention).Scan(&worked)
		}))
		require.False(t, faultTheRow(t, f, key).ExpiresAt.Before(worked))

		long := &fixture{Store: f.NewStore(t, f.Pool, time.Millisecond, retention), Pool: f.Pool, Schema: f.Schema} // whose end reaches further than Begin set aside
		recordExec(t, f, `DELETE FROM %s`)
		require.NoError(t, run(t, long, func(tx pgx.Tx, _ *pgstore.Store, _ pgstore.Record) error {
			return tx.QueryRow(t.Context(), `SELECT clock_timestamp() + lease FROM pg_sleep(0.01), (SELECT $1::interval) AS of (lease)`, retention).Scan(&worked)
		}))
		require.False(t, recordScalar[time.Time](t, f, `SELECT purge_after FROM %s`).Before(worked))
	})
	for column, copied := range map[string]string{
		"tenant":    `SELECT 'other', operation, key`,
		"operation": `SELECT tenant, 'other', key`,
		"key":       `SELECT tenant, operation, 'other'`,
	} {
		t.Run("not a record with another "+column, func(t *testing.T) {
			t.Parallel()
			f := setup(t)
			require.NoError(t, run(t, f, func(tx pgx.Tx, _ *pgstore.Store, _ pgstore.Record) error {
				return execute(tx, f, `INSERT INTO %[1]s (tenant, operation, key, state, fingerprint, attempt, claim, begun_at, expires_at, purge_after) `+
					copied+`, state, fingerprint, attempt, claim, begun_at, expires_at, purge_after FROM %[1]s`)
			}))
			require.Equal(t, 1, recordScalar[int](t, f, `SELECT count(*) FROM %s WHERE state = 'done'`))
			require.Equal(t, 1, recordScalar[int](t, f, `SELECT count(*) FROM %s WHERE state = 'in_progress'`))
		})
	}
	for name, tampered := range map[string]struct {
		within func(tx pgx.Tx, f *fixture, s *pgstore.Store, r pgstore.Record) error
		want   error
	}{
		"another fingerprint": {func(tx pgx.Tx, f *fixture, _ *pgstore.Store, _ pgstore.Record) error {
			return execute(tx, f, `UPDATE %s SET fingerprint = 'other'`)
		}, pgstore.ErrConflict},
		"another attempt": {func(tx pgx.Tx, f *fixture, _ *pgstore.Store, _ pgstore.Record) error {
			return execute(tx, f, `UPDATE %s SET attempt = attempt + 1000`)
		}, pgstore.ErrStaleAttempt},
		"failed by the function": {func(_ pgx.Tx, _ *fixture, s *pgstore.Store, r pgstore.Record) error {
			return s.Fail(t.Context(), key, fingerprint, r.Attempt, false)
		}, pgstore.ErrStaleAttempt},
		"completed by the function with another response": {func(_ pgx.Tx, _ *fixture, s *pgstore.Store, r pgstore.Record) error {
			return s.Complete(t.Context(), key, fingerprint, r.Attempt, "another")
		}, pgstore.ErrStaleAttempt},
		"completed by the function with the same response": {func(_ pgx.Tx, _ *fixture, s *pgstore.Store, r pgstore.Record) error {
			return s.Complete(t.Context(), key, fingerprint, r.Attempt, recordResponse)
		}, nil},
		"no record": {func(tx pgx.Tx, f *fixture, _ *pgstore.Store, _ pgstore.Record) error {
			return execute(tx, f, `DELETE FROM %s`)
		}, pgstore.ErrLeaseExpired},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := setup(t)
			err := run(t, f, func(tx pgx.Tx, s *pgstore.Store, r pgstore.Record) error { return tampered.within(tx, f, s, r) })
			require.ErrorIs(t, err, tampered.want)
			if tampered.want != nil {
				require.Empty(t, faultRows(t, f, key), "nothing of it is committed")
				return
			}
			require.Equal(t, pgstore.StateDone, faultTheRow(t, f, key).State)
		})
	}
}
