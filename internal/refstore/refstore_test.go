package refstore_test

import (
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/archlab/idempotency/internal/refstore"
	"github.com/archlab/idempotency/pgstore"
)

const (
	lease       = 10 * time.Second
	retention   = time.Hour
	maxResponse = 8
	fingerprint = "fingerprint"
	other       = "another fingerprint"
	response    = "\x00\xff"
)

var (
	key   = pgstore.Key{Tenant: "t", Operation: "o", Value: "v"}
	start = time.Date(2031, 2, 3, 4, 5, 6, 789_012_000, time.UTC)
)

// fixture is a store whose time the test sets, with the key brought into a state.
type fixture struct {
	*refstore.Store
	table   *refstore.Table
	now     time.Time
	attempt uint64
}

func setup() *fixture {
	f := &fixture{now: start}
	f.table = refstore.NewTable(func() time.Time { return f.now })
	f.Store = f.table.Store(lease, retention, maxResponse)
	return f
}

// begin begins the key, which must be free.
func (f *fixture) begin(t *testing.T) pgstore.Record {
	t.Helper()
	record, created, err := f.Begin(t.Context(), key, fingerprint)
	require.NoError(t, err)
	require.True(t, created)
	f.attempt = record.Attempt
	return record
}

// situations are the rows of the tables, as ways to get there.
var situations = map[string]func(t *testing.T, f *fixture){
	"none":        func(*testing.T, *fixture) {},
	"in_progress": func(t *testing.T, f *fixture) { t.Helper(); f.begin(t) },
	"lapsed":      func(t *testing.T, f *fixture) { t.Helper(); f.begin(t); f.now = f.now.Add(lease) },
	"done": func(t *testing.T, f *fixture) {
		t.Helper()
		f.begin(t)
		require.NoError(t, f.Complete(t.Context(), key, fingerprint, f.attempt, response))
	},
	"failed": func(t *testing.T, f *fixture) {
		t.Helper()
		f.begin(t)
		require.NoError(t, f.Fail(t.Context(), key, fingerprint, f.attempt, false))
	},
	"retryable": func(t *testing.T, f *fixture) {
		t.Helper()
		f.begin(t)
		require.NoError(t, f.Fail(t.Context(), key, fingerprint, f.attempt, true))
	},
	"forgotten": func(t *testing.T, f *fixture) {
		t.Helper()
		f.begin(t)
		require.NoError(t, f.Complete(t.Context(), key, fingerprint, f.attempt, response))
		f.now = f.now.Add(retention)
	},
}

func TestBeginFollowsItsTable(t *testing.T) {
	t.Parallel()
	type outcome struct {
		created bool
		state   pgstore.State
		err     error
	}
	created := outcome{created: true, state: pgstore.StateInProgress}
	for _, c := range []struct {
		situation   string
		same, other outcome
	}{
		{"none", created, created},
		{"lapsed", created, created},
		{"forgotten", created, created},
		{"in_progress", outcome{err: pgstore.ErrInProgress}, outcome{err: pgstore.ErrConflict}},
		{"done", outcome{state: pgstore.StateDone}, outcome{err: pgstore.ErrConflict}},
		{"failed", outcome{state: pgstore.StateFailed}, outcome{err: pgstore.ErrConflict}},
		{"retryable", created, outcome{err: pgstore.ErrConflict}},
	} {
		for sent, want := range map[string]outcome{fingerprint: c.same, other: c.other} {
			t.Run(c.situation+"/"+sent, func(t *testing.T) {
				t.Parallel()
				f := setup()
				situations[c.situation](t, f)
				before := f.table.Rows()

				record, created, err := f.Begin(t.Context(), key, sent)

				require.ErrorIs(t, err, want.err)
				require.Equal(t, want.created, created)
				require.Equal(t, want.state, record.State)
				if want.created {
					require.Equal(t, refstore.Row{
						State: pgstore.StateInProgress, Fingerprint: sent, Attempt: f.attempt + 1, Abandoned: record.Abandoned,
						BegunAt: f.now, ExpiresAt: f.now.Add(lease), PurgeAfter: f.now.Add(lease + retention),
					}, f.table.Rows()[key])
					require.Equal(t, f.attempt+1, record.Attempt)
					require.Equal(t, lease, record.Remaining)
				} else {
					require.Equal(t, before, f.table.Rows(), "a repeat changes nothing")
				}
			})
		}
	}
}

func TestBeginReplaysTheRecordAndDrawsNoAttempt(t *testing.T) {
	t.Parallel()
	f := setup()
	situations["done"](t, f)
	f.now = f.now.Add(time.Minute)

	record, created, err := f.Begin(t.Context(), key, fingerprint)

	require.NoError(t, err)
	require.False(t, created)
	require.Equal(t, pgstore.Record{
		State: pgstore.StateDone, Fingerprint: fingerprint, Response: response, Attempt: 1,
		ExpiresAt: start.Add(retention), Remaining: retention - time.Minute,
	}, record)
	f.now = f.now.Add(retention)
	require.EqualValues(t, 2, f.begin(t).Attempt)
}

