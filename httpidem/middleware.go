package httpidem

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"reflect"

	"github.com/archlab/idempotency/pgstore"
)

// Store is what the middleware needs of a store. *[pgstore.Store] is one.
type Store interface {
	// Do is [pgstore.Store.Do], and every one of its promises is relied on.
	Do(ctx context.Context, k pgstore.Key, fingerprint string,
		fn func(ctx context.Context, r pgstore.Record) (string, error), opts ...pgstore.DoOption) (pgstore.Outcome, error)

	// Limits says how long keys are held and kept, and what fits.
	Limits() pgstore.Limits
}

// Middleware makes the handlers that it wraps safe to repeat. It is configured once, by [NewMiddleware], and then only read: its
// methods may be called concurrently.
type Middleware struct {
	store  Store
	tenant func(*http.Request) string
	options
}

// NewMiddleware returns a middleware that keeps responses in store, for the tenant that the function finds in a request: the
// account that was authenticated, say. Keys of different tenants have nothing to do with each other. A request for which it
// returns "" is refused with 403; no two clients ever share a tenant by accident.
func NewMiddleware(store Store, tenant func(*http.Request) string, opts ...Option) (*Middleware, error) {
	m := &Middleware{store: store, tenant: tenant, options: defaults()}
	var errs []error
	if isNil(store) {
		errs = append(errs, errors.New("the store is nil"))
	}
	if tenant == nil {
		errs = append(errs, errors.New("the tenant function is nil: for a service with one tenant, return a constant"))
	}
	for _, opt := range opts {
		if opt == nil {
			errs = append(errs, errors.New("an option is nil"))
			continue
		}
		opt(&m.options)
	}
	errs = append(errs, m.validate())
	if err := errors.Join(errs...); err != nil {
		return nil, fmt.Errorf("idempotency: new middleware: %w", err)
	}
	if limit := store.Limits().MaxResponse; m.maxResponse > limit {
		return nil, fmt.Errorf("idempotency: new middleware: responses of up to %d bytes were asked for, "+
			"and the store takes %d: raise pgstore.WithMaxResponse", m.maxResponse, limit)
	}
	return m, nil
}

// New returns the Wrap method of a [NewMiddleware], for services that publish their specification in another way than [Middleware.Spec].
func New(store Store, tenant func(*http.Request) string, opts ...Option) (func(http.Handler) http.Handler, error) {
	m, err := NewMiddleware(store, tenant, opts...)
	if err != nil {
		return nil, err
	}
	return m.Wrap, nil
}

// isNil reports whether an interface holds nothing, or a nil pointer.
func isNil(v any) bool {
	if v == nil {
		return true
	}
	value := reflect.ValueOf(v)
	return value.Kind() == reflect.Pointer && value.IsNil()
}

// Wrap returns a handler that runs next at most once for each key.
func (m *Middleware) Wrap(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !m.methods[r.Method] {
			next.ServeHTTP(w, r)
			return
		}
		value, present, err := keyValue(r.Header, m.strictKey)
		switch {
		case err != nil:
			m.reject(w, r, keyInvalid, err)
		case present:
			m.serve(w, r, next, value)
		case m.optionalKey:
			next.ServeHTTP(w, r)
		default:
			m.reject(w, r, keyMissing, nil)
		}
	})
}

// serve answers a request that has a key.
func (m *Middleware) serve(w http.ResponseWriter, r *http.Request, next http.Handler, value string) {
	key := pgstore.Key{Tenant: m.tenant(r), Operation: m.operationOf(r), Value: value}
	if key.Tenant == "" {
		m.reject(w, r, tenantUnknown, nil)
		return
	}
	body, err := readBody(w, r, m.maxRequest)
	if err != nil {
		m.reject(w, r, bodyProblem(err), err)
		return
	}
	fingerprint, err := m.fingerprint(r, body)
	if err != nil {
		m.reject(w, r, requestUnreadable, fmt.Errorf("fingerprint: %w", err))
		return
	}

	// Until the handler starts the client's going away ends the call; from then on it does not.
	ctx, cancel := context.WithCancelCause(context.WithoutCancel(r.Context()))
	defer cancel(nil)
	detach := context.AfterFunc(r.Context(), func() { cancel(context.Cause(r.Context())) }) //nolint:contextcheck // the client's own
	defer detach()

	run := &execution{middleware: m, next: next, recorder: newRecorder(w, r.Method, m.maxResponse), attempt: Attempt{Key: key}}
	outcome, err := m.store.Do(ctx, key, fingerprint, func(ctx context.Context, record pgstore.Record) (string, error) {
		if !detach() {
			return "", pgstore.Retryable(errClientGone)
		}
		return run.handle(ctx, r, body, record)
	}, pgstore.WithWait(m.wait))

	switch {
	case run.started:
		// Whatever became of recording it: this response tells the client what was done.
		if errors.Is(err, pgstore.ErrNotRecorded) {
			m.report(r, err)
		}
		run.send(r.Method)
	case err != nil:
		m.reject(w, r, refusal(err), err)
	default:
		m.replay(w, r, outcome.Response)
	}
}

var errClientGone = errors.New("the client has gone before its request was executed")

// replay sends a stored response.
func (m *Middleware) replay(w http.ResponseWriter, r *http.Request, record string) {
	stored, err := decode(record, r.Method)
	switch {
	case errors.Is(err, errNotStored):
		m.reject(w, r, responseNotStored, err)
	case err != nil:
		m.report(r, err)
		m.reject(w, r, responseNotStored, err)
	default:
		stored.sendAgain(w, r.Method)
	}
}

// report tells the hook of an error that the client cannot do anything about.
func (m *Middleware) report(r *http.Request, err error) {
	if m.errorHook != nil {
		m.errorHook(r, err)
	}
}
