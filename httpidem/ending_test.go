package httpidem_test

import (
	"bufio"
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/archlab/idempotency/httpidem"
	"github.com/archlab/idempotency/internal/pgtest"
	"github.com/archlab/idempotency/pgstore"
)

// The client has gone before the handler ends: the response is stored, and the repeat gets it.
func TestAClientThatGoesAwayChangesNothing(t *testing.T) {
	t.Parallel()
	running, gone, ended := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	s := serve(t, func(w http.ResponseWriter, r *http.Request) {
		close(running)
		<-gone
		ended <- r.Context().Err()
		created(w, r)
	})
	ctx, leave := context.WithCancel(t.Context())
	left := make(chan error)
	r := request{body: "a"}.build(ctx, t, s.URL)
	go func() {
		_, err := client.Do(r) //nolint:bodyclose // there is none
		left <- err
	}()
	closed(t, running, "the handler")
	leave()
	require.ErrorIs(t, <-left, context.Canceled)
	close(gone)
	require.NoError(t, <-ended, "the handler's context is not the client's")
	var again answer
	require.Eventually(t, func() bool {
		again = s.send(t, request{body: "a"})
		return again.Problem() != "request-outstanding"
	}, 30*time.Second, time.Millisecond)
	require.Equal(t, http.StatusCreated, again.Status)
	require.Equal(t, "a", again.Body)
	require.True(t, again.Replayed())
	require.EqualValues(t, 1, s.runs.Load())
}

// A client that has gone before the handler starts: it does not start, and the key is free.
func TestAClientThatGoesBeforeTheHandlerStartsRunsNothing(t *testing.T) {
	t.Parallel()
	store := newStore(t)
	wrapped, runs := wrap(t, store, created)
	ctx, leave := context.WithCancel(t.Context())
	leave()
	w := httptest.NewRecorder()
	wrapped.ServeHTTP(w, request{}.build(ctx, t, "http://example.com"))
	require.Equal(t, http.StatusServiceUnavailable, w.Code) // for whoever still listens: a timeout around the middleware, say
	require.Zero(t, runs.Load())

	// Also where it goes between the store's answer and the handler.
	late := &lateStore{Store: store}
	wrapped, runs = wrap(t, late, created)
	ctx, late.before = context.WithCancel(t.Context())
	wrapped.ServeHTTP(httptest.NewRecorder(), request{}.build(ctx, t, "http://example.com"))
	require.Zero(t, runs.Load())
	record, found, err := store.Get(t.Context(), keyOf("POST /orders", aKey))
	require.NoError(t, err)
	require.True(t, found)
	require.Equal(t, pgstore.StateRetryable, record.State)
}

// lateStore does something just before the handler would run, or just after it.
type lateStore struct {
	httpidem.Store

	before, after func()
}

func (s *lateStore) Do(
	ctx context.Context, k pgstore.Key, fingerprint string, fn func(ctx context.Context, r pgstore.Record) (string, error), opts ...pgstore.DoOption,
) (pgstore.Outcome, error) {
	return s.Store.Do(ctx, k, fingerprint, func(ctx context.Context, r pgstore.Record) (string, error) {
		if s.before != nil {
			s.before()
		}
		response, err := fn(ctx, r)
		if s.after != nil {
			s.after()
		}
		return response, err
	}, opts...)
}

// The server is shut down while a handler runs: Shutdown waits for it, and its response is stored.
func TestAShutdownWaitsForTheResponseToBeStored(t *testing.T) {
	t.Parallel()
	store := newStore(t)
	running, finish := make(chan struct{}), make(chan struct{})
	s := serveWith(t, store, func(w http.ResponseWriter, r *http.Request) {
		close(running)
		<-finish
		created(w, r)
	})
	var first answer
	var wg sync.WaitGroup
	wg.Go(func() { first = s.send(t, request{body: "a"}) })
	closed(t, running, "the handler")
	down := make(chan error)
	go func() { down <- s.Config.Shutdown(t.Context()) }()
	require.Eventually(t, func() bool {
		_, err := exchange(t, client, s.URL, request{})
		return err != nil // it takes no new requests
	}, 30*time.Second, time.Millisecond)
	close(finish)
	require.NoError(t, <-down)
	wg.Wait()
	require.Equal(t, http.StatusCreated, first.Status)
	next := serveWith(t, store, created)
	require.True(t, next.send(t, request{body: "a"}).Replayed())
	require.Zero(t, next.runs.Load())
}

