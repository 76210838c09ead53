package pgstore_test

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/archlab/idempotency/internal/pgtest"
	"github.com/archlab/idempotency/pgstore"
)

const (
	raceCallers  = 64
	racePoolSize = 16

	// raceRoundsVariable sets how many rounds each kind of race runs.
	raceRoundsVariable = "IDEMPOTENCY_RACE_ROUNDS"
	raceRoundsDefault  = 400
	raceRoundsShort    = 50
)

// raceRounds is the number of rounds of each kind of race.
func raceRounds(t *testing.T) int {
	t.Helper()
	if text := os.Getenv(raceRoundsVariable); text != "" {
		rounds, err := strconv.Atoi(text)
		require.NoError(t, err, raceRoundsVariable)
		return rounds
	}
	if testing.Short() {
		return raceRoundsShort
	}
	return raceRoundsDefault
}

// racePool opens a pool of its own, so that racers do not queue behind other tests.
func racePool(tb testing.TB) *pgxpool.Pool {
	tb.Helper()
	config, err := pgxpool.ParseConfig(pgtest.DSN(tb))
	require.NoError(tb, err)
	config.MaxConns = racePoolSize
	pool, err := pgxpool.NewWithConfig(tb.Context(), config)
	require.NoError(tb, err)
	tb.Cleanup(pool.Close)
	return pool
}

// raceTogether runs calls at once, each in a goroutine of its own, and returns when all are back.
func raceTogether(calls ...func()) {
	var (
		racers sync.WaitGroup
		start  = make(chan struct{})
	)
	for _, call := range calls {
		racers.Go(func() {
			<-start
			call()
		})
	}
	close(start)
	racers.Wait()
}

func TestConcurrentSameKeyOnlyOneOwner(t *testing.T) {
	t.Parallel()
	check := func(t *testing.T, stores []*pgstore.Store) {
		t.Helper()
		var (
			created, inProgress, other atomic.Int64
			calls                      []func()
		)
		for _, store := range stores {
			calls = append(calls, func() {
				_, ok, err := store.Begin(t.Context(), key, fingerprint)
				switch {
				case err == nil && ok:
					created.Add(1)
				case errors.Is(err, pgstore.ErrInProgress):
					inProgress.Add(1)
				default:
					other.Add(1)
				}
			})
		}
		raceTogether(calls...)
		t.Logf("workers=%d created=%d in_progress=%d other=%d", len(stores), created.Load(), inProgress.Load(), other.Load())
		require.EqualValues(t, 1, created.Load())
		require.EqualValues(t, raceCallers-1, inProgress.Load())
		require.Zero(t, other.Load())
	}

	t.Run("64 backends", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		var (
			conns  [raceCallers]*pgx.Conn
			opened errgroup.Group
		)
		for i := range conns {
			opened.Go(func() (err error) {
				conns[i], err = pgx.Connect(t.Context(), pgtest.DSN(t))
				return err
			})
		}
		err := opened.Wait()
		var stores []*pgstore.Store
		backends := map[int]bool{}
		for _, conn := range conns {
			if conn == nil {
				continue
			}
			t.Cleanup(func() { _ = conn.PgConn().Conn().Close() })
			var pid int
			require.NoError(t, conn.QueryRow(t.Context(), `SELECT pg_backend_pid()`).Scan(&pid))
			backends[pid] = true
			stores = append(stores, f.NewStore(t, conn, lease, retention))
		}
		require.NoError(t, err)
		require.Len(t, backends, raceCallers)
		check(t, stores)
	})
	t.Run("pool of 16", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		store := f.NewStore(t, racePool(t), lease, retention)
		stores := make([]*pgstore.Store, raceCallers)
		for i := range stores {
			stores[i] = store
		}
		check(t, stores)
	})
}

// race is what all rounds share: one table, one pool, and a list of every attempt that was ever handed out.
type race struct {
	f *fixture

	mu       sync.Mutex
	attempts map[uint64]pgstore.Key
}

// owns notes that a Begin handed out the attempt. No two may.
func (r *race) owns(t *testing.T, k pgstore.Key, attempt uint64) {
	t.Helper()
	r.mu.Lock()
	defer r.mu.Unlock()
	if owner, ok := r.attempts[attempt]; ok {
		t.Errorf("attempt %d was handed out for %s and for %s", attempt, owner, k)
	}
	r.attempts[attempt] = k
}

