package httpidem_test

import (
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/archlab/idempotency/internal/pgtest"
	"github.com/archlab/idempotency/migrations"
	"github.com/archlab/idempotency/pgstore"
)

// A database that is stopped: nothing runs unprotected. One that stops between the handler and recording: the client gets the real
// response, the hook is told, and a repeat does not run the handler before the lease has ended.
func TestTheDatabaseIsStopped(t *testing.T) {
	t.Parallel()
	const short = 2 * time.Second
	database := pgtest.NewServer(t)
	pool, err := pgxpool.New(t.Context(), database.URL())
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	_, err = migrations.Up(t.Context(), pool)
	require.NoError(t, err)
	store, err := pgstore.New(pool, short, retention)
	require.NoError(t, err)
	var told hook
	var stop func()
	s := serveWith(t, store, func(w http.ResponseWriter, r *http.Request) {
		if stop != nil {
			stop()
		}
		created(w, r)
	}, told.option())

	require.NoError(t, database.Stop(t.Context()))
	down := s.send(t, request{body: "a"})
	require.Equal(t, http.StatusServiceUnavailable, down.Status)
	require.Equal(t, "application/problem+json", down.Header.Get("Content-Type"))
	require.Equal(t, "store-unavailable", down.Problem())
	require.Equal(t, "1", down.Header.Get("Retry-After"))
	require.NotContains(t, down.Body, "connect", "what is wrong inside is not for clients")
	require.Zero(t, s.runs.Load())
	require.Len(t, told.errors(), 1)

	require.NoError(t, database.Start(t.Context()))
	require.Equal(t, "a", s.send(t, request{body: "a"}).Body)

	stop = func() { require.NoError(t, database.Stop(t.Context())) }
	r := request{body: "b", key: `"b"`}
	response := s.send(t, r)
	require.Equal(t, http.StatusCreated, response.Status)
	require.Equal(t, "b", response.Body)
	require.False(t, response.Replayed())
	require.Len(t, told.errors(), 2)
	require.ErrorIs(t, told.errors()[1], pgstore.ErrNotRecorded)
	require.EqualValues(t, 2, s.runs.Load())
	require.Equal(t, "store-unavailable", s.send(t, r).Problem())
	require.EqualValues(t, 2, s.runs.Load())

	// The lease is over when recording has been given up; then the next attempt may run, and knows of this one.
	stop = nil
	require.NoError(t, database.Start(t.Context()))
	again := s.send(t, r)
	require.Equal(t, http.StatusCreated, again.Status)
	require.EqualValues(t, 3, s.runs.Load())
	record, _, err := store.Get(t.Context(), keyOf("POST /orders", "b"))
	require.NoError(t, err)
	require.NotZero(t, record.Abandoned)
}

// This server's way to the database is cut before it can record: a repeat at another server is told to wait as long as the lease
// lasts, and does not run the handler.
func TestAResponseThatCannotBeRecordedHoldsTheKey(t *testing.T) {
	t.Parallel()
	schema := pgtest.Schema(t)
	proxy := pgtest.NewProxy(t, pgtest.DSN(t))
	pool, err := pgxpool.New(t.Context(), proxy.URL())
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	const short = 3 * time.Second
	cutOff, err := pgstore.New(pool, short, retention, pgstore.WithSchema(schema))
	require.NoError(t, err)
	connected, err := pgstore.New(pgtest.Pool(t), short, retention, pgstore.WithSchema(schema))
	require.NoError(t, err)

	var told hook
	down := make(chan struct{})
	s := serveWith(t, cutOff, func(w http.ResponseWriter, r *http.Request) {
		proxy.Down()
		close(down)
		created(w, r)
	}, told.option())
	other := serveWith(t, connected, created)
	var first answer
	var wg sync.WaitGroup
	wg.Go(func() { first = s.send(t, request{body: "a"}) })
	closed(t, down, "the handler")
	require.Equal(t, "request-outstanding", other.send(t, request{body: "a"}).Problem())
	require.Zero(t, other.runs.Load())
	wg.Wait()
	require.Equal(t, http.StatusCreated, first.Status)
	require.Equal(t, "a", first.Body)
	require.Len(t, told.errors(), 1)
	require.ErrorIs(t, told.errors()[0], pgstore.ErrNotRecorded)
	require.EqualValues(t, 1, s.runs.Load())
}
