// Package refstore is the state machine of package pgstore in memory: the oracle that tests compare the SQL with.
//
// It is written from the tables of the design, one case per line, and knows nothing of SQL, races or faults: a mutex makes
// every call an instant. What it says is right by being readable.
package refstore

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/archlab/idempotency/pgstore"
)

// Row is what a table holds for a key, live or not.
type Row struct {
	State                          pgstore.State
	Fingerprint, Response          string
	Attempt, Abandoned             uint64
	BegunAt, ExpiresAt, PurgeAfter time.Time
}

// Table is what stores share: the rows, the counter that attempts come from, and the clock.
type Table struct {
	mu       sync.Mutex
	now      func() time.Time
	rows     map[pgstore.Key]Row
	attempts uint64
}

// NewTable returns an empty table whose attempts count from 1. The clock is cut to microseconds.
func NewTable(now func() time.Time) *Table {
	return &Table{now: now, rows: map[pgstore.Key]Row{}}
}

// Rows returns a copy of everything in the table, live or not.
func (t *Table) Rows() map[pgstore.Key]Row {
	t.mu.Lock()
	defer t.mu.Unlock()
	return maps.Clone(t.rows)
}

// Restore puts the rows of an earlier moment back, as the rollback of a transaction does. Attempts that were drawn in
// between stay drawn.
func (t *Table) Restore(rows map[pgstore.Key]Row) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.rows = maps.Clone(rows)
}

// lock returns the time of one call and the function that ends it.
func (t *Table) lock() (now time.Time, unlock func()) {
	t.mu.Lock()
	return time.UnixMicro(t.now().UnixMicro()).UTC(), t.mu.Unlock
}

// Store has the methods of pgstore.Store. Contexts play no part in it.
type Store struct {
	table            *Table
	lease, retention time.Duration
	maxResponse      int
	modes            Modes
}

// Modes are what pgstore.WithoutTakeover and pgstore.WithLateCompletion switch on.
type Modes struct{ NoTakeover, LateCompletion bool }

// Store returns a store on the table, as pgstore.New does for the same durations and pgstore.WithMaxResponse.
func (t *Table) Store(lease, retention time.Duration, maxResponse int) *Store {
	return &Store{table: t, lease: lease.Truncate(time.Microsecond), retention: retention.Truncate(time.Microsecond), maxResponse: maxResponse}
}

// In returns the store in the modes.
func (s *Store) In(modes Modes) *Store {
	in := *s
	in.modes = modes
	return &in
}

// Begin reserves the key, or says what stands in the way.
func (s *Store) Begin(_ context.Context, k pgstore.Key, fingerprint string) (pgstore.Record, bool, error) {
	if err := validate(k, fingerprint, 0, 0); err != nil {
		return pgstore.Record{}, false, err
	}
	now, unlock := s.table.lock()
	defer unlock()
	held := s.table.rows[k]
	if held.live(now) || s.modes.NoTakeover && held.lapsed(now) {
		switch {
		case held.Fingerprint != fingerprint:
			return pgstore.Record{}, false, pgstore.ErrConflict
		case held.lapsed(now):
			return pgstore.Record{}, false, pgstore.ErrAbandoned
		case held.State == pgstore.StateInProgress:
			return pgstore.Record{}, false, &pgstore.InProgressError{RetryAfter: held.ExpiresAt.Sub(now)}
		case held.State != pgstore.StateRetryable:
			return held.record(now), false, nil
		}
	}
	s.table.attempts++
	row := Row{
		State: pgstore.StateInProgress, Fingerprint: fingerprint,
		Attempt: s.table.attempts, Abandoned: held.abandonedBy(now),
		BegunAt: now, ExpiresAt: now.Add(s.lease), PurgeAfter: now.Add(s.lease + s.retention),
	}
	s.table.rows[k] = row
	return row.record(now), true, nil
}

// Complete ends the attempt with success.
func (s *Store) Complete(_ context.Context, k pgstore.Key, fingerprint string, attempt uint64, response string) error {
	if err := validate(k, fingerprint, len(response), s.maxResponse); err != nil {
		return err
	}
	return s.end(k, fingerprint, attempt, pgstore.StateDone, response)
}

// Fail ends the attempt without a response.
func (s *Store) Fail(_ context.Context, k pgstore.Key, fingerprint string, attempt uint64, retryable bool) error {
	if err := validate(k, fingerprint, 0, 0); err != nil {
		return err
	}
	if retryable {
		return s.end(k, fingerprint, attempt, pgstore.StateRetryable, "")
	}
	return s.end(k, fingerprint, attempt, pgstore.StateFailed, "")
}

// end brings the attempt's record into a state in which nobody holds the key.
func (s *Store) end(k pgstore.Key, fingerprint string, attempt uint64, state pgstore.State, response string) error {
	now, unlock := s.table.lock()
	defer unlock()
	row, err := s.table.owned(k, fingerprint, attempt, now, s.modes.LateCompletion)
	if err != nil {
		return err
	}
	return s.settle(k, row, state, response, now)
}

func (s *Store) settle(k pgstore.Key, row Row, state pgstore.State, response string, now time.Time) error {
	switch {
	case row.State == state && row.Response == response:
		return nil
	case row.State != pgstore.StateInProgress:
		return pgstore.ErrStaleAttempt
	}
	row.State, row.Response = state, response
	row.ExpiresAt = now.Add(s.retention)
	row.PurgeAfter = later(row.PurgeAfter, row.ExpiresAt)
	s.table.rows[k] = row
	return nil
}