func TestInProgressCarriesTheRemainingLease(t *testing.T) {
	t.Parallel()
	f := setup()
	f.begin(t)
	f.now = f.now.Add(lease - time.Microsecond)

	_, _, err := f.Begin(t.Context(), key, fingerprint)

	var inProgress *pgstore.InProgressError
	require.ErrorAs(t, err, &inProgress)
	require.Equal(t, time.Microsecond, inProgress.RetryAfter)
}

func TestCompleteFailAndExtendFollowTheirTables(t *testing.T) {
	t.Parallel()
	calls := map[string]func(t *testing.T, f *fixture, sent string, attempt uint64) error{
		"complete": func(t *testing.T, f *fixture, sent string, attempt uint64) error {
			t.Helper()
			return f.Complete(t.Context(), key, sent, attempt, response)
		},
		"complete otherwise": func(t *testing.T, f *fixture, sent string, attempt uint64) error {
			t.Helper()
			return f.Complete(t.Context(), key, sent, attempt, "otherwise"[:maxResponse])
		},
		"fail": func(t *testing.T, f *fixture, sent string, attempt uint64) error {
			t.Helper()
			return f.Fail(t.Context(), key, sent, attempt, false)
		},
		"release": func(t *testing.T, f *fixture, sent string, attempt uint64) error {
			t.Helper()
			return f.Fail(t.Context(), key, sent, attempt, true)
		},
		"extend": func(t *testing.T, f *fixture, sent string, attempt uint64) error {
			t.Helper()
			_, err := f.Extend(t.Context(), key, sent, attempt)
			return err
		},
	}
	repeated := map[string]string{"complete": "done", "fail": "failed", "release": "retryable"} // call → state that it asks for
	for name, call := range calls {
		for _, situation := range []string{"none", "lapsed", "forgotten", "in_progress", "done", "failed", "retryable"} {
			t.Run(name+"/"+situation, func(t *testing.T) {
				t.Parallel()
				f := setup()
				situations[situation](t, f)
				before := f.table.Rows()
				live := situation != "none" && situation != "lapsed" && situation != "forgotten"

				// Wrong in several ways at once: the first check of the order decides.
				wantOther, wantStale := pgstore.ErrConflict, pgstore.ErrStaleAttempt
				if !live {
					wantOther, wantStale = pgstore.ErrLeaseExpired, pgstore.ErrLeaseExpired
				}
				require.ErrorIs(t, call(t, f, other, f.attempt+1), wantOther)
				require.ErrorIs(t, call(t, f, other, f.attempt), wantOther)
				require.ErrorIs(t, call(t, f, fingerprint, f.attempt+1), wantStale)
				require.ErrorIs(t, call(t, f, fingerprint, 0), wantStale)
				require.Equal(t, before, f.table.Rows(), "a refused call changes nothing")

				f.now = f.now.Add(time.Second)
				err := call(t, f, fingerprint, f.attempt)
				switch {
				case !live:
					require.ErrorIs(t, err, pgstore.ErrLeaseExpired)
					require.Equal(t, before, f.table.Rows())
				case situation == "in_progress":
					require.NoError(t, err)
					require.NotEqual(t, before, f.table.Rows())
				case repeated[name] == situation:
					require.NoError(t, err)
					require.Equal(t, before, f.table.Rows(), "a repeat changes nothing")
				default:
					require.ErrorIs(t, err, pgstore.ErrStaleAttempt)
					require.Equal(t, before, f.table.Rows())
				}
			})
		}
	}
}

func TestEndingsKeepTheOutcomeForTheRetention(t *testing.T) {
	t.Parallel()
	for _, situation := range []string{"done", "failed", "retryable"} {
		t.Run(situation, func(t *testing.T) {
			t.Parallel()
			f := setup()
			situations[situation](t, f)

			row := f.table.Rows()[key]
			require.Equal(t, pgstore.State(situation), row.State)
			require.Equal(t, f.now.Add(retention), row.ExpiresAt)
			require.Equal(t, f.now.Add(lease+retention), row.PurgeAfter, "Begin has made room for it")

			f.now = row.ExpiresAt.Add(-time.Microsecond)
			record, live, err := f.Get(t.Context(), key)
			require.NoError(t, err)
			require.True(t, live)
			require.Equal(t, time.Microsecond, record.Remaining)

			f.now = row.ExpiresAt
			record, live, err = f.Get(t.Context(), key)
			require.NoError(t, err)
			require.False(t, live)
			require.Zero(t, record)
		})
	}
}

