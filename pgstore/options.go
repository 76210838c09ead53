package pgstore

import (
	"errors"
	"fmt"
	"time"

	"github.com/archlab/idempotency/internal/sqlgen"
)

// Limits and defaults of [New] and its options.
const (
	// MinDuration and MaxDuration bound lease and retention: a millisecond to a hundred years.
	MinDuration = time.Millisecond
	MaxDuration = 100 * 365 * 24 * time.Hour

	// SchemaDefault is the schema of the store's table unless [WithSchema] names another.
	SchemaDefault = "public"

	// MaxResponseDefault is the longest response in bytes, 8 MiB, unless [WithMaxResponse] sets another.
	MaxResponseDefault = 8 << 20

	// MaxResponseLimit is the most that [WithMaxResponse] takes, 256 MiB. PostgreSQL's own limit for a message is 1 GiB,
	// and the simple query protocol writes a byte as two letters.
	MaxResponseLimit = 256 << 20
)

// Option configures a [Store]; see [New].
type Option func(*Store)

// WithSchema names the schema that holds the store's table: the one given to migrations.Up. Any name that PostgreSQL
// takes will do; it is quoted. Defaults to [SchemaDefault].
func WithSchema(name string) Option {
	return func(s *Store) { s.schema = name }
}

// WithMaxResponse sets the longest response in bytes that Complete stores, from 0 to [MaxResponseLimit]. Defaults to
// [MaxResponseDefault]. It does not bound what Begin and Get read: a response stored under a larger limit comes back
// whole.
func WithMaxResponse(n int) Option {
	return func(s *Store) { s.maxResponse = n }
}

// WithoutTakeover parks an attempt whose lease lapsed, instead of letting the next Begin take its key over: for operations
// that a person, or a program that asks the other system, must look at before they run again. Begin returns ErrAbandoned
// (ErrConflict first, for another fingerprint) until [Store.Resolve] says what became of the attempt, or until the record is
// forgotten, a retention after its lease lapsed, as any outcome is. [Store.Get] shows the parked record, with Remaining 0. All
// stores that share a table for such operations need the option: one without it takes over. By default the next Begin takes over.
func WithoutTakeover() Option {
	return func(s *Store) { s.noTakeover = true }
}

// WithLateCompletion accepts the Complete or Fail of an attempt whose lease has lapsed, as long as no other attempt has begun
// and the record is not forgotten. It saves the outcome of work that was slow and unrivalled; whether work is refused for being
// late then depends on whether somebody has asked meanwhile. By default a lapsed lease refuses both, with ErrLeaseExpired.
func WithLateCompletion() Option {
	return func(s *Store) { s.lateCompletion = true }
}

// WithClock replaces the database's clock by now, cut to microseconds, for tests that move time instead of sleeping.
// Never use it in a service: processes whose clocks differ would no longer agree on which lease has lapsed. Defaults to
// the database's clock.
func WithClock(now func() time.Time) Option {
	return func(s *Store) { s.now, s.clockGiven = now, true }
}

// Limits is what a store was configured with, for layers above it that have to say so to their own clients.
type Limits struct {
	Lease       time.Duration // how long an attempt holds its key unless it extends
	Retention   time.Duration // how long an outcome can be replayed, counted from its completion
	MaxResponse int           // the longest response that Complete stores, in bytes
}

// Limits returns what the store was configured with.
func (s *Store) Limits() Limits {
	return Limits{Lease: s.lease, Retention: s.retention, MaxResponse: s.maxResponse}
}

// validate returns each violated rule as a sentence of its own, or nil.
func (s *Store) validate() error {
	var errs []error
	for _, d := range [...]struct {
		name  string
		value time.Duration
	}{{"lease", s.lease}, {"retention", s.retention}} {
		if d.value < MinDuration || d.value > MaxDuration {
			errs = append(errs, fmt.Errorf("the %s is %v: it must be between %v and %v (100 years)",
				d.name, d.value, MinDuration, MaxDuration))
		}
	}
	if err := sqlgen.ValidateSchema(s.schema); err != nil {
		errs = append(errs, err)
	}
	if s.maxResponse < 0 || s.maxResponse > MaxResponseLimit {
		errs = append(errs, fmt.Errorf("the response limit is %d bytes: it must be between 0 and %d",
			s.maxResponse, MaxResponseLimit))
	}
	if s.clockGiven && s.now == nil {
		errs = append(errs, errors.New("the clock is nil: leave WithClock out to use the database's clock"))
	}
	return errors.Join(errs...)
}
