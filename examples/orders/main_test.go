package main_test

import (
	"bytes"
	"context"
	"flag"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	orders "github.com/archlab/idempotency/examples/orders"
	"github.com/archlab/idempotency/internal/pgtest"
	"github.com/archlab/idempotency/pgstore"
)

var update = flag.Bool("update", false, "write what the README's lines print into it")

func TestMain(m *testing.M) { pgtest.Main(m) }

// output is what a program writes while it runs.
type output struct {
	mu    sync.Mutex
	text  bytes.Buffer
	lines chan string
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.text.Write(p)
	if bytes.Contains(p, []byte("Serving orders on http://")) {
		address, _, _ := strings.Cut(strings.SplitAfter(string(p), "http://")[1], ";")
		o.lines <- address
	}
	return len(p), nil
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.String()
}

// The README's lines, run as they are against the program, say what the README says.
func TestTheReadmesLinesSayWhatTheySay(t *testing.T) {
	t.Parallel()
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	stdout, stderr := &output{lines: make(chan string, 1)}, &output{}
	code := make(chan int, 1)
	go func() { code <- orders.Run(ctx, []string{"-addr", "127.0.0.1:0"}, stdout, stderr) }()
	var address string
	select {
	case address = <-stdout.lines:
	case <-code:
		require.FailNow(t, "it does not serve", "%s%s", stdout, stderr)
	}

	readme, err := os.ReadFile("README.md")
	require.NoError(t, err)
	if _, err := exec.LookPath("curl"); err != nil && os.Getenv("CI") == "" {
		t.Skip("the README's lines need curl, which continuous integration installs")
	}
	page := string(readme)
	blocks := regexp.MustCompile("(?s)```sh\n([^`]*)```\n\n```(?:http|json)\n([^`]*)```").FindAllStringSubmatchIndex(page, -1)
	require.Len(t, blocks, 10)
	var written strings.Builder
	last := 0
	for _, block := range blocks {
		script := strings.ReplaceAll(page[block[2]:block[3]], "localhost:8080", address)
		command := exec.CommandContext(ctx, "bash", "-c", script) //nolint:gosec // our own README
		command.Env = append(os.Environ(), "no_proxy=*")
		command.Stderr = stderr
		out, err := command.Output()
		require.NoError(t, err, "%s\n%s", script, stderr)
		got := strings.ReplaceAll(string(out), "\r\n", "\n")
		got = regexp.MustCompile(`(?m)^Date: .*\n`).ReplaceAllString(got, "")
		if !*update {
			require.Equal(t, page[block[4]:block[5]], got, script)
		}
		written.WriteString(page[last:block[4]] + got)
		last = block[5]
	}
	if *update {
		require.NoError(t, os.WriteFile("README.md", []byte(written.String()+page[last:]), 0o600))
	}
	stop()
	require.Zero(t, <-code, "%s%s", stdout, stderr)
	require.Contains(t, stdout.String(), "Waiting for the requests that are running.")
	require.Contains(t, stderr.String(), `"msg":"request","method":"POST","path":"/orders","status":201,"replayed":true`)
	require.NotContains(t, stderr.String(), "first", "keys are not logged")
}

// A shutdown in the middle of a clock: it is made, answered and recorded.
func TestAShutdownWaitsForRunningRequests(t *testing.T) {
	t.Parallel()
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	stdout, stderr := &output{lines: make(chan string, 1)}, &output{}
	code := make(chan int, 1)
	go func() { code <- orders.Run(ctx, []string{"-addr", "127.0.0.1:0"}, stdout, stderr) }()
	address := <-stdout.lines
	post := func() (*http.Response, error) {
		r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+address+"/orders", strings.NewReader(`{"item":"clock","quantity":1}`))
		require.NoError(t, err)
		r.Header.Set("Authorization", "Bearer acct_7")
		r.Header.Set("Idempotency-Key", "k")
		return (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Do(r)
	}
	statuses := make(chan int, 2)
	for range 2 {
		go func() {
			response, err := post()
			if err != nil {
				statuses <- 0
				return
			}
			response.Body.Close()
			statuses <- response.StatusCode
		}()
	}
	require.Equal(t, http.StatusConflict, <-statuses, "one is told at once that the other runs")
	stop()
	require.Equal(t, http.StatusCreated, <-statuses)
	require.Zero(t, <-code, "%s%s", stdout, stderr)
}

