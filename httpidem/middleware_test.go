package httpidem_test

import (
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/archlab/idempotency/httpidem"
	"github.com/archlab/idempotency/pgstore"
)

func TestARepeatGetsTheFirstResponseAndTheHandlerRunsOnce(t *testing.T) {
	t.Parallel()
	s := serve(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header()["Vary"] = []string{"Accept", "Origin", "Accept"}
		w.Header().Add("Content-Disposition", `attachment; filename="a,b.txt"`)
		w.Header().Add("Expires", "Mon, 21 Oct 2030 07:28:00 GMT")
		w.Header().Set("ETag", `"v1"`)
		w.Header().Set("Location", "/orders/1")
		w.WriteHeader(http.StatusCreated)
		_, _ = w.Write([]byte("\x00\xff bytes\r\n"))
	})
	first := s.send(t, request{body: "a"})
	require.Equal(t, http.StatusCreated, first.Status)
	require.Equal(t, "\x00\xff bytes\r\n", first.Body)
	require.Equal(t, []string{"Accept", "Origin", "Accept"}, first.Header["Vary"])
	require.False(t, first.Replayed())
	require.NotContains(t, first.Header, httpidem.ReplayedHeader)

	for range 3 {
		again := s.send(t, request{body: "a"})
		require.True(t, again.Replayed())
		again.Header.Del(httpidem.ReplayedHeader)
		require.Equal(t, first, again)
	}
	require.EqualValues(t, 1, s.runs.Load())
}

// Two requests at once, with the handler held: one runs, the other is told to wait; another body is a conflict before that.
func TestOfTwoParallelRequestsOneRunsAndTheOtherIsTold(t *testing.T) {
	t.Parallel()
	running, finish := make(chan struct{}), make(chan struct{})
	s := serve(t, func(w http.ResponseWriter, r *http.Request) {
		close(running)
		<-finish
		created(w, r)
	})
	var first answer
	var wg sync.WaitGroup
	wg.Go(func() { first = s.send(t, request{body: "a"}) })
	closed(t, running, "the handler")

	outstanding := s.send(t, request{body: "a"})
	require.Equal(t, http.StatusConflict, outstanding.Status)
	require.Equal(t, "request-outstanding", outstanding.Problem())
	require.Contains(t, outstanding.Body, `"title":"A request is outstanding for this Idempotency-Key"`)
	require.Equal(t, "5", outstanding.Header.Get("Retry-After"))
	require.NotContains(t, outstanding.Header, httpidem.ReplayedHeader)

	reused := s.send(t, request{body: "b"})
	require.Equal(t, http.StatusUnprocessableEntity, reused.Status)
	require.Equal(t, "key-reused", reused.Problem())
	require.Contains(t, reused.Body, `"title":"Idempotency-Key is already used"`)
	require.NotContains(t, reused.Header, "Retry-After")

	close(finish)
	wg.Wait()
	require.Equal(t, http.StatusCreated, first.Status)
	again := s.send(t, request{body: "a"})
	require.True(t, again.Replayed())
	require.Equal(t, first.Body, again.Body)
	require.Equal(t, "key-reused", s.send(t, request{body: "b"}).Problem())
	require.EqualValues(t, 1, s.runs.Load())
}

// Many at once, of which some wait: one run, one response.
func TestRepeatsThatWaitGetTheResponse(t *testing.T) {
	t.Parallel()
	const callers = 20
	started, finish := make(chan struct{}), make(chan struct{})
	s := serve(t, func(w http.ResponseWriter, r *http.Request) {
		close(started)
		<-finish
		created(w, r)
	}, httpidem.WithWait(30*time.Second))
	answers := make([]answer, callers)
	var wg sync.WaitGroup
	for i := range callers {
		wg.Go(func() { answers[i] = s.send(t, request{body: "a"}) })
	}
	closed(t, started, "the handler")
	close(finish)
	wg.Wait()
	replays := 0
	for _, a := range answers {
		require.Equal(t, http.StatusCreated, a.Status)
		require.Equal(t, "a", a.Body)
		if a.Replayed() {
			replays++
		}
	}
	require.Equal(t, callers-1, replays)
	require.EqualValues(t, 1, s.runs.Load())
}

func TestTenantsNeverSeeEachOther(t *testing.T) {
	t.Parallel()
	s := serve(t, func(w http.ResponseWriter, r *http.Request) { _, _ = w.Write([]byte(tenantOf(r))) })
	require.Equal(t, "a", s.send(t, request{tenant: "a"}).Body)
	b := s.send(t, request{tenant: "b"})
	require.Equal(t, "b", b.Body)
	require.False(t, b.Replayed())
	require.True(t, s.send(t, request{tenant: "a"}).Replayed())
	require.EqualValues(t, 2, s.runs.Load())

	for _, tenant := range []string{"-", "\x80"} { // none, and one that no key can hold
		refused := s.send(t, request{tenant: tenant})
		require.Equal(t, http.StatusForbidden, refused.Status)
		require.Equal(t, "tenant-unknown", refused.Problem())
	}
	require.EqualValues(t, 2, s.runs.Load())
}