// put writes a record by hand, as an attempt of its own that ends in the given time, and returns that attempt.
func (r *race) put(t *testing.T, k pgstore.Key, state pgstore.State, fingerprint string, expires, purge time.Duration) uint64 {
	t.Helper()
	attempt := recordScalar[int64](t, r.f, `INSERT INTO %s
			(tenant, operation, key, state, fingerprint, response, attempt, claim, begun_at, expires_at, purge_after)
		SELECT $1, $2, $3, $4, $5, CASE WHEN $4 = 'done' THEN '\x6f6c64'::bytea END, nextval($8::text::regclass), 0, now,
			now + $6::interval, now + $7::interval
		FROM clock_timestamp() AS now
		RETURNING attempt`, k.Tenant, k.Operation, k.Value, string(state), []byte(fingerprint), expires, purge, recordSequence(r.f))
	r.owns(t, k, uint64(attempt)) //nolint:gosec // from a sequence
	return uint64(attempt)        //nolint:gosec // from a sequence
}

// raceAnswer is what one Begin got.
type raceAnswer struct {
	record  pgstore.Record
	created bool
	err     error
}

// round lets 64 callers begin the key, with the disturbances beside them, and checks what holds in every race: at most one
// owner, with an attempt above the previous one and never seen before, and no error but sentinels. It returns the owner, if
// there is one, the stored outcomes that others got, and the disturbances' errors in their order.
func (r *race) round(t *testing.T, k pgstore.Key, previous uint64, disturbances ...func(s *pgstore.Store) error) (
	owner *pgstore.Record, replays []pgstore.Record, disturbed []error,
) {
	t.Helper()
	answers := make([]raceAnswer, raceCallers)
	disturbed = make([]error, len(disturbances))
	var calls []func()
	for i := range answers {
		calls = append(calls, func() {
			a := &answers[i]
			a.record, a.created, a.err = r.f.Begin(t.Context(), k, fingerprint)
		})
	}
	for i, disturb := range disturbances {
		calls = append(calls, func() { disturbed[i] = disturb(r.f.Store) })
	}
	rand.Shuffle(len(calls), func(i, j int) { calls[i], calls[j] = calls[j], calls[i] })
	raceTogether(calls...)

	for _, a := range answers {
		switch {
		case a.err == nil && a.created:
			require.Nil(t, owner, "two owners of %s", k)
			require.Greater(t, a.record.Attempt, previous)
			require.Positive(t, a.record.Remaining)
			r.owns(t, k, a.record.Attempt)
			owner = &a.record
		case a.err == nil:
			replays = append(replays, a.record)
		default:
			inProgress, ok := errors.AsType[*pgstore.InProgressError](a.err)
			require.True(t, ok, "%v", a.err)
			require.Positive(t, inProgress.RetryAfter)
		}
	}
	for _, err := range disturbed {
		if err != nil && !errors.Is(err, pgstore.ErrLeaseExpired) && !errors.Is(err, pgstore.ErrStaleAttempt) &&
			!errors.Is(err, pgstore.ErrConflict) {
			require.NoError(t, err)
		}
	}
	return owner, replays, disturbed
}

// What disturbs a round: calls of an attempt other than the one that is about to be created, and sweeps.

func raceComplete(t *testing.T, k pgstore.Key, fingerprint string, attempt uint64, response string) func(*pgstore.Store) error {
	t.Helper()
	return func(s *pgstore.Store) error { return s.Complete(t.Context(), k, fingerprint, attempt, response) }
}

func raceFail(t *testing.T, k pgstore.Key, fingerprint string, attempt uint64, retryable bool) func(*pgstore.Store) error {
	t.Helper()
	return func(s *pgstore.Store) error { return s.Fail(t.Context(), k, fingerprint, attempt, retryable) }
}

func raceExtend(t *testing.T, k pgstore.Key, fingerprint string, attempt uint64) func(*pgstore.Store) error {
	t.Helper()
	return func(s *pgstore.Store) error {
		_, err := s.Extend(t.Context(), k, fingerprint, attempt)
		return err
	}
}

