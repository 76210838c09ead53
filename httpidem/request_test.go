package httpidem_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"mime/multipart"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/archlab/idempotency/httpidem"
	"github.com/archlab/idempotency/pgstore"
)

// At the limit the handler reads every byte, and again; over it nothing is recorded.
func TestABodyIsBoundedAndGivenBackWhole(t *testing.T) {
	t.Parallel()
	const limit = 1000
	atLimit := strings.Repeat("x", limit)
	for name, chunked := range map[string]bool{"with Content-Length": false, "chunked": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			store := newStore(t)
			s := serveWith(t, store, func(w http.ResponseWriter, r *http.Request) {
				one, err := io.ReadAll(r.Body)
				if err != nil {
					panic(err)
				}
				again, err := r.GetBody()
				if err != nil {
					panic(err)
				}
				two, _ := io.ReadAll(again)
				if r.ContentLength != int64(len(one)) || r.TransferEncoding != nil || !bytes.Equal(one, two) {
					panic(fmt.Sprint(r.ContentLength, r.TransferEncoding, len(one), len(two)))
				}
				_, _ = w.Write(two)
			}, httpidem.WithMaxRequestBytes(limit))
			post := func(key, body string) answer {
				r := request{key: key, body: body}.build(t.Context(), t, s.URL)
				if chunked {
					r.Body, r.ContentLength = io.NopCloser(struct{ io.Reader }{strings.NewReader(body)}), -1
				}
				response, err := client.Do(r)
				require.NoError(t, err)
				defer response.Body.Close()
				got, err := io.ReadAll(response.Body)
				require.NoError(t, err)
				return answer{Status: response.StatusCode, Header: response.Header, Body: string(got)}
			}
			require.Equal(t, atLimit, post(`"1"`, atLimit).Body)
			require.Empty(t, post(`"2"`, "").Body)
			s.runs.Store(0)
			over := post(`"3"`, atLimit+"x")
			require.Equal(t, http.StatusRequestEntityTooLarge, over.Status)
			require.Equal(t, "request-too-large", over.Problem())
			require.Zero(t, s.runs.Load())
			_, found, err := store.Get(t.Context(), keyOf("POST /orders", "3"))
			require.NoError(t, err)
			require.False(t, found)
			_, found, err = store.Get(t.Context(), keyOf("POST /orders", "1"))
			require.NoError(t, err)
			require.True(t, found)
			require.True(t, post(`"1"`, atLimit).Replayed())
		})
	}
}

// A client that waits to be asked for a body that is too long is not asked.
func TestATooLongBodyIsNotAskedFor(t *testing.T) {
	t.Parallel()
	s := serve(t, created, httpidem.WithMaxRequestBytes(3))
	head := "POST /orders HTTP/1.1\r\nHost: x\r\nTenant: acct_7\r\nIdempotency-Key: \"e\"\r\nExpect: 100-continue\r\nConnection: close\r\n"
	require.Equal(t, http.StatusRequestEntityTooLarge, rawExchange(t, s, head+"Content-Length: 4\r\n\r\n").Status)
	require.Zero(t, s.runs.Load())

	// One that fits is.
	require.Equal(t, http.StatusContinue, rawExchange(t, s, head+"Content-Length: 3\r\n\r\nabc").Status)
}

// Outer middleware that has read the body would make all requests with one key the same: nothing runs, and the hook hears why.
func TestABodyThatSomebodyElseHasReadIsTheServersFault(t *testing.T) {
	t.Parallel()
	var told hook
	wrapped, runs := wrap(t, newStore(t), created, told.option())
	s := &server{start(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_ = r.ParseForm()
		wrapped.ServeHTTP(w, r)
	})), runs}
	form := http.Header{"Content-Type": {"application/x-www-form-urlencoded"}}
	a := s.send(t, request{body: "amount=1", header: form})
	require.Equal(t, "store-unavailable", a.Problem())
	require.Len(t, told.errors(), 1)
	require.ErrorContains(t, told.errors()[0], "the body was read before the request came to the middleware")
	require.Equal(t, http.StatusCreated, s.send(t, request{header: form}).Status) // there was none
	require.EqualValues(t, 1, runs.Load())
}