func TestPurgeAfterGrowsWithALongerStoreAndNeverShrinks(t *testing.T) {
	t.Parallel()
	f := setup()
	short := f.table.Store(time.Second, time.Minute, maxResponse)
	long := f.table.Store(time.Minute, 24*time.Hour, maxResponse)
	f.begin(t)

	record, err := short.Extend(t.Context(), key, fingerprint, f.attempt)
	require.NoError(t, err)
	require.Equal(t, time.Second, record.Remaining, "a fresh lease, whatever was left of the old one")
	require.Equal(t, f.now.Add(lease+retention), f.table.Rows()[key].PurgeAfter)

	_, err = long.Extend(t.Context(), key, fingerprint, f.attempt)
	require.NoError(t, err)
	require.Equal(t, f.now.Add(time.Minute+24*time.Hour), f.table.Rows()[key].PurgeAfter)

	require.NoError(t, short.Complete(t.Context(), key, fingerprint, f.attempt, ""))
	require.Equal(t, f.now.Add(time.Minute), f.table.Rows()[key].ExpiresAt)
	require.Equal(t, f.now.Add(time.Minute+24*time.Hour), f.table.Rows()[key].PurgeAfter)
}

func TestEndingByAStoreWithALongRetentionMovesPurgeAfter(t *testing.T) {
	t.Parallel()
	f := setup()
	f.begin(t)

	err := f.table.Store(lease, 2*retention, maxResponse).Fail(t.Context(), key, fingerprint, f.attempt, false)

	require.NoError(t, err)
	row := f.table.Rows()[key]
	require.Equal(t, f.now.Add(2*retention), row.ExpiresAt)
	require.Equal(t, row.ExpiresAt, row.PurgeAfter)
}

func TestALapsedAttemptIsRememberedUntilItIsPurged(t *testing.T) {
	t.Parallel()
	t.Run("to its successor", func(t *testing.T) {
		t.Parallel()
		f := setup()
		f.begin(t)
		f.now = start.Add(lease + retention - time.Microsecond)
		require.EqualValues(t, 1, f.begin(t).Abandoned)
	})
	t.Run("not beyond purge_after, swept or not", func(t *testing.T) {
		t.Parallel()
		f := setup()
		f.begin(t)
		f.now = start.Add(lease + retention)
		require.Zero(t, f.begin(t).Abandoned)
	})
	t.Run("through a release, even a lapsed one", func(t *testing.T) {
		t.Parallel()
		f := setup()
		f.begin(t)
		f.now = f.now.Add(lease)
		require.EqualValues(t, 1, f.begin(t).Abandoned)
		require.NoError(t, f.Fail(t.Context(), key, fingerprint, f.attempt, true))
		require.EqualValues(t, 1, f.begin(t).Abandoned)
		require.NoError(t, f.Fail(t.Context(), key, fingerprint, f.attempt, true))
		f.now = f.now.Add(retention)
		require.EqualValues(t, 1, f.begin(t).Abandoned)
	})
	t.Run("only the last of several", func(t *testing.T) {
		t.Parallel()
		f := setup()
		f.begin(t)
		f.now = f.now.Add(lease)
		f.begin(t)
		f.now = f.now.Add(lease)
		require.EqualValues(t, 2, f.begin(t).Abandoned)
	})
	t.Run("not after an outcome", func(t *testing.T) {
		t.Parallel()
		f := setup()
		f.begin(t)
		f.now = f.now.Add(lease)
		f.begin(t)
		require.NoError(t, f.Complete(t.Context(), key, fingerprint, f.attempt, response))
		f.now = f.now.Add(retention)
		require.Zero(t, f.begin(t).Abandoned)
	})
}

func TestSweepDeletesWhatIsPastPurgeAfterTheEarliestFirst(t *testing.T) {
	t.Parallel()
	f := setup()
	keys := []pgstore.Key{
		{Tenant: "t", Operation: "o", Value: "3"}, {Tenant: "t", Operation: "o", Value: "1"}, {Tenant: "t", Operation: "o", Value: "2"},
	}
	for _, k := range keys {
		_, _, err := f.Begin(t.Context(), k, fingerprint)
		require.NoError(t, err)
		f.now = f.now.Add(time.Second)
	}
	sweep := func(limit int) int64 {
		n, err := f.Sweep(t.Context(), limit)
		require.NoError(t, err)
		return n
	}
	f.now = start.Add(lease + retention - time.Microsecond)
	require.Zero(t, sweep(10))
	f.now = start.Add(lease + retention + time.Second) // the second's moment
	require.EqualValues(t, 1, sweep(1))
	require.NotContains(t, f.table.Rows(), keys[0])
	require.EqualValues(t, 1, sweep(10))
	require.NotContains(t, f.table.Rows(), keys[1])
	require.Contains(t, f.table.Rows(), keys[2])

	_, err := f.Sweep(t.Context(), 0)
	require.Error(t, err)
	_, _, err = f.Begin(t.Context(), keys[0], fingerprint)
	require.NoError(t, err)
	require.EqualValues(t, 4, f.table.Rows()[keys[0]].Attempt, "attempts go on after a purge")
}

