package httpidem_test

import (
	"io"
	"net/http"
	"testing"

	"github.com/go-chi/chi/v5"
	chimiddleware "github.com/go-chi/chi/v5/middleware"
	"github.com/labstack/echo/v4"
	"github.com/stretchr/testify/require"

	"github.com/archlab/idempotency/httpidem"
)

// Behind net/http's mux, chi and echo: the same promise.
func TestItWorksBehindRouters(t *testing.T) {
	t.Parallel()
	for name, route := range map[string]func(idempotent func(http.Handler) http.Handler) http.Handler{
		"net/http, each route": func(idempotent func(http.Handler) http.Handler) http.Handler {
			mux := http.NewServeMux()
			mux.Handle("POST /orders/{id}", idempotent(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { placed(w, r.PathValue("id")) })))
			return mux
		},
		"net/http, the whole mux": func(idempotent func(http.Handler) http.Handler) http.Handler {
			mux := http.NewServeMux()
			mux.HandleFunc("POST /orders/{id}", func(w http.ResponseWriter, r *http.Request) { placed(w, r.PathValue("id")) })
			return idempotent(mux)
		},
		"chi, with its wrappers around and inside": func(idempotent func(http.Handler) http.Handler) http.Handler {
			router := chi.NewRouter()
			router.Use(chimiddleware.Compress(5), idempotent, chimiddleware.Recoverer)
			router.Post("/orders/{id}", func(w http.ResponseWriter, r *http.Request) { placed(w, chi.URLParam(r, "id")) })
			return router
		},
		"chi, one route": func(idempotent func(http.Handler) http.Handler) http.Handler {
			router := chi.NewRouter()
			router.With(idempotent).Post("/orders/{id}", func(w http.ResponseWriter, r *http.Request) { placed(w, chi.URLParam(r, "id")) })
			return router
		},
		"echo": func(idempotent func(http.Handler) http.Handler) http.Handler {
			router := echo.New()
			router.Use(echo.WrapMiddleware(idempotent))
			router.POST("/orders/:id", func(c echo.Context) error { return c.String(http.StatusCreated, c.Param("id")) })
			return router
		},
		"echo, one route": func(idempotent func(http.Handler) http.Handler) http.Handler {
			router := echo.New()
			router.POST("/orders/:id", func(c echo.Context) error { return c.String(http.StatusCreated, c.Param("id")) }, echo.WrapMiddleware(idempotent))
			return router
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			idempotent, err := httpidem.New(newStore(t), tenantOf)
			require.NoError(t, err)
			s := &server{Server: start(t, route(idempotent))}
			first := s.send(t, request{path: "/orders/7"})
			require.Equal(t, http.StatusCreated, first.Status)
			require.Equal(t, "7", first.Body)
			again := s.send(t, request{path: "/orders/7"})
			require.True(t, again.Replayed())
			require.Equal(t, "7", again.Body)
			other := s.send(t, request{path: "/orders/8", key: `"other"`})
			require.Equal(t, "8", other.Body)
			require.Contains(t, []string{"", "key-reused"}, s.send(t, request{path: "/orders/8"}).Problem())
			require.Equal(t, "key-missing", s.send(t, request{path: "/orders/7", key: "-"}).Problem())
		})
	}
}

func placed(w http.ResponseWriter, id string) {
	w.WriteHeader(http.StatusCreated)
	_, _ = io.WriteString(w, id)
}
