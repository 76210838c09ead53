package pgstore

import (
	"context"
	"time"

	"github.com/archlab/idempotency/internal/sqlgen"
)

// Statements gives tests the rendered statements of s, to read and to change before the first call.
func (s *Store) Statements() *sqlgen.Statements { return s.sql }

// Config is what the statements of s were rendered for.
func (s *Store) Config() sqlgen.Config {
	return sqlgen.Config{Schema: s.schema, Clock: s.clockGiven, NoTakeover: s.noTakeover, LateCompletion: s.lateCompletion}
}

// SetClaims replaces the random numbers by which Begin calls recognise their own records.
func (s *Store) SetClaims(next func() int64) { s.newClaim = next }

// WithStatements returns a copy of s that runs other statements.
func (s *Store) WithStatements(statements *sqlgen.Statements) *Store {
	changed := *s
	changed.sql = statements
	return &changed
}

// TrustedBegin returns until when what Begin got can be trusted.
func (s *Store) TrustedBegin(ctx context.Context, k Key, fingerprint string) (time.Time, error) {
	r, err := s.begin(ctx, k, fingerprint)
	return r.trusted, err
}

// TrustedExtend returns until when what Extend got can be trusted.
func (s *Store) TrustedExtend(ctx context.Context, k Key, fingerprint string, attempt uint64) (time.Time, error) {
	_, trusted, err := s.extend(ctx, k, fingerprint, attempt)
	return trusted, err
}