// Panics and Goexit are crashes: they go on, the client sees a broken connection, nothing is stored, and the key is held until the
// lease lapses. Then the next attempt runs, and is told.
func TestACrashOfTheHandlerHoldsTheKeyUntilTheLeaseLapses(t *testing.T) {
	t.Parallel()
	for name, crash := range map[string]func(w http.ResponseWriter){
		"panic":           func(http.ResponseWriter) { panic("ouch") },
		"ErrAbortHandler": func(w http.ResponseWriter) { _, _ = io.WriteString(w, "10 bytes.."); panic(http.ErrAbortHandler) },
		"Goexit":          func(http.ResponseWriter) { runtime.Goexit() },
		"panic in a stream": func(w http.ResponseWriter) {
			_, _ = io.WriteString(w, "10 bytes..")
			w.(http.Flusher).Flush()
			panic(http.ErrAbortHandler)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := &movable{now: time.Date(2031, 2, 3, 4, 5, 6, 0, time.UTC)}
			store := newStore(t, pgstore.WithClock(c.Now))
			var attempts []pgstore.Record
			s := serveWith(t, store, func(w http.ResponseWriter, r *http.Request) {
				attempt, _ := httpidem.FromContext(r.Context())
				attempts = append(attempts, attempt.Record)
				if len(attempts) == 1 {
					crash(w)
				}
				created(w, r)
			})
			_, err := exchange(t, client, s.URL, request{body: "a"})
			require.Error(t, err)
			outstanding := s.send(t, request{body: "a"})
			require.Equal(t, "request-outstanding", outstanding.Problem())
			require.Equal(t, "key-reused", s.send(t, request{body: "b"}).Problem())
			c.Advance(lease)
			again := s.send(t, request{body: "a"})
			require.Equal(t, http.StatusCreated, again.Status)
			require.False(t, again.Replayed())
			require.Len(t, attempts, 2)
			require.Equal(t, attempts[0].Attempt, attempts[1].Abandoned)
			require.True(t, s.send(t, request{body: "a"}).Replayed())
			require.EqualValues(t, 2, s.runs.Load())
		})
	}
}

// The panic's value reaches the server as it was.
func TestAPanicGoesOnAsItWas(t *testing.T) {
	t.Parallel()
	wrapped, _ := wrap(t, newStore(t), func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) })
	require.PanicsWithValue(t, http.ErrAbortHandler, func() {
		wrapped.ServeHTTP(httptest.NewRecorder(), request{}.build(t.Context(), t, "http://example.com"))
	})
}

// movable is the time that a test sets.
type movable struct {
	mu  sync.Mutex
	now time.Time
}

func (c *movable) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

func (c *movable) Advance(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = c.now.Add(d)
}

// Environment of the child process of the next test.
const (
	childURL    = "HTTPIDEM_TEST_URL"
	childSchema = "HTTPIDEM_TEST_SCHEMA"
)

// The process is killed in the handler: 409 until the lease ends, then one more run, which is told of the abandoned attempt.
func TestAKilledProcessIsFollowedByOneMoreRun(t *testing.T) {
	t.Parallel()
	if os.Getenv(childURL) != "" {
		serveUntilKilled(t)
		return
	}
	const short = 3 * time.Second
	schema := pgtest.Schema(t)
	store, err := pgstore.New(pgtest.Pool(t), short, retention, pgstore.WithSchema(schema))
	require.NoError(t, err)
	var abandoned uint64
	s := serveWith(t, store, func(w http.ResponseWriter, r *http.Request) {
		attempt, _ := httpidem.FromContext(r.Context())
		abandoned = attempt.Abandoned
		created(w, r)
	})

	child := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^"+t.Name()+"$") //nolint:gosec // this test binary
	child.Env = append(os.Environ(), childURL+"="+pgtest.DSN(t), childSchema+"="+schema, pgtest.EnvURL+"="+pgtest.DSN(t))
	out, err := child.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, child.Start())
	lines := bufio.NewScanner(out)
	address, running := "", make(chan struct{})
	for address == "" && lines.Scan() {
		address, _ = strings.CutPrefix(lines.Text(), "listening on ")
		if !strings.HasPrefix(address, "http://") {
			address = ""
		}
	}
	require.NotEmpty(t, address)
	go func() {
		for lines.Scan() {
			if lines.Text() == "running" {
				close(running)
			}
		}
	}()
	var wg sync.WaitGroup
	wg.Go(func() {
		_, err := exchange(t, client, address, request{body: "a"})
		if err == nil {
			t.Error("a killed process has answered")
		}
	})
	closed(t, running, "the child's handler")
	require.NoError(t, child.Process.Kill())
	wg.Wait()
	_ = child.Wait()

	require.Equal(t, "request-outstanding", s.send(t, request{body: "a"}).Problem())
	var again answer
	require.Eventually(t, func() bool {
		again = s.send(t, request{body: "a"})
		return again.Problem() != "request-outstanding"
	}, 30*time.Second, 10*time.Millisecond)
	require.Equal(t, http.StatusCreated, again.Status)
	require.False(t, again.Replayed())
	require.EqualValues(t, 1, abandoned)
	require.EqualValues(t, 1, s.runs.Load())
	require.True(t, s.send(t, request{body: "a"}).Replayed())
}

