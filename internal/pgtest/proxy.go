package pgtest

import (
	"context"
	"net"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

const (
	dialTimeout  = 10 * time.Second // for the proxy to reach its server
	drainTimeout = 10 * time.Second // for the server to end a session that was cut
	waitTimeout  = 30 * time.Second // for what a test waits for
)

// Proxy stands between clients and a server, reads the messages that go by, and fails at the one that a test names: so a test of a
// lost answer needs neither luck nor sleep. Clients speak to it without TLS.
//
// A fault strikes once, at the first message, of any connection, that its match accepts. Where several are set, the one that was
// set first is asked first, and a message that it takes is not shown to the others; set a fault several times for it to strike as
// often. A match is called for one message at a time and must not call the proxy. Terminate, with which a client says goodbye, is
// not shown to it.
//
// Requests and replies are counted in cycles: what a client sends up to and including a Sync (or a simple Query) is one request, and
// what the server answers, up to and including ReadyForQuery, is its reply. In autocommit the effects are committed when
// ReadyForQuery comes, and not before the server has read the Sync. The startup, with its passwords, is a cycle too; its reply is what
// follows when the server knows who the client is.
type Proxy struct {
	address  string
	network  string
	target   string
	listener net.Listener
	ended    <-chan struct{} // closed at the test's end
	running  sync.WaitGroup

	mu         sync.Mutex
	faults     []*Fault // those that have not struck
	sessions   map[*session]struct{}
	accepted   int
	down       bool
	roundTrips int
}

// NewProxy starts a proxy before the server that targetURL names, and closes it with all its connections when the test ends.
func NewProxy(tb testing.TB, targetURL string) *Proxy {
	tb.Helper()
	target, err := pgconn.ParseConfig(targetURL)
	if err != nil {
		tb.Fatalf("pgtest: the proxy's target: %v", err)
	}
	address, err := url.Parse(targetURL)
	if err != nil || address.Scheme == "" {
		tb.Fatalf("pgtest: the proxy's target must be a URL: %v", err)
	}
	query := address.Query()
	if strings.HasPrefix(query.Get("sslmode"), "verify-") || query.Get("sslmode") == "require" {
		tb.Fatalf("pgtest: the proxy speaks no TLS, which its target asks for; use a server of NewServer")
	}
	var config net.ListenConfig
	listener, err := config.Listen(tb.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		tb.Fatalf("pgtest: start the proxy: %v", err)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(tb.Context())) // sessions end at cleanup, after those who use them
	p := &Proxy{listener: listener, ended: ctx.Done(), sessions: map[*session]struct{}{}}
	p.network, p.target = pgconn.NetworkAddress(target.Host, target.Port)
	query.Set("sslmode", "disable")
	query.Del("host") // they would overrule the address
	query.Del("port")
	address.Host, address.RawQuery = listener.Addr().String(), strings.ReplaceAll(query.Encode(), "+", "%20") // as pgx reads it
	p.address = address.String()
	p.running.Go(func() { p.accept(ctx) })
	tb.Cleanup(func() {
		listener.Close() //nolint:errcheck,gosec // nobody comes any more
		cancel()
		p.running.Wait()
	})
	return p
}

// URL returns the target's URL with the proxy's address in it.
func (p *Proxy) URL() string { return p.address }

// RoundTrips returns how many replies clients have got in full: cycles that they began, and whose ReadyForQuery was passed on. Those
// of the startup are not counted.
func (p *Proxy) RoundTrips() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.roundTrips
}

// CutBeforeSend cuts the connection in place of passing on the message: the server does not get it.
func (p *Proxy) CutBeforeSend(match func(FrontendMessage) bool) *Fault {
	return p.set(&Fault{kind: cutRequest, match: match})
}

// CutAfterReply passes the message on, waits until the server has answered its request to the end, and cuts the connection: the
// client gets nothing of the reply.
func (p *Proxy) CutAfterReply(match func(FrontendMessage) bool) *Fault {
	return p.set(&Fault{kind: cutReply, match: match})
}

// CutWithinReply is [Proxy.CutAfterReply] with the client getting the reply up to and including the first message of type last: 'D',
// say, for the first row, or 'C' for CommandComplete. The server has answered to the end all the same. If the reply has no such
// message, the client gets all but ReadyForQuery.
func (p *Proxy) CutWithinReply(match func(FrontendMessage) bool, last byte) *Fault {
	return p.set(&Fault{kind: cutReply, match: match, last: last})
}

// HoldRequest holds the message, and what the client sends after it, until [Fault.Release]. Then it reaches the server even if the
// client has gone: late, as messages do in networks.
func (p *Proxy) HoldRequest(match func(FrontendMessage) bool) *Fault {
	return p.set(&Fault{kind: holdRequest, match: match})
}

