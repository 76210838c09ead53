package httpidem_test

import (
	"bytes"
	"compress/gzip"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/klauspost/compress/gzhttp"
	"github.com/stretchr/testify/require"
)

var (
	withGzip    = http.Header{"Accept-Encoding": {"gzip"}}
	withoutGzip = http.Header{"Accept-Encoding": {"identity"}}
	compressed  = strings.Repeat("compress me ", 1000)
)

// plain returns an answer's body, decoded as its header says.
func plain(t *testing.T, a answer) string {
	t.Helper()
	if a.Header.Get("Content-Encoding") == "" {
		return a.Body
	}
	require.Equal(t, "gzip", a.Header.Get("Content-Encoding"))
	r, err := gzip.NewReader(bytes.NewReader([]byte(a.Body)))
	require.NoError(t, err)
	body, err := io.ReadAll(r)
	require.NoError(t, err)
	return string(body)
}

// Outside: every client gets what it can read, the first and each repeat, whoever came first.
func TestCompressionOutsideIsForEachClient(t *testing.T) {
	t.Parallel()
	for name, accepts := range map[string][]http.Header{
		"gzip first":     {withGzip, withoutGzip, withGzip, nil},
		"identity first": {withoutGzip, withGzip, nil, withGzip},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			wrapped, runs := wrap(t, newStore(t), func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, compressed) })
			s := &server{start(t, gzhttp.GzipHandler(wrapped)), runs}
			for i, accept := range accepts {
				a := s.send(t, request{header: accept})
				require.Equal(t, i > 0, a.Replayed())
				require.Equal(t, accept.Get("Accept-Encoding") == "gzip", a.Header.Get("Content-Encoding") == "gzip")
				require.Equal(t, compressed, plain(t, a))
				require.Equal(t, "Accept-Encoding", a.Header.Get("Vary"))
			}
			require.EqualValues(t, 1, runs.Load())
		})
	}
}

// Inside: it is not told what the first client accepts, so what is stored is for everyone.
func TestCompressionInsideDoesNotEncodeWhatIsStored(t *testing.T) {
	t.Parallel()
	handler := gzhttp.GzipHandler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, compressed) }))
	s := serve(t, handler.ServeHTTP)
	for i, accept := range []http.Header{withGzip, withoutGzip, nil} {
		a := s.send(t, request{header: accept})
		require.Equal(t, i > 0, a.Replayed())
		require.Empty(t, a.Header.Get("Content-Encoding"))
		require.Equal(t, compressed, a.Body)
	}
	require.EqualValues(t, 1, s.runs.Load())
}

// A handler that encodes unasked is taken at its word: the encoding and the bytes belong together, first and again.
func TestAnEncodingThatTheHandlerInsistsOnIsReplayedWhole(t *testing.T) {
	t.Parallel()
	var encoded bytes.Buffer
	zip := gzip.NewWriter(&encoded)
	_, _ = io.WriteString(zip, compressed)
	require.NoError(t, zip.Close())
	s := serve(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Encoding", "gzip")
		w.Header().Set("Content-Type", "text/plain")
		_, _ = w.Write(encoded.Bytes())
	})
	for i := range 2 {
		a := s.send(t, request{header: withoutGzip})
		require.Equal(t, i > 0, a.Replayed())
		require.Equal(t, "gzip", a.Header.Get("Content-Encoding"))
		require.Equal(t, compressed, plain(t, a))
	}
}
