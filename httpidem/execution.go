package httpidem

import (
	"context"
	"errors"
	"net/http"
	"sync/atomic"

	"github.com/archlab/idempotency/pgstore"
)

// execution is one run of a handler.
type execution struct {
	middleware *Middleware
	next       http.Handler
	recorder   *recorder
	attempt    Attempt
	response   *response // nil if it went to the client as it came
	started    bool
	released   atomic.Bool
}

// handle runs the handler and returns what is to be recorded.
func (e *execution) handle(ctx context.Context, r *http.Request, body string, record pgstore.Record) (string, error) {
	e.started, e.attempt.Record = true, record
	ctx, cancel := context.WithTimeout(context.WithValue(ctx, executionKey{}, e), e.middleware.handlerTimeout)
	defer cancel()
	inner := requestFor(ctx, r, body)
	defer func() { r.MultipartForm = inner.MultipartForm }() // whose files the server removes at the request's end

	e.next.ServeHTTP(e.recorder, inner)

	e.response = e.recorder.finish()
	if e.released.Load() || e.middleware.releasing[e.recorder.status] {
		return "", pgstore.Retryable(errReleased)
	}
	return e.result(r.Method), nil
}

// result returns what is stored of the response: itself, or a marker that says why not.
func (e *execution) result(method string) string {
	if e.response == nil {
		return e.recorder.passed.marker()
	}
	record, err := e.response.encode(method, e.recorder.initial)
	switch {
	case err != nil:
		return unwritable.marker()
	case len(record) > e.middleware.store.Limits().MaxResponse:
		return tooLarge.marker()
	}
	return record
}

// send sends the response to the client that the handler ran for, if it has not had it.
func (e *execution) send(method string) {
	if e.response == nil {
		return
	}
	setHeader(e.recorder.w.Header(), e.response.header)
	e.response.send(e.recorder.w, method)
}

var errReleased = errors.New("the response promises that nothing has happened")

type executionKey struct{}

// Release says that the request has had no effect and may run again at once: the handler's response is sent, and not stored. It
// is for handlers that know better than their response's status; see [WithReleasingStatuses]. Call it with the request's context
// before the handler returns. Where the middleware does not protect the request, it does nothing.
func Release(ctx context.Context) {
	if e, ok := ctx.Value(executionKey{}).(*execution); ok {
		e.released.Store(true)
	}
}

// Attempt is one run of a handler under a key.
type Attempt struct {
	// Key is the key in the store: its Value is what the client chose, in whichever spelling it sent it.
	Key pgstore.Key

	// Record is the attempt's own. Its Abandoned is the number of an attempt before it that was lost in the middle, or 0: look for
	// that one's effect before you repeat it. Its Attempt is a fencing token for other systems.
	pgstore.Record
}

// FromContext returns the attempt that runs under ctx, a request's context, and whether there is one.
func FromContext(ctx context.Context) (Attempt, bool) {
	e, ok := ctx.Value(executionKey{}).(*execution)
	if !ok {
		return Attempt{}, false
	}
	return e.attempt, true
}
