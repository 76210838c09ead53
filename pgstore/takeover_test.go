package pgstore_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/archlab/idempotency/pgstore"
)

// From the end of its lease to the end of its retention, to the microsecond, an attempt is parked.
func TestParkedAttemptBlocksUntilItIsForgotten(t *testing.T) {
	t.Parallel()
	clock := newClock()
	f := setup(t, pgstore.WithoutTakeover(), pgstore.WithClock(clock.Now))
	begin := func(fingerprint string, want error) pgstore.Record {
		t.Helper()
		record, created, err := f.Begin(t.Context(), key, fingerprint)
		require.ErrorIs(t, err, want)
		require.Equal(t, want == nil, created)
		return record
	}
	first := begin(fingerprint, nil)
	clock.Advance(lease - time.Microsecond)
	begin(fingerprint, pgstore.ErrInProgress)
	clock.Advance(time.Microsecond)
	for range 2 {
		begin(fingerprint, pgstore.ErrAbandoned)
		begin("sha256:of another", pgstore.ErrConflict)
		parked, live, err := f.Get(t.Context(), key)
		require.NoError(t, err)
		require.True(t, live)
		require.Equal(t, pgstore.Record{
			State: pgstore.StateInProgress, Fingerprint: fingerprint, Attempt: first.Attempt, ExpiresAt: first.ExpiresAt,
		}, parked, "with nothing remaining")
		clock.Advance(retention - time.Microsecond)
	}
	clock.Advance(-retention + 2*time.Microsecond)
	_, live, err := f.Get(t.Context(), key)
	require.NoError(t, err)
	require.False(t, live)
	second := begin("sha256:of another", nil) // a new request: the old one is forgotten
	require.Zero(t, second.Abandoned)

	// What has ended is no attempt: nothing of it is parked when it is forgotten.
	for _, retryable := range []bool{true, false} {
		require.NoError(t, f.Fail(t.Context(), key, "sha256:of another", second.Attempt, retryable))
		if retryable {
			begin(fingerprint, pgstore.ErrConflict)
			second = begin("sha256:of another", nil)
		}
	}
	clock.Advance(retention)
	_, live, err = f.Get(t.Context(), key)
	require.NoError(t, err)
	require.False(t, live)
	third := begin(fingerprint, nil)
	require.NoError(t, f.Complete(t.Context(), key, fingerprint, third.Attempt, recordResponse))
	clock.Advance(retention)
	begin("sha256:of another", nil)
}

func TestErrAbandonedNamesTheAttempt(t *testing.T) {
	t.Parallel()
	f := setup(t, pgstore.WithoutTakeover())
	recordPut(t, f, key, pgstore.StateInProgress)
	recordAge(t, f, key, lease)
	before := recordRow(t, f, key)
	_, _, err := f.Begin(t.Context(), key, fingerprint)
	require.EqualError(t, err, `idempotency: begin "tenant-a"/"order.create"/"req-1001": idempotency: attempt was abandoned and awaits resolution: attempt 1`)

	var abandoned atomic.Int64
	var g errgroup.Group
	for range 64 {
		g.Go(func() error {
			_, _, err := f.Begin(t.Context(), key, fingerprint)
			if errors.Is(err, pgstore.ErrAbandoned) {
				abandoned.Add(1)
				return nil
			}
			return err
		})
	}
	require.NoError(t, g.Wait())
	require.EqualValues(t, 64, abandoned.Load())
	require.Equal(t, before, recordRow(t, f, key), "nothing is written")
}

// A process died in the middle, and its effect may have happened: nothing runs until somebody has looked.
func TestCrashedAttemptIsNotRunAgainWithoutTakeover(t *testing.T) {
	t.Parallel()
	for name, resolution := range map[string]struct {
		as    pgstore.Resolution
		check func(t *testing.T, outcome pgstore.Outcome, err error)
		runs  int64
	}{
		"done": {pgstore.AsDone("paid"), func(t *testing.T, outcome pgstore.Outcome, err error) {
			t.Helper()
			require.NoError(t, err)
			require.Equal(t, pgstore.Outcome{Response: "paid", Replayed: true, Attempt: 1}, outcome)
		}, 1},
		"failed": {pgstore.AsFailed(), func(t *testing.T, _ pgstore.Outcome, err error) {
			t.Helper()
			require.ErrorIs(t, err, pgstore.ErrFailed)
		}, 1},
		"retryable": {pgstore.AsRetryable(), func(t *testing.T, outcome pgstore.Outcome, err error) {
			t.Helper()
			require.NoError(t, err)
			require.Equal(t, pgstore.Outcome{Response: "second", Attempt: 2}, outcome)
		}, 2},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := setup(t, pgstore.WithoutTakeover())
			var runs atomic.Int64
			_, err := f.Do(t.Context(), key, fingerprint, doReturns(&runs, "", errDo))
			require.ErrorIs(t, err, errDo)
			recordAge(t, f, key, lease)

			_, err = f.Do(t.Context(), key, fingerprint, doNever(t), pgstore.WithWait(time.Hour))
			require.ErrorIs(t, err, pgstore.ErrAbandoned)
			_, err = f.DoTx(t.Context(), key, fingerprint, dotxNever(t), pgstore.WithWait(time.Hour))
			require.ErrorIs(t, err, pgstore.ErrAbandoned)
			_, err = f.Do(t.Context(), key, "sha256:of another", doNever(t))
			require.ErrorIs(t, err, pgstore.ErrConflict)

			parked, live, err := f.Get(t.Context(), key)
			require.NoError(t, err)
			require.True(t, live)
			require.NoError(t, f.Resolve(t.Context(), key, parked.Attempt, resolution.as))
			outcome, err := f.Do(t.Context(), key, fingerprint, func(_ context.Context, r pgstore.Record) (string, error) {
				runs.Add(1)
				require.Zero(t, r.Abandoned, "it is known what became of it")
				return "second", nil
			})
			resolution.check(t, outcome, err)
			require.Equal(t, resolution.runs, runs.Load())
		})
	}
}

