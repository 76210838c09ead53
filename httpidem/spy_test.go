package httpidem_test

import (
	"context"

	"github.com/archlab/idempotency/pgstore"
)

// spy stands in for a store where a test looks at what the middleware asks of it, and nothing is to be kept: it runs each function,
// and keeps the key, the fingerprint and what was to be recorded.
type spy struct {
	keys         []pgstore.Key
	fingerprints []string
	responses    []string
	outcome      *pgstore.Outcome // in the place of running anything
	err          error
}

func (s *spy) Do(
	ctx context.Context, k pgstore.Key, fingerprint string, fn func(ctx context.Context, r pgstore.Record) (string, error), _ ...pgstore.DoOption,
) (pgstore.Outcome, error) {
	s.keys = append(s.keys, k)
	s.fingerprints = append(s.fingerprints, fingerprint)
	if s.err != nil {
		return pgstore.Outcome{}, s.err
	}
	if s.outcome != nil {
		return *s.outcome, nil
	}
	response, err := fn(ctx, pgstore.Record{State: pgstore.StateInProgress, Fingerprint: fingerprint, Attempt: 1})
	s.responses = append(s.responses, response)
	return pgstore.Outcome{Response: response, Attempt: 1}, err
}

func (s *spy) Limits() pgstore.Limits {
	return pgstore.Limits{Lease: lease, Retention: retention, MaxResponse: pgstore.MaxResponseDefault}
}
