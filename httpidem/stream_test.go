package httpidem_test

import (
	"bufio"
	"bytes"
	"context"
	"io"
	"net"
	"net/http"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/archlab/idempotency/httpidem"
)

// requireNotStored checks that a repeat gets the answer for a response that was not stored, and that the handler does not run again.
// What passes to the client is there before its marker is recorded.
func requireNotStored(t *testing.T, s *server, r request) {
	t.Helper()
	require.Eventually(t, func() bool { return s.send(t, r).Problem() != "request-outstanding" }, 30*time.Second, time.Millisecond)
	for range 2 {
		again := s.send(t, r)
		require.Equal(t, http.StatusConflict, again.Status)
		require.Equal(t, "response-not-stored", again.Problem())
		require.NotContains(t, again.Header, "Retry-After")
		require.NotContains(t, again.Header, httpidem.ReplayedHeader)
	}
	require.EqualValues(t, 1, s.runs.Load())
}

// One byte less than the cap, the cap, one more: the first client gets every byte, and what fits is replayed.
func TestAResponseOverTheCapReachesTheFirstClientWhole(t *testing.T) {
	t.Parallel()
	const limit = 1 << 20
	for size, stored := range map[int]bool{limit - 1: true, limit: true, limit + 1: false, 3 * limit: false} {
		body := strings.Repeat("0123456789abcde\n", size/16+1)[:size]
		for name, write := range map[string]func(http.ResponseWriter){
			"in three writes": func(w http.ResponseWriter) {
				for _, part := range []string{body[:size/3], body[size/3 : size-1], body[size-1:]} {
					_, _ = w.Write([]byte(part))
				}
			},
			"in one write": func(w http.ResponseWriter) { _, _ = w.Write([]byte(body)) },
			"as a string":  func(w http.ResponseWriter) { _, _ = io.WriteString(w, body) },
			"copied":       func(w http.ResponseWriter) { _, _ = io.Copy(w, struct{ io.Reader }{strings.NewReader(body)}) },
		} {
			s := serve(t, func(w http.ResponseWriter, _ *http.Request) {
				w.WriteHeader(http.StatusCreated)
				write(w)
			})
			first := s.send(t, request{})
			require.Equal(t, http.StatusCreated, first.Status)
			require.Len(t, first.Body, len(body), "%d bytes %s", size, name)
			require.True(t, strings.HasPrefix(first.Body, body), "%d bytes %s", size, name)
			if !stored {
				requireNotStored(t, s, request{})
				continue
			}
			again := s.send(t, request{})
			require.True(t, again.Replayed() && body == again.Body, "%d bytes %s", size, name)
		}
	}
}

// A handler that flushes is heard at once.
func TestAStreamReachesTheClientAsItComes(t *testing.T) {
	t.Parallel()
	for name, flush := range map[string]func(http.ResponseWriter){
		"Flusher":            func(w http.ResponseWriter) { w.(http.Flusher).Flush() },
		"ResponseController": func(w http.ResponseWriter) { _ = http.NewResponseController(w).Flush() },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			heard := make(chan struct{})
			s := serve(t, func(w http.ResponseWriter, _ *http.Request) {
				w.Header().Set("Trailer", "Checksum")
				w.WriteHeader(http.StatusCreated)
				_, _ = io.WriteString(w, "one")
				flush(w)
				<-heard
				_, _ = io.WriteString(w, "two")
				w.Header().Set("Checksum", "abc")
				w.Header().Set(http.TrailerPrefix+"Late", "1")
			})
			response, err := client.Do(request{}.build(t.Context(), t, s.URL))
			require.NoError(t, err)
			defer response.Body.Close()
			require.Equal(t, http.StatusCreated, response.StatusCode)
			one := make([]byte, 3)
			_, err = io.ReadFull(response.Body, one)
			require.NoError(t, err)
			require.Equal(t, "one", string(one))
			require.Equal(t, "request-outstanding", s.send(t, request{}).Problem())
			close(heard)
			rest, err := io.ReadAll(response.Body)
			require.NoError(t, err)
			require.Equal(t, "two", string(rest))
			require.Equal(t, http.Header{"Checksum": {"abc"}, "Late": {"1"}}, response.Trailer)
			requireNotStored(t, s, request{})
		})
	}
}