// A body that breaks off half way is no request: nothing is recorded, and the whole one is executed.
func TestABodyThatBreaksOffIsNotExecuted(t *testing.T) {
	t.Parallel()
	rejected := make(chan httpidem.Rejection, 1)
	s := serve(t, created, httpidem.WithRejectionHandler(func(w http.ResponseWriter, _ *http.Request, rejection httpidem.Rejection) {
		rejection.Respond(w)
		rejected <- rejection
	}))
	for _, rest := range []string{"Content-Length: 10\r\n\r\nhello", "Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n", "Transfer-Encoding: chunked\r\n\r\nnonsense\r\n"} {
		conn, err := new(net.Dialer).DialContext(t.Context(), "tcp", s.Listener.Addr().String())
		require.NoError(t, err)
		_, err = io.WriteString(conn, "POST /orders HTTP/1.1\r\nHost: x\r\nTenant: acct_7\r\nIdempotency-Key: "+aKey+"\r\n"+rest)
		require.NoError(t, err)
		require.NoError(t, conn.(*net.TCPConn).CloseWrite())
		rejection := <-rejected
		require.Equal(t, http.StatusBadRequest, rejection.Status)
		require.True(t, strings.HasSuffix(rejection.Type, "#request-unreadable"))
		require.Error(t, rejection.Err)
		conn.Close()
	}
	require.Zero(t, s.runs.Load())
	whole := s.send(t, request{body: "hello"})
	require.Equal(t, http.StatusCreated, whole.Status)
	require.False(t, whole.Replayed())
}

// What shifts between method, path, query and body is another request; what a header says is not.
func TestTheFingerprintIsMethodPathQueryAndBody(t *testing.T) {
	t.Parallel()
	store := &spy{}
	wrapped, _ := wrap(t, store, created, httpidem.WithOperation(func(*http.Request) string { return "one" }))
	fingerprint := func(r request) string {
		wrapped.ServeHTTP(nopWriter{http.Header{}}, asServed(t, r))
		return store.fingerprints[len(store.fingerprints)-1]
	}
	seen := map[string]request{}
	for _, r := range []request{
		{path: "/a", body: "b"}, {path: "/ab"}, {path: "/a?b"}, {path: "/a?", body: "b"}, {path: "/a", body: "?b"}, {path: "/a", body: `{"a":1,"b":2}`},
		{path: "/a", body: `{"b":2,"a":1}`}, {path: "/a", method: http.MethodPatch, body: "b"}, {path: "/a?x=1&y=2"}, {path: "/a?y=2&x=1"},
		{path: "/A", body: "b"}, {path: "/a/", body: "b"}, {path: "/%61", body: "b"},
	} {
		digest := fingerprint(r)
		require.Len(t, digest, 32)
		require.NotContains(t, seen, digest, "%+v and %+v", r, seen[digest])
		seen[digest] = r
	}
	r := request{path: "/a", body: "b"}
	want := fingerprint(r)
	r.header = http.Header{"Date": {"now"}, "Authorization": {"Bearer fresh"}, "Traceparent": {"00-1"}, "Content-Type": {"text/plain"}}
	require.Equal(t, want, fingerprint(r))
}

// asServed returns a request as a handler gets it from a server.
func asServed(tb testing.TB, r request) *http.Request {
	tb.Helper()
	out := r.build(tb.Context(), tb, "http://example.com")
	out.RequestURI = out.URL.RequestURI()
	return out
}

// Paths that routers and cleaners make one of are two operations here: nobody gets the response to another request.
func TestPathTricksNeverMergeTwoOperations(t *testing.T) {
	t.Parallel()
	s := serve(t, created)
	paths := []string{
		"/a/b", "/a//b", "//a/b", "/a%2Fb", "/a%2fb", "/a/b/", "/A/b", "/a/./b", "/a/x/../b", "/a/%62", "/a/b?", "/a/b?x", "/a/b;x", "/a/b%3Fx", "/a/b%00",
	}
	for _, path := range paths {
		a := s.send(t, request{path: path})
		require.False(t, a.Replayed(), path)
		if strings.HasPrefix(path, "/a/b?") { // the same path with another query
			require.Equal(t, "key-reused", a.Problem(), path)
			continue
		}
		require.Equal(t, http.StatusCreated, a.Status, path)
	}

	// Nor do a router's mounts and cleaners.
	idempotent, err := httpidem.New(newStore(t), tenantOf)
	require.NoError(t, err)
	handler := idempotent(http.HandlerFunc(created))
	outer := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		for _, mount := range []string{"/v1", "/v2"} {
			if strings.HasPrefix(r.URL.Path, mount+"/") {
				http.StripPrefix(mount, handler).ServeHTTP(w, r)
				return
			}
		}
	})
	mounted := &server{Server: start(t, outer)}
	require.False(t, mounted.send(t, request{path: "/v1/orders"}).Replayed())
	v2 := mounted.send(t, request{path: "/v2/orders"})
	require.Equal(t, http.StatusCreated, v2.Status)
	require.False(t, v2.Replayed())
	require.True(t, mounted.send(t, request{path: "/v1/orders"}).Replayed())
}

