package pgstore_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/archlab/idempotency/internal/pgtest"
	"github.com/archlab/idempotency/internal/refstore"
	"github.com/archlab/idempotency/internal/sqlgen"
	"github.com/archlab/idempotency/pgstore"
)

// TestStoreAgreesWithModel drives the store and the model of package refstore with the same random commands at the same
// times and expects the same answers, the same errors and the same table, in each of pgx's ways to send a statement.
//
// A fresh table's attempts count from 1 in both, so equal attempts also say that no call but a Begin that creates has
// drawn a number.
func TestStoreAgreesWithModel(t *testing.T) {
	t.Parallel()
	for _, mode := range []pgx.QueryExecMode{
		pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec,
		pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
	} {
		t.Run(strings.ReplaceAll(mode.String(), " ", "_"), func(t *testing.T) {
			t.Parallel()
			newModelTest(t, mode).check(t, nil)
		})
	}
}

// TestStoreInTransactionsAgreesWithModel does the same with many commands inside transactions, of which some roll back.
func TestStoreInTransactionsAgreesWithModel(t *testing.T) {
	t.Parallel()
	for _, level := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable} {
		t.Run(strings.ReplaceAll(string(level), " ", "_"), func(t *testing.T) {
			t.Parallel()
			newModelTest(t, pgx.QueryExecModeCacheStatement).check(t, &pgx.TxOptions{IsoLevel: level})
		})
	}
}

// An attempt is unique in the whole table, so it could do harm through any key, if the key were not compared.
func TestAnAttemptEndsNoRecordButItsOwn(t *testing.T) {
	t.Parallel()
	own := modelKey
	for component, other := range map[string]pgstore.Key{
		"tenant":    {Tenant: "other", Operation: own.Operation, Value: own.Value},
		"operation": {Tenant: own.Tenant, Operation: "other", Value: own.Value},
		"value":     {Tenant: own.Tenant, Operation: own.Operation, Value: "other"},
	} {
		t.Run(component, func(t *testing.T) {
			t.Parallel()
			f := setup(t)
			record, _, err := f.Begin(t.Context(), own, fingerprint)
			require.NoError(t, err)
			refused := func(want error) {
				t.Helper()
				_, err := f.Extend(t.Context(), other, fingerprint, record.Attempt)
				require.ErrorIs(t, err, want)
				require.ErrorIs(t, f.Complete(t.Context(), other, fingerprint, record.Attempt, ""), want)
				require.ErrorIs(t, f.Fail(t.Context(), other, fingerprint, record.Attempt, true), want)
				require.ErrorIs(t, f.Resolve(t.Context(), other, record.Attempt, pgstore.AsFailed()), want)
				kept, live, err := f.Get(t.Context(), own)
				require.NoError(t, err)
				require.True(t, live)
				record.Remaining = kept.Remaining
				require.Equal(t, record, kept)
			}
			_, live, err := f.Get(t.Context(), other)
			require.NoError(t, err)
			require.False(t, live)
			refused(pgstore.ErrLeaseExpired)
			_, _, err = f.Begin(t.Context(), other, fingerprint)
			require.NoError(t, err)
			refused(pgstore.ErrStaleAttempt)
		})
	}
}

func TestAnAttemptHoldsItsKeyToTheLastMicrosecondOfItsLease(t *testing.T) {
	t.Parallel()
	for name, call := range map[string]func(f *fixture, attempt uint64) error{
		"complete": func(f *fixture, attempt uint64) error { return f.Complete(t.Context(), key, fingerprint, attempt, "") },
		"fail":     func(f *fixture, attempt uint64) error { return f.Fail(t.Context(), key, fingerprint, attempt, false) },
		"extend": func(f *fixture, attempt uint64) error {
			_, err := f.Extend(t.Context(), key, fingerprint, attempt)
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for left, want := range map[time.Duration]error{time.Microsecond: nil, 0: pgstore.ErrLeaseExpired} {
				clock := newClock()
				f := setup(t, pgstore.WithClock(clock.Now))
				record, _, err := f.Begin(t.Context(), key, fingerprint)
				require.NoError(t, err)
				clock.Advance(lease - left)
				require.ErrorIs(t, call(f, record.Attempt), want)
			}
		})
	}
}

