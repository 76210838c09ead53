package httpidem_test

import (
	"context"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/archlab/idempotency/httpidem"
	"github.com/archlab/idempotency/pgstore"
)

// BenchmarkMiddleware puts a handler that writes a response of 1 KiB, 100 KiB and 1 MiB beside itself: alone; behind the middleware
// on a store that keeps nothing, which leaves the middleware's own work; behind it on PostgreSQL; and beside what the store alone
// takes, a bare Begin and Complete of as many bytes. Compare within one run. There are no sockets: they cost every one the same.
func BenchmarkMiddleware(b *testing.B) {
	for _, size := range []int{1 << 10, 100 << 10, 1 << 20} {
		body := []byte(strings.Repeat("0123456789abcdef", size/16))
		handler := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/octet-stream")
			w.WriteHeader(http.StatusCreated)
			_, _ = w.Write(body)
		})
		store := newStore(b)
		n := 0
		next := func() string {
			n++
			return fmt.Sprintf(`"%036d"`, n)
		}
		behind := func(store httpidem.Store) http.Handler {
			idempotent, err := httpidem.New(store, tenantOf)
			require.NoError(b, err)
			return idempotent(handler)
		}
		send := func(handler http.Handler, key string) {
			r := request{key: key, body: `{"amount":10}`}.build(b.Context(), b, "http://example.com")
			handler.ServeHTTP(nopWriter{http.Header{}}, r)
		}
		run := func(name string, call func()) {
			b.Run(strconv.Itoa(size>>10)+"KiB/"+name, func(b *testing.B) {
				b.ReportAllocs()
				for b.Loop() {
					call()
				}
			})
		}
		run("handler_alone", func() { send(handler, next()) })
		own := behind(&forgetful{})
		run("own_work_first", func() { send(own, next()) })
		kept := &memory{}
		replaying := behind(kept)
		send(replaying, aKey)
		run("own_work_replay", func() { send(replaying, aKey) })
		run("bare_Begin_and_Complete", func() {
			key := keyOf("bare", next())
			record, created, err := store.Begin(b.Context(), key, "fingerprint")
			if err != nil || !created {
				b.Fatal(created, err)
			}
			if err := store.Complete(b.Context(), key, "fingerprint", record.Attempt, string(body)); err != nil {
				b.Fatal(err)
			}
		})
		whole := behind(store)
		run("on_PostgreSQL_first", func() { send(whole, next()) })
		send(whole, aKey)
		run("on_PostgreSQL_replay", func() { send(whole, aKey) })
		key := keyOf("bare", next())
		record, _, err := store.Begin(b.Context(), key, "fingerprint")
		require.NoError(b, err)
		require.NoError(b, store.Complete(b.Context(), key, "fingerprint", record.Attempt, string(body)))
		run("bare_Begin_of_a_repeat", func() {
			if _, _, err := store.Begin(b.Context(), key, "fingerprint"); err != nil {
				b.Fatal(err)
			}
		})
	}
}

// forgetful runs every function and keeps nothing.
type forgetful struct{ spy }

func (*forgetful) Do(
	ctx context.Context, _ pgstore.Key, _ string, fn func(ctx context.Context, r pgstore.Record) (string, error), _ ...pgstore.DoOption,
) (pgstore.Outcome, error) {
	response, err := fn(ctx, pgstore.Record{Attempt: 1})
	return pgstore.Outcome{Response: response, Attempt: 1}, err
}
