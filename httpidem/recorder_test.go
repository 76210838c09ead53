package httpidem_test

import (
	"bytes"
	"io"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/archlab/idempotency/httpidem"
)

// Handlers that use a ResponseWriter in every way that they can, right and wrong.
var handlers = map[string]http.HandlerFunc{
	"nothing at all": func(http.ResponseWriter, *http.Request) {},
	"Write only":     func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("hello")) },
	"several writes": func(w http.ResponseWriter, _ *http.Request) {
		for _, s := range []string{"<html>", "", "one", "two"} {
			_, _ = io.WriteString(w, s)
		}
	},
	"an empty write":   func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(nil); w.WriteHeader(http.StatusTeapot) },
	"WriteHeader only": func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusAccepted) },
	"WriteHeader twice": func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusCreated)
		w.WriteHeader(http.StatusInternalServerError)
		_, _ = w.Write([]byte("x"))
	},
	"WriteHeader after Write": func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write([]byte("x"))
		w.WriteHeader(http.StatusInternalServerError)
	},
	"headers set too late": func(w http.ResponseWriter, _ *http.Request) {
		h := w.Header()
		h.Set("Early", "1")
		w.WriteHeader(http.StatusOK)
		h.Set("Late", "1")
		h.Del("Early")
		_, _ = w.Write([]byte("x"))
	},
	"204": func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusNoContent)
		if _, err := w.Write([]byte("x")); err != http.ErrBodyNotAllowed { //nolint:errorlint // as net/http has it
			panic(err)
		}
	},
	"304": func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Etag", `"1"`)
		w.WriteHeader(http.StatusNotModified)
	},
	"302": func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, "/elsewhere", http.StatusFound) },
	"599": func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(599); _, _ = w.Write([]byte("odd")) },
	"an error": func(w http.ResponseWriter, _ *http.Request) {
		http.Error(w, "it went wrong", http.StatusInternalServerError)
	},
	"repeated and odd header fields": func(w http.ResponseWriter, _ *http.Request) {
		w.Header()["X-Many"] = []string{"a, b", "", "c;d", "\ttabs\t", "é"}
		w.Header()["x-lower"] = []string{"1"}
		w.Header()["X-Newline"] = []string{"a\r\nInjected: yes"}
		w.Header()["bad name"] = []string{"1"}
		w.Header()["X-None"] = nil
		_, _ = w.Write([]byte("x"))
	},
	"no Content-Type, on purpose": func(w http.ResponseWriter, _ *http.Request) {
		w.Header()["Content-Type"] = nil
		_, _ = w.Write([]byte("<html>"))
	},
	"a Content-Encoding": func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Encoding", "br")
		_, _ = w.Write([]byte("<html>"))
	},
	"Content-Length right": func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Length", "5")
		_, _ = w.Write([]byte("hello"))
	},
	"Content-Length too short": func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Length", "3")
		_, _ = w.Write([]byte("abc"))
		if _, err := w.Write([]byte("d")); err != http.ErrContentLength { //nolint:errorlint // as net/http has it
			panic(err)
		}
	},
	"Content-Length nonsense": func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPost { // after HEAD the server alone would send it
			w.Header().Set("Content-Length", "many")
		}
		_, _ = w.Write([]byte("hello"))
	},
	"Transfer-Encoding identity": func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Transfer-Encoding", "identity")
		_, _ = w.Write([]byte("hello"))
	},
	"hundred kilobytes": func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write(bytes.Repeat([]byte("0123456789"), 10_000))
	},
	"io.Copy": func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.Copy(w, struct{ io.Reader }{strings.NewReader(strings.Repeat("copy ", 20_000))})
	},
	"io.Copy of nothing": func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.Copy(w, struct{ io.Reader }{strings.NewReader("")})
	},
	"ServeContent": func(w http.ResponseWriter, r *http.Request) {
		http.ServeContent(w, r, "a.txt", time.Unix(1, 0), strings.NewReader("content"))
	},
	"trailers declared": func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Add("Trailer", "Checksum, Unset")
		w.Header().Add("Trailer", "another")
		_, _ = w.Write([]byte("body"))
		w.Header().Set("Checksum", "abc")
		w.Header()["Another"] = []string{"1", "2"}
	},
	"trailers by prefix": func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write(bytes.Repeat([]byte("x"), 4096)) // more than the server's buffer, else it has no trailers
		w.Header().Set(http.TrailerPrefix+"Checksum", "abc")
	},
	"trailers without a body": func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Trailer", "Checksum")
		w.WriteHeader(http.StatusOK)
		w.Header().Set("Checksum", "abc")
	},
	"informational responses": func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Add("Link", "</style.css>; rel=preload")
		w.WriteHeader(http.StatusEarlyHints)
		w.Header().Set("X-Final", "1")
		w.WriteHeader(http.StatusProcessing)
		w.WriteHeader(http.StatusCreated)
	},
}

