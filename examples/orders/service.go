package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/archlab/idempotency/httpidem"
	"github.com/archlab/idempotency/pgstore"
)

// handlerTimeout bounds the work on one order, whatever its client does.
const handlerTimeout = 20 * time.Second

// service sells things.
type service struct {
	pool  *pgxpool.Pool
	table string
}

// newService returns the service's handler, its table created.
func newService(ctx context.Context, pool *pgxpool.Pool, schema string, log *slog.Logger) (http.Handler, error) {
	s := &service{pool, pgx.Identifier{schema, "orders"}.Sanitize()}
	// An order remembers which request made it: an attempt that follows a lost one can look whether that one got so far.
	_, err := pool.Exec(ctx, `CREATE TABLE `+s.table+` (
		id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
		account     text NOT NULL,
		request_key text NOT NULL,
		item        text NOT NULL,
		quantity    integer NOT NULL,
		UNIQUE (account, request_key))`)
	if err != nil {
		return nil, fmt.Errorf("create the table of orders: %w", err)
	}
	store, err := pgstore.New(pool, lease, retention, pgstore.WithSchema(schema))
	if err != nil {
		return nil, err
	}
	idempotent, err := httpidem.NewMiddleware(store, accountOf,
		httpidem.WithDocumentation("/idempotency"),
		httpidem.WithHandlerTimeout(handlerTimeout),
		httpidem.WithErrorHook(func(r *http.Request, err error) {
			log.LogAttrs(r.Context(), slog.LevelError, "idempotency", slog.String("path", r.URL.Path), slog.Any("error", err))
		}))
	if err != nil {
		return nil, err
	}
	mux := http.NewServeMux()
	mux.Handle("POST /orders", authenticated(idempotent.Wrap(http.HandlerFunc(s.place))))
	mux.Handle("GET /orders/{id}", authenticated(http.HandlerFunc(s.show)))
	mux.Handle("GET /idempotency", idempotent.Spec())
	return logged(log, mux), nil
}

// order is what a client asks for, and gets.
type order struct {
	ID       int64  `json:"id,omitempty"`
	Item     string `json:"item"`
	Quantity int    `json:"quantity"`
}

// place makes an order. It runs once for each key; what it answers is what every repeat gets.
func (s *service) place(w http.ResponseWriter, r *http.Request) {
	var o order
	if err := json.NewDecoder(r.Body).Decode(&o); err != nil || o.Item == "" || o.Quantity < 1 {
		answer(w, http.StatusUnprocessableEntity, map[string]string{"error": "an order needs an item and a quantity of at least 1"})
		return
	}
	attempt, _ := httpidem.FromContext(r.Context())
	if attempt.Abandoned != 0 { // an attempt before this one was lost in the middle: it may have made the order
		switch made, found, err := s.find(r.Context(), "request_key", accountOf(r), attempt.Key.Value); {
		case err != nil:
			panic(err) // nobody knows: the next attempt looks again
		case found:
			placed(w, made)
			return
		}
	}
	switch o.Item {
	case "clock": // is made to order
		select {
		case <-time.After(3 * time.Second):
		case <-r.Context().Done():
			panic(http.ErrAbortHandler) // the key was lost, or time is up
		}
	case "moon": // is not to be had today, and nothing has happened: the client may ask again under the same key
		w.Header().Set("Retry-After", "60")
		answer(w, http.StatusServiceUnavailable, map[string]string{"error": "the supplier does not answer"})
		return
	}
	err := s.pool.QueryRow(r.Context(), `INSERT INTO `+s.table+` (account, request_key, item, quantity) VALUES ($1, $2, $3, $4) RETURNING id`,
		accountOf(r), attempt.Key.Value, o.Item, o.Quantity).Scan(&o.ID)
	if err != nil {
		panic(err) // it may have been written: a crash, so that the next attempt looks
	}
	placed(w, o)
}

func placed(w http.ResponseWriter, o order) {
	w.Header().Set("Location", "/orders/"+strconv.FormatInt(o.ID, 10))
	answer(w, http.StatusCreated, o)
}

// show shows an order.
func (s *service) show(w http.ResponseWriter, r *http.Request) {
	o, found, err := s.find(r.Context(), "id::text", accountOf(r), r.PathValue("id"))
	switch {
	case err != nil:
		panic(err)
	case !found:
		answer(w, http.StatusNotFound, map[string]string{"error": "there is no such order"})
	default:
		answer(w, http.StatusOK, o)
	}
}

// find returns an account's order whose column has a value.
func (s *service) find(ctx context.Context, column, account, value string) (o order, found bool, err error) {
	err = s.pool.QueryRow(ctx, `SELECT id, item, quantity FROM `+s.table+` WHERE account = $1 AND `+column+` = $2`, account, value).
		Scan(&o.ID, &o.Item, &o.Quantity)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return order{}, false, nil
	case err != nil:
		return order{}, false, fmt.Errorf("find an order: %w", err)
	}
	return o, true, nil
}

func answer(w http.ResponseWriter, status int, body any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(body) // a client that has gone will ask again
}

type accountKey struct{}

// authenticated lets nobody through who does not say which account it is. In this example the token is the account; in a service
// it is looked up. It stands before the middleware, so that replays are protected too.
func authenticated(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		account, ok := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
		if !ok || account == "" {
			w.Header().Set("WWW-Authenticate", "Bearer")
			answer(w, http.StatusUnauthorized, map[string]string{"error": "who are you?"})
			return
		}
		next.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), accountKey{}, account)))
	})
}

// accountOf returns the account that was authenticated, or "".
func accountOf(r *http.Request) string {
	account, _ := r.Context().Value(accountKey{}).(string)
	return account
}

// logged writes a line for each request. The key is left out: it is the client's own, and long logs make short secrets.
func logged(log *slog.Logger, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		started := time.Now()
		s := &statusWriter{ResponseWriter: w}
		defer func() { //nolint:contextcheck // the request's
			log.LogAttrs(r.Context(), slog.LevelInfo, "request",
				slog.String("method", r.Method), slog.String("path", r.URL.Path), slog.Int("status", s.status),
				slog.Bool("replayed", w.Header().Get(httpidem.ReplayedHeader) != ""), slog.Duration("took", time.Since(started)))
		}()
		next.ServeHTTP(s, r)
	})
}

// statusWriter remembers the status; 0 is a request that was never answered.
type statusWriter struct {
	http.ResponseWriter

	status int
}

// WriteHeader implements http.ResponseWriter.
func (w *statusWriter) WriteHeader(status int) {
	w.status = status
	w.ResponseWriter.WriteHeader(status)
}

// Unwrap is for http.ResponseController.
func (w *statusWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }
