package httpidem_test

import (
	"net/http"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/archlab/idempotency/httpidem"
	"github.com/archlab/idempotency/pgstore"
)

// kept is whether a status is final, for every status that HTTP has a name for.
func TestStatusesThatPromiseNoEffectFreeTheKey(t *testing.T) {
	t.Parallel()
	free := map[int]bool{401: true, 403: true, 408: true, 425: true, 429: true, 503: true}
	status := make(chan int, 2)
	s := serve(t, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(<-status) })
	for code := 200; code < 600; code++ {
		if http.StatusText(code) == "" {
			continue
		}
		s.runs.Store(0)
		key := `"` + http.StatusText(code) + `"`
		status <- code
		first := s.send(t, request{key: key})
		require.Equal(t, code, first.Status)
		require.False(t, first.Replayed())
		if free[code] {
			status <- http.StatusCreated
			again := s.send(t, request{key: key})
			require.Equal(t, http.StatusCreated, again.Status, code)
			require.False(t, again.Replayed())
			require.EqualValues(t, 2, s.runs.Load())
			require.Equal(t, http.StatusCreated, s.send(t, request{key: key}).Status)
			continue
		}
		again := s.send(t, request{key: key})
		require.Equal(t, code, again.Status)
		require.True(t, again.Replayed(), code)
		require.EqualValues(t, 1, s.runs.Load(), code)
	}
}

// A freed key stays that request's: another one is a conflict all the same.
func TestAFreedKeyIsForTheSameRequest(t *testing.T) {
	t.Parallel()
	s := serve(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Retry-After", "7")
		http.Error(w, "slow down", http.StatusTooManyRequests)
	})
	first := s.send(t, request{body: "a"})
	require.Equal(t, "7", first.Header.Get("Retry-After"))
	require.Equal(t, "slow down\n", first.Body)
	require.Equal(t, "key-reused", s.send(t, request{body: "b"}).Problem())
	require.Equal(t, first, s.send(t, request{body: "a"}))
	require.EqualValues(t, 2, s.runs.Load())
}

func TestTheReleasingStatusesCanBeChosen(t *testing.T) {
	t.Parallel()
	handler := func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Want") == "503" {
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		w.WriteHeader(http.StatusBadRequest)
	}
	s := serve(t, handler, httpidem.WithReleasingStatuses(http.StatusBadRequest))
	require.False(t, s.send(t, request{}).Replayed())
	require.False(t, s.send(t, request{}).Replayed())
	unavailable := request{key: `"2"`, header: http.Header{"Want": {"503"}}}
	require.Equal(t, http.StatusServiceUnavailable, s.send(t, unavailable).Status)
	require.True(t, s.send(t, unavailable).Replayed())

	none := serve(t, handler, httpidem.WithReleasingStatuses())
	require.False(t, none.send(t, unavailable).Replayed())
	require.True(t, none.send(t, unavailable).Replayed())
}

// A handler knows better than its status.
func TestAHandlerCanReleaseTheKeyItself(t *testing.T) {
	t.Parallel()
	s := serve(t, func(w http.ResponseWriter, r *http.Request) {
		httpidem.Release(r.Context())
		w.WriteHeader(http.StatusInternalServerError)
	})
	for n := range int64(3) {
		a := s.send(t, request{})
		require.Equal(t, http.StatusInternalServerError, a.Status)
		require.Equal(t, n+1, s.runs.Load())
	}

	// Also where the response is a stream, and without the middleware it does nothing.
	stream := serve(t, func(w http.ResponseWriter, r *http.Request) {
		_ = http.NewResponseController(w).Flush()
		httpidem.Release(r.Context())
	})
	require.Equal(t, http.StatusOK, stream.send(t, request{}).Status)
	require.Equal(t, http.StatusOK, stream.send(t, request{}).Status)
	require.EqualValues(t, 2, stream.runs.Load())
	httpidem.Release(t.Context())
}

// The handler sees its attempt, and which one it follows.
func TestAHandlerSeesItsAttempt(t *testing.T) {
	t.Parallel()
	var seen []pgstore.Record
	s := serve(t, func(w http.ResponseWriter, r *http.Request) {
		attempt, ok := httpidem.FromContext(r.Context())
		if !ok {
			panic("no attempt")
		}
		seen = append(seen, attempt.Record)
		w.WriteHeader(http.StatusTooManyRequests)
	})
	s.send(t, request{})
	s.send(t, request{})
	require.Len(t, seen, 2)
	require.Less(t, seen[0].Attempt, seen[1].Attempt)
	require.Zero(t, seen[1].Abandoned) // the first promised that it had no effect
	require.Equal(t, pgstore.StateInProgress, seen[1].State)
	_, ok := httpidem.FromContext(t.Context())
	require.False(t, ok)
}
