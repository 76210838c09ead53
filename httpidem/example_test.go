package httpidem_test

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"

	"github.com/archlab/idempotency/httpidem"
)

// A service puts the middleware between authentication and the handler, and publishes its specification.
func Example() {
	store, leave := exampleStore()
	defer leave()
	idempotent, err := httpidem.NewMiddleware(store, func(r *http.Request) string { return r.Header.Get("Account") },
		httpidem.WithDocumentation("/idempotency"))
	if err != nil {
		fmt.Println(err)
		return
	}
	orders := 0
	mux := http.NewServeMux()
	mux.Handle("GET /idempotency", idempotent.Spec())
	mux.Handle("POST /orders", idempotent.Wrap(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		orders++
		w.WriteHeader(http.StatusCreated)
		_, _ = fmt.Fprintf(w, "order %d", orders)
	})))

	for _, body := range []string{"a book", "a book", "two books"} {
		r := httptest.NewRequest(http.MethodPost, "/orders", strings.NewReader(body)) //nolint:noctx // an example
		r.Header.Set("Account", "acct_7")
		r.Header.Set("Idempotency-Key", `"8e03978e-40d5-43e8-bc93-6894a57f9324"`)
		w := httptest.NewRecorder()
		mux.ServeHTTP(w, r)
		answer, _ := io.ReadAll(io.LimitReader(w.Body, 60))
		fmt.Println(w.Code, w.Header().Get("Idempotent-Replayed"), strings.TrimSpace(string(answer)))
	}
	// Output:
	// 201  order 1
	// 201 true order 1
	// 422  {"type":"/idempotency#key-reused","title":"Idempotency-Key i
}