// An attempt that was lost after it had made the order: the next one finds it, and makes no second one.
func TestALostAttemptsOrderIsFound(t *testing.T) {
	t.Parallel()
	pool, schema := pgtest.Pool(t), pgtest.Schema(t)
	handler, err := orders.NewService(t.Context(), pool, schema, slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	s := httptest.NewServer(handler)
	defer s.Close()
	table := pgx.Identifier{schema, "orders"}.Sanitize()
	const body = `{"item":"book","quantity":2}`
	post := func() (int, string) {
		r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, s.URL+"/orders", strings.NewReader(body))
		require.NoError(t, err)
		r.Header.Set("Authorization", "Bearer acct_7")
		r.Header.Set("Idempotency-Key", "k")
		response, err := s.Client().Do(r)
		require.NoError(t, err)
		defer response.Body.Close()
		got, err := io.ReadAll(response.Body)
		require.NoError(t, err)
		return response.StatusCode, string(got)
	}
	status, _ := post()
	require.Equal(t, http.StatusCreated, status)
	// As if its process had died before it could record the response.
	_, err = pool.Exec(t.Context(), `UPDATE `+pgx.Identifier{schema, "idempotency_keys"}.Sanitize()+`
		SET state = 'in_progress', response = NULL, expires_at = statement_timestamp() - interval '1 second'`)
	require.NoError(t, err)
	store, err := pgstore.New(pool, time.Minute, time.Hour, pgstore.WithSchema(schema))
	require.NoError(t, err)
	status, got := post()
	require.Equal(t, http.StatusCreated, status)
	require.JSONEq(t, `{"id":1,"item":"book","quantity":2}`, got)
	record, found, err := store.Get(t.Context(), pgstore.Key{Tenant: "acct_7", Operation: "POST /orders", Value: "k"})
	require.NoError(t, err)
	require.True(t, found)
	require.EqualValues(t, 1, record.Abandoned)
	var n int
	require.NoError(t, pool.QueryRow(t.Context(), `SELECT count(*) FROM `+table).Scan(&n))
	require.Equal(t, 1, n)
}

func TestOrdersAreShownToTheirAccountAlone(t *testing.T) {
	t.Parallel()
	pool, schema := pgtest.Pool(t), pgtest.Schema(t)
	handler, err := orders.NewService(t.Context(), pool, schema, slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	send := func(method, path, account, body string) (int, string) {
		r := httptest.NewRequestWithContext(t.Context(), method, path, strings.NewReader(body))
		r.Header.Set("Idempotency-Key", "k")
		if account != "" {
			r.Header.Set("Authorization", "Bearer "+account)
		}
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, r)
		return w.Code, w.Body.String()
	}
	status, _ := send(http.MethodPost, "/orders", "", `{"item":"book","quantity":2}`)
	require.Equal(t, http.StatusUnauthorized, status)
	status, made := send(http.MethodPost, "/orders", "a", `{"item":"book","quantity":2}`)
	require.Equal(t, http.StatusCreated, status)
	status, shown := send(http.MethodGet, "/orders/1", "a", "")
	require.Equal(t, http.StatusOK, status)
	require.Equal(t, made, shown)
	status, _ = send(http.MethodGet, "/orders/1", "b", "")
	require.Equal(t, http.StatusNotFound, status)
}

func TestWrongFlagsAreRefused(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{{"extra"}, {"-unknown"}} {
		var stderr bytes.Buffer
		require.Equal(t, 2, orders.Run(t.Context(), args, io.Discard, &stderr))
		require.NotEmpty(t, stderr.String())
	}
	var stderr bytes.Buffer
	require.Equal(t, 1, orders.Run(t.Context(), []string{"-addr", "256.0.0.1:1"}, io.Discard, &stderr))
	require.Contains(t, stderr.String(), "-addr takes another address")
}