// A flush before anything is written sends the header, as in the server.
func TestAnEmptyFlushSendsTheHeader(t *testing.T) {
	t.Parallel()
	s := serve(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("X-Early", "1")
		_ = http.NewResponseController(w).Flush()
		w.Header().Set("X-Late", "1")
	})
	first := s.send(t, request{})
	require.Equal(t, http.StatusOK, first.Status)
	require.Contains(t, first.Header, "X-Early")
	require.NotContains(t, first.Header, "X-Late")
	requireNotStored(t, s, request{})
}

func TestAHijackedConnectionIsNeverStored(t *testing.T) {
	t.Parallel()
	s := serve(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Query().Has("written") {
			w.Header().Set("Content-Length", "11")
			_, _ = io.WriteString(w, "hello ")
		}
		conn, buffered, err := http.NewResponseController(w).Hijack()
		if err != nil {
			panic(err)
		}
		defer conn.Close()
		if !r.URL.Query().Has("written") {
			_, _ = buffered.WriteString("HTTP/1.1 202 Accepted\r\nContent-Length: 11\r\n\r\nhello ")
		}
		_, _ = buffered.WriteString("world")
		_ = buffered.Flush()
		w.WriteHeader(http.StatusInternalServerError)
		if _, err := w.Write([]byte("x")); err != http.ErrHijacked { //nolint:errorlint // as net/http has it
			panic(err)
		}
		if _, err := io.Copy(w, struct{ io.Reader }{strings.NewReader("x")}); err != http.ErrHijacked { //nolint:errorlint // as net/http has it
			panic(err)
		}
		w.(http.Flusher).Flush() // says nothing, and does no harm
	})
	for path, status := range map[string]int{"/?written": http.StatusOK, "/": http.StatusAccepted} {
		s.runs.Store(0)
		r := request{path: path, key: `"` + path + `"`}
		first := s.send(t, r)
		require.Equal(t, status, first.Status)
		require.Equal(t, "hello world", first.Body)
		requireNotStored(t, s, r)
	}
}

// What a ResponseController asks of the server works through the wrapper; what the server cannot do is said, and costs nothing.
func TestResponseControllerWorksThroughTheWrapper(t *testing.T) {
	t.Parallel()
	s := serve(t, func(w http.ResponseWriter, r *http.Request) {
		control := http.NewResponseController(w)
		for _, err := range []error{
			control.SetReadDeadline(time.Now().Add(time.Minute)), control.SetWriteDeadline(time.Now().Add(time.Minute)), control.EnableFullDuplex(),
		} {
			if err != nil {
				panic(err)
			}
		}
		if _, ok := w.(http.Pusher); ok {
			panic("a push would not be recorded")
		}
		created(w, r)
	})
	require.Equal(t, http.StatusCreated, s.send(t, request{}).Status)
	require.True(t, s.send(t, request{}).Replayed())

	late := serve(t, func(w http.ResponseWriter, _ *http.Request) {
		_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(-time.Second))
		w.WriteHeader(http.StatusCreated)
	})
	_, err := exchange(t, client, late.URL, request{})
	require.Error(t, err) // the deadline reached the connection
	require.Equal(t, http.StatusCreated, late.send(t, request{}).Status)
	require.EqualValues(t, 1, late.runs.Load())
}

func TestAWriterWithoutFlushAndHijackIsNoPanic(t *testing.T) {
	t.Parallel()
	store := &spy{}
	wrapped, _ := wrap(t, store, func(w http.ResponseWriter, _ *http.Request) {
		control := http.NewResponseController(w)
		_, _, err := control.Hijack()
		for _, err := range []error{
			err, control.Flush(), control.SetReadDeadline(time.Time{}), control.SetWriteDeadline(time.Time{}), control.EnableFullDuplex(),
		} {
			if !strings.Contains(err.Error(), http.ErrNotSupported.Error()) {
				panic(err)
			}
		}
		w.(http.Flusher).Flush()
		_, _ = io.WriteString(w, "stored")
	})
	wrapped.ServeHTTP(nopWriter{http.Header{}}, request{}.build(t.Context(), t, "http://example.com"))
	require.Len(t, store.responses, 1)
	require.True(t, strings.HasSuffix(store.responses[0], "\r\n\r\nstored"), store.responses[0])
}

