package httpidem

import (
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/archlab/idempotency/pgstore"
)

// Defaults of the options.
const (
	// MaxRequestBytesDefault is the longest request body, 1 MiB, unless [WithMaxRequestBytes] sets another.
	MaxRequestBytesDefault = 1 << 20

	// MaxResponseBytesDefault is the longest response body that is stored, 1 MiB, unless [WithMaxResponseBytes] sets another.
	MaxResponseBytesDefault = 1 << 20

	// HandlerTimeoutDefault is when a handler's context ends unless [WithHandlerTimeout] says otherwise.
	HandlerTimeoutDefault = time.Minute

	// DocumentationDefault is what problem types and Link headers point to unless [WithDocumentation] says otherwise: the draft.
	DocumentationDefault = "https://datatracker.ietf.org/doc/html/draft-ietf-httpapi-idempotency-key-header-07"
)

// ReleasingStatuses returns the statuses that free the key unless [WithReleasingStatuses] says otherwise. Each of them says that the
// request was turned away before it had an effect: 401 Unauthorized, 403 Forbidden, 408 Request Timeout, 425 Too Early, 429 Too Many
// Requests and 503 Service Unavailable.
func ReleasingStatuses() []int {
	return []int{
		http.StatusUnauthorized, http.StatusForbidden, http.StatusRequestTimeout, http.StatusTooEarly, http.StatusTooManyRequests,
		http.StatusServiceUnavailable,
	}
}

// Option configures a [Middleware]; see [NewMiddleware].
type Option func(*options)

type options struct {
	optionalKey      bool
	strictKey        bool
	methods          map[string]bool
	operation        func(*http.Request) string
	fingerprint      func(*http.Request, string) (string, error)
	ownFingerprint   bool
	maxRequest       int64
	maxResponse      int
	releasing        map[int]bool
	handlerTimeout   time.Duration
	wait             time.Duration
	documentation    string
	errorHook        func(*http.Request, error)
	rejectionHandler func(http.ResponseWriter, *http.Request, Rejection)
}

func defaults() options {
	return options{
		methods:        setOf([]string{http.MethodPost, http.MethodPatch}),
		operation:      routeOrPath,
		fingerprint:    wholeRequest,
		maxRequest:     MaxRequestBytesDefault,
		maxResponse:    MaxResponseBytesDefault,
		releasing:      setOf(ReleasingStatuses()),
		handlerTimeout: HandlerTimeoutDefault,
		documentation:  DocumentationDefault,
		rejectionHandler: func(w http.ResponseWriter, _ *http.Request, rejection Rejection) {
			rejection.Respond(w)
		},
	}
}

func setOf[T comparable](values []T) map[T]bool {
	set := make(map[T]bool, len(values))
	for _, value := range values {
		set[value] = true
	}
	return set
}

// WithOptionalKey lets requests without a key through to the handler, unprotected. By default they are refused with 400.
func WithOptionalKey() Option {
	return func(o *options) { o.optionalKey = true }
}

// WithStrictKey takes the draft's form of a key only, a String of RFC 8941: Idempotency-Key: "…". By default the bare value that most
// clients send is taken as well, and is the same key.
func WithStrictKey() Option {
	return func(o *options) { o.strictKey = true }
}

// WithMethods names the methods that are protected; others pass through. Defaults to POST and PATCH, which HTTP does not define as
// idempotent.
func WithMethods(methods ...string) Option {
	return func(o *options) { o.methods = setOf(methods) }
}

// WithOperation sets what becomes the Operation of a request's key. Requests of one tenant with one key value are the same operation, or a
// conflict, only if this is equal. What a key cannot hold (over 512 bytes, not UTF-8, NUL) is replaced by its digest. Defaults to the
// route's pattern, [http.Request.Pattern], where a router has set it, else to method and path as the client sent it.
func WithOperation(operation func(*http.Request) string) Option {
	return func(o *options) { o.operation = operation }
}

// WithFingerprint sets what two requests with one key must agree in, else the second is refused with 422. It gets the request, whose Body has been
// read, and the body; it returns the fingerprint, a digest of at most 1 KiB such as [pgstore.Fingerprint] makes, or an error, for
// which the request is refused with 400. Defaults to method, path, query and body, byte for byte: no header is part of it, and
// clients that write the same JSON or multipart form in another way on a repeat need a function of their own.
func WithFingerprint(fingerprint func(r *http.Request, body string) (string, error)) Option {
	return func(o *options) { o.fingerprint, o.ownFingerprint = fingerprint, true }
}