// Extend gives the attempt a fresh lease.
func (s *Store) Extend(_ context.Context, k pgstore.Key, fingerprint string, attempt uint64) (pgstore.Record, error) {
	if err := validate(k, fingerprint, 0, 0); err != nil {
		return pgstore.Record{}, err
	}
	now, unlock := s.table.lock()
	defer unlock()
	row, err := s.table.owned(k, fingerprint, attempt, now, false)
	switch {
	case err != nil:
		return pgstore.Record{}, err
	case row.State != pgstore.StateInProgress:
		return pgstore.Record{}, pgstore.ErrStaleAttempt
	}
	row.ExpiresAt = now.Add(s.lease)
	row.PurgeAfter = later(row.PurgeAfter, now.Add(s.lease+s.retention))
	s.table.rows[k] = row
	return row.record(now), nil
}

// Get returns the live record of the key.
func (s *Store) Get(_ context.Context, k pgstore.Key) (pgstore.Record, bool, error) {
	if err := validateKey(k); err != nil {
		return pgstore.Record{}, false, err
	}
	now, unlock := s.table.lock()
	defer unlock()
	row := s.table.rows[k]
	if row.live(now) || s.modes.NoTakeover && row.lapsed(now) {
		return row.record(now), true, nil
	}
	return pgstore.Record{}, false, nil
}

// Resolve ends the attempt in the name of whoever found out what became of it: as pgstore.AsDone, AsFailed or AsRetryable.
func (s *Store) Resolve(_ context.Context, k pgstore.Key, attempt uint64, state pgstore.State, response string) error {
	if err := validateKey(k); err != nil {
		return err
	}
	if len(response) > s.maxResponse {
		return pgstore.ErrResponseTooLarge
	}
	now, unlock := s.table.lock()
	defer unlock()
	row := s.table.rows[k]
	switch {
	case !row.live(now) && !row.lapsed(now):
		return pgstore.ErrLeaseExpired
	case row.Attempt != attempt:
		return pgstore.ErrStaleAttempt
	}
	return s.settle(k, row, state, response, now)
}

// Sweep deletes at most limit rows whose PurgeAfter has come, the earliest first; of equal ones, any.
func (s *Store) Sweep(_ context.Context, limit int) (int64, error) {
	if limit < 1 {
		return 0, errors.New("idempotency: sweep: the limit must be at least 1")
	}
	now, unlock := s.table.lock()
	defer unlock()
	due := slices.SortedFunc(maps.Keys(s.table.rows), func(a, b pgstore.Key) int {
		return s.table.rows[a].PurgeAfter.Compare(s.table.rows[b].PurgeAfter)
	})
	due = slices.DeleteFunc(due, func(k pgstore.Key) bool { return s.table.rows[k].PurgeAfter.After(now) })
	due = due[:min(limit, len(due))]
	for _, k := range due {
		delete(s.table.rows, k)
	}
	return int64(len(due)), nil
}

// owned returns the live row of the key, or with late the lapsed one, if the attempt holds it or was the last to hold it.
func (t *Table) owned(k pgstore.Key, fingerprint string, attempt uint64, now time.Time, late bool) (Row, error) {
	row := t.rows[k]
	switch {
	case !row.live(now) && (!late || !row.lapsed(now)):
		return Row{}, pgstore.ErrLeaseExpired
	case row.Fingerprint != fingerprint:
		return Row{}, pgstore.ErrConflict
	case row.Attempt != attempt:
		return Row{}, pgstore.ErrStaleAttempt
	}
	return row, nil
}

// live reports whether the row exists for the calls that ask for a record. The zero Row never does.
func (r Row) live(now time.Time) bool { return r.ExpiresAt.After(now) }

// lapsed reports whether the row is an attempt whose lease is over and which is not forgotten yet.
func (r Row) lapsed(now time.Time) bool {
	return r.State == pgstore.StateInProgress && !r.live(now) && r.PurgeAfter.After(now)
}

// abandonedBy returns the lapsed attempt of which one that replaces r has to know, or 0.
func (r Row) abandonedBy(now time.Time) uint64 {
	switch {
	case !r.PurgeAfter.After(now): // forgotten, or never there
		return 0
	case r.State == pgstore.StateInProgress: // lapsed, else it would not be replaced
		return r.Attempt
	case r.State == pgstore.StateRetryable: // r.Attempt promised no effect, for itself
		return r.Abandoned
	}
	return 0
}

func (r Row) record(now time.Time) pgstore.Record {
	return pgstore.Record{
		State: r.State, Fingerprint: r.Fingerprint, Response: r.Response,
		ExpiresAt: r.ExpiresAt, Remaining: max(r.ExpiresAt.Sub(now), 0), Attempt: r.Attempt, Abandoned: r.Abandoned,
	}
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

func validate(k pgstore.Key, fingerprint string, response, maxResponse int) error {
	if err := validateKey(k); err != nil {
		return err
	}
	switch {
	case fingerprint == "" || len(fingerprint) > 1024:
		return pgstore.ErrFingerprintInvalid
	case response > maxResponse:
		return pgstore.ErrResponseTooLarge
	}
	return nil
}

func validateKey(k pgstore.Key) error {
	components := []string{k.Tenant, k.Operation, k.Value}
	if slices.Contains(components, "") {
		return pgstore.ErrKeyEmpty
	}
	for _, c := range components {
		if len(c) > 512 || !utf8.ValidString(c) || strings.Contains(c, "\x00") {
			return pgstore.ErrKeyInvalid
		}
	}
	return nil
}