func TestOtherMethodsPassThrough(t *testing.T) {
	t.Parallel()
	s := serve(t, created)
	for _, method := range []string{http.MethodGet, http.MethodPut, http.MethodDelete, http.MethodOptions} {
		for range 2 {
			a := s.send(t, request{method: method})
			require.Equal(t, http.StatusCreated, a.Status, method)
			require.False(t, a.Replayed(), method)
		}
	}
	require.EqualValues(t, 8, s.runs.Load())
	require.False(t, s.send(t, request{method: http.MethodPatch}).Replayed())
	require.True(t, s.send(t, request{method: http.MethodPatch}).Replayed())

	puts := serve(t, created, httpidem.WithMethods(http.MethodPut))
	require.False(t, puts.send(t, request{method: http.MethodPut}).Replayed())
	require.True(t, puts.send(t, request{method: http.MethodPut}).Replayed())
	require.False(t, puts.send(t, request{}).Replayed())
	require.False(t, puts.send(t, request{}).Replayed())
}

func TestAMissingKeyIsRefusedUnlessItIsOptional(t *testing.T) {
	t.Parallel()
	s := serve(t, created)
	missing := s.send(t, request{key: "-"})
	require.Equal(t, http.StatusBadRequest, missing.Status)
	require.Equal(t, "key-missing", missing.Problem())
	require.Contains(t, missing.Body, `"title":"Idempotency-Key is missing"`)
	require.Zero(t, s.runs.Load())

	optional := serve(t, created, httpidem.WithOptionalKey())
	for range 2 {
		require.Equal(t, http.StatusCreated, optional.send(t, request{key: "-"}).Status)
	}
	require.EqualValues(t, 2, optional.runs.Load())
	require.Equal(t, "key-invalid", optional.send(t, request{key: `"`}).Problem())
	require.EqualValues(t, 2, optional.runs.Load())
}

// After the retention a key means a new request, whatever it meant before.
func TestAKeyIsForgottenAfterTheRetention(t *testing.T) {
	t.Parallel()
	now := time.Date(2031, 2, 3, 4, 5, 6, 0, time.UTC)
	var mu sync.Mutex
	store := newStore(t, pgstore.WithClock(func() time.Time {
		mu.Lock()
		defer mu.Unlock()
		return now
	}))
	s := serveWith(t, store, created)
	require.Equal(t, "a", s.send(t, request{body: "a"}).Body)
	require.Equal(t, "key-reused", s.send(t, request{body: "b"}).Problem())
	mu.Lock()
	now = now.Add(retention)
	mu.Unlock()
	b := s.send(t, request{body: "b"})
	require.Equal(t, "b", b.Body)
	require.False(t, b.Replayed())
}

func TestNewNamesEveryMistake(t *testing.T) {
	t.Parallel()
	var missing *pgstore.Store
	_, err := httpidem.New(missing, nil, nil,
		httpidem.WithMethods("post", ""), httpidem.WithOperation(nil), httpidem.WithFingerprint(nil), httpidem.WithMaxRequestBytes(-1),
		httpidem.WithMaxResponseBytes(-1), httpidem.WithReleasingStatuses(100), httpidem.WithHandlerTimeout(0), httpidem.WithWait(-1),
		httpidem.WithDocumentation("docs#x"), httpidem.WithRejectionHandler(nil))
	for _, text := range []string{
		"idempotency: new middleware: ", "the store is nil", "the tenant function is nil", "an option is nil", `"post" is not a method`,
		`"" is not a method`, "the operation function is nil", "the fingerprint function is nil", "the longest request is -1 bytes",
		"the longest response is -1 bytes", "100 is not the status", "the handler's timeout is 0s", "the wait is -1ns",
		`the documentation is at "docs#x"`, "the rejection handler is nil",
	} {
		require.ErrorContains(t, err, text)
	}
	_, err = httpidem.New(nil, tenantOf)
	require.ErrorContains(t, err, "the store is nil")
	store := newStore(t)
	_, err = httpidem.New(store, tenantOf, httpidem.WithMethods())
	require.ErrorContains(t, err, "no method is protected")
	_, err = httpidem.New(store, tenantOf, httpidem.WithMaxResponseBytes(pgstore.MaxResponseDefault+1))
	require.ErrorContains(t, err, "raise pgstore.WithMaxResponse")
	for _, address := range []string{"", "docs", "https://example.com/#", "https://exa mple.com/", ":"} {
		_, err = httpidem.New(store, tenantOf, httpidem.WithDocumentation(address))
		require.ErrorContains(t, err, "the documentation is at", address)
	}
	_, err = httpidem.New(store, tenantOf, httpidem.WithDocumentation("/idempotency"), httpidem.WithMaxResponseBytes(0))
	require.NoError(t, err)
}
