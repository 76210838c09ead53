package httpidem

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"net/http"
	"strings"
	"unicode/utf8"

	"github.com/archlab/idempotency/pgstore"
)

// target returns path and query, with its question mark, as the client sent them, escapes and all: routers and other middleware may have cut or cleaned what
// r.URL holds, and make one of two.
func target(r *http.Request) (path, query string) {
	sent := r.RequestURI
	if sent == "" {
		sent = r.URL.RequestURI() // not a server's request
	}
	path, _, _ = strings.Cut(sent, "?")
	return path, sent[len(path):]
}

// routeOrPath is the operation unless [WithOperation] says otherwise: the pattern that the router matched, else the path, with the method.
func routeOrPath(r *http.Request) string {
	if r.Pattern == "" {
		path, _ := target(r)
		return r.Method + " " + path
	}
	if strings.ContainsAny(r.Pattern, " \t") {
		return r.Pattern // it begins with a method
	}
	return r.Method + " " + r.Pattern
}

// operationOf returns the key's operation. One that a key cannot hold is replaced by its digest.
func (m *Middleware) operationOf(r *http.Request) string {
	operation := m.operation(r)
	if len(operation) <= pgstore.MaxKeyComponentBytes && utf8.ValidString(operation) && !strings.Contains(operation, "\x00") {
		return operation
	}
	digest := sha256.Sum256([]byte(operation))
	return "sha256:" + hex.EncodeToString(digest[:])
}

// wholeRequest is the fingerprint unless [WithFingerprint] says otherwise.
func wholeRequest(r *http.Request, body string) (string, error) {
	path, query := target(r)
	return pgstore.Fingerprint(r.Method, path, query, body), nil
}

// trustedLength is how much memory a request gets because it says that it will need it, in bytes.
const trustedLength = 64 << 10

// copyBuffer is the most memory that is used to copy a body, in bytes: what io.Copy takes for every one.
const copyBuffer = 32 << 10

// readBody reads the request's body to its end, of at most limit bytes.
func readBody(w http.ResponseWriter, r *http.Request, limit int64) (string, error) {
	if r.Body == nil || r.Body == http.NoBody {
		return "", nil
	}
	if r.ContentLength > limit {
		return "", &http.MaxBytesError{Limit: limit} // without asking the client for it, if it waits to be asked
	}
	var body strings.Builder
	size := min(max(r.ContentLength, 0), trustedLength)
	body.Grow(int(size))
	_, err := io.CopyBuffer(&body, http.MaxBytesReader(w, r.Body, limit), make([]byte, min(size+512, copyBuffer)))
	if err == nil && body.Len() == 0 && r.ContentLength > 0 {
		err = errBodyTaken
	}
	return body.String(), err
}

// errBodyTaken is returned where all requests would have the same fingerprint: that of an empty body.
var errBodyTaken = errors.New("the body was read before the request came to the middleware: put what reads it behind, or let it put it back")

// bodyProblem returns the problem for an error of readBody.
func bodyProblem(err error) problem {
	if _, ok := errors.AsType[*http.MaxBytesError](err); ok {
		return requestTooLarge
	}
	if errors.Is(err, errBodyTaken) {
		return storeUnavailable
	}
	return requestUnreadable
}

// requestFor returns the request as the handler gets it: with a context of its own, the body that was read, and without the client's
// Accept-Encoding, since what is stored is for others too.
func requestFor(ctx context.Context, r *http.Request, body string) *http.Request {
	inner := r.WithContext(ctx)
	if _, ok := r.Header["Accept-Encoding"]; ok {
		inner.Header = r.Header.Clone()
		inner.Header.Del("Accept-Encoding")
	}
	if body == "" {
		inner.Body = http.NoBody
	} else {
		inner.Body = io.NopCloser(strings.NewReader(body))
	}
	inner.GetBody = func() (io.ReadCloser, error) { return io.NopCloser(strings.NewReader(body)), nil }
	inner.ContentLength = int64(len(body))
	inner.TransferEncoding = nil
	return inner
}
