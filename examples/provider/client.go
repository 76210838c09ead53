package main

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/archlab/idempotency/pgstore"
)

// payment is what a client of ours asks for, under an idempotency key of its own.
type payment struct {
	Tenant, Key string
	Amount      int64
}

func (p payment) key() pgstore.Key {
	return pgstore.Key{Tenant: p.Tenant, Operation: "payment.create", Value: p.Key}
}

// providerKey is the provider's idempotency key for an operation of ours. It is made of all that names the operation, and not of the
// attempt: a later attempt asks for the same charge.
func providerKey(k pgstore.Key) string {
	return hex.EncodeToString([]byte(pgstore.Fingerprint(k.Tenant, k.Operation, k.Value)))
}

// client makes payments, and counts how they went.
type client struct {
	store    *pgstore.Store
	provider *api
	blind    bool

	charged, found, chargedLate, declined, released, lost atomic.Int64
}

// pay is the part to copy.
func (c *client) pay(ctx context.Context, p payment) (string, error) {
	fingerprint := pgstore.Fingerprint(p.Tenant, strconv.FormatInt(p.Amount, 10))
	outcome, err := c.store.Do(ctx, p.key(), fingerprint, func(ctx context.Context, r pgstore.Record) (string, error) {
		key := providerKey(p.key())
		if c.blind {
			key += strconv.FormatUint(r.Attempt, 10)
		} else if r.Abandoned != 0 { // an attempt before this one got lost, and may have charged: ask first
			charge, found, err := c.provider.find(ctx, key)
			if err != nil || found {
				return c.countFound(charge, err)
			}
			c.chargedLate.Add(1)
		}
		charge, err := c.provider.charge(ctx, key, p.Amount)
		switch {
		case errors.Is(err, errDeclined):
			return "", pgstore.Permanent(err) // it will never succeed
		case errors.Is(err, errOverloaded):
			return "", pgstore.Retryable(err) // the provider promises that it has done nothing
		case err != nil:
			return "", err // a timeout, a broken connection: nobody knows
		}
		c.charged.Add(1)
		return charge, nil
	})
	return outcome.Response, err
}

func (c *client) countFound(charge string, err error) (string, error) {
	if err == nil {
		c.found.Add(1)
	}
	return charge, err
}

// answer is what a client got in the end.
type answer struct {
	payment
	Charge   string
	Declined bool
}

// insist repeats a request until it has an answer, as a client does.
func (c *client) insist(ctx context.Context, p payment) (answer, error) {
	for {
		charge, err := c.pay(ctx, p)
		pause := time.Millisecond
		held, isHeld := errors.AsType[*pgstore.InProgressError](err)
		switch {
		case err == nil:
			return answer{payment: p, Charge: charge}, nil
		case errors.Is(err, pgstore.ErrFailed):
			c.declined.Add(1)
			return answer{payment: p, Declined: true}, nil
		case isHeld:
			pause = held.RetryAfter
		case errors.Is(err, errOverloaded):
			c.released.Add(1)
		case errors.Is(err, errUnknown):
			c.lost.Add(1)
		default:
			return answer{}, err
		}
		select {
		case <-ctx.Done():
			return answer{}, ctx.Err() //nolint:wrapcheck // it says all there is
		case <-time.After(pause):
		}
	}
}

// payAll makes the payments, some clients at once.
func payAll(ctx context.Context, o options, c *client) ([]answer, error) {
	var (
		mu      sync.Mutex
		answers []answer
	)
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(o.clients)
	for i := range o.payments {
		g.Go(func() error {
			a, err := c.insist(ctx, payment{fmt.Sprint("acct_", i%3), fmt.Sprintf("order-%03d", i), int64(100 + i)})
			mu.Lock()
			defer mu.Unlock()
			answers = append(answers, a)
			return err
		})
	}
	return answers, g.Wait() //nolint:wrapcheck // our own
}
