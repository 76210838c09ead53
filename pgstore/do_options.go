package pgstore

import (
	"errors"
	"fmt"
	"math"
	"time"
)

// Defaults of the options of Do and DoTx.
const (
	// LockWaitDefault is how long DoTx waits for the lock of another transaction unless [WithLockWait] says otherwise.
	LockWaitDefault = 5 * time.Second

	// RecordTimeoutDefault bounds each try to record an ending unless [WithRecordTimeout] says otherwise.
	RecordTimeoutDefault = 5 * time.Second
)

// DoOption configures one call of Do, DoTx, DoValue or DoTxValue. An option for one of them has no meaning for the others, and does
// no harm there.
type DoOption func(*doOptions)

type doOptions struct {
	wait          time.Duration
	lockWait      time.Duration
	recordTimeout time.Duration
	codec         Codec
}

// WithWait lets a call whose key is held by another attempt wait for the outcome, up to d, and replay it; after d it returns
// ErrInProgress. Waiting is polling, with pauses that grow from 5 to 500 ms and are jittered: one query each, and no connection
// is held between them. Up to [MaxDuration]. Defaults to 0: no wait.
func WithWait(d time.Duration) DoOption {
	return func(o *doOptions) { o.wait = d }
}

// WithLockWait bounds how long a DoTx waits for another transaction that holds the key, and with it any other lock that its
// transaction needs, those of the function's own statements included: it is the transaction's lock_timeout. When it passes on the key, DoTx
// returns ErrInProgress. From 1 ms to some 24 days, in whole milliseconds. Defaults to [LockWaitDefault].
func WithLockWait(d time.Duration) DoOption {
	return func(o *doOptions) { o.lockWait = d }
}

// WithRecordTimeout bounds each try to record how the function ended: one statement of Do; the Complete, the COMMIT or the
// ROLLBACK of DoTx. Tries do not end with the caller's context. Do repeats them until its lease is over, DoTx those to record a
// failure for once more this time. From 1 ms to [MaxDuration]. Defaults to [RecordTimeoutDefault].
func WithRecordTimeout(d time.Duration) DoOption {
	return func(o *doOptions) { o.recordTimeout = d }
}

// WithCodec sets how [DoValue] and [DoTxValue] write a value as a response and read it back. Defaults to encoding/json.
func WithCodec(codec Codec) DoOption {
	return func(o *doOptions) { o.codec = codec }
}

// newDoOptions applies the options and returns each violated rule as a sentence of its own.
func newDoOptions(opts []DoOption) (*doOptions, error) {
	o := &doOptions{lockWait: LockWaitDefault, recordTimeout: RecordTimeoutDefault, codec: jsonCodec{}}
	var errs []error
	for _, opt := range opts {
		if opt == nil {
			errs = append(errs, errors.New("an option is nil"))
			continue
		}
		opt(o)
	}
	if o.wait < 0 || o.wait > MaxDuration {
		errs = append(errs, fmt.Errorf("the wait is %v: it must be between 0 and %v", o.wait, MaxDuration))
	}
	if o.lockWait < time.Millisecond || o.lockWait.Milliseconds() > math.MaxInt32 {
		errs = append(errs, fmt.Errorf("the wait for a lock is %v: it must be between 1ms and %v", o.lockWait,
			math.MaxInt32*time.Millisecond))
	}
	if o.recordTimeout < MinDuration || o.recordTimeout > MaxDuration {
		errs = append(errs, fmt.Errorf("the timeout for recording is %v: it must be between %v and %v", o.recordTimeout,
			MinDuration, MaxDuration))
	}
	if isNil(o.codec) {
		errs = append(errs, errors.New("the codec is nil: leave WithCodec out to use JSON"))
	}
	return o, errors.Join(errs...)
}
