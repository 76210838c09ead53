package httpidem_test

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/archlab/idempotency/httpidem"
)

// spec returns the answer of a Spec handler.
func spec(t *testing.T, method, accept string, opts ...httpidem.Option) *httptest.ResponseRecorder {
	t.Helper()
	m, err := httpidem.NewMiddleware(&spy{}, tenantOf, opts...)
	require.NoError(t, err)
	r := httptest.NewRequestWithContext(t.Context(), method, "/idempotency", http.NoBody)
	if accept != "" {
		r.Header.Set("Accept", accept)
	}
	w := httptest.NewRecorder()
	m.Spec().ServeHTTP(w, r)
	return w
}

func TestSpecIsForWhoeverAsks(t *testing.T) {
	t.Parallel()
	for accept, isJSON := range map[string]bool{
		"": false, "*/*": false, "text/html": false, "application/json": true, "text/html, application/json;q=0.9": false,
		"text/html;q=0.5, application/json": true, "application/json, text/plain, */*": true, "nonsense;;": false,
		"text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8": false,
	} {
		w := spec(t, http.MethodGet, accept)
		require.Equal(t, http.StatusOK, w.Code)
		require.Equal(t, "Accept", w.Header().Get("Vary"))
		require.Equal(t, isJSON, w.Header().Get("Content-Type") == "application/json", accept)
		require.Equal(t, isJSON, json.Valid(w.Body.Bytes()), accept)
	}
	require.Equal(t, http.StatusOK, spec(t, http.MethodHead, "").Code)
	w := spec(t, http.MethodPost, "")
	require.Equal(t, http.StatusMethodNotAllowed, w.Code)
	require.Equal(t, "GET, HEAD", w.Header().Get("Allow"))
}

// Every setting that a client can notice is in what is published.
func TestSpecIsMadeFromTheConfigurationInForce(t *testing.T) {
	t.Parallel()
	read := func(opts ...httpidem.Option) map[string]any {
		var published map[string]any
		require.NoError(t, json.Unmarshal(spec(t, http.MethodGet, "application/json", opts...).Body.Bytes(), &published))
		return published
	}
	usual := read()
	require.Equal(t, map[string]any{
		"draft": httpidem.DocumentationDefault, "header": "Idempotency-Key", "required": true, "quoted_only": false,
		"max_key_bytes": 512.0, "methods": []any{"PATCH", "POST"}, "fingerprint": "method, path, query and body, byte for byte; no header",
		"retention_seconds": retention.Seconds(), "lease_seconds": lease.Seconds(), "wait_seconds": 0.0, "max_request_bytes": 1048576.0,
		"max_response_bytes": 1048576.0, "releasing_statuses": []any{401.0, 403.0, 408.0, 425.0, 429.0, 503.0},
		"replayed_header": "Idempotent-Replayed", "not_replayed": usual["not_replayed"], "problems": usual["problems"],
	}, usual)
	require.Contains(t, usual["not_replayed"], "Set-Cookie")
	require.Len(t, usual["problems"], len(rejections()))

	opts := []httpidem.Option{
		httpidem.WithOptionalKey(), httpidem.WithStrictKey(), httpidem.WithMethods(http.MethodPut), httpidem.WithWait(1500 * time.Millisecond),
		httpidem.WithFingerprint(func(*http.Request, string) (string, error) { return "x", nil }), httpidem.WithMaxRequestBytes(1000),
		httpidem.WithMaxResponseBytes(2 << 10), httpidem.WithReleasingStatuses(), httpidem.WithDocumentation("/idempotency"),
	}
	other := read(opts...)
	for name, value := range map[string]any{
		"required": false, "quoted_only": true, "methods": []any{"PUT"}, "wait_seconds": 1.5, "fingerprint": "chosen by this service",
		"max_request_bytes": 1000.0, "max_response_bytes": 2048.0, "releasing_statuses": nil,
	} {
		require.Equal(t, value, other[name], name)
	}
	first := other["problems"].([]any)[0].(map[string]any)
	require.Equal(t, "/idempotency#key-missing", first["type"])

	page := spec(t, http.MethodGet, "", opts...).Body.String()
	for _, text := range []string{"No. A PUT request that has none", "quotes are required", "up to 1.5s", "1000 bytes", "2 KiB", "Every response is kept", "chosen by this service"} {
		require.Contains(t, page, text)
	}
	page = spec(t, http.MethodGet, "").Body.String()
	for _, text := range []string{"Yes, for every PATCH or POST request.", "for 1 day after", "no sooner than 1 minute", "1 MiB", "429 Too Many Requests", "<code>Set-Cookie</code>"} {
		require.Contains(t, page, text)
	}
}

// The link in a rejection leads to the place on the page that explains it.
func TestProblemTypesLeadIntoTheSpec(t *testing.T) {
	t.Parallel()
	page := spec(t, http.MethodGet, "").Body.String()
	for name, w := range rejected(t) {
		require.Equal(t, name, answer{Header: w.Header()}.Problem())
		require.Equal(t, 1, strings.Count(page, `id="`+name+`"`), name)
	}
	require.NotContains(t, page, "<script")
	require.Contains(t, page, `name="viewport"`)
}
