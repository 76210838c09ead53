package pgtest

import (
	"bufio"
	"net"
	"time"
)

// session is one connection through the proxy.
type session struct {
	proxy  *Proxy
	number int
	client net.Conn
	server halfCloser

	// Only for the goroutine that reads the client.
	statements map[string]string // SQL by the statement's name
	portals    map[string]string // SQL by the portal's name
	executed   string            // SQL of the cycle's last Execute

	// Guarded by the proxy's mutex.
	sent    int     // cycles that the client has ended with a Sync, Query or FunctionCall
	replied int     // cycles that the server has ended with ReadyForQuery; the startup is the first
	armed   []armed // faults in replies to come
	cuts    []*Fault
}

// halfCloser is a connection whose sending half can be closed: the other side reads what was sent, and then the end.
type halfCloser interface {
	net.Conn
	CloseWrite() error
}

// armed is a fault that waits for a cycle's reply.
type armed struct {
	fault *Fault
	cycle int
}

func newSession(p *Proxy, client, server net.Conn) *session {
	return &session{
		proxy: p, client: client, server: server.(halfCloser), // as TCP's and Unix sockets' are
		statements: map[string]string{}, portals: map[string]string{},
	}
}

// run passes messages on until both sides are done.
func (s *session) run(startup []byte) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		s.relayReplies()
		// The server is done, so there is nothing left for the client, nor from it.
		s.client.Close() //nolint:errcheck,gosec // it may have been cut
		s.completeFaults()
	}()
	s.relayRequests(startup)
	// The server reads what it was sent, and then the end. Its answers still go to the client, if that is there.
	s.server.CloseWrite() //nolint:errcheck,gosec // it may have gone
	<-done
}

func (s *session) relayRequests(startup []byte) {
	in, out := bufio.NewReader(s.client), bufio.NewWriter(s.server)
	m, raw := FrontendMessage{Conn: s.number, Body: startup[4:]}, startup
	for {
		fault := s.offer(m)
		if fault != nil && (fault.kind == cutRequest || fault.kind == holdRequest) {
			if out.Flush() != nil { // what came before has been sent
				return
			}
			if fault.kind == cutRequest {
				s.cut(fault)
				return
			}
			fault.hold()
		}
		if _, err := out.Write(raw); err != nil {
			return
		}
		if in.Buffered() == 0 && out.Flush() != nil {
			return
		}
		var err error
		if raw, err = readMessage(in); err != nil {
			out.Flush() //nolint:errcheck,gosec // the server may have gone
			return
		}
		m = s.read(raw)
	}
}

// offer asks the faults for one that takes the message, and keeps count of the cycles.
func (s *session) offer(m FrontendMessage) *Fault {
	s.proxy.mu.Lock()
	defer s.proxy.mu.Unlock()
	cycle := s.sent + 1
	switch m.Type {
	case startupMessage, 'p':
		cycle = 0
	case 'X':
		return nil
	}
	fault := s.proxy.strike(m)
	if fault != nil && (fault.kind == cutReply || fault.kind == holdReply) {
		s.armed = append(s.armed, armed{fault, cycle})
	}
	if m.Type == 'Q' || m.Type == 'S' || m.Type == 'F' {
		s.sent++
	}
	return fault
}

func (s *session) relayReplies() {
	in, out := bufio.NewReader(s.server), bufio.NewWriter(s.client)
	var held []byte
	swallow, authenticated := false, false
	for {
		raw, err := readMessage(in)
		if err != nil {
			out.Flush() //nolint:errcheck,gosec // the client may have gone
			return
		}
		fault, end := s.countReply(raw[0] == 'Z'), raw[0] == 'Z'
		authenticated = authenticated || isAuthenticationOk(raw)
		switch {
		case fault == nil || !authenticated: // until then the client has to answer questions
			s.pass(out, raw)
		case fault.kind == holdReply:
			held = append(held, raw...)
			if end {
				fault.hold()
				s.pass(out, held)
				held = nil
			}
		case end:
			out.Flush() //nolint:errcheck,gosec // the client may have gone
			s.cut(fault)
		case fault.last != 0 && !swallow:
			s.pass(out, raw)
			swallow = raw[0] == fault.last
		}
		if in.Buffered() == 0 {
			out.Flush() //nolint:errcheck,gosec // the client may have gone; the server is heard to the end all the same
		}
	}
}

// pass writes to the client. If it has gone, the server is heard to the end all the same.
func (s *session) pass(out *bufio.Writer, raw []byte) {
	out.Write(raw) //nolint:errcheck,gosec // see above
}

// countReply returns the fault in the current cycle's reply, if any, and counts the cycle if this is its end. It does so before the
// client can see the end, so that a client that has its answer finds it counted.
func (s *session) countReply(end bool) *Fault {
	s.proxy.mu.Lock()
	defer s.proxy.mu.Unlock()
	var fault *Fault
	for _, a := range s.armed {
		if a.cycle == s.replied {
			fault = a.fault
			break
		}
	}
	if end {
		if s.replied > 0 && (fault == nil || fault.kind == holdReply) {
			s.proxy.roundTrips++
		}
		s.replied++
	}
	return fault
}

// cut breaks the connection. The fault is complete when the server has ended the session.
func (s *session) cut(fault *Fault) {
	s.proxy.mu.Lock()
	s.cuts = append(s.cuts, fault)
	s.proxy.mu.Unlock()
	s.client.Close()                                       //nolint:errcheck,gosec // it is meant to break
	s.server.CloseWrite()                                  //nolint:errcheck,gosec // it may have gone
	s.server.SetReadDeadline(time.Now().Add(drainTimeout)) //nolint:errcheck,gosec // it may have gone
}

// completeFaults says that nothing more will happen in this session.
func (s *session) completeFaults() {
	s.proxy.mu.Lock()
	defer s.proxy.mu.Unlock()
	for _, fault := range s.cuts {
		fault.complete()
	}
	for _, a := range s.armed {
		a.fault.complete()
	}
}
