package httpidem_test

import (
	"crypto/tls"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"os"
	"os/exec"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/archlab/idempotency/httpidem"
)

// HTTP/1.0 has no chunks: the connection's end or a length tells where a response ends.
func TestHTTP10(t *testing.T) {
	t.Parallel()
	s := serve(t, created)
	for i := range 2 {
		a := rawExchange(t, s, "POST /orders HTTP/1.0\r\nTenant: acct_7\r\nIdempotency-Key: \"ten\"\r\nContent-Length: 3\r\n\r\nabc")
		require.Equal(t, http.StatusCreated, a.Status)
		require.Equal(t, "abc", a.Body)
		require.Equal(t, "3", a.Header.Get("Content-Length"))
		require.Equal(t, i > 0, a.Replayed())
	}
	require.EqualValues(t, 1, s.runs.Load())
}

// HTTP/2, without TLS and with it: every handler of the other tests, first and again.
func TestHTTP2(t *testing.T) {
	t.Parallel()
	for name, encrypted := range map[string]bool{"h2c": false, "TLS": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for name, handler := range handlers {
				wrapped, runs := wrap(t, newStore(t), handler)
				s, client := http2(t, wrapped, encrypted)
				first, err := exchange(t, client, s, request{})
				require.NoError(t, err, name)
				again, err := exchange(t, client, s, request{})
				require.NoError(t, err, name)
				require.True(t, again.Replayed(), name)
				again.Header.Del(httpidem.ReplayedHeader)
				require.Equal(t, first, again, name)
				require.EqualValues(t, 1, runs.Load(), name)
			}
		})
	}
}

// http2 starts a server that speaks nothing but HTTP/2, and returns its URL and a client.
func http2(t *testing.T, handler http.Handler, encrypted bool) (string, *http.Client) {
	t.Helper()
	s := unstarted(handler)
	var protocols http.Protocols
	transport := &http.Transport{Protocols: &protocols, DisableCompression: true, DisableKeepAlives: true}
	if encrypted {
		protocols.SetHTTP2(true)
		s.EnableHTTP2 = true
		s.StartTLS()
		transport.TLSClientConfig = &tls.Config{RootCAs: s.Client().Transport.(*http.Transport).TLSClientConfig.RootCAs, MinVersion: tls.VersionTLS13}
	} else {
		protocols.SetUnencryptedHTTP2(true)
		s.Config.Protocols = &protocols
		s.Start()
	}
	t.Cleanup(s.Close)
	return s.URL, &http.Client{Transport: checked{t, transport}, CheckRedirect: client.CheckRedirect}
}

// checked fails a test whose responses come in another protocol.
type checked struct {
	t *testing.T
	http.RoundTripper
}

func (c checked) RoundTrip(r *http.Request) (*http.Response, error) {
	response, err := c.RoundTripper.RoundTrip(r)
	if err == nil {
		require.Equal(c.t, 2, response.ProtoMajor)
	}
	return response, err
}

// Informational responses reach the first client, and no other.
func TestInformationalResponsesAreForTheFirstClient(t *testing.T) {
	t.Parallel()
	s := serve(t, handlers["informational responses"])
	for i := range 2 {
		var codes []int
		var early http.Header
		trace := &httptrace.ClientTrace{Got1xxResponse: func(code int, header textproto.MIMEHeader) error {
			codes = append(codes, code)
			if code == http.StatusEarlyHints {
				early = http.Header(header)
			}
			return nil
		}}
		response, err := client.Do(request{}.build(httptrace.WithClientTrace(t.Context(), trace), t, s.URL))
		require.NoError(t, err)
		response.Body.Close()
		require.Equal(t, http.StatusCreated, response.StatusCode)
		require.Equal(t, "</style.css>; rel=preload", response.Header.Get("Link"))
		if i == 0 {
			require.Equal(t, []int{http.StatusEarlyHints, http.StatusProcessing}, codes)
			require.Equal(t, "</style.css>; rel=preload", early.Get("Link"))
			continue
		}
		require.Empty(t, codes)
	}
}

// A client that waits for 100 gets it when its body is wanted, and the handler gets the body.
func TestExpectContinue(t *testing.T) {
	t.Parallel()
	s := serve(t, created)
	for i := range 2 {
		continued := false
		trace := &httptrace.ClientTrace{Got100Continue: func() { continued = true }}
		r := request{body: "abc", header: http.Header{"Expect": {"100-continue"}}}.build(httptrace.WithClientTrace(t.Context(), trace), t, s.URL)
		patient := &http.Client{Transport: &http.Transport{ExpectContinueTimeout: 1 << 40, DisableKeepAlives: true}}
		response, err := patient.Do(r)
		require.NoError(t, err)
		response.Body.Close()
		require.True(t, continued)
		require.Equal(t, http.StatusCreated, response.StatusCode)
		require.Equal(t, i > 0, response.Header.Get(httpidem.ReplayedHeader) == "true")
	}
}

// A kept connection serves one request after the other, replays and rejections too.
func TestAKeptConnectionStaysUsable(t *testing.T) {
	t.Parallel()
	s := serve(t, created)
	kept := &http.Client{Transport: &http.Transport{MaxConnsPerHost: 1}}
	t.Cleanup(kept.CloseIdleConnections)
	reused := 0
	for i, r := range []request{{body: "a"}, {body: "a"}, {body: "b"}, {key: "-", body: "c"}, {body: "a"}, {key: `"`, body: "d"}, {method: http.MethodGet}} {
		trace := &httptrace.ClientTrace{GotConn: func(info httptrace.GotConnInfo) {
			if info.Reused {
				reused++
			}
		}}
		out := r.build(httptrace.WithClientTrace(t.Context(), trace), t, s.URL)
		response, err := kept.Do(out)
		require.NoError(t, err)
		buffer := make([]byte, 2048)
		for err == nil {
			_, err = response.Body.Read(buffer)
		}
		response.Body.Close()
		require.Equal(t, i, reused)
	}
}

// curl, where there is one: what most people try first.
func TestCurl(t *testing.T) {
	t.Parallel()
	curl, err := exec.LookPath("curl")
	if err != nil && os.Getenv("CI") == "" {
		t.Skip("needs curl, which continuous integration installs")
	}
	require.NoError(t, err)
	s := serve(t, created)
	for i := range 2 {
		out, err := exec.CommandContext(t.Context(), curl, "-sS", "-i", "--compressed", "-H", "Idempotency-Key: curl-1", "-H", "Tenant: acct_7", //nolint:gosec // found on the path
			"-d", "amount=1", s.URL+"/orders").Output()
		require.NoError(t, err)
		require.Contains(t, string(out), "HTTP/1.1 201 Created\r\n")
		require.Contains(t, string(out), "\r\n\r\namount=1")
		if i > 0 {
			require.Contains(t, string(out), "Idempotent-Replayed: true\r\n")
		}
	}
}