// serveUntilKilled is the child: its handler never ends.
func serveUntilKilled(t *testing.T) {
	t.Helper()
	pool, err := pgxpool.New(t.Context(), os.Getenv(childURL))
	require.NoError(t, err)
	defer pool.Close()
	store, err := pgstore.New(pool, 3*time.Second, retention, pgstore.WithSchema(os.Getenv(childSchema)))
	require.NoError(t, err)
	s := serveWith(t, store, func(http.ResponseWriter, *http.Request) {
		_, _ = io.WriteString(os.Stdout, "running\n")
		select {}
	})
	_, _ = io.WriteString(os.Stdout, "listening on "+s.URL+"\n")
	<-t.Context().Done()
}

// A handler's context ends when its time is over, whatever the client does.
func TestAHandlersContextEndsWhenItsTimeIsOver(t *testing.T) {
	t.Parallel()
	s := serve(t, func(w http.ResponseWriter, r *http.Request) {
		<-r.Context().Done()
		http.Error(w, context.Cause(r.Context()).Error(), http.StatusGatewayTimeout)
	}, httpidem.WithHandlerTimeout(10*time.Millisecond))
	first := s.send(t, request{})
	require.Equal(t, http.StatusGatewayTimeout, first.Status)
	require.Equal(t, "context deadline exceeded\n", first.Body)
	require.True(t, s.send(t, request{}).Replayed()) // nobody knows how far it got: 504 is final
}

// The lease is lost while the handler runs, to somebody who resolved the key by hand: its context ends with the cause, its client gets
// the real response, the hook is told, and repeats get what was decided.
func TestALostLeaseEndsTheHandlersContext(t *testing.T) {
	t.Parallel()
	store := newStoreWithLease(t, 3*time.Second) // a beat each second
	var told hook
	var cause error
	s := serveWith(t, store, func(w http.ResponseWriter, r *http.Request) {
		attempt, _ := httpidem.FromContext(r.Context())
		err := store.Resolve(r.Context(), keyOf("POST /orders", aKey), attempt.Attempt, pgstore.AsDone("HTTP/1.1 202 Accepted\r\nContent-Length: 2\r\nX-By: hand\r\n\r\nok"))
		if err != nil {
			panic(err)
		}
		<-r.Context().Done()
		cause = context.Cause(r.Context())
		created(w, r)
	}, told.option())
	first := s.send(t, request{body: "mine"})
	require.Equal(t, "mine", first.Body)
	require.ErrorIs(t, cause, pgstore.ErrStaleAttempt)
	require.Len(t, told.errors(), 1)
	require.ErrorIs(t, told.errors()[0], pgstore.ErrNotRecorded)
	again := s.send(t, request{body: "mine"})
	require.Equal(t, http.StatusAccepted, again.Status)
	require.Equal(t, "ok", again.Body)
	require.Equal(t, "hand", again.Header.Get("X-By"))
	require.True(t, again.Replayed())
}

// A key that was resolved by hand to something that is no response, or failed, or is parked: each says so, and nothing runs.
func TestKeysThatWereSettledOtherwiseAreAnswered(t *testing.T) {
	t.Parallel()
	c := &movable{now: time.Date(2031, 2, 3, 4, 5, 6, 0, time.UTC)}
	store := newStore(t, pgstore.WithClock(c.Now), pgstore.WithoutTakeover())
	var told hook
	s := serveWith(t, store, func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }, told.option())
	_, err := exchange(t, client, s.URL, request{})
	require.Error(t, err)
	c.Advance(lease)
	parked := s.send(t, request{})
	require.Equal(t, http.StatusConflict, parked.Status)
	require.Equal(t, "operation-abandoned", parked.Problem())
	require.Equal(t, "key-reused", s.send(t, request{body: "other"}).Problem())
	require.Empty(t, told.errors())

	key := keyOf("POST /orders", aKey)
	record, _, err := store.Get(t.Context(), key)
	require.NoError(t, err)
	require.NoError(t, store.Resolve(t.Context(), key, record.Attempt, pgstore.AsFailed()))
	failed := s.send(t, request{})
	require.Equal(t, http.StatusUnprocessableEntity, failed.Status)
	require.Equal(t, "operation-failed", failed.Problem())

	for n, response := range []string{"done", "", "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nshort"} {
		r := request{key: "bad-" + string(rune('0'+n))}
		_, err := exchange(t, client, s.URL, r)
		require.Error(t, err)
		key := keyOf("POST /orders", r.key)
		record, _, err := store.Get(t.Context(), key)
		require.NoError(t, err)
		require.NoError(t, store.Resolve(t.Context(), key, record.Attempt, pgstore.AsDone(response)))
		a := s.send(t, r)
		require.Equal(t, http.StatusConflict, a.Status)
		require.Equal(t, "response-not-stored", a.Problem())
		require.Len(t, told.errors(), n+1)
	}
	require.EqualValues(t, 4, s.runs.Load())
}