func raceSweep(t *testing.T) func(*pgstore.Store) error {
	t.Helper()
	return func(s *pgstore.Store) error {
		_, err := s.Sweep(t.Context(), 2)
		return err
	}
}

func TestRacesHaveOneOwner(t *testing.T) {
	t.Parallel()
	f := setup(t)
	f.Store = f.NewStore(t, racePool(t), lease, retention)
	r := &race{f: f, attempts: map[uint64]pgstore.Key{}}
	rounds := raceRounds(t)
	for name, run := range map[string]func(t *testing.T, r *race, rounds int){
		"fresh key":                  raceForAFreshKey,
		"expired key":                raceForAnExpiredKey,
		"released key":               raceForAReleasedKey,
		"attempt that ends":          raceAgainstTheEndOfAnAttempt,
		"lease that ends":            raceAgainstTheEndOfALease,
		"owners one after the other": raceOfOwners,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			start := time.Now()
			run(t, r, rounds)
			t.Logf("rounds=%d callers=%d elapsed=%v", rounds, raceCallers, time.Since(start).Round(time.Millisecond))
		})
	}
}

func raceForAFreshKey(t *testing.T, r *race, rounds int) {
	t.Helper()
	for n := range rounds {
		k := pgstore.Key{Tenant: "fresh", Operation: "race", Value: strconv.Itoa(n)}
		owner, replays, disturbed := r.round(t, k, 0,
			raceComplete(t, k, fingerprint, math.MaxInt64, "forged"), raceFail(t, k, fingerprint, math.MaxInt64, true),
			raceExtend(t, k, fingerprint, math.MaxInt64), raceSweep(t))
		require.NotNil(t, owner)
		require.Zero(t, owner.Abandoned)
		require.Empty(t, replays)
		for _, err := range disturbed[:3] {
			require.Error(t, err, "a forged attempt was accepted")
		}
		require.NoError(t, r.f.Complete(t.Context(), k, fingerprint, owner.Attempt, ""))
	}
}

// Records of every state that have expired, half of them due for deletion, half of them of another request; their old
// attempts come back at the same moment.
func raceForAnExpiredKey(t *testing.T, r *race, rounds int) {
	t.Helper()
	for n := range rounds {
		k := pgstore.Key{Tenant: "expired", Operation: "race", Value: strconv.Itoa(n)}
		old, purge := fingerprint, -time.Second
		if n/8%2 == 0 {
			old = "sha256:of another"
		}
		if n/4%2 == 0 {
			purge = time.Hour
		}
		state := recordStates[n%len(recordStates)]
		previous := r.put(t, k, state, old, -2*time.Second, purge)
		owner, replays, disturbed := r.round(t, k, previous,
			raceComplete(t, k, old, previous, "old"), raceFail(t, k, old, previous, true), raceFail(t, k, old, previous, false),
			raceExtend(t, k, old, previous), raceSweep(t))
		require.NotNil(t, owner)
		require.Empty(t, replays)
		abandoned := uint64(0)
		if state == pgstore.StateInProgress && purge > 0 {
			abandoned = previous
		}
		require.Equal(t, abandoned, owner.Abandoned)
		for _, err := range disturbed[:4] {
			require.Error(t, err, "an attempt that lost its key was accepted")
		}
		require.NoError(t, r.f.Complete(t.Context(), k, fingerprint, owner.Attempt, ""))
	}
}

func raceForAReleasedKey(t *testing.T, r *race, rounds int) {
	t.Helper()
	for n := range rounds {
		k := pgstore.Key{Tenant: "released", Operation: "race", Value: strconv.Itoa(n)}
		previous := r.put(t, k, pgstore.StateRetryable, fingerprint, time.Hour, time.Hour)
		owner, replays, disturbed := r.round(t, k, previous,
			raceComplete(t, k, fingerprint, previous, "old"), raceFail(t, k, fingerprint, previous, false),
			raceExtend(t, k, fingerprint, previous), raceFail(t, k, fingerprint, previous, true), raceSweep(t))
		require.NotNil(t, owner)
		require.Zero(t, owner.Abandoned)
		require.Empty(t, replays)
		for _, err := range disturbed[:3] {
			require.ErrorIs(t, err, pgstore.ErrStaleAttempt, "an attempt that released its key was accepted")
		}
		require.NoError(t, r.f.Complete(t.Context(), k, fingerprint, owner.Attempt, ""))
	}
}