// A Begin that waited for another session for longer than its own lease has executed nothing: it is not parked by that.
func TestBeginThatWaitedOutItsLeaseIsNotParked(t *testing.T) {
	t.Parallel()
	const short = 100 * time.Millisecond
	f := setup(t)
	tx := directedTx(t, f.Pool)
	_, _, err := f.WithTx(tx).Begin(t.Context(), key, fingerprint)
	require.NoError(t, err)
	begin := goBegin(t.Context(), f.NewStore(t, f.Pool, short, retention, pgstore.WithoutTakeover()), key)
	begin.waitsFor(t, f.Pool, tx)
	require.NoError(t, beatPasses(t.Context(), f, short))
	require.NoError(t, tx.Rollback(t.Context()))

	record, created, err := begin.result(t)
	require.NoError(t, err)
	require.True(t, created)
	require.Positive(t, record.Remaining)
	require.Zero(t, record.Abandoned)
	require.Equal(t, record.Attempt, faultTheRow(t, f, key).Attempt)
}

// What another session left while Begin waited for it is not in Begin's snapshot: only the last look, at the locked row, is.
func TestBeginWithoutTakeoverThatWaitedObeysWhatItFinds(t *testing.T) {
	t.Parallel()
	for name, left := range map[string]struct {
		leave func(s *pgstore.Store, attempt uint64) error
		want  error
	}{
		"a running attempt": {func(*pgstore.Store, uint64) error { return nil }, pgstore.ErrInProgress},
		"a lapsed attempt":  {func(*pgstore.Store, uint64) error { return nil }, pgstore.ErrAbandoned},
		"a response": {func(s *pgstore.Store, attempt uint64) error {
			return s.Complete(t.Context(), key, fingerprint, attempt, "")
		}, nil},
		"a failure": {func(s *pgstore.Store, attempt uint64) error {
			return s.Fail(t.Context(), key, fingerprint, attempt, false)
		}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := setup(t, pgstore.WithoutTakeover())
			tx := directedTx(t, f.Pool)
			holder := f.WithTx(tx)
			held, _, err := holder.Begin(t.Context(), key, fingerprint)
			require.NoError(t, err)
			require.NoError(t, left.leave(holder, held.Attempt))
			if left.want == pgstore.ErrAbandoned { //nolint:errorlint // the very value
				_, err = tx.Exec(t.Context(), `UPDATE `+recordTable(f)+` SET expires_at = clock_timestamp()`)
				require.NoError(t, err)
			}
			begin := goBegin(t.Context(), f.Store, key)
			begin.waitsFor(t, f.Pool, tx)
			require.NoError(t, tx.Commit(t.Context()))

			_, created, err := begin.result(t)
			require.ErrorIs(t, err, left.want)
			require.False(t, created)
			require.Equal(t, held.Attempt, faultTheRow(t, f, key).Attempt)
		})
	}
}

// A transaction that is parked by nobody: DoTx holds its row.
func TestDoTxWithoutTakeover(t *testing.T) {
	t.Parallel()
	f := setup(t, pgstore.WithoutTakeover())
	own := faultOwn(t, f)
	var runs atomic.Int64
	_, err := f.DoTx(t.Context(), key, fingerprint, dotxInserts(own, &runs, "", errDo))
	require.ErrorIs(t, err, errDo)
	outcome, err := f.DoTx(t.Context(), key, fingerprint, func(ctx context.Context, tx pgx.Tx, r pgstore.Record) (string, error) {
		require.Zero(t, r.Abandoned)
		return dotxInserts(own, &runs, recordResponse, nil)(ctx, tx, r)
	})
	require.NoError(t, err)
	require.Equal(t, recordResponse, outcome.Response)
	require.Equal(t, 1, faultCount(t, f, own))
}
