package pgstore

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// heartbeat keeps an attempt's lease alive while its work runs: one goroutine, which extends the lease every third of it on
// whatever connection the pool has free.
//
// Trust in the lease is counted on the local monotonic clock: what the database granted, from the moment before the last
// successful call was sent. A failed Extend changes nothing, and is tried again while trust remains. When the database says that
// the attempt no longer owns its key, or trust runs out, lose is called with the cause, once, and the heartbeat ends.
type heartbeat struct {
	store       *Store
	key         Key
	fingerprint string
	attempt     uint64
	lose        context.CancelCauseFunc

	trusted  time.Time          // the goroutine's own until ended is closed
	stopping chan struct{}      // closed by stop
	cut      context.CancelFunc // ends an Extend that is under way
	ended    chan struct{}      // closed by the goroutine
}

// heartbeatGrace is how long stop lets an Extend that is under way come to its end: cutting it off would cost its connection.
const heartbeatGrace = time.Second

// startHeartbeat starts the heartbeat of a reservation. It goes on when ctx ends, since the work may go on too: only stop ends it.
func (s *Store) startHeartbeat(ctx context.Context, k Key, fingerprint string, r reservation, lose context.CancelCauseFunc) *heartbeat {
	ctx, cut := context.WithCancel(context.WithoutCancel(ctx))
	h := &heartbeat{
		store: s, key: k, fingerprint: fingerprint, attempt: r.record.Attempt, lose: lose,
		trusted: r.trusted, stopping: make(chan struct{}), cut: cut, ended: make(chan struct{}),
	}
	go h.run(ctx)
	return h
}

// stop ends the heartbeat and returns until when the lease can be trusted. Nothing of the heartbeat outlives it.
func (h *heartbeat) stop() time.Time {
	close(h.stopping)
	grace := time.AfterFunc(heartbeatGrace, h.cut)
	<-h.ended
	grace.Stop()
	h.cut()
	return h.trusted
}

func (h *heartbeat) run(ctx context.Context) {
	defer close(h.ended)
	third := min(h.store.lease, time.Until(h.trusted)) / 3
	next := third - jittered(third/2+1) // the first beats of many that began together are spread
	for h.sleep(next) {
		sent := time.Now()
		err := h.beat(ctx)
		rest := time.Until(h.trusted)
		switch {
		case err == nil:
			next = h.store.lease/3 - time.Since(sent)
		case isRefusal(err):
			h.lose(err)
			return
		case rest <= 0:
			h.lose(fmt.Errorf("%w: it could not be extended in time: %w", ErrLeaseExpired, err))
			return
		default:
			next = max(rest/3, time.Millisecond)
		}
	}
}

// beat extends the lease once. An answer that comes when trust has run out comes too late.
func (h *heartbeat) beat(ctx context.Context) error {
	ctx, cancel := context.WithDeadline(ctx, h.trusted)
	defer cancel()
	_, trusted, err := h.store.extend(ctx, h.key, h.fingerprint, h.attempt)
	if err != nil {
		return err
	}
	h.trusted = trusted
	return nil
}

// sleep waits for d, and returns false when the heartbeat is to stop.
func (h *heartbeat) sleep(d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-h.stopping:
		return false
	case <-timer.C:
		return true
	}
}

// isRefusal reports whether the database has said that the attempt does not own its key. No repetition will change that.
func isRefusal(err error) bool {
	return errors.Is(err, ErrLeaseExpired) || errors.Is(err, ErrStaleAttempt) || errors.Is(err, ErrConflict)
}
