package httpidem

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"iter"
	"maps"
	"net/http"
	"net/textproto"
	"slices"
	"strconv"
	"strings"
)

// ReplayedHeader is the response header that a replay has, with the value "true", and a first response has not.
const ReplayedHeader = "Idempotent-Replayed"

// response is a response whose body is known to its end.
type response struct {
	status  int
	header  http.Header
	trailer http.Header // nil if there is none
	body    []byte
	length  int64 // of the body, also where it is not there (HEAD); -1 if unknown
}

// send sends the response with the header that w has.
func (r *response) send(w http.ResponseWriter, method string) {
	header := w.Header()
	header.Del("Content-Length")
	if r.trailer != nil {
		header["Trailer"] = slices.Sorted(maps.Keys(r.trailer))
	} else if bodyAllowed(r.status) && r.length >= 0 {
		header.Set("Content-Length", strconv.FormatInt(r.length, 10))
	}
	if _, ok := header["Content-Type"]; !ok {
		header["Content-Type"] = nil // the server shall not guess
	}
	w.WriteHeader(r.status)
	if len(r.body) > 0 && method != http.MethodHead {
		_, _ = w.Write(r.body) //nolint:gosec // the handler's own; a client that has gone will ask again
	}
	maps.Copy(header, r.trailer)
}

// sendAgain sends a response that was stored, over what outer middleware has set in w's header.
func (r *response) sendAgain(w http.ResponseWriter, method string) {
	header := w.Header()
	if _, ok := r.header["Content-Type"]; !ok && len(r.body) > 0 {
		delete(header, "Content-Type")
	}
	maps.Copy(header, r.header)
	header.Set(ReplayedHeader, "true")
	r.send(w, method)
}

// encode returns what is stored of a response: its HTTP/1.1 wire form, as net/http writes it, with the header fields that the handler
// set or changed, less those that are never replayed.
func (r *response) encode(method string, initial http.Header) (string, error) {
	wire := http.Response{
		StatusCode: r.status, ProtoMajor: 1, ProtoMinor: 1, Request: &http.Request{Method: method},
		Header: replayable(r.header, initial), Body: io.NopCloser(bytes.NewReader(r.body)), ContentLength: r.length,
	}
	if r.trailer != nil {
		wire.Trailer = replayable(r.trailer, nil)
		wire.TransferEncoding = []string{"chunked"} // the form that has room for them
		wire.ContentLength = -1
	}
	var record strings.Builder
	record.Grow(len(r.body) + headerEstimate)
	if err := wire.Write(&record); err != nil {
		return "", fmt.Errorf("encode the response: %w", err)
	}
	return record.String(), nil
}

// headerEstimate is the memory that a stored header usually fits, in bytes.
const headerEstimate = 512

// decode reads a stored response back, or returns errNotStored for a marker.
func decode(record, method string) (*response, error) {
	if why, ok := strings.CutPrefix(record, markerPrefix); ok {
		return nil, fmt.Errorf("%w: %s", errNotStored, why)
	}
	wire, err := http.ReadResponse(bufio.NewReaderSize(strings.NewReader(record), headerEstimate), &http.Request{Method: method})
	if err != nil {
		return nil, fmt.Errorf("the record is not an HTTP/1.1 response: %w", err)
	}
	defer func() { _ = wire.Body.Close() }() // it reads from memory
	var body bytes.Buffer
	body.Grow(int(min(max(wire.ContentLength, 0), int64(len(record)))))
	if _, err := body.ReadFrom(wire.Body); err != nil {
		return nil, fmt.Errorf("the record's body: %w", err)
	}
	wire.Header.Del("Content-Length") // it is computed anew
	return &response{wire.StatusCode, wire.Header, wire.Trailer, body.Bytes(), wire.ContentLength}, nil
}

// reason is why a response was not stored.
type reason string

const (
	tooLarge   reason = "it was too large"
	streamed   reason = "it was streamed"
	hijacked   reason = "the handler took the connection over"
	incomplete reason = "it was shorter than its Content-Length"
	unwritable reason = "it cannot be written as HTTP/1.1"
)

// marker is what is stored in the place of a response. An HTTP response begins otherwise.
func (why reason) marker() string { return markerPrefix + string(why) }

const markerPrefix = "httpidem: the response was not stored: "

var errNotStored = errors.New("the response was not stored")

// What is never replayed, beside what the response's Connection names: what belongs to one client, one connection or one moment,
// and what is made anew. In any case of letters; a star stands for the rest of a name.
var notReplayed = []string{
	"Alt-Svc", "Authorization", "Connection", "Content-Length", "Date", ReplayedHeader, "Keep-Alive", "Proxy-*", "Server",
	"Set-Cookie", "Set-Cookie2", "TE", "Trailer", "Transfer-Encoding", "Upgrade", "WWW-Authenticate",
}

// isReplayed reports whether a field may be stored, as far as its name says.
func isReplayed(canonical string) bool {
	return !slices.ContainsFunc(notReplayed, func(name string) bool {
		if prefix, ok := strings.CutSuffix(name, "*"); ok {
			return strings.HasPrefix(canonical, prefix)
		}
		return strings.EqualFold(canonical, name)
	})
}

// replayable returns the fields of header that are stored: not those that are never replayed, and not those that outer middleware had
// set, which it will set again.
func replayable(header, initial http.Header) http.Header {
	stored := make(http.Header, len(header))
	connection := slices.Collect(elements(header["Connection"]))
	for name, values := range header {
		canonical := http.CanonicalHeaderKey(name)
		switch {
		case !isReplayed(canonical), slices.Contains(connection, canonical),
			len(values) > 0 && slices.Equal(values, initial[name]):
		default:
			stored[canonical] = append(stored[canonical], values...)
		}
	}
	return stored
}

// tidy makes of each field what the server makes of it when it writes HTTP/1.1, so that it is the same in every protocol and again:
// names that are none are left out, line breaks become spaces. So are values with other control characters, which no client could read.
func tidy(header http.Header) {
	for name, values := range header {
		if !isToken(name) {
			delete(header, name)
			continue
		}
		if !slices.ContainsFunc(values, func(value string) bool { return written(value) != value || strings.ContainsFunc(value, isControl) }) {
			continue
		}
		readable := make([]string, 0, len(values))
		for _, value := range values {
			if value = written(value); !strings.ContainsFunc(value, isControl) {
				readable = append(readable, value)
			}
		}
		header[name] = readable
	}
}

var breaks = strings.NewReplacer("\n", " ", "\r", " ")

// written is a field's value as net/http writes it.
func written(value string) string { return textproto.TrimString(breaks.Replace(value)) }

func isControl(r rune) bool { return r < ' ' && r != '\t' || r == 0x7f }

// elements yields the elements of a list of field names, in canonical form.
func elements(lines []string) iter.Seq[string] {
	return func(yield func(string) bool) {
		for _, line := range lines {
			for element := range strings.SplitSeq(line, ",") {
				if name := textproto.TrimString(element); isToken(name) && !yield(http.CanonicalHeaderKey(name)) {
					return
				}
			}
		}
	}
}

// isToken reports whether a name is one that a field may have: a token of RFC 9110, section 5.6.2.
func isToken(name string) bool {
	const others = "!#$%&'*+-.^_`|~"
	for i := range len(name) {
		letter := name[i] | ('a' - 'A')
		if (letter < 'a' || letter > 'z') && (name[i] < '0' || name[i] > '9') && strings.IndexByte(others, name[i]) < 0 {
			return false
		}
	}
	return name != ""
}
