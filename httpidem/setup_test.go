package httpidem_test

import (
	"bytes"
	"context"
	"io"
	"log"
	"maps"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/archlab/idempotency/httpidem"
	"github.com/archlab/idempotency/internal/pgtest"
	"github.com/archlab/idempotency/pgstore"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

const (
	lease     = time.Minute
	retention = 24 * time.Hour
	aKey      = `"8e03978e-40d5-43e8-bc93-6894a57f9324"`
)

// newStore returns a store on a fresh schema of the shared server, and another with a lease of its own on request.
func newStore(tb testing.TB, opts ...pgstore.Option) *pgstore.Store {
	tb.Helper()
	return newStoreWithLease(tb, lease, opts...)
}

func newStoreWithLease(tb testing.TB, lease time.Duration, opts ...pgstore.Option) *pgstore.Store {
	tb.Helper()
	opts = append([]pgstore.Option{pgstore.WithSchema(pgtest.Schema(tb))}, opts...)
	store, err := pgstore.New(pgtest.Pool(tb), lease, retention, opts...)
	require.NoError(tb, err)
	return store
}

// tenantHeader says in these tests who a client is.
const tenantHeader = "Tenant"

func tenantOf(r *http.Request) string { return r.Header.Get(tenantHeader) }

// wrap returns the handler behind the middleware, and a counter of its runs.
func wrap(tb testing.TB, store httpidem.Store, handler http.HandlerFunc, opts ...httpidem.Option) (http.Handler, *atomic.Int64) {
	tb.Helper()
	idempotent, err := httpidem.New(store, tenantOf, opts...)
	require.NoError(tb, err)
	var runs atomic.Int64
	return idempotent(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		runs.Add(1)
		handler(w, r)
	})), &runs
}

// server is an HTTP server on a real socket, and a client of it.
type server struct {
	*httptest.Server
	runs *atomic.Int64
}

// serve starts a server whose every path leads to the handler behind the middleware.
func serve(tb testing.TB, handler http.HandlerFunc, opts ...httpidem.Option) *server {
	tb.Helper()
	return serveWith(tb, newStore(tb), handler, opts...)
}

func serveWith(tb testing.TB, store httpidem.Store, handler http.HandlerFunc, opts ...httpidem.Option) *server {
	tb.Helper()
	wrapped, runs := wrap(tb, store, handler, opts...)
	return &server{start(tb, wrapped), runs}
}

// start starts a server. Its log, which net/http writes panics to, belongs to nobody.
func start(tb testing.TB, handler http.Handler) *httptest.Server {
	tb.Helper()
	s := unstarted(handler)
	s.Start()
	tb.Cleanup(s.Close)
	return s
}

func unstarted(handler http.Handler) *httptest.Server {
	s := httptest.NewUnstartedServer(handler)
	s.Config.ErrorLog = log.New(io.Discard, "", 0)
	return s
}

// request is what a test sends. Its zero value is a POST with a key.
type request struct {
	method string
	path   string
	key    string // the header's value; "-" for none
	tenant string // "-" for none
	header http.Header
	body   string
}

// answer is what comes back, without its Date.
type answer struct {
	Status  int
	Header  http.Header
	Body    string
	Trailer http.Header
}

// Replayed reports whether the answer is a replay.
func (a answer) Replayed() bool { return a.Header.Get(httpidem.ReplayedHeader) == "true" }

// Problem returns the name of the answer's problem type.
func (a answer) Problem() string {
	_, name, _ := strings.Cut(a.Header.Get("Link"), "#")
	name, _, _ = strings.Cut(name, ">")
	return name
}

func (r request) build(ctx context.Context, tb testing.TB, url string) *http.Request {
	tb.Helper()
	if r.method == "" {
		r.method = http.MethodPost
	}
	if r.path == "" {
		r.path = "/orders"
	}
	out, err := http.NewRequestWithContext(ctx, r.method, url+r.path, strings.NewReader(r.body))
	require.NoError(tb, err)
	maps.Copy(out.Header, r.header)
	for name, field := range map[string]struct{ value, usual string }{
		httpidem.KeyHeader: {r.key, aKey}, tenantHeader: {r.tenant, "acct_7"},
	} {
		switch field.value {
		case "":
			out.Header.Set(name, field.usual)
		case "-":
		default:
			out.Header[name] = []string{field.value}
		}
	}
	return out
}

// client sends each request on a connection of its own, once: net/http would send a request with an Idempotency-Key again by itself
// where a connection that it had kept breaks, and would ask for gzip.
var client = &http.Client{
	Transport:     &http.Transport{DisableKeepAlives: true, DisableCompression: true},
	CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
}

// send sends a request and reads the answer.
func (s *server) send(tb testing.TB, r request) answer {
	tb.Helper()
	a, err := exchange(tb, client, s.URL, r)
	require.NoError(tb, err)
	return a
}

func exchange(tb testing.TB, client *http.Client, url string, r request) (answer, error) {
	tb.Helper()
	response, err := client.Do(r.build(tb.Context(), tb, url))
	if err != nil {
		return answer{}, err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	response.Header.Del("Date")
	return answer{response.StatusCode, response.Header, string(body), response.Trailer}, err
}

// hook collects what the middleware reports.
type hook struct {
	mu   sync.Mutex
	errs []error
}

func (h *hook) option() httpidem.Option {
	return httpidem.WithErrorHook(func(_ *http.Request, err error) {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.errs = append(h.errs, err)
	})
}

func (h *hook) errors() []error {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.errs
}

// keyOf is the store's key for a request of these tests to a server without routes.
func keyOf(operation, value string) pgstore.Key {
	return pgstore.Key{Tenant: "acct_7", Operation: operation, Value: strings.Trim(value, `"`)}
}

// closed waits for a signal.
func closed(tb testing.TB, signal <-chan struct{}, what string) {
	tb.Helper()
	select {
	case <-signal:
	case <-time.After(30 * time.Second):
		require.FailNow(tb, "waited in vain", what)
	}
}

// created is the usual handler: it makes something and says where.
func created(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Location", "/orders/1")
	w.WriteHeader(http.StatusCreated)
	_, _ = io.Copy(w, bytes.NewReader(body))
}
