package httpidem

import (
	"bytes"
	"encoding/json"
	"errors"
	"math"
	"net/http"
	"strconv"
	"time"

	"github.com/archlab/idempotency/pgstore"
)

// Rejection is the answer to a request that the middleware refuses: the handler did not run for it.
type Rejection struct {
	Status int    // of HTTP
	Type   string // the problem type, a URL: the documentation's, with the problem's name as its fragment
	Title  string // the same for every problem of the type
	Detail string // what the client should know and do

	// RetryAfter is how long the client should wait before it sends the request again. 0 if that would not help, or need not be
	// waited for.
	RetryAfter time.Duration

	// Err is what the store or a function of the configuration returned, or nil. It is not for the client.
	Err error
}

// Respond sends the rejection as application/problem+json (RFC 9457), with a Link to its type, and Retry-After in whole seconds.
func (p Rejection) Respond(w http.ResponseWriter) {
	header := w.Header()
	header.Set("Content-Type", "application/problem+json")
	header.Set("Content-Language", "en")
	header.Set("Link", "<"+p.Type+`>; rel="describedby"; type="text/html"`)
	if p.RetryAfter > 0 {
		header.Set("Retry-After", strconv.FormatFloat(math.Ceil(p.RetryAfter.Seconds()), 'f', 0, 64))
	}
	body := p.body()
	header.Set("Content-Length", strconv.Itoa(len(body)))
	w.WriteHeader(p.Status)
	_, _ = w.Write(body) // a client that has gone does not read it
}

// body is the problem document.
func (p Rejection) body() []byte {
	var body bytes.Buffer
	encoder := json.NewEncoder(&body)
	encoder.SetEscapeHTML(false) // it is not HTML, and people read it
	_ = encoder.Encode(struct {  // strings and a number always encode
		Type   string `json:"type"`
		Title  string `json:"title"`
		Status int    `json:"status"`
		Detail string `json:"detail"`
	}{p.Type, p.Title, p.Status, p.Detail})
	return body.Bytes()
}

// problem is a type of rejections.
type problem struct {
	name   string // the fragment of its URL
	status int
	title  string
	detail string
	retry  retry
}

// retry is what the client can do about a problem by sending the same request again.
type retry string

const (
	retryNever   retry = "correct first" // it has to change something
	retryAfter   retry = "after delay"   // unchanged, after Retry-After
	retryOutcome retry = "look first"    // it has to find out what happened
)

// The problems, in the order in which a request can meet them. The first three titles are the draft's.
var (
	keyMissing = problem{"key-missing", http.StatusBadRequest, "Idempotency-Key is missing",
		"This operation requires an Idempotency-Key header: a value that you choose for this one request, such as a UUID, and send again " +
			"with every repeat of it.", retryNever}
	keyInvalid = problem{"key-invalid", http.StatusBadRequest, "Idempotency-Key is invalid",
		"The request needs one Idempotency-Key header that holds one value of at most 512 printable ASCII characters, " +
			"in double quotes.", retryNever}
	tenantUnknown = problem{"tenant-unknown", http.StatusForbidden, "The client is unknown",
		"An Idempotency-Key belongs to one client, and this request does not say whose it is. It was not executed.", retryNever}
	requestTooLarge = problem{"request-too-large", http.StatusRequestEntityTooLarge, "The request is too large",
		"The request's body is longer than this operation accepts. It was not executed.", retryNever}
	requestUnreadable = problem{"request-unreadable", http.StatusBadRequest, "The request cannot be read",
		"The request's body did not arrive whole, or does not have the form that this operation expects. " +
			"It was not executed.", retryNever}
	keyReused = problem{"key-reused", http.StatusUnprocessableEntity, "Idempotency-Key is already used",
		"This Idempotency-Key was used for another request. It must not be reused across different payloads of this operation: " +
			"choose a new key for a new request, or repeat the earlier one exactly.", retryNever}
	requestOutstanding = problem{"request-outstanding", http.StatusConflict, "A request is outstanding for this Idempotency-Key",
		"A request with the same Idempotency-Key for the same operation is being processed or is outstanding. " +
			"Send this one again, unchanged, after the time that Retry-After gives.", retryAfter}
	operationAbandoned = problem{"operation-abandoned", http.StatusConflict, "An earlier attempt was abandoned",
		"An attempt with this Idempotency-Key was interrupted, and it is being looked into what became of it. " +
			"Do not send the request under another key: it may have been executed.", retryOutcome}
	operationFailed = problem{"operation-failed", http.StatusUnprocessableEntity, "The operation has failed",
		"The operation with this Idempotency-Key has failed for good.", retryNever}
	responseNotStored = problem{"response-not-stored", http.StatusConflict, "The response was not stored",
		"The request with this Idempotency-Key has been executed, and its response, which was too large or streamed, cannot be " +
			"repeated. Do not send the request under another key before you have looked for its effect.", retryOutcome}
	storeUnavailable = problem{"store-unavailable", http.StatusServiceUnavailable, "Idempotency is not available",
		"The request could not be protected against being executed twice, so it was not executed. " +
			"Send it again, unchanged, after the time that Retry-After gives.", retryAfter}
)

// problems lists all of them.
func problems() []problem {
	return []problem{
		keyMissing, keyInvalid, tenantUnknown, requestTooLarge, requestUnreadable, keyReused, requestOutstanding, operationAbandoned,
		operationFailed, responseNotStored, storeUnavailable,
	}
}

// refusal returns the problem for an error with which the store refused to run the handler.
func refusal(err error) problem {
	for _, known := range [...]struct {
		err     error
		problem problem
	}{
		{pgstore.ErrConflict, keyReused},
		{pgstore.ErrInProgress, requestOutstanding},
		{pgstore.ErrAbandoned, operationAbandoned},
		{pgstore.ErrFailed, operationFailed},
		{pgstore.ErrKeyInvalid, tenantUnknown}, // value and operation have been checked
	} {
		if errors.Is(err, known.err) {
			return known.problem
		}
	}
	return storeUnavailable
}

// maxRetryAfter bounds the Retry-After of a request that is outstanding. The lease says when a crashed attempt frees the key; most
// requests end long before, and to ask once more costs one read.
const maxRetryAfter = 5 * time.Second

// storeRetryAfter is when to try again what found the store down.
const storeRetryAfter = time.Second

// reject answers a request that is refused. The hook is told where the fault is the server's.
func (m *Middleware) reject(w http.ResponseWriter, r *http.Request, p problem, err error) {
	rejection := Rejection{
		Status: p.status, Type: m.documentation + "#" + p.name, Title: p.title, Detail: p.detail, Err: err,
	}
	if held, ok := errors.AsType[*pgstore.InProgressError](err); ok {
		rejection.RetryAfter = min(held.RetryAfter, maxRetryAfter)
	}
	if p == storeUnavailable {
		rejection.RetryAfter = storeRetryAfter
		m.report(r, err)
	}
	m.rejectionHandler(w, r, rejection)
}