func TestArgumentsAreCheckedBeforeTheRecord(t *testing.T) {
	t.Parallel()
	valid := strings.Repeat("é", 256)
	for _, c := range []struct {
		key         pgstore.Key
		fingerprint string
		want        error
	}{
		{pgstore.Key{Tenant: valid, Operation: valid, Value: valid}, strings.Repeat("\xff", 1024), nil},
		{pgstore.Key{Operation: "o", Value: "v"}, fingerprint, pgstore.ErrKeyEmpty},
		{pgstore.Key{Tenant: "t", Value: "v"}, "", pgstore.ErrKeyEmpty},
		{pgstore.Key{Tenant: "t", Operation: "o"}, fingerprint, pgstore.ErrKeyEmpty},
		{pgstore.Key{Tenant: valid + "x", Operation: "o", Value: "v"}, "", pgstore.ErrKeyInvalid},
		{pgstore.Key{Tenant: "t", Operation: "\xff", Value: "v"}, fingerprint, pgstore.ErrKeyInvalid},
		{pgstore.Key{Tenant: "t", Operation: "o", Value: "\x00"}, fingerprint, pgstore.ErrKeyInvalid},
		{key, "", pgstore.ErrFingerprintInvalid},
		{key, strings.Repeat("x", 1025), pgstore.ErrFingerprintInvalid},
	} {
		f := setup()
		_, _, err := f.Begin(t.Context(), c.key, c.fingerprint)
		require.ErrorIs(t, err, c.want)
		if c.want == nil {
			continue
		}
		require.ErrorIs(t, f.Complete(t.Context(), c.key, c.fingerprint, 1, "more than the limit"), c.want)
		require.ErrorIs(t, f.Fail(t.Context(), c.key, c.fingerprint, 1, true), c.want)
		_, err = f.Extend(t.Context(), c.key, c.fingerprint, 1)
		require.ErrorIs(t, err, c.want)
		if c.key != key {
			_, _, err = f.Get(t.Context(), c.key)
			require.ErrorIs(t, err, c.want)
		}
		require.Empty(t, f.table.Rows())
	}

	f := setup()
	require.ErrorIs(t, f.Complete(t.Context(), key, fingerprint, 1, strings.Repeat("x", maxResponse+1)), pgstore.ErrResponseTooLarge)
	require.ErrorIs(t, f.Complete(t.Context(), key, fingerprint, 1, strings.Repeat("x", maxResponse)), pgstore.ErrLeaseExpired)
}

func TestKeysNeverJoinIntoOneString(t *testing.T) {
	t.Parallel()
	f := setup()
	for i, k := range []pgstore.Key{
		{Tenant: "a/b", Operation: "c", Value: "d"}, {Tenant: "a", Operation: "b/c", Value: "d"}, {Tenant: "A/b", Operation: "c", Value: "d"},
	} {
		record, created, err := f.Begin(t.Context(), k, fingerprint)
		require.NoError(t, err)
		require.True(t, created)
		require.EqualValues(t, i+1, record.Attempt)
	}
}

func TestTimeIsCutToMicroseconds(t *testing.T) {
	t.Parallel()
	f := setup()
	f.now = start.Add(999)
	store := f.table.Store(time.Millisecond+999, retention+1, maxResponse)

	record, _, err := store.Begin(t.Context(), key, fingerprint)

	require.NoError(t, err)
	require.Equal(t, start.Add(time.Millisecond), record.ExpiresAt)
	require.Equal(t, start.Add(time.Millisecond+retention), f.table.Rows()[key].PurgeAfter)
}

func TestRestoreTakesRowsBackButNoAttempts(t *testing.T) {
	t.Parallel()
	f := setup()
	before := f.table.Rows()
	f.begin(t)

	f.table.Restore(before)

	require.Empty(t, f.table.Rows())
	require.EqualValues(t, 2, f.begin(t).Attempt)
}

func TestOfConcurrentCallersOneOwnsTheKey(t *testing.T) {
	t.Parallel()
	f := setup()
	var (
		wg     sync.WaitGroup
		owners = make(chan uint64, 64)
	)
	for range cap(owners) {
		wg.Go(func() {
			if record, created, _ := f.Begin(t.Context(), key, fingerprint); created {
				owners <- record.Attempt
			}
		})
	}
	wg.Wait()
	close(owners)
	require.EqualValues(t, 1, <-owners)
	require.Empty(t, owners)
}