// The operation is the route where there is one: the same key for two things of one kind is a conflict, for two kinds it is not.
func TestTheOperationIsTheRoute(t *testing.T) {
	t.Parallel()
	store := &spy{}
	idempotent, err := httpidem.New(store, tenantOf)
	require.NoError(t, err)
	mux := http.NewServeMux()
	for _, pattern := range []string{"POST /orders/{id}", "/any/", "PATCH example.com/host"} {
		mux.Handle(pattern, idempotent(http.NotFoundHandler()))
	}
	long := "/" + strings.Repeat("long", 200)
	mux.Handle(long, idempotent(http.NotFoundHandler()))
	for _, r := range []request{
		{path: "/orders/1"}, {path: "/any/thing"}, {path: "/any/thing", method: http.MethodPatch}, {path: "/host", method: http.MethodPatch}, {path: long},
	} {
		mux.ServeHTTP(httptest.NewRecorder(), asServed(t, r))
	}
	wrapped, _ := wrap(t, store, created)
	wrapped.ServeHTTP(nopWriter{http.Header{}}, request{path: "/bare?x=1"}.build(t.Context(), t, "http://example.com"))
	wrapped, _ = wrap(t, store, created, httpidem.WithOperation(func(*http.Request) string { return "bad\x00" }))
	wrapped.ServeHTTP(nopWriter{http.Header{}}, asServed(t, request{}))
	var operations []string
	for _, k := range store.keys {
		operations = append(operations, k.Operation)
	}
	require.Equal(t, []string{"POST /orders/{id}", "POST /any/", "PATCH /any/", "PATCH example.com/host"}, operations[:4])
	require.Regexp(t, "^sha256:[0-9a-f]{64}$", operations[4])
	require.Equal(t, "POST /bare", operations[5])
	require.Regexp(t, "^sha256:[0-9a-f]{64}$", operations[6])
	require.NotEqual(t, operations[4], operations[6])
}

func TestTwoThingsOfOneRouteAreAConflict(t *testing.T) {
	t.Parallel()
	idempotent, err := httpidem.New(newStore(t), tenantOf)
	require.NoError(t, err)
	mux := http.NewServeMux()
	mux.Handle("POST /orders/{id}", idempotent(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(w, r.PathValue("id"))
	})))
	mux.Handle("POST /refunds/{id}", idempotent(http.HandlerFunc(created)))
	s := &server{Server: start(t, mux)}
	require.Equal(t, "1", s.send(t, request{path: "/orders/1"}).Body)
	require.Equal(t, "key-reused", s.send(t, request{path: "/orders/2"}).Problem())
	require.Equal(t, http.StatusCreated, s.send(t, request{path: "/refunds/1"}).Status)
}

// form returns the same form with a boundary of its own.
func form(t *testing.T, boundary string) request {
	t.Helper()
	var body bytes.Buffer
	w := multipart.NewWriter(&body)
	require.NoError(t, w.SetBoundary(boundary))
	require.NoError(t, w.WriteField("amount", "10"))
	file, err := w.CreateFormFile("receipt", "a.bin")
	require.NoError(t, err)
	_, err = file.Write(bytes.Repeat([]byte("x"), 100_000))
	require.NoError(t, err)
	require.NoError(t, w.Close())
	return request{body: body.String(), header: http.Header{"Content-Type": {w.FormDataContentType()}}}
}

