package pgtest

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"strings"
)

// maxMessage is the longest message that PostgreSQL sends or takes, about 1 GiB.
const maxMessage = 1<<30 - 1

// Codes of startup packets, which have no type.
const (
	startupMessage = 0 // the type that FrontendMessage gives to it

	codeCancel = 80877102
	codeTLS    = 80877103
	codeGSS    = 80877104
)

// FrontendMessage is a message from a client to the server.
type FrontendMessage struct {
	// Conn is the number of the connection through the proxy, from 1.
	Conn int
	// Type is the protocol's letter: 'Q' Query, 'P' Parse, 'B' Bind, 'D' Describe, 'E' Execute, 'S' Sync, 'C' Close, 'p' a password;
	// 0 for the startup.
	Type byte
	// SQL is the text of the statement that the message is about, in whichever of the protocol's ways it was given: of a Bind, that
	// which was prepared under the name; of a Sync, that of the last Execute before it. It is empty if there is none.
	SQL string
	// Body is the message without its type and length.
	Body []byte
}

// Sends matches messages of one of the types, or of any if types is empty, about a statement whose text contains sql.
func Sends(types, sql string) func(FrontendMessage) bool {
	return func(m FrontendMessage) bool {
		return (types == "" || strings.IndexByte(types, m.Type) >= 0) && strings.Contains(m.SQL, sql)
	}
}

// Executes matches the message with which a client has a statement run whose text contains sql, whatever the mode: Execute in the
// extended protocol, Query in the simple one.
func Executes(sql string) func(FrontendMessage) bool { return Sends("EQ", sql) }

// Nth matches the n-th message, counted from 1, that match accepts, over all connections. Each Nth counts for itself, from its first use.
func Nth(n int, match func(FrontendMessage) bool) func(FrontendMessage) bool {
	seen := 0
	return func(m FrontendMessage) bool {
		if match(m) {
			seen++
			return seen == n
		}
		return false
	}
}

// read understands a message as far as it is about a statement.
func (s *session) read(raw []byte) FrontendMessage {
	m := FrontendMessage{Conn: s.number, Type: raw[0], Body: raw[5:]}
	switch m.Type {
	case 'Q':
		m.SQL, _ = cString(m.Body)
	case 'P':
		name, rest := cString(m.Body)
		m.SQL, _ = cString(rest)
		s.statements[name] = m.SQL
	case 'B':
		portal, rest := cString(m.Body)
		name, _ := cString(rest)
		m.SQL = s.statements[name]
		s.portals[portal] = m.SQL
	case 'D', 'C':
		m.SQL = s.described(m)
	case 'E':
		portal, _ := cString(m.Body)
		m.SQL = s.portals[portal]
		s.executed = m.SQL
	case 'S':
		m.SQL, s.executed = s.executed, ""
	}
	return m
}

// described returns the statement that a Describe or a Close names.
func (s *session) described(m FrontendMessage) string {
	if len(m.Body) == 0 {
		return ""
	}
	names := s.portals
	if m.Body[0] == 'S' {
		names = s.statements
	}
	name, _ := cString(m.Body[1:])
	sql := names[name]
	if m.Type == 'C' {
		delete(names, name)
	}
	return sql
}

// cString splits off a text that ends with a zero byte.
func cString(b []byte) (text string, rest []byte) {
	head, rest, _ := bytes.Cut(b, []byte{0})
	return string(head), rest
}

// readMessage reads a whole message: a type, a length that counts itself, and a body.
func readMessage(r io.Reader) ([]byte, error) {
	var header [5]byte
	if _, err := io.ReadFull(r, header[:]); err != nil {
		return nil, fmt.Errorf("read a message's header: %w", err)
	}
	return readBody(r, header[:], 1)
}

// readBody completes a message of which all up to the length is there. The length counts from its own start, at position from.
func readBody(r io.Reader, header []byte, from int) ([]byte, error) {
	length := binary.BigEndian.Uint32(header[from:])
	if length < 4 || length > maxMessage {
		return nil, fmt.Errorf("a message of %d bytes", length)
	}
	raw := make([]byte, from+int(length))
	copy(raw, header)
	if _, err := io.ReadFull(r, raw[len(header):]); err != nil {
		return nil, fmt.Errorf("read a message's body: %w", err)
	}
	return raw, nil
}

// readStartup reads the first message of a connection. It declines encryption, which clients may ask for before.
func readStartup(client net.Conn) ([]byte, error) {
	for {
		var header [8]byte
		if _, err := io.ReadFull(client, header[:]); err != nil {
			return nil, fmt.Errorf("read the startup: %w", err)
		}
		switch binary.BigEndian.Uint32(header[4:]) {
		case codeTLS, codeGSS:
			if _, err := client.Write([]byte{'N'}); err != nil {
				return nil, fmt.Errorf("decline encryption: %w", err)
			}
		default:
			if binary.BigEndian.Uint32(header[:]) < 8 {
				return nil, fmt.Errorf("a startup of %d bytes", binary.BigEndian.Uint32(header[:]))
			}
			return readBody(client, header[:], 0)
		}
	}
}

// isAuthenticationOk reports whether a reply says that the server knows now who the client is.
func isAuthenticationOk(raw []byte) bool {
	return raw[0] == 'R' && len(raw) == 9 && binary.BigEndian.Uint32(raw[5:]) == 0
}

func isCancel(startup []byte) bool { return binary.BigEndian.Uint32(startup[4:]) == codeCancel }

// relayCancel passes on the request to cancel another session's statement. The server closes when it has done it.
func relayCancel(client, server net.Conn, request []byte) {
	if _, err := server.Write(request); err == nil {
		io.Copy(client, server) //nolint:errcheck,gosec // nothing comes but the end
	}
}