// raceAgainstAnAttempt is a round against an attempt that holds the key and ends it in every way at once. It returns
// whether another took over because the lease was over.
func raceAgainstAnAttempt(t *testing.T, r *race, k pgstore.Key, attempt uint64) (lapsed bool) {
	t.Helper()
	owner, replays, disturbed := r.round(t, k, attempt,
		raceComplete(t, k, fingerprint, attempt, "won"), raceComplete(t, k, fingerprint, attempt, "won"),
		raceFail(t, k, fingerprint, attempt, false), raceFail(t, k, fingerprint, attempt, true),
		raceExtend(t, k, fingerprint, attempt), raceSweep(t))
	done := disturbed[0] == nil || disturbed[1] == nil
	failed, released, extended := disturbed[2] == nil, disturbed[3] == nil, disturbed[4] == nil
	outcomes := 0
	for _, outcome := range []bool{done, failed, released} {
		if outcome {
			outcomes++
		}
	}
	require.LessOrEqual(t, outcomes, 1, "%s has two outcomes", k)
	if done || failed || extended && !released {
		require.Nil(t, owner, "%s was taken over although its attempt held it", k)
	}
	for _, replay := range replays {
		require.True(t, done || failed, "an outcome that nobody recorded")
		require.Equal(t, attempt, replay.Attempt)
		if done {
			require.Equal(t, pgstore.StateDone, replay.State)
			require.Equal(t, "won", replay.Response)
		} else {
			require.Equal(t, pgstore.StateFailed, replay.State)
		}
	}
	if owner != nil && released {
		require.Zero(t, owner.Abandoned)
	} else if owner != nil {
		require.Equal(t, attempt, owner.Abandoned)
		lapsed = true
	}

	// What everybody will see from now on agrees with what the calls were told.
	record, live, err := r.f.Get(t.Context(), k)
	require.NoError(t, err)
	switch {
	case done:
		require.Equal(t, pgstore.StateDone, record.State)
		require.Equal(t, "won", record.Response)
	case failed:
		require.Equal(t, pgstore.StateFailed, record.State)
	case owner != nil:
		require.Equal(t, pgstore.StateInProgress, record.State)
		require.Equal(t, owner.Attempt, record.Attempt)
	case released:
		require.Equal(t, pgstore.StateRetryable, record.State)
	default: // the lease ended when nobody was looking any more
		require.True(t, !live || record.Attempt == attempt)
	}
	return lapsed
}

func raceAgainstTheEndOfAnAttempt(t *testing.T, r *race, rounds int) {
	t.Helper()
	for n := range rounds {
		k := pgstore.Key{Tenant: "ending", Operation: "race", Value: strconv.Itoa(n)}
		attempt := r.put(t, k, pgstore.StateInProgress, fingerprint, time.Hour, 2*time.Hour)
		require.False(t, raceAgainstAnAttempt(t, r, k, attempt), "%s was taken over within its lease", k)
	}
}

// The same while the lease itself is over in the middle of the round.
func raceAgainstTheEndOfALease(t *testing.T, r *race, rounds int) {
	t.Helper()
	takenOver := 0
	took := 10 * time.Millisecond
	for n := range rounds {
		k := pgstore.Key{Tenant: "lapsing", Operation: "race", Value: strconv.Itoa(n)}
		left := time.Duration(rand.Int64N(int64(took)))
		attempt := r.put(t, k, pgstore.StateInProgress, fingerprint, left, time.Hour)
		start := time.Now()
		if raceAgainstAnAttempt(t, r, k, attempt) {
			takenOver++
		}
		took = max(time.Since(start), time.Millisecond)
	}
	t.Logf("taken_over=%d held_to_the_end=%d", takenOver, rounds-takenOver)
}

// raceTrack is one of a few operations that all workers want, again and again under a new key.
type raceTrack struct {
	generation atomic.Int64
	owner      atomic.Uint64 // the attempt that holds the key, between its Begin's return and its end
	last       atomic.Uint64
}