// A form with a new boundary is another request by default; with a function of the service's own it need not be.
func TestAFormWithANewBoundaryIsWhatTheServiceSays(t *testing.T) {
	t.Parallel()
	handler := func(w http.ResponseWriter, r *http.Request) {
		if err := r.ParseMultipartForm(1); err != nil { // the file goes to the disk
			panic(err)
		}
		name := ""
		if file, err := r.MultipartForm.File["receipt"][0].Open(); err == nil {
			if f, ok := file.(*os.File); ok {
				name = f.Name()
			}
			file.Close()
		}
		w.Header().Set("Temporary", name)
		_, _ = io.WriteString(w, r.PostFormValue("amount"))
	}
	s := serve(t, handler)
	require.Equal(t, "10", s.send(t, form(t, "one")).Body)
	require.Equal(t, "key-reused", s.send(t, form(t, "two")).Problem())

	byContent := serve(t, handler, httpidem.WithFingerprint(func(r *http.Request, body string) (string, error) {
		_, boundary, ok := strings.Cut(r.Header.Get("Content-Type"), "boundary=")
		if !ok {
			return "", errors.New("not a form")
		}
		return pgstore.Fingerprint(strings.ReplaceAll(body, boundary, "")), nil
	}))
	first := byContent.send(t, form(t, "one"))
	require.Equal(t, "10", first.Body)
	require.True(t, byContent.send(t, form(t, "two")).Replayed())
	require.EqualValues(t, 1, byContent.runs.Load())
	unreadable := byContent.send(t, request{key: `"2"`})
	require.Equal(t, http.StatusBadRequest, unreadable.Status)
	require.Equal(t, "request-unreadable", unreadable.Problem())

	// The server removes the form's temporary files, though the handler had a request of its own.
	require.NotEmpty(t, first.Header.Get("Temporary"))
	require.Eventually(t, func() bool {
		_, err := os.Stat(first.Header.Get("Temporary"))
		return errors.Is(err, os.ErrNotExist)
	}, 30*time.Second, time.Millisecond)
}

// Canonical JSON as the fingerprint, where a service chose it: the order of members means nothing then.
func TestAServiceCanIgnoreTheSpellingOfJSON(t *testing.T) {
	t.Parallel()
	s := serve(t, created, httpidem.WithFingerprint(func(_ *http.Request, body string) (string, error) {
		canonical, err := pgstore.CanonicalJSON(body)
		return pgstore.Fingerprint(canonical), err
	}))
	require.Equal(t, `{"a":1,"b":2}`, s.send(t, request{body: `{"a":1,"b":2}`}).Body)
	require.Equal(t, `{"a":1,"b":2}`, s.send(t, request{body: `{ "b":2, "a":1 }`}).Body)
	require.Equal(t, "key-reused", s.send(t, request{body: `{"a":1.0,"b":2}`}).Problem())
	require.Equal(t, "request-unreadable", s.send(t, request{body: `{`}).Problem())
	require.EqualValues(t, 1, s.runs.Load())
}

// A fingerprint that no store takes is the service's mistake: nothing runs unprotected, and the hook hears of it.
func TestAnImpossibleFingerprintIsTheServersFault(t *testing.T) {
	t.Parallel()
	var told hook
	s := serve(t, created, told.option(), httpidem.WithFingerprint(func(*http.Request, string) (string, error) { return "", nil }))
	a := s.send(t, request{})
	require.Equal(t, http.StatusServiceUnavailable, a.Status)
	require.Equal(t, "store-unavailable", a.Problem())
	require.Len(t, told.errors(), 1)
	require.ErrorIs(t, told.errors()[0], pgstore.ErrFingerprintInvalid)
	require.Zero(t, s.runs.Load())
}

// The handler gets the request as it was, but for what the middleware says that it changes.
func TestTheHandlerGetsTheRequestAsItWas(t *testing.T) {
	t.Parallel()
	s := serve(t, func(w http.ResponseWriter, r *http.Request) {
		if _, ok := r.Header["Accept-Encoding"]; ok {
			panic("Accept-Encoding")
		}
		want := url.Values{"x": {"1"}}
		if r.URL.Query().Encode() != want.Encode() || r.Header.Get("X-Custom") != "kept" || r.Header.Get(httpidem.KeyHeader) != aKey {
			panic(fmt.Sprint(r.URL, r.Header))
		}
		created(w, r)
	})
	r := request{path: "/orders?x=1", header: http.Header{"Accept-Encoding": {"gzip"}, "X-Custom": {"kept"}}}
	require.Equal(t, http.StatusCreated, s.send(t, r).Status)
}
