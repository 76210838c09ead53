package httpidem

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"iter"
	"maps"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// recorder is the ResponseWriter that a handler gets. It holds the response back until it is known to be recorded, unless it grows
// over the limit, is flushed, or the connection is hijacked: then it goes to the client as it comes, from its first byte.
//
// It follows net/http's server in what a handler may do wrong. It does not unwrap, since what is written around it would not be
// recorded, and it has no Push.
type recorder struct {
	w      http.ResponseWriter
	method string
	limit  int // of the body, in bytes

	initial  http.Header  // what outer middleware had set before the handler ran
	live     http.Header  // the handler's own; counts until WriteHeader
	status   int          // 0 before WriteHeader
	header   http.Header  // live, at WriteHeader
	declared int64        // the Content-Length in it, or -1
	written  int64        // what the handler has tried to write while it was held back
	body     bytes.Buffer // what is held back
	passed   reason       // why the response goes to the client as it comes, if it does
}

func newRecorder(w http.ResponseWriter, method string, limit int) *recorder {
	return &recorder{w: w, method: method, limit: limit, initial: w.Header().Clone(), live: w.Header().Clone(), declared: -1}
}

// Header returns the header that the handler sets, with what outer middleware has set in it.
func (r *recorder) Header() http.Header { return r.live }

// WriteHeader takes the response's status, and its header as it is now. An informational response goes on to the client at once.
func (r *recorder) WriteHeader(status int) {
	if status < 100 || status > 999 {
		panic(fmt.Sprintf("invalid WriteHeader code %v", status)) // as the server does, and before anything is recorded
	}
	if r.status != 0 || r.passed == hijacked {
		return
	}
	if status < http.StatusOK && status != http.StatusSwitchingProtocols {
		setHeader(r.w.Header(), r.live)
		r.w.WriteHeader(status)
		return
	}
	r.status = status
	r.header = r.live.Clone()
	if length := r.header.Get("Content-Length"); length != "" {
		n, err := strconv.ParseInt(length, 10, 64)
		if err != nil || n < 0 {
			r.header.Del("Content-Length")
		} else {
			r.declared = n
		}
	}
	if status == http.StatusSwitchingProtocols {
		r.pass(streamed)
	}
}

// Write takes more of the body.
func (r *recorder) Write(p []byte) (int, error) {
	if err := r.take(len(p)); err != nil {
		return 0, err
	}
	if r.passed != "" {
		return r.w.Write(p)
	}
	return r.body.Write(p)
}

// WriteString is Write.
func (r *recorder) WriteString(s string) (int, error) {
	if err := r.take(len(s)); err != nil {
		return 0, err
	}
	if r.passed != "" {
		return io.WriteString(r.w, s)
	}
	return r.body.WriteString(s)
}

// take makes room for n more bytes of the body, or returns the server's error for a handler that must not write them. Once the
// response passes, that is the server's own affair.
func (r *recorder) take(n int) error {
	if r.passed != "" {
		return nil
	}
	if r.status == 0 {
		r.WriteHeader(http.StatusOK)
	}
	if n == 0 {
		return nil
	}
	if !bodyAllowed(r.status) {
		return http.ErrBodyNotAllowed
	}
	r.written += int64(n)
	switch {
	case r.declared >= 0 && r.written > r.declared:
		return http.ErrContentLength
	case r.body.Len()+n > r.limit:
		r.pass(tooLarge)
	}
	return nil
}

// ReadFrom lets io.Copy hand on to the server what is not held back, and the server to the kernel.
func (r *recorder) ReadFrom(src io.Reader) (n int64, err error) {
	if r.passed == hijacked {
		return 0, http.ErrHijacked // where the server's ReadFrom would panic
	}
	if r.passed == "" {
		over := int64(r.limit-r.body.Len()) + 1
		n, err = io.Copy(struct{ io.Writer }{r}, io.LimitReader(src, over))
		if err != nil || r.passed == "" {
			return n, err
		}
	}
	more, err := io.Copy(r.w, src)
	return n + more, err
}

// Flush is FlushError without its error.
func (r *recorder) Flush() { _ = r.FlushError() }

// FlushError sends what there is: from here on the response is a stream. Where the server cannot flush, it stays what it is.
func (r *recorder) FlushError() error {
	if r.passed == hijacked {
		return http.ErrHijacked // where the server's Flush would panic
	}
	if r.passed == "" && canFlush(r.w) {
		if r.status == 0 {
			r.WriteHeader(http.StatusOK)
		}
		r.pass(streamed)
	}
	return http.NewResponseController(r.w).Flush()
}