// modelTest is what the sequences of one test share.
type modelTest struct {
	fixture             *fixture
	pool                *pgxpool.Pool
	schema              string // quoted
	sequences, commands atomic.Int64
}

func newModelTest(t *testing.T, mode pgx.QueryExecMode) *modelTest {
	t.Helper()
	f := setup(t)
	config, err := pgxpool.ParseConfig(pgtest.DSN(t))
	require.NoError(t, err)
	config.MaxConns = 1
	config.ConnConfig.DefaultQueryExecMode = mode
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	return &modelTest{fixture: f, pool: pool, schema: sqlgen.QuoteIdentifier(f.Schema)}
}

// check runs the sequences. With options, some of their commands run in transactions.
func (m *modelTest) check(t *testing.T, options *pgx.TxOptions) {
	t.Helper()
	rapid.Check(t, func(r *rapid.T) {
		s := m.start(t, r)
		defer s.rollback(r)
		actions := map[string]func(*rapid.T){
			"":            s.compareTables,
			"begin":       s.begin,
			"begin again": s.begin, // twice the share: everything else starts with it
			"complete":    s.complete,
			"edge":        s.moveTimeToEdge,
			"extend":      s.extend,
			"fail":        s.fail,
			"get":         s.get,
			"resolve":     s.resolve,
			"sweep":       s.sweep,
			"time":        s.moveTime,
		}
		if options != nil {
			actions["transaction"] = func(r *rapid.T) { s.openTx(r, *options) }
			actions["commit"] = s.commitTx
			actions["roll back"] = s.rollbackTx
		}
		r.Repeat(actions)
	})
	t.Logf("sequences=%d commands=%d", m.sequences.Load(), m.commands.Load())
}

// modelStore is what the store and its model have in common.
type modelStore interface {
	Begin(ctx context.Context, k pgstore.Key, fingerprint string) (pgstore.Record, bool, error)
	Complete(ctx context.Context, k pgstore.Key, fingerprint string, attempt uint64, response string) error
	Fail(ctx context.Context, k pgstore.Key, fingerprint string, attempt uint64, retryable bool) error
	Extend(ctx context.Context, k pgstore.Key, fingerprint string, attempt uint64) (pgstore.Record, error)
	Get(ctx context.Context, k pgstore.Key) (pgstore.Record, bool, error)
	Sweep(ctx context.Context, limit int) (int64, error)
}

// modelMaxResponse is the limit of every store here: small, so that the limit itself is often met.
const modelMaxResponse = 64

