package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/archlab/idempotency/pgstore"
)

// consumerCommand is the first argument of a consumer process.
const consumerCommand = "consume"

// setup is what a consumer is told, as JSON on its standard input.
type setup struct {
	URL, Schema string
	Unprotected bool
	Crash       moment // at which the consumer dies
	After       int    // so many messages
}

// moment is a point in the life of a message at which a crash hurts.
type moment string

const (
	beforeCommit moment = "before COMMIT"
	beforeAck    moment = "between COMMIT and the acknowledgement"
)

// consumer takes messages from the queue and books them.
type consumer struct {
	pool  *pgxpool.Pool
	store *pgstore.Store
	queue queue
	crash moment
	after int // messages that it still lives for
	say   func(outcome string) error
}

// errNonsense is what a message says that can never be booked.
var errNonsense = errors.New("the amount is not positive")

// book is the part to copy: the booking and the record of the message are one commit. A message that comes again, because its
// sender was not sure, or because a consumer died before it could acknowledge, finds the record, and is not booked again.
func (c *consumer) book(ctx context.Context, m message) (outcome string, err error) {
	key := pgstore.Key{Tenant: m.Account, Operation: "ledger.book", Value: m.ID}
	result, err := c.store.DoTx(ctx, key, pgstore.Fingerprint(m.Account, strconv.FormatInt(m.Amount, 10)),
		func(ctx context.Context, tx pgx.Tx, _ pgstore.Record) (string, error) {
			if m.Amount <= 0 {
				return "", pgstore.Permanent(errNonsense)
			}
			err := c.queue.bookEntry(ctx, tx, m)
			c.crashAt(beforeCommit)
			return "", err
		}, pgstore.WithWait(5*time.Second)) // for a twin that is being booked right now
	switch {
	case errors.Is(err, pgstore.ErrFailed):
		return failed, nil // acknowledge it, or it comes for ever; a real consumer would put it aside for a person
	case err != nil:
		return "", err // the queue delivers it again
	case result.Replayed:
		return replayed, nil
	}
	return executed, nil
}

// bookUnprotected is the way without the store.
func (c *consumer) bookUnprotected(ctx context.Context, m message) (string, error) {
	if m.Amount <= 0 {
		return failed, nil
	}
	err := pgx.BeginFunc(ctx, c.pool, func(tx pgx.Tx) error {
		defer c.crashAt(beforeCommit)
		return c.queue.bookEntry(ctx, tx, m)
	})
	return executed, err //nolint:wrapcheck // it is bookEntry's
}

// consume takes messages until the queue is empty. What was taken and not acknowledged comes again, by the queue's own rule.
func (c *consumer) consume(ctx context.Context, book func(context.Context, message) (string, error)) error {
	for {
		m, found, err := c.queue.take(ctx, c.pool)
		switch {
		case err != nil:
			return err
		case !found:
			left, err := c.queue.length(ctx, c.pool)
			if err != nil || left == 0 {
				return err
			}
			select { // somebody else has the rest, and may still die
			case <-ctx.Done():
				return ctx.Err() //nolint:wrapcheck // it says all there is
			case <-time.After(20 * time.Millisecond):
			}
			continue
		}
		outcome, err := book(ctx, m)
		if err != nil {
			return fmt.Errorf("message %s: %w", m.ID, err)
		}
		c.crashAt(beforeAck)
		// The acknowledgement is a transaction of its own. If it gets lost, the message comes again, and is replayed.
		if err := c.queue.acknowledge(ctx, c.pool, m); err != nil {
			return err
		}
		if err := c.say(outcome); err != nil {
			return err
		}
	}
}

// crashAt kills this process, as the kernel or an orchestrator would, if this is the moment it was given.
func (c *consumer) crashAt(here moment) {
	if c.crash != here {
		return
	}
	if c.after--; c.after < 0 {
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {} // until the signal is there
	}
}

// consumerMain is main in a consumer process.
func consumerMain(ctx context.Context, in io.Reader, out io.Writer) error {
	var s setup
	if err := json.NewDecoder(in).Decode(&s); err != nil {
		return fmt.Errorf("read the setup: %w", err)
	}
	pool, err := pgxpool.New(ctx, s.URL)
	if err != nil {
		return fmt.Errorf("connect: %w", err)
	}
	defer pool.Close()
	store, err := pgstore.New(pool, 30*time.Second, 24*time.Hour, pgstore.WithSchema(s.Schema))
	if err != nil {
		return err
	}
	c := &consumer{pool: pool, store: store, queue: newQueue(s.Schema), crash: s.Crash, after: s.After, say: func(outcome string) error {
		_, err := fmt.Fprintln(out, outcome)
		return err //nolint:wrapcheck // the parent has gone
	}}
	if s.Unprotected {
		return c.consume(ctx, c.bookUnprotected)
	}
	return c.consume(ctx, c.book)
}