// canFlush reports whether http.ResponseController will find something to flush.
func canFlush(w http.ResponseWriter) bool {
	for {
		switch t := w.(type) {
		case http.Flusher, interface{ FlushError() error }:
			return true
		case interface{ Unwrap() http.ResponseWriter }:
			w = t.Unwrap()
		default:
			return false
		}
	}
}

// Hijack gives the handler the connection, after what it has written.
func (r *recorder) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	if r.status != 0 {
		r.Flush()
	}
	conn, buffered, err := http.NewResponseController(r.w).Hijack()
	if err == nil {
		r.passed = hijacked
	}
	return conn, buffered, err
}

// SetReadDeadline is for http.ResponseController.
func (r *recorder) SetReadDeadline(deadline time.Time) error {
	return http.NewResponseController(r.w).SetReadDeadline(deadline)
}

// SetWriteDeadline is for http.ResponseController.
func (r *recorder) SetWriteDeadline(deadline time.Time) error {
	return http.NewResponseController(r.w).SetWriteDeadline(deadline)
}

// EnableFullDuplex is for http.ResponseController. The request has been read already.
func (r *recorder) EnableFullDuplex() error {
	return http.NewResponseController(r.w).EnableFullDuplex()
}

// pass sends what was held back, and lets everything that follows through.
func (r *recorder) pass(why reason) {
	r.passed = why
	setHeader(r.w.Header(), r.header)
	r.w.WriteHeader(r.status)
	if r.body.Len() > 0 {
		_, _ = r.w.Write(r.body.Bytes()) //nolint:gosec // the handler's own; a client that has gone is what its next Write says
	}
	r.body = bytes.Buffer{}
}

// finish ends the response of a handler that has returned, and returns it; nil if it has gone to the client already.
func (r *recorder) finish() *response {
	if r.status == 0 && r.passed == "" {
		r.WriteHeader(http.StatusOK)
	}
	if r.passed == "" && !r.whole() {
		// As the server does, which then closes the connection, so that nobody takes a part for the whole.
		r.pass(incomplete)
	}
	if r.passed != "" {
		for name, values := range r.live {
			if strings.HasPrefix(name, http.TrailerPrefix) {
				r.w.Header()[name] = values
			}
		}
		for name := range r.declaredTrailers() {
			r.w.Header()[name] = r.live[name]
		}
		return nil
	}
	trailer := r.trailer()
	// What the server would add, so that it is the same whenever the response is sent.
	_, typed := r.header["Content-Type"]
	if !typed && r.body.Len() > 0 && r.header.Get("Content-Encoding") == "" && r.header.Get("Transfer-Encoding") == "" {
		r.header.Set("Content-Type", http.DetectContentType(r.body.Bytes()))
	}
	// What it decides when it knows the whole response.
	r.header.Del("Transfer-Encoding")
	r.header.Del("Trailer")
	tidy(r.header)
	tidy(trailer)
	length := int64(r.body.Len())
	if r.method == http.MethodHead && (r.declared >= 0 || length == 0) {
		length = r.declared
	}
	return &response{r.status, r.header, trailer, r.body.Bytes(), length}
}

// whole reports whether the body is as long as the handler declared.
func (r *recorder) whole() bool {
	return r.declared < 0 || r.declared == int64(r.body.Len()) || r.method == http.MethodHead || !bodyAllowed(r.status)
}

// trailer returns the trailers that the handler declared, or marked by http.TrailerPrefix; nil if there are none, or no body that they
// could follow.
func (r *recorder) trailer() http.Header {
	if r.method == http.MethodHead || !bodyAllowed(r.status) {
		return nil
	}
	trailer := http.Header{}
	for name := range r.declaredTrailers() {
		trailer[name] = r.live[name]
	}
	for name, values := range r.live {
		if name, ok := strings.CutPrefix(name, http.TrailerPrefix); ok {
			trailer[http.CanonicalHeaderKey(name)] = values
		}
	}
	if len(trailer) == 0 {
		return nil
	}
	return trailer
}

func (r *recorder) declaredTrailers() iter.Seq[string] {
	return elements(r.header["Trailer"])
}

// setHeader makes to hold what from holds, and nothing else.
func setHeader(to, from http.Header) {
	clear(to)
	maps.Copy(to, from)
}

// bodyAllowed reports whether a response of the status may have a body: RFC 9110, sections 6.4.1 and 15.
func bodyAllowed(status int) bool {
	return status >= http.StatusOK && status != http.StatusNoContent && status != http.StatusNotModified
}