// WithMaxRequestBytes sets the longest request body in bytes, from 0. A longer one is refused with 413, and nothing is recorded. The
// body is held in memory while the request is served. Defaults to [MaxRequestBytesDefault].
func WithMaxRequestBytes(n int64) Option {
	return func(o *options) { o.maxRequest = n }
}

// WithMaxResponseBytes sets the longest response body in bytes that is stored, from 0 to the store's own limit. A longer one goes to
// the client as it comes, and a repeat gets 409 without the handler running again. Defaults to [MaxResponseBytesDefault].
func WithMaxResponseBytes(n int) Option {
	return func(o *options) { o.maxResponse = n }
}

// WithReleasingStatuses sets the statuses by which a handler promises that nothing has happened: the response is sent, not stored,
// and the key is free at once. Give none to store every response. Defaults to [ReleasingStatuses].
func WithReleasingStatuses(statuses ...int) Option {
	return func(o *options) { o.releasing = setOf(statuses) }
}

// WithHandlerTimeout sets how long a handler's context lasts, which does not end with the client's connection. From 1 ms to a hundred years. Defaults
// to [HandlerTimeoutDefault].
func WithHandlerTimeout(d time.Duration) Option {
	return func(o *options) { o.handlerTimeout = d }
}

// WithWait lets a repeat of a running request wait for its response, up to d, before it is refused with 409; see [pgstore.WithWait].
// Defaults to 0: no wait.
func WithWait(d time.Duration) Option {
	return func(o *options) { o.wait = d }
}

// WithDocumentation sets the URL at which clients find the service's specification, absolute or beginning with a slash, without a
// fragment: where [Middleware.Spec] is served. Problem types are made of it. Defaults to [DocumentationDefault].
func WithDocumentation(address string) Option {
	return func(o *options) { o.documentation = address }
}

// WithErrorHook sets a function that is told of what went wrong on the server's side: the store could not be asked (503), a response
// was sent but could not be recorded (errors.Is finds [pgstore.ErrNotRecorded]), a record could not be read. It runs before the
// response is sent, and may be called concurrently. By default nobody is told.
func WithErrorHook(hook func(r *http.Request, err error)) Option {
	return func(o *options) { o.errorHook = hook }
}

// WithRejectionHandler sets the function that answers requests that the middleware refuses. It can change the [Rejection] and call its
// Respond, or write something of its own. Defaults to Respond.
func WithRejectionHandler(handler func(w http.ResponseWriter, r *http.Request, rejection Rejection)) Option {
	return func(o *options) { o.rejectionHandler = handler }
}

// validate returns each violated rule as a sentence of its own, or nil.
func (o *options) validate() error {
	var errs []error
	refuse := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if len(o.methods) == 0 {
		refuse("no method is protected")
	}
	for method := range o.methods {
		if !isToken(method) || method != strings.ToUpper(method) {
			refuse("%q is not a method: methods are written in upper case", method)
		}
	}
	for status := range o.releasing {
		if status < http.StatusOK || status > 999 {
			refuse("%d is not the status of a response", status)
		}
	}
	if o.operation == nil {
		refuse("the operation function is nil")
	}
	if o.fingerprint == nil {
		refuse("the fingerprint function is nil")
	}
	if o.rejectionHandler == nil {
		refuse("the rejection handler is nil")
	}
	if o.maxRequest < 0 {
		refuse("the longest request is %d bytes: it must not be negative", o.maxRequest)
	}
	if o.maxResponse < 0 {
		refuse("the longest response is %d bytes: it must not be negative", o.maxResponse)
	}
	if o.handlerTimeout < pgstore.MinDuration || o.handlerTimeout > pgstore.MaxDuration {
		refuse("the handler's timeout is %v: it must be between %v and %v", o.handlerTimeout, pgstore.MinDuration, pgstore.MaxDuration)
	}
	if o.wait < 0 || o.wait > pgstore.MaxDuration {
		refuse("the wait is %v: it must be between 0 and %v", o.wait, pgstore.MaxDuration)
	}
	switch address, err := url.Parse(o.documentation); {
	case err != nil, address.Fragment != "", strings.HasSuffix(o.documentation, "#"),
		!address.IsAbs() && !strings.HasPrefix(o.documentation, "/"):
		refuse("the documentation is at %q: it must be a URL, absolute or beginning with a slash, without a fragment", o.documentation)
	default:
		o.documentation = address.String()
	}
	return errors.Join(errs...)
}

// sorted returns the members of a set in order.
func sorted[T interface{ ~string | ~int }](set map[T]bool) []T {
	var members []T
	for member, in := range set {
		if in {
			members = append(members, member)
		}
	}
	slices.Sort(members)
	return members
}