// HoldReply passes the message on, waits until the server has answered its request to the end, and holds the whole reply until
// [Fault.Release].
func (p *Proxy) HoldReply(match func(FrontendMessage) bool) *Fault {
	return p.set(&Fault{kind: holdReply, match: match})
}

// Down cuts all connections, and each new one at once, until [Proxy.Up].
func (p *Proxy) Down() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.down = true
	for s := range p.sessions {
		s.client.Close() //nolint:errcheck,gosec // it is meant to break
		s.server.Close() //nolint:errcheck,gosec // it is meant to break
	}
}

// Up ends [Proxy.Down].
func (p *Proxy) Up() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.down = false
}

// faultKind is what a fault does.
type faultKind int

const (
	cutRequest faultKind = iota
	cutReply
	holdRequest
	holdReply
)

// Fault is a failure that a test has asked a [Proxy] for.
type Fault struct {
	proxy    *Proxy
	kind     faultKind
	match    func(FrontendMessage) bool
	last     byte
	struck   bool          // guarded by the proxy's mutex
	reached  chan struct{} // closed when it is done
	reach    sync.Once
	released chan struct{}
	release  sync.Once
}

// Reached returns a channel that is closed when the fault is complete. A cut is when the client's connection is closed and the
// server has ended the session, its transaction rolled back and its locks gone. A hold is when the message is held; of a reply, when
// the server has answered to the end.
func (f *Fault) Reached() <-chan struct{} { return f.reached }

// Wait waits until the fault is complete, and fails the test if that takes over 30 seconds. Like tb.Fatal it belongs in the test's
// own goroutine.
func (f *Fault) Wait(tb testing.TB) {
	tb.Helper()
	timer := time.NewTimer(waitTimeout)
	defer timer.Stop()
	select {
	case <-f.reached:
	case <-timer.C:
		tb.Fatalf("pgtest: the proxy's fault did not come about within %v (message seen: %t)", waitTimeout, f.Struck())
	}
}

// Struck reports whether the message that the fault waits for has come.
func (f *Fault) Struck() bool {
	f.proxy.mu.Lock()
	defer f.proxy.mu.Unlock()
	return f.struck
}

// Release lets what is held go on. A fault that has not struck is withdrawn.
func (f *Fault) Release() {
	f.release.Do(func() { close(f.released) })
	f.proxy.mu.Lock()
	defer f.proxy.mu.Unlock()
	f.proxy.drop(f)
}

func (f *Fault) complete() { f.reach.Do(func() { close(f.reached) }) }

// hold keeps the calling goroutine until the fault is released, or the test is over.
func (f *Fault) hold() {
	f.complete()
	select {
	case <-f.released:
	case <-f.proxy.ended:
	}
}

func (p *Proxy) set(f *Fault) *Fault {
	f.proxy, f.reached, f.released = p, make(chan struct{}), make(chan struct{})
	p.mu.Lock()
	defer p.mu.Unlock()
	p.faults = append(p.faults, f)
	return f
}

// drop takes f off the list. The caller holds the mutex.
func (p *Proxy) drop(f *Fault) {
	for i := range p.faults {
		if p.faults[i] == f {
			p.faults = append(p.faults[:i:i], p.faults[i+1:]...)
			return
		}
	}
}

// strike returns the fault that takes the message, if any. The caller holds the mutex.
func (p *Proxy) strike(m FrontendMessage) *Fault {
	for _, f := range p.faults {
		if f.match(m) {
			f.struck = true
			p.drop(f)
			return f
		}
	}
	return nil
}

func (p *Proxy) accept(ctx context.Context) {
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return // closed
		}
		p.running.Go(func() {
			defer client.Close() //nolint:errcheck // what was to be said has been said, or was meant to be lost
			p.serve(ctx, client)
		})
	}
}

// serve handles one connection to its end.
func (p *Proxy) serve(ctx context.Context, client net.Conn) {
	defer context.AfterFunc(ctx, func() { client.Close() })() //nolint:errcheck,gosec // the test is over
	startup, err := readStartup(client)
	if err != nil {
		return
	}
	dialer := net.Dialer{Timeout: dialTimeout}
	server, err := dialer.DialContext(ctx, p.network, p.target)
	if err != nil {
		return
	}
	defer server.Close()                                      //nolint:errcheck // see the client's
	defer context.AfterFunc(ctx, func() { server.Close() })() //nolint:errcheck,gosec // the test is over
	if isCancel(startup) {
		relayCancel(client, server, startup)
		return
	}
	s := newSession(p, client, server)
	if !p.enter(s) {
		return
	}
	defer p.leave(s)
	s.run(startup)
}

// enter lets a session in, unless the proxy is down.
func (p *Proxy) enter(s *session) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.down {
		return false
	}
	p.sessions[s] = struct{}{}
	p.accepted++
	s.number = p.accepted
	return true
}

func (p *Proxy) leave(s *session) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.sessions, s)
}
