package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/archlab/idempotency/pgstore"
)

// settleByHand shows a payout that nobody dares to run a second time: its store parks lost attempts until a person has looked. What the
// person does is in this function, as it would be in a console.
func settleByHand(ctx context.Context, store *pgstore.Store, bank *api, p *provider, say func(format string, args ...any)) error {
	const amount = 1000001 // after which the provider hangs
	key := pgstore.Key{Tenant: "acct_0", Operation: "payout.create", Value: "payout-2031-02"}
	fingerprint := pgstore.Fingerprint(strconv.Itoa(amount))
	payout := func() (pgstore.Outcome, error) {
		return store.Do(ctx, key, fingerprint, func(ctx context.Context, _ pgstore.Record) (string, error) {
			return bank.charge(ctx, providerKey(key), amount)
		})
	}
	_, err := payout()
	say("By hand. A payout of %d: %v\n", amount, err)
	for !errors.Is(err, pgstore.ErrAbandoned) { // the client repeats it
		if _, err = payout(); err == nil {
			return errors.New("the payout ran a second time")
		}
		select {
		case <-ctx.Done():
			return ctx.Err() //nolint:wrapcheck // it says all there is
		case <-time.After(lease / 10):
		}
	}
	say("  a lease later, for every repeat: %v\n", err)
	record, _, err := store.Get(ctx, key)
	if err != nil {
		return err
	}
	say("  Get:     state %s, attempt %d, %v remaining\n", record.State, record.Attempt, record.Remaining)
	charge, found, err := bank.find(ctx, providerKey(key))
	if err != nil || !found {
		return fmt.Errorf("the provider does not know of the payout: %w", err)
	}
	say("  the provider, asked by a person: paid, as %s\n", charge)
	if err := store.Resolve(ctx, key, record.Attempt, pgstore.AsDone(charge)); err != nil {
		return err
	}
	outcome, err := payout()
	if err != nil {
		return err
	}
	p.mu.Lock()
	calls := p.calls[amount]
	p.mu.Unlock()
	say("  Resolve: done. Every repeat now: %q, replayed: %t. The provider was called %d time.\n\n", outcome.Response, outcome.Replayed, calls)
	if outcome.Response != charge || calls != 1 {
		return errors.New("the payout is not what the provider made of it")
	}
	return nil
}
