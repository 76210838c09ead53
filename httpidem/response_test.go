package httpidem_test

import (
	"bytes"
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/archlab/idempotency/httpidem"
	"github.com/archlab/idempotency/pgstore"
)

// memory replays what it was given, for one key.
type memory struct {
	spy

	record *string
}

func (m *memory) Do(
	ctx context.Context, k pgstore.Key, fingerprint string, fn func(ctx context.Context, r pgstore.Record) (string, error), opts ...pgstore.DoOption,
) (pgstore.Outcome, error) {
	if m.record != nil {
		return pgstore.Outcome{Response: *m.record, Replayed: true, Attempt: 1}, nil
	}
	outcome, err := m.spy.Do(ctx, k, fingerprint, fn, opts...)
	if err == nil {
		m.record = &outcome.Response
	}
	return outcome, err
}

// What is stored is what a person can read and write: an HTTP/1.1 response.
func TestTheRecordIsAnHTTPResponse(t *testing.T) {
	t.Parallel()
	store := &memory{}
	wrapped, _ := wrap(t, store, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Location", "/orders/1")
		w.Header().Set("Set-Cookie", "secret")
		w.WriteHeader(http.StatusCreated)
		_, _ = io.WriteString(w, "{}")
	})
	wrapped.ServeHTTP(httptest.NewRecorder(), request{}.build(t.Context(), t, "http://example.com"))
	require.Equal(t, "HTTP/1.1 201 Created\r\nContent-Length: 2\r\nContent-Type: text/plain; charset=utf-8\r\nLocation: /orders/1\r\n\r\n{}", *store.record)
}

// A response that the store could not hold, because of its header, is not stored: better than an ending that is not recorded.
func TestAResponseOverTheStoresLimitIsNotStored(t *testing.T) {
	t.Parallel()
	store := newStore(t, pgstore.WithMaxResponse(1000))
	s := serveWith(t, store, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Long", strings.Repeat("x", 600))
		_, _ = io.WriteString(w, strings.Repeat("y", 600))
	}, httpidem.WithMaxResponseBytes(1000))
	require.Len(t, s.send(t, request{}).Body, 600)
	requireNotStored(t, s, request{})
}

// Whatever a handler does to its response, the repeat of it is the same, and has nothing that is not to be replayed.
func FuzzStoredResponse(f *testing.F) {
	f.Add(201, "Location", "/orders/1", "set-cookie", "a=b", "Checksum", "1", []byte("body"), uint8(0))
	f.Add(204, "X", "", "Connection", "x", "", "", []byte{}, uint8(1))
	f.Add(999, "bad name", "a\r\nb: c", "X-Ctl", "\x01", "Trailer", "x\x00", []byte("\x00\xff"), uint8(2))
	f.Add(304, "Content-Type", "", "Content-Length", "7", "Content-Length", "7", []byte("0\r\n\r\n"), uint8(3))
	f.Add(200, "Transfer-Encoding", "chunked", "Content-Encoding", "gzip", "Transfer-Encoding", "chunked", []byte("5\r\nhello\r\n0\r\n\r\n"), uint8(7))
	f.Add(200, "Proxy-X", "1", "IDEMPOTENT-REPLAYED", "no", "Set-Cookie", "1", []byte("HTTP/1.1 200 OK"), uint8(4))
	f.Fuzz(func(t *testing.T, status int, name1, value1, name2, value2, trailer, trailerValue string, body []byte, how uint8) {
		if status < 200 || status > 999 {
			status = 200
		}
		method := http.MethodPost
		if how&1 != 0 {
			method = http.MethodHead
		}
		handler := func(w http.ResponseWriter, _ *http.Request) {
			w.Header()[name1] = append(w.Header()[name1], value1)
			w.Header()[name2] = append(w.Header()[name2], value2, "")
			if how&2 != 0 {
				w.Header().Add("Trailer", trailer)
			}
			w.WriteHeader(status)
			_, _ = w.Write(body)
			if how&4 != 0 {
				trailer = http.TrailerPrefix + trailer
			}
			w.Header()[trailer] = append(w.Header()[trailer], trailerValue)
		}
		store := &memory{}
		wrapped, runs := wrap(t, store, handler, httpidem.WithMethods(http.MethodPost, http.MethodHead), httpidem.WithReleasingStatuses())
		answers := make([]*http.Response, 2)
		for i := range answers {
			w := httptest.NewRecorder()
			wrapped.ServeHTTP(w, request{method: method}.build(t.Context(), t, "http://example.com"))
			answers[i] = w.Result()
			answers[i].Header.Del("Date")
		}
		require.EqualValues(t, 1, runs.Load())
		first, again := answers[0], answers[1]
		if strings.HasPrefix(*store.record, "httpidem: ") {
			require.Equal(t, http.StatusConflict, again.StatusCode)
			return
		}
		require.Equal(t, "true", again.Header.Get(httpidem.ReplayedHeader))
		require.Equal(t, first.StatusCode, again.StatusCode)
		one, err := io.ReadAll(first.Body)
		require.NoError(t, err)
		two, err := io.ReadAll(again.Body)
		require.NoError(t, err)
		require.True(t, bytes.Equal(one, two), "%q and %q", one, two)
		for name := range again.Header {
			switch http.CanonicalHeaderKey(name) {
			case "Set-Cookie", "Authorization", "Www-Authenticate", "Server", "Alt-Svc":
				require.Fail(t, "replayed", name)
			}
		}
	})
}