// raceOfOwners lets 64 workers run whole lives of a few keys, with forged calls and sweeps in between. While one owns a key
// nobody else does, and the attempts of a key increase in the order in which they own it.
func raceOfOwners(t *testing.T, r *race, rounds int) {
	t.Helper()
	var (
		tracks  [8]raceTrack
		calls   []func()
		owners  atomic.Int64
		perform = max(rounds/4, 10)
	)
	for range raceCallers {
		calls = append(calls, func() {
			for range perform {
				owned, err := raceLife(t, r, &tracks, rand.IntN(len(tracks)))
				if err != nil {
					t.Error(err)
					return
				}
				if owned {
					owners.Add(1)
				}
			}
		})
	}
	raceTogether(calls...)
	t.Logf("workers=%d begins=%d owners=%d", raceCallers, raceCallers*perform, owners.Load())
	require.Positive(t, owners.Load())
}

// raceLife is one worker's try of one track: it owns the key and ends it in some way, or learns that it does not.
func raceLife(t *testing.T, r *race, tracks *[8]raceTrack, n int) (owned bool, err error) {
	t.Helper()
	track := &tracks[n]
	k := pgstore.Key{Tenant: "owners", Operation: strconv.Itoa(n), Value: strconv.FormatInt(track.generation.Load(), 10)}
	record, created, err := r.f.Begin(t.Context(), k, fingerprint)
	switch {
	case errors.Is(err, pgstore.ErrInProgress):
		if owner := track.owner.Load(); owner > 1 && rand.N(4) == 0 {
			err = r.f.Complete(t.Context(), k, fingerprint, owner-1, "forged")
			if !errors.Is(err, pgstore.ErrStaleAttempt) && !errors.Is(err, pgstore.ErrLeaseExpired) {
				return false, fmt.Errorf("a forged completion of %s: %w", k, err)
			}
		}
		if rand.N(16) == 0 {
			if _, err := r.f.Sweep(t.Context(), 2); err != nil {
				return false, err
			}
		}
		return false, nil
	case err != nil:
		return false, err
	case !created:
		if record.State == pgstore.StateDone && record.Response != strconv.FormatUint(record.Attempt, 10) {
			return false, fmt.Errorf("%s has the response %q of another attempt than %d", k, record.Response, record.Attempt)
		}
		return false, nil
	}

	r.owns(t, k, record.Attempt)
	if !track.owner.CompareAndSwap(0, record.Attempt) {
		return true, fmt.Errorf("%s is owned by attempts %d and %d at once", k, track.owner.Load(), record.Attempt)
	}
	if last := track.last.Swap(record.Attempt); last >= record.Attempt {
		return true, fmt.Errorf("%s was owned by attempt %d and then by %d", k, last, record.Attempt)
	}
	if _, err := r.f.Extend(t.Context(), k, fingerprint, record.Attempt); err != nil {
		return true, err
	}
	switch rand.N(4) {
	case 0:
		err = r.f.Complete(t.Context(), k, fingerprint, record.Attempt, strconv.FormatUint(record.Attempt, 10))
		track.owner.Store(0)
		track.generation.Add(1)
	case 1:
		err = r.f.Fail(t.Context(), k, fingerprint, record.Attempt, false)
		track.owner.Store(0)
		track.generation.Add(1)
	default:
		track.owner.Store(0) // before the release: others may own the key before the answer is here
		err = r.f.Fail(t.Context(), k, fingerprint, record.Attempt, true)
	}
	return true, err
}

// A thousand goroutines want twenty keys: each key gets one of them.
func TestManyCallersOfManyKeysGetOneOwnerEach(t *testing.T) {
	t.Parallel()
	f := setup(t)
	store := f.NewStore(t, racePool(t), lease, retention)
	const callers, keys = 1000, 20
	var (
		created [keys]atomic.Int64
		others  atomic.Int64
		calls   []func()
	)
	for n := range callers {
		calls = append(calls, func() {
			_, ok, err := store.Begin(t.Context(), recordKey(strconv.Itoa(n%keys)), fingerprint)
			switch {
			case ok:
				created[n%keys].Add(1)
			case errors.Is(err, pgstore.ErrInProgress):
				others.Add(1)
			default:
				t.Error(err)
			}
		})
	}
	raceTogether(calls...)
	for n := range created {
		require.EqualValues(t, 1, created[n].Load(), "key %d", n)
	}
	require.EqualValues(t, callers-keys, others.Load())
}