// The same handler without the middleware, behind it, and repeated: on real sockets a client gets the same each time.
func TestClientsGetWhatTheServerAloneWouldSend(t *testing.T) {
	t.Parallel()
	for name, handler := range handlers {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for _, method := range []string{http.MethodPost, http.MethodHead} {
				bare := &server{Server: start(t, handler)}
				want := bare.send(t, request{method: method})
				s := serve(t, handler, httpidem.WithMethods(http.MethodPost, http.MethodHead))
				first := s.send(t, request{method: method})
				again := s.send(t, request{method: method})
				require.EqualValues(t, 1, s.runs.Load(), method)
				require.True(t, again.Replayed(), method)
				again.Header.Del(httpidem.ReplayedHeader)
				require.Equal(t, first, again, method)
				// The one difference: where the server alone would have sent pieces, the length is known.
				if want.Header.Get("Content-Length") == "" {
					first.Header.Del("Content-Length")
				}
				if method == http.MethodHead {
					want.Header.Del("Trailer") // no body will come that they could follow
				}
				require.Equal(t, want, first, method)
			}
		})
	}
}

// Outer middleware's header fields are its own: the handler sees them and may change them, and a replay has those of its own request.
func TestOuterHeadersAreNotReplayed(t *testing.T) {
	t.Parallel()
	wrapped, _ := wrap(t, newStore(t), func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Add("Vary", "Accept")
		w.Header().Set("Handler", "saw "+w.Header().Get("Request-Id"))
		w.Header().Set("Frame-Options", "changed")
		w.Header().Del("Powered-By")
	})
	ids := slices.Values([]string{"one", "two"})
	next := make(chan string, 2)
	for id := range ids {
		next <- id
	}
	s := &server{Server: start(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Request-Id", <-next)
		w.Header().Set("Vary", "Origin")
		w.Header().Set("Frame-Options", "deny")
		w.Header().Set("Powered-By", "x")
		wrapped.ServeHTTP(w, r)
	}))}
	first, again := s.send(t, request{}), s.send(t, request{})
	require.Equal(t, "one", first.Header.Get("Request-Id"))
	require.NotContains(t, first.Header, "Powered-By")
	require.Equal(t, "two", again.Header.Get("Request-Id"))
	require.True(t, again.Replayed())
	for _, a := range []answer{first, again} {
		require.Equal(t, []string{"Origin", "Accept"}, a.Header["Vary"])
		require.Equal(t, "saw one", a.Header.Get("Handler"))
		require.Equal(t, "changed", a.Header.Get("Frame-Options"))
	}
}

// What belongs to one client, one connection or one moment never comes back, in whatever case the handler writes it.
func TestWhatBelongsToOneClientIsNeverReplayed(t *testing.T) {
	t.Parallel()
	excluded := []string{
		"Set-Cookie", "set-cookie", "SET-COOKIE", "Set-Cookie2", "Authorization", "authorization", "WWW-Authenticate", "Www-Authenticate",
		"Proxy-Authenticate", "proxy-authorization", "Proxy-Anything", "Date", "Server", "server", "Alt-Svc", "ALT-SVC", "Keep-Alive",
		"Te", "Upgrade", "X-Hop", "x-hop-2", "Idempotent-Replayed",
	}
	s := serve(t, func(w http.ResponseWriter, _ *http.Request) {
		for _, name := range excluded {
			w.Header()[name] = []string{"secret"}
		}
		w.Header()["Connection"] = []string{"x-HOP, other", "X-Hop-2"}
		w.Header().Set("X-Kept", "1")
		w.WriteHeader(http.StatusCreated)
	})
	first := s.send(t, request{})
	require.Equal(t, []string{"secret", "secret", "secret"}, first.Header["Set-Cookie"])
	require.Equal(t, "secret", first.Header.Get("X-Hop"))
	again := s.send(t, request{})
	require.Equal(t, []string{"Content-Length", "Idempotent-Replayed", "X-Kept"}, slices.Sorted(maps.Keys(again.Header)))
	require.Equal(t, "true", again.Header.Get(httpidem.ReplayedHeader))
	require.NotContains(t, again.Body, "secret")
}

// A status that HTTP does not have is the handler's mistake, as with the server alone, and found before anything is stored.
func TestAnImpossibleStatusPanicsAsInTheServer(t *testing.T) {
	t.Parallel()
	store := &spy{}
	wrapped, _ := wrap(t, store, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(99) })
	r := request{}.build(t.Context(), t, "http://example.com")
	require.PanicsWithValue(t, "invalid WriteHeader code 99", func() { wrapped.ServeHTTP(nopWriter{http.Header{}}, r) })
	require.Empty(t, store.responses)
}

// nopWriter is a ResponseWriter that can do nothing more than it must.
type nopWriter struct{ header http.Header }

func (w nopWriter) Header() http.Header       { return w.header }
func (nopWriter) Write(p []byte) (int, error) { return len(p), nil }
func (nopWriter) WriteHeader(int)             {}

// A response shorter than it said: the client sees that it is broken, as with the server alone, and nobody takes it for whole.
func TestAResponseShorterThanItSaidIsNotStored(t *testing.T) {
	t.Parallel()
	s := serve(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Length", "10")
		_, _ = w.Write([]byte("hello"))
	})
	first, err := exchange(t, client, s.URL, request{})
	require.ErrorIs(t, err, io.ErrUnexpectedEOF)
	require.Equal(t, "hello", first.Body)
	again := s.send(t, request{})
	require.Equal(t, http.StatusConflict, again.Status)
	require.Equal(t, "response-not-stored", again.Problem())
	require.EqualValues(t, 1, s.runs.Load())
}
