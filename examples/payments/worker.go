package main

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	mathrand "math/rand/v2"
	"strconv"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/archlab/idempotency/pgstore"
)

// retention is how long outcomes can be replayed: longer than any client repeats.
const retention = 24 * time.Hour

// pay executes a payment exactly once, whoever asks how often, and whatever dies at whatever moment.
//
// THIS IS THE PART TO COPY. The calls of at are for the demo, which kills processes there.
func (w *worker) pay(ctx context.Context, p payment, at func(moment)) (message, error) {
	key := pgstore.Key{Tenant: p.Tenant, Operation: "payment.create", Value: p.IdempotencyKey}
	fingerprint := p.fingerprint()

	// Take the key. This commits at once: from here on every worker on every machine sees that it is held.
	record, created, err := w.store.Begin(ctx, key, fingerprint)
	if err != nil {
		return message{}, err // in progress, a conflict, or nobody knows: whatever it is, do not execute
	}
	if !created {
		return message{Outcome: replayed, Response: []byte(record.Response)}, nil
	}
	at(afterBegin)

	// What takes time happens here, while no transaction and no connection is held.
	if err := w.assessRisk(ctx); err != nil {
		return message{}, err
	}

	// The effect and the response commit together, or neither does. If the lease was lost meanwhile, Complete fails, and the
	// rollback takes the ledger's row back.
	id, response := succeeded(p)
	err = pgx.BeginFunc(ctx, w.pool, func(tx pgx.Tx) error {
		if err := w.ledger.insert(ctx, tx, entry{payment: p, PaymentID: id, Attempt: record.Attempt}); err != nil {
			return err
		}
		at(afterInsert)
		if err := w.store.WithTx(tx).Complete(ctx, key, fingerprint, record.Attempt, response); err != nil {
			return err
		}
		at(beforeCommit)
		return nil
	})
	if err != nil {
		return message{}, fmt.Errorf("book the payment: %w", err)
	}
	at(afterCommit)
	return message{Outcome: executed, Response: []byte(response), Attempt: record.Attempt, Abandoned: record.Abandoned}, nil
}

// handle makes an answer of what pay returns.
func (w *worker) handle(ctx context.Context, r request) message {
	p, err := parse(r.Body)
	if err != nil {
		return message{Kind: answered, Line: r.Line, Outcome: rejected, Reason: err.Error()}
	}
	waited := false
	for pause := minPause; ; pause = min(2*pause, maxPause) {
		m, err := w.pay(ctx, p, func(now moment) { w.reached(ctx, r, now) })
		m.Kind, m.Line = answered, r.Line
		inProgress, isInProgress := errors.AsType[*pgstore.InProgressError](err)
		switch {
		case err == nil && m.Abandoned != 0:
			// Before it repeats an effect in another system, a service would now ask that system what became of the abandoned
			// attempt. Here the effect lives in our database, and was rolled back with it.
			m.Outcome = takenOver
			return m
		case err == nil && m.Outcome == replayed && waited:
			m.Outcome = waitedReplayed
			return m
		case err == nil:
			return m
		case isInProgress:
			// Another request is at it. A service would rather answer 409 with Retry-After and let the client wait.
			waited = true
			if !sleep(ctx, min(inProgress.RetryAfter, jitter(pause))) {
				return message{Kind: failed, Line: r.Line, Reason: err.Error()}
			}
		case errors.Is(err, pgstore.ErrLeaseExpired), errors.Is(err, pgstore.ErrStaleAttempt):
			// We were too slow, nothing of ours remains: see who has the key now.
		case errors.Is(err, pgstore.ErrConflict):
			m.Outcome, m.Reason = conflict, errors.Unwrap(err).Error()
			return m
		case errors.Is(err, pgstore.ErrKeyEmpty), errors.Is(err, pgstore.ErrKeyInvalid):
			m.Outcome, m.Reason = rejected, errors.Unwrap(err).Error() // the reason without the whole key in front
			return m
		default:
			return message{Kind: failed, Line: r.Line, Reason: err.Error()}
		}
	}
}

// Between two looks at a key that is in progress passes a time that doubles from minPause to maxPause, half of it at random.
const (
	minPause = 10 * time.Millisecond
	maxPause = 200 * time.Millisecond
)

func jitter(d time.Duration) time.Duration {
	return d/2 + mathrand.N(d/2+1) //nolint:gosec // needs no secret
}

// sleep waits for d, or until ctx is done; then it returns false.
func sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}

// assessRisk stands for a slow question to another service. It has no effect, so it does no harm that a takeover asks again.
func (w *worker) assessRisk(ctx context.Context) error {
	if !sleep(ctx, jitter(w.Work)) {
		return fmt.Errorf("assess the risk: %w", ctx.Err())
	}
	return nil
}

// succeeded makes the response: one that no other execution would make, so that a replay can be told from it.
func succeeded(p payment) (id, response string) {
	var random [12]byte
	_, _ = rand.Read(random[:]) // never fails: crypto/rand ends the program first
	id = "pay_" + hex.EncodeToString(random[:])
	return id, `{"id":"` + id + `","status":"succeeded","amount":` + strconv.FormatInt(p.Amount, 10) +
		`,"currency":"` + p.Currency + `"}` + "\n"
}

// worker is what the program runs as in each of its worker processes.
type worker struct {
	setup
	pool   *pgxpool.Pool
	store  *pgstore.Store
	ledger ledger

	sending sync.Mutex
	out     *json.Encoder
}

// work serves requests until its input ends.
func work(ctx context.Context, in io.Reader, out io.Writer) error {
	w := &worker{out: json.NewEncoder(out)}
	input := json.NewDecoder(in)
	if err := input.Decode(&w.setup); err != nil {
		return fmt.Errorf("read the setup: %w", err)
	}
	if err := w.connect(ctx); err != nil {
		return err
	}
	defer w.pool.Close()
	ctx, cancel := context.WithCancel(ctx)
	var working sync.WaitGroup
	defer working.Wait()
	defer cancel() // the program ends the input when all is answered, or by dying: then nobody waits for an answer
	w.send(message{Kind: ready})
	for {
		var r request
		switch err := input.Decode(&r); {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return fmt.Errorf("read a request: %w", err)
		}
		working.Go(func() { w.send(w.handle(ctx, r)) })
	}
}

func (w *worker) connect(ctx context.Context) error {
	config, err := pgxpool.ParseConfig(w.URL)
	if err != nil {
		return fmt.Errorf("read the database's URL: %w", err)
	}
	config.MaxConns = slots
	config.ConnConfig.RuntimeParams["application_name"] = w.Schema + " worker " + strconv.Itoa(w.Seat)
	if w.pool, err = pgxpool.NewWithConfig(ctx, config); err != nil {
		return fmt.Errorf("connect: %w", err)
	}
	if err = w.pool.Ping(ctx); err != nil {
		w.pool.Close()
		return fmt.Errorf("connect: %w", err)
	}
	w.ledger = newLedger(w.Schema)
	if w.store, err = pgstore.New(w.pool, w.Lease, retention, pgstore.WithSchema(w.Schema)); err != nil {
		w.pool.Close()
		return err
	}
	return nil
}

// reached stops for good if the request says so. The program kills this process as soon as it hears of it.
func (w *worker) reached(ctx context.Context, r request, now moment) {
	if r.Halt != now {
		return
	}
	w.send(message{Kind: halted, Line: r.Line})
	<-ctx.Done()
}

func (w *worker) send(m message) {
	w.sending.Lock()
	defer w.sending.Unlock()
	_ = w.out.Encode(m) // fails when the program has died, and then the input ends too
}
