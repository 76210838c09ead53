package pgstore_test

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/archlab/idempotency/internal/pgtest"
	"github.com/archlab/idempotency/pgstore"
)

// What each call costs on a connection that is open and has prepared the statements: one round trip to the server, whatever it
// finds. Only a refusal of Complete, Fail and Extend, and a repeat of them, takes a second one, to say why.
func TestCallsTakeOneRoundTrip(t *testing.T) {
	t.Parallel()
	begin := func(fingerprint string, want error) func(t *testing.T, s *pgstore.Store, k pgstore.Key, attempt uint64) {
		return func(t *testing.T, s *pgstore.Store, k pgstore.Key, _ uint64) {
			t.Helper()
			_, _, err := s.Begin(t.Context(), k, fingerprint)
			require.ErrorIs(t, err, want)
		}
	}
	complete := func(t *testing.T, s *pgstore.Store, k pgstore.Key, attempt uint64) {
		t.Helper()
		require.NoError(t, s.Complete(t.Context(), k, fingerprint, attempt, recordResponse))
	}
	state := func(state pgstore.State) func(t *testing.T, f *fixture, k pgstore.Key) uint64 {
		return func(t *testing.T, f *fixture, k pgstore.Key) uint64 {
			t.Helper()
			return recordPut(t, f, k, state)
		}
	}
	lapsed := func(t *testing.T, f *fixture, k pgstore.Key) uint64 {
		t.Helper()
		attempt := faultBegun(t, f, k)
		recordAge(t, f, k, lease)
		return attempt
	}
	calls := map[string]struct {
		put   func(t *testing.T, f *fixture, k pgstore.Key) uint64
		do    func(t *testing.T, s *pgstore.Store, k pgstore.Key, attempt uint64)
		trips int
	}{
		"begin a fresh key":          {faultNothing, begin(fingerprint, nil), 1},
		"begin a lapsed key":         {lapsed, begin(fingerprint, nil), 1},
		"begin a released key":       {state(pgstore.StateRetryable), begin(fingerprint, nil), 1},
		"begin a running key":        {faultBegun, begin(fingerprint, pgstore.ErrInProgress), 1},
		"begin a finished key":       {state(pgstore.StateDone), begin(fingerprint, nil), 1},
		"begin with another request": {state(pgstore.StateDone), begin("sha256:of another", pgstore.ErrConflict), 1},
		"complete":                   {faultBegun, complete, 1},
		"complete once more":         {state(pgstore.StateDone), complete, 2},
		"complete a lapsed key": {lapsed, func(t *testing.T, s *pgstore.Store, k pgstore.Key, attempt uint64) {
			t.Helper()
			require.ErrorIs(t, s.Complete(t.Context(), k, fingerprint, attempt, recordResponse), pgstore.ErrLeaseExpired)
		}, 2},
		"complete another's attempt": {faultBegun, func(t *testing.T, s *pgstore.Store, k pgstore.Key, attempt uint64) {
			t.Helper()
			require.ErrorIs(t, s.Complete(t.Context(), k, fingerprint, attempt+1, recordResponse), pgstore.ErrStaleAttempt)
		}, 2},
	}
	for _, call := range faultCalls() {
		if call.name == "begin" || call.name == "complete" {
			continue
		}
		entry := calls[call.name]
		entry.put, entry.trips = call.put, 1
		entry.do = func(t *testing.T, s *pgstore.Store, k pgstore.Key, attempt uint64) {
			t.Helper()
			require.NoError(t, call.do(t.Context(), s, k, attempt).err)
		}
		calls[call.name] = entry
	}
	for _, mode := range recordModes {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			f := setup(t)
			proxy := pgtest.NewProxy(t, pgtest.DSN(t))
			pool := newFaultPool(t, proxy.URL(), faultSingle, func(config *pgxpool.Config) { config.ConnConfig.DefaultQueryExecMode = mode })
			store := f.NewStore(t, pool, lease, retention)
			for name, call := range calls {
				for _, round := range []string{"cold ", "warm "} {
					k := recordKey(round + name)
					attempt := call.put(t, f, k)
					before := proxy.RoundTrips()
					call.do(t, store, k, attempt)
					trips := proxy.RoundTrips() - before
					switch {
					case mode == pgx.QueryExecModeDescribeExec:
						require.Equal(t, 2*call.trips, trips, "each statement is described first: %s", round+name)
					case round == "warm ":
						require.Equal(t, call.trips, trips, name)
					}
				}
			}
		})
	}
}

// What Do and DoTx cost beside what their functions do.
func TestRoundTripsOfDoAndDoTx(t *testing.T) {
	t.Parallel()
	f := setup(t)
	own := faultOwn(t, f)
	proxy := pgtest.NewProxy(t, pgtest.DSN(t))
	store := f.NewStore(t, newFaultPool(t, proxy.URL(), faultSingle), lease, retention)
	k := key
	calls := []struct {
		name  string
		trips int
		call  func() error
	}{
		{"Do, fresh", 2, func() error {
			_, err := store.Do(t.Context(), k, fingerprint, func(context.Context, pgstore.Record) (string, error) { return recordResponse, nil })
			return err
		}},
		{"Do, repeat", 1, func() error {
			_, err := store.Do(t.Context(), k, fingerprint, doNever(t))
			return err
		}},
		{"DoTx, repeat", 3, func() error {
			_, err := store.DoTx(t.Context(), k, fingerprint, dotxNever(t))
			return err
		}},
		{"DoTx, fresh, with one statement of the function's", 4 + 1, func() error {
			k.Value += "'"
			_, err := store.DoTx(t.Context(), k, fingerprint, func(ctx context.Context, tx pgx.Tx, _ pgstore.Record) (string, error) {
				_, err := tx.Exec(ctx, `INSERT INTO `+own+` VALUES (1)`)
				return recordResponse, err
			})
			return err
		}},
	}
	for _, round := range []string{"cold", "warm"} {
		k.Value += "'"
		for _, call := range calls {
			before := proxy.RoundTrips()
			require.NoError(t, call.call())
			if round == "warm" { // every statement has been prepared
				require.Equal(t, call.trips, proxy.RoundTrips()-before, call.name)
			}
		}
	}
}