// What sequences choose from. The first key is in each of them; its neighbours differ from it in one component, the strangers
// in where a separator stands, in trailing space, or entirely.
var (
	modelKey        = pgstore.Key{Tenant: "a/b", Operation: "c", Value: "d"}
	modelNeighbours = []pgstore.Key{
		{Tenant: "a/b", Operation: "C", Value: "d"},
		{Tenant: "A/b", Operation: "c", Value: "d"},
		{Tenant: "a/b", Operation: "c", Value: "D"},
	}
	modelStrangers = []pgstore.Key{
		{Tenant: "a", Operation: "b/c", Value: "d"},
		{Tenant: "a/b", Operation: "c", Value: "d "},
		{Tenant: "caf\u00e9", Operation: "c", Value: "d"},
		{Tenant: "cafe\u0301", Operation: "c", Value: "d"},
		{Tenant: `'"\`, Operation: "$1", Value: "\U0001f4b6 -- \n\x7f"},
		{Tenant: strings.Repeat("t", 512), Operation: strings.Repeat("\u20ac", 170), Value: strings.Repeat("v", 512)},
	}
	modelInvalidKeys = []pgstore.Key{
		{}, {Tenant: "a", Operation: "b"}, {Operation: "b", Value: "\xff"}, {Tenant: "a", Value: "v"},
		{Tenant: "a\x00", Operation: "b", Value: "v"}, {Tenant: "a", Operation: "\xed\xa0\x80", Value: "v"},
		{Tenant: "a", Operation: "b", Value: strings.Repeat("v", 513)},
	}
	modelFingerprints        = []string{"\x00", "\xff\xfe", strings.Repeat("f", 1024)}
	modelInvalidFingerprints = []string{"", strings.Repeat("f", 1025)}
	modelDurations           = []time.Duration{
		time.Millisecond, time.Millisecond + 999, 10 * time.Second, time.Hour, 24*time.Hour + time.Microsecond, pgstore.MaxDuration,
	}
	modelErrors = []error{
		pgstore.ErrConflict, pgstore.ErrInProgress, pgstore.ErrLeaseExpired, pgstore.ErrStaleAttempt, pgstore.ErrKeyEmpty,
		pgstore.ErrAbandoned, pgstore.ErrKeyInvalid, pgstore.ErrFingerprintInvalid, pgstore.ErrResponseTooLarge, pgstore.ErrNotMigrated,
	}
)

// modelSequence is one sequence of commands: two stores on one table, and their two models on another.
type modelSequence struct {
	*modelTest
	clock  *clock
	table  *refstore.Table
	stores []*pgstore.Store
	models []*refstore.Store
	keys   []pgstore.Key
	tx     pgx.Tx                       // where one is open
	saved  map[pgstore.Key]refstore.Row // the model's rows when it was opened
}

// start empties the table, lets its attempts count from 1 again, and draws what the sequence works with.
func (m *modelTest) start(t *testing.T, r *rapid.T) *modelSequence {
	t.Helper()
	m.sequences.Add(1)
	s := &modelSequence{modelTest: m, clock: newClock()}
	s.table = refstore.NewTable(s.clock.Now)
	s.keys = slices.Concat([]pgstore.Key{modelKey},
		rapid.SliceOfNDistinct(rapid.SampledFrom(modelNeighbours), 0, 2, rapid.ID[pgstore.Key]).Draw(r, "neighbours"),
		rapid.SliceOfNDistinct(rapid.SampledFrom(modelStrangers), 0, 1, rapid.ID[pgstore.Key]).Draw(r, "stranger"))
	for range 2 {
		lease := rapid.SampledFrom(modelDurations).Draw(r, "lease")
		retention := rapid.SampledFrom(modelDurations).Draw(r, "retention")
		options := []pgstore.Option{pgstore.WithClock(s.clock.Now), pgstore.WithMaxResponse(modelMaxResponse)}
		var modes refstore.Modes
		if modes.NoTakeover = rapid.Bool().Draw(r, "no takeover"); modes.NoTakeover {
			options = append(options, pgstore.WithoutTakeover())
		}
		if modes.LateCompletion = rapid.Bool().Draw(r, "late completion"); modes.LateCompletion {
			options = append(options, pgstore.WithLateCompletion())
		}
		s.stores = append(s.stores, m.fixture.NewStore(t, m.pool, lease, retention, options...))
		s.models = append(s.models, s.table.Store(lease, retention, modelMaxResponse).In(modes))
	}
	var batch pgx.Batch
	batch.Queue("DELETE FROM " + m.schema + "." + sqlgen.Table)
	batch.Queue("SELECT setval($1::regclass, 1, false)", m.schema+"."+sqlgen.Sequence)
	require.NoError(r, m.pool.SendBatch(r.Context(), &batch).Close())
	return s
}

// modelAnswer is what a call returned, in a form that compares.
type modelAnswer struct {
	Record     pgstore.Record
	Found      bool
	Swept      int64
	Err        string // the sentinels that it is, or the text of an error that is none
	RetryAfter time.Duration
}

func newModelAnswer(record pgstore.Record, found bool, err error) modelAnswer {
	a := modelAnswer{Record: record, Found: found}
	if err == nil {
		return a
	}
	for _, sentinel := range modelErrors {
		if errors.Is(err, sentinel) {
			a.Err += sentinel.Error() + "; "
		}
	}
	if a.Err == "" {
		a.Err = "none of the sentinels: " + err.Error()
	}
	if inProgress, ok := errors.AsType[*pgstore.InProgressError](err); ok {
		a.RetryAfter = inProgress.RetryAfter
	}
	return a
}

// both makes one call to a store and to its model, and compares the answers.
func (s *modelSequence) both(r *rapid.T, call func(store modelStore) modelAnswer) {
	s.commands.Add(1)
	i := rapid.IntRange(0, len(s.stores)-1).Draw(r, "store")
	store := s.stores[i]
	if s.tx != nil {
		store = store.WithTx(s.tx)
	}
	require.Equal(r, call(s.models[i]), call(store))
}

func (s *modelSequence) begin(r *rapid.T) {
	k := s.drawKey(r)
	fingerprint := rapid.SampledFrom([]string{
		modelFingerprints[0], modelFingerprints[0], modelFingerprints[0], modelFingerprints[1], drawFingerprint(r, ""),
	}).Draw(r, "fingerprint")
	s.both(r, func(store modelStore) modelAnswer {
		return newModelAnswer(store.Begin(r.Context(), k, fingerprint))
	})
}

func (s *modelSequence) complete(r *rapid.T) {
	k, fingerprint, attempt := s.drawOwner(r)
	response := s.drawResponse(r, k)
	s.both(r, func(store modelStore) modelAnswer {
		return newModelAnswer(pgstore.Record{}, false, store.Complete(r.Context(), k, fingerprint, attempt, response))
	})
}

func (s *modelSequence) fail(r *rapid.T) {
	k, fingerprint, attempt := s.drawOwner(r)
	retryable := rapid.SampledFrom([]bool{true, true, false}).Draw(r, "retryable")
	s.both(r, func(store modelStore) modelAnswer {
		return newModelAnswer(pgstore.Record{}, false, store.Fail(r.Context(), k, fingerprint, attempt, retryable))
	})
}

func (s *modelSequence) extend(r *rapid.T) {
	k, fingerprint, attempt := s.drawOwner(r)
	s.both(r, func(store modelStore) modelAnswer {
		record, err := store.Extend(r.Context(), k, fingerprint, attempt)
		return newModelAnswer(record, false, err)
	})
}

func (s *modelSequence) get(r *rapid.T) {
	k := s.drawKey(r)
	s.both(r, func(store modelStore) modelAnswer {
		return newModelAnswer(store.Get(r.Context(), k))
	})
}

func (s *modelSequence) resolve(r *rapid.T) {
	k, _, attempt := s.drawOwner(r)
	state := rapid.SampledFrom([]pgstore.State{pgstore.StateDone, pgstore.StateFailed, pgstore.StateRetryable}).Draw(r, "state")
	response, resolution := "", pgstore.AsFailed()
	switch state {
	case pgstore.StateDone:
		response = s.drawResponse(r, k)
		resolution = pgstore.AsDone(response)
	case pgstore.StateRetryable:
		resolution = pgstore.AsRetryable()
	case pgstore.StateFailed, pgstore.StateInProgress:
	}
	s.both(r, func(store modelStore) modelAnswer {
		if model, ok := store.(*refstore.Store); ok {
			return newModelAnswer(pgstore.Record{}, false, model.Resolve(r.Context(), k, attempt, state, response))
		}
		return newModelAnswer(pgstore.Record{}, false, store.(*pgstore.Store).Resolve(r.Context(), k, attempt, resolution))
	})
}

func (s *modelSequence) sweep(r *rapid.T) {
	limit := rapid.SampledFrom([]int{1, 1, 2, 3, 1000, math.MaxInt, 0, -1}).Draw(r, "limit")
	if limit < 1 {
		for _, store := range []modelStore{s.stores[0], s.models[0]} {
			_, err := store.Sweep(r.Context(), limit)
			require.Error(r, err)
		}
		return
	}
	// Of rows that are due at the same moment a sweep may take any: let the limit not part them.
	due := s.edges(func(row refstore.Row) []time.Time { return []time.Time{row.PurgeAfter} })
	for limit < len(due) && due[limit-1].Equal(due[limit]) {
		limit++
	}
	s.both(r, func(store modelStore) modelAnswer {
		n, err := store.Sweep(r.Context(), limit)
		a := newModelAnswer(pgstore.Record{}, false, err)
		a.Swept = n
		return a
	})
}

// moveTime moves the clock by anything, small or large, now and then back, as an administrator may.
func (s *modelSequence) moveTime(r *rapid.T) {
	s.clock.Advance(rapid.OneOf(
		rapid.Map(rapid.Int64Range(0, int64(time.Millisecond)), func(n int64) time.Duration { return time.Duration(n) }),
		rapid.SampledFrom(modelDurations),
		rapid.SampledFrom([]time.Duration{-1, -time.Microsecond, -time.Second, -time.Hour}),
	).Draw(r, "move"))
}

// moveTimeToEdge moves the clock to a moment at which something expires or is due for a sweep, or right beside it.
func (s *modelSequence) moveTimeToEdge(r *rapid.T) {
	edges := s.edges(func(row refstore.Row) []time.Time { return []time.Time{row.ExpiresAt, row.PurgeAfter} })
	now := s.clock.Now()
	edges = slices.DeleteFunc(edges, func(edge time.Time) bool { return edge.Before(now) })
	if len(edges) == 0 {
		r.Skip("nothing expires")
	}
	edge := rapid.SampledFrom([]time.Time{edges[0], edges[0], rapid.SampledFrom(edges).Draw(r, "edge")}).Draw(r, "edge")
	beside := rapid.SampledFrom([]time.Duration{0, 999, -1, -time.Microsecond, time.Microsecond}).Draw(r, "beside")
	s.clock.Advance(edge.Add(beside).Sub(now))
}

// edges returns the moments that of finds in the rows, in order.
func (s *modelSequence) edges(of func(row refstore.Row) []time.Time) []time.Time {
	var edges []time.Time
	for row := range maps.Values(s.table.Rows()) {
		edges = append(edges, of(row)...)
	}
	slices.SortFunc(edges, time.Time.Compare)
	return edges
}

func (s *modelSequence) drawResponse(r *rapid.T, k pgstore.Key) string {
	return rapid.SampledFrom([]string{
		"", "ok", "\x00", "\xff\xfe\x80", strings.Repeat("x", modelMaxResponse), strings.Repeat("x", modelMaxResponse+1),
		string(rapid.SliceOfN(rapid.Byte(), 0, modelMaxResponse).Draw(r, "bytes")),
		s.table.Rows()[k].Response, // as a repeat does
	}).Draw(r, "response")
}

func (s *modelSequence) drawKey(r *rapid.T) pgstore.Key {
	if rapid.IntRange(0, 31).Draw(r, "valid") == 31 {
		return rapid.SampledFrom(modelInvalidKeys).Draw(r, "invalid key")
	}
	return rapid.SampledFrom(s.keys).Draw(r, "key")
}

// drawFingerprint draws any fingerprint but one.
func drawFingerprint(r *rapid.T, but string) string {
	if rapid.IntRange(0, 15).Draw(r, "valid") == 15 {
		return rapid.SampledFrom(modelInvalidFingerprints).Draw(r, "invalid fingerprint")
	}
	others := slices.DeleteFunc(slices.Clone(modelFingerprints), func(f string) bool { return f == but })
	return rapid.SampledFrom(others).Draw(r, "fingerprint")
}

// drawOwner draws the arguments of Complete, Fail and Extend: mostly those of the record's owner.
func (s *modelSequence) drawOwner(r *rapid.T) (k pgstore.Key, fingerprint string, attempt uint64) {
	rows := s.table.Rows()
	k = s.drawKey(r)
	owner := k
	if rapid.IntRange(0, 7).Draw(r, "own key") == 7 { // an attempt at another's record
		owner = rapid.SampledFrom(s.keys).Draw(r, "owner")
	}
	fingerprint, attempt = rows[owner].Fingerprint, rows[owner].Attempt
	if fingerprint == "" || rapid.IntRange(0, 5).Draw(r, "own fingerprint") == 5 {
		fingerprint = drawFingerprint(r, fingerprint)
	}
	if rapid.IntRange(0, 5).Draw(r, "own attempt") == 5 {
		attempt = rapid.SampledFrom([]uint64{
			0, attempt - 1, attempt + 1, 1, math.MaxInt64, math.MaxInt64 + 1, math.MaxUint64,
		}).Draw(r, "attempt")
	}
	return k, fingerprint, attempt
}

func (s *modelSequence) openTx(r *rapid.T, options pgx.TxOptions) {
	if s.tx != nil {
		r.Skip("there is one")
	}
	var err error
	s.tx, err = s.pool.BeginTx(r.Context(), options)
	require.NoError(r, err)
	s.saved = s.table.Rows()
}

func (s *modelSequence) commitTx(r *rapid.T) {
	if s.tx == nil {
		r.Skip("there is none")
	}
	require.NoError(r, s.tx.Commit(r.Context()))
	s.tx = nil
}

func (s *modelSequence) rollbackTx(r *rapid.T) {
	if s.tx == nil {
		r.Skip("there is none")
	}
	require.NoError(r, s.tx.Rollback(r.Context()))
	s.tx = nil
	s.table.Restore(s.saved)
}

// rollback ends a transaction that the sequence has left open, also where it failed.
func (s *modelSequence) rollback(r *rapid.T) {
	if s.tx != nil {
		_ = s.tx.Rollback(context.WithoutCancel(r.Context()))
	}
}

// compareTables compares every row, live or not, in every column that the model has.
func (s *modelSequence) compareTables(r *rapid.T) {
	var db pgstore.DB = s.pool
	if s.tx != nil {
		db = s.tx
	}
	rows, err := db.Query(r.Context(), `
		SELECT tenant, operation, key, state, fingerprint, response, attempt, coalesce(abandoned, 0),
			(extract(epoch FROM begun_at) * 1000000)::bigint,
			(extract(epoch FROM expires_at) * 1000000)::bigint,
			(extract(epoch FROM purge_after) * 1000000)::bigint
		FROM `+s.schema+`.`+sqlgen.Table)
	require.NoError(r, err)
	stored := map[pgstore.Key]refstore.Row{}
	var (
		k                              pgstore.Key
		row                            refstore.Row
		fingerprint                    []byte
		response                       *[]byte
		attempt, abandoned             int64
		begunAt, expiresAt, purgeAfter int64
	)
	_, err = pgx.ForEachRow(rows, []any{
		&k.Tenant, &k.Operation, &k.Value, &row.State, &fingerprint, &response, &attempt, &abandoned,
		&begunAt, &expiresAt, &purgeAfter,
	}, func() error {
		row.Fingerprint, row.Response = string(fingerprint), ""
		if response != nil {
			row.Response = string(*response)
		}
		if (response != nil) != (row.State == pgstore.StateDone) {
			return fmt.Errorf("%s is %s: a response is there in StateDone and in no other", k, row.State)
		}
		row.Attempt, row.Abandoned = uint64(attempt), uint64(abandoned) //nolint:gosec // neither is negative
		row.BegunAt, row.ExpiresAt = time.UnixMicro(begunAt).UTC(), time.UnixMicro(expiresAt).UTC()
		row.PurgeAfter = time.UnixMicro(purgeAfter).UTC()
		stored[k] = row
		return nil
	})
	require.NoError(r, err)
	require.Equal(r, s.table.Rows(), stored)
}
