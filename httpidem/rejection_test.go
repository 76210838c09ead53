package httpidem_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/archlab/idempotency/httpidem"
	"github.com/archlab/idempotency/pgstore"
)

// rejections returns what brings each rejection about: an error of the store, or a request.
func rejections() []struct {
	name string
	err  error
	send request
	opts []httpidem.Option
} {
	held := fmt.Errorf("do: %w", &pgstore.InProgressError{RetryAfter: 1500 * time.Millisecond})
	return []struct {
		name string
		err  error
		send request
		opts []httpidem.Option
	}{
		{name: "key-missing", send: request{key: "-"}},
		{name: "key-invalid", send: request{key: `"`}},
		{name: "tenant-unknown", send: request{tenant: "-"}},
		{name: "request-too-large", send: request{body: "ab"}, opts: []httpidem.Option{httpidem.WithMaxRequestBytes(1)}},
		{name: "request-unreadable", opts: []httpidem.Option{
			httpidem.WithFingerprint(func(*http.Request, string) (string, error) { return "", io.ErrUnexpectedEOF }),
		}},
		{name: "key-reused", err: fmt.Errorf("do: %w", pgstore.ErrConflict)},
		{name: "request-outstanding", err: held},
		{name: "operation-abandoned", err: pgstore.ErrAbandoned},
		{name: "operation-failed", err: pgstore.ErrFailed},
		{name: "response-not-stored"},
		{name: "store-unavailable", err: errors.New("secret: the database is down")},
	}
}

// rejected returns the answer to each rejection, in the order of the documentation.
func rejected(t *testing.T, opts ...httpidem.Option) map[string]*httptest.ResponseRecorder {
	t.Helper()
	answers := map[string]*httptest.ResponseRecorder{}
	for _, c := range rejections() {
		store := &spy{err: c.err}
		if c.name == "response-not-stored" {
			store.outcome = &pgstore.Outcome{Response: "httpidem: the response was not stored: it was streamed", Replayed: true}
		}
		wrapped, runs := wrap(t, store, created, append(c.opts, opts...)...)
		w := httptest.NewRecorder()
		wrapped.ServeHTTP(w, c.send.build(t.Context(), t, "http://example.com"))
		require.Zero(t, runs.Load(), c.name)
		answers[c.name] = w
	}
	return answers
}

// The table in the documentation has each rejection with its exact body; here they are made and compared.
func TestEveryRejectionIsAsDocumented(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile("../docs/http.md")
	require.NoError(t, err)
	_, section, found := strings.Cut(string(page), "\n## Rejections\n")
	require.True(t, found)
	section, _, _ = strings.Cut(section, "\n## ")
	for name, w := range rejected(t, httpidem.WithDocumentation("https://api.example.com/idempotency")) {
		var block strings.Builder
		fmt.Fprintf(&block, "```http\nHTTP/1.1 %d %s\n", w.Code, http.StatusText(w.Code))
		for _, field := range []string{"Content-Type", "Content-Language", "Link", "Retry-After"} {
			if value := w.Header().Get(field); value != "" {
				block.WriteString(field + ": " + value + "\n")
			}
		}
		block.WriteString("\n" + w.Body.String() + "```\n")
		require.Contains(t, section, "\n### "+name+"\n")
		require.Contains(t, section, block.String(), name)
	}
	require.Equal(t, len(rejections()), strings.Count(section, "\n### "))
}

func TestRejectionsAreProblemDocuments(t *testing.T) {
	t.Parallel()
	types := map[string]bool{}
	for name, w := range rejected(t) {
		require.Equal(t, "application/problem+json", w.Header().Get("Content-Type"))
		require.Equal(t, "en", w.Header().Get("Content-Language"))
		var problem struct {
			Type, Title, Detail string
			Status              int
		}
		decoder := json.NewDecoder(w.Body)
		decoder.DisallowUnknownFields()
		require.NoError(t, decoder.Decode(&problem))
		require.Equal(t, httpidem.DocumentationDefault+"#"+name, problem.Type)
		require.Equal(t, "<"+problem.Type+`>; rel="describedby"; type="text/html"`, w.Header().Get("Link"))
		require.Equal(t, w.Code, problem.Status)
		require.NotEmpty(t, problem.Title)
		require.NotEmpty(t, problem.Detail)
		require.NotContains(t, problem.Detail, "secret")
		require.False(t, types[problem.Type+problem.Title])
		types[problem.Type+problem.Title] = true
		switch name {
		case "request-outstanding":
			require.Equal(t, "2", w.Header().Get("Retry-After"), "whole seconds, rounded up")
		case "store-unavailable":
			require.Equal(t, "1", w.Header().Get("Retry-After"))
		default:
			require.Empty(t, w.Header().Get("Retry-After"), name)
		}
	}
}

// Every rejection can be answered in another way.
func TestEveryRejectionIsReplaceable(t *testing.T) {
	t.Parallel()
	seen := map[string]httpidem.Rejection{}
	for name, w := range rejected(t, httpidem.WithRejectionHandler(func(w http.ResponseWriter, _ *http.Request, rejection httpidem.Rejection) {
		_, name, _ := strings.Cut(rejection.Type, "#")
		seen[name] = rejection
		rejection.Status, rejection.Detail, rejection.RetryAfter = http.StatusTeapot, `<"ours">`, 0
		rejection.Respond(w)
	})) {
		require.Equal(t, http.StatusTeapot, w.Code)
		require.Contains(t, w.Body.String(), `"detail":"<\"ours\">"`)
		require.Contains(t, w.Body.String(), `"status":418`)
		require.Empty(t, w.Header().Get("Retry-After"))
		require.Contains(t, seen, name)
	}
	require.ErrorIs(t, seen["key-reused"].Err, pgstore.ErrConflict)
	require.ErrorIs(t, seen["request-outstanding"].Err, pgstore.ErrInProgress)
	require.ErrorContains(t, seen["store-unavailable"].Err, "secret")
	require.NoError(t, seen["key-missing"].Err)
}

// Whatever a rejection holds, its body is one JSON document that says just that.
func FuzzProblemBody(f *testing.F) {
	f.Add("https://example.com/#a", "Title", "Detail", 409, int64(1500))
	f.Add("\"\\\n\x00", "<>&\u2028", "\xff", 200, int64(-1))
	f.Fuzz(func(t *testing.T, typ, title, detail string, status int, retryAfter int64) {
		if status < 200 || status > 599 {
			status = 400
		}
		w := httptest.NewRecorder()
		httpidem.Rejection{Status: status, Type: typ, Title: title, Detail: detail, RetryAfter: time.Duration(retryAfter)}.Respond(w)
		var problem struct {
			Type, Title, Detail string
			Status              int
		}
		require.NoError(t, json.Unmarshal(w.Body.Bytes(), &problem))
		valid := func(s string) string { return strings.ToValidUTF8(s, "\ufffd") }
		require.Equal(t, status, problem.Status)
		for _, c := range [][2]string{{typ, problem.Type}, {title, problem.Title}, {detail, problem.Detail}} {
			if valid(c[0]) == c[0] {
				require.Equal(t, c[0], c[1])
			}
		}
		if seconds := w.Header().Get("Retry-After"); retryAfter > 0 {
			require.Regexp(t, `^[1-9][0-9]*$`, seconds)
		} else {
			require.Empty(t, seconds)
		}
	})
}
