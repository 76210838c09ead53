package pgstore

import "context"

// Get returns the live record of the key, and whether there is one. Of a store made with [WithoutTakeover] it also returns a
// parked one: StateInProgress with Remaining 0, its attempt the one to resolve. It takes no lock and changes nothing; what it returns
// may be outdated at once, so decide nothing by it that Begin should decide.
func (s *Store) Get(ctx context.Context, k Key) (Record, bool, error) {
	if err := k.validate(); err != nil {
		return Record{}, false, wrap("get", k, err)
	}
	var (
		r    row
		live bool
	)
	err := s.retry(ctx, func(ctx context.Context) (err error) {
		r = row{}
		live, err = s.queryRow(ctx, s.sql.Get, s.arguments(k.Tenant, k.Operation, k.Value),
			&r.state, &r.fingerprint, &r.response, &r.attempt, &r.abandoned, &r.expiresAt, &r.remaining)
		return err
	})
	if err != nil {
		return Record{}, false, wrap("get", k, err)
	}
	if !live {
		return Record{}, false, nil
	}
	record := r.record()
	record.Remaining = max(record.Remaining, 0)
	return record, true, nil
}