// unwrapping is outer middleware that only unwraps.
type unwrapping struct{ nopWriter }

func (u unwrapping) Unwrap() http.ResponseWriter { return flushing(u) }

type flushing struct{ nopWriter }

func (flushing) FlushError() error { return nil }

func TestAFlusherIsFoundBehindOuterMiddleware(t *testing.T) {
	t.Parallel()
	store := &spy{}
	wrapped, _ := wrap(t, store, func(w http.ResponseWriter, _ *http.Request) {
		if err := http.NewResponseController(w).Flush(); err != nil {
			panic(err)
		}
	})
	wrapped.ServeHTTP(unwrapping{nopWriter{http.Header{}}}, request{}.build(t.Context(), t, "http://example.com"))
	require.Equal(t, []string{"httpidem: the response was not stored: it was streamed"}, store.responses)
}

// Switching protocols is no response that anybody could repeat.
func TestSwitchingProtocolsPasses(t *testing.T) {
	t.Parallel()
	store := &spy{}
	wrapped, _ := wrap(t, store, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusSwitchingProtocols) })
	wrapped.ServeHTTP(nopWriter{http.Header{}}, request{}.build(t.Context(), t, "http://example.com"))
	require.Equal(t, []string{"httpidem: the response was not stored: it was streamed"}, store.responses)
}

// A gibibyte through the middleware: memory stays where it was.
func TestMemoryStaysFlatForALongStream(t *testing.T) { //nolint:paralleltest // it measures the whole process
	const size, chunk = 1 << 30, 1 << 20
	part := bytes.Repeat([]byte("x"), chunk)
	for name, write := range map[string]func(w http.ResponseWriter){ //nolint:paralleltest // as above
		"written": func(w http.ResponseWriter) {
			for range size / chunk {
				_, _ = w.Write(part)
			}
		},
		"copied": func(w http.ResponseWriter) { _, _ = io.Copy(w, io.LimitReader(endless{}, size)) },
	} {
		t.Run(name, func(t *testing.T) {
			var before, after runtime.MemStats
			s := serve(t, func(w http.ResponseWriter, _ *http.Request) {
				runtime.ReadMemStats(&before)
				write(w)
				runtime.ReadMemStats(&after)
			})
			response, err := client.Do(request{}.build(t.Context(), t, s.URL))
			require.NoError(t, err)
			defer response.Body.Close()
			n, err := io.Copy(io.Discard, response.Body)
			require.NoError(t, err)
			require.EqualValues(t, size, n)
			requireNotStored(t, s, request{})
			require.Less(t, after.TotalAlloc-before.TotalAlloc, uint64(16<<20))
		})
	}
}

// endless is a reader without an end, and without WriteTo.
type endless struct{}

func (endless) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = 'x'
	}
	return len(p), nil
}

// A client that goes away in the middle of a stream is what the handler's Write says; the operation ends as it ends.
func TestAClientThatLeavesAStreamIsSeenByTheHandler(t *testing.T) {
	t.Parallel()
	ended := make(chan error, 1)
	s := serve(t, func(w http.ResponseWriter, _ *http.Request) {
		var err error
		for err == nil {
			_, err = w.Write(make([]byte, 1<<16))
		}
		ended <- err
	})
	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	response, err := client.Do(request{}.build(ctx, t, s.URL))
	require.NoError(t, err)
	leave()
	response.Body.Close()
	select {
	case err := <-ended:
		require.ErrorAs(t, err, new(*net.OpError))
	case <-time.After(30 * time.Second):
		require.FailNow(t, "the handler still writes")
	}
	requireNotStored(t, s, request{})
}

// rawExchange writes text to a connection of its own and reads the response that comes back.
func rawExchange(tb testing.TB, s *server, text string) answer {
	tb.Helper()
	conn, err := new(net.Dialer).DialContext(tb.Context(), "tcp", s.Listener.Addr().String())
	require.NoError(tb, err)
	defer conn.Close()
	_, err = io.WriteString(conn, text)
	require.NoError(tb, err)
	response, err := http.ReadResponse(bufio.NewReader(conn), nil)
	require.NoError(tb, err)
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	require.NoError(tb, err)
	return answer{Status: response.StatusCode, Header: response.Header, Body: string(body)}
}
