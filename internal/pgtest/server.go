package pgtest

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"net/url"
	"os"
	"slices"
	"strconv"
	"time"
)

// MinVersion is the oldest major version of PostgreSQL that the library supports.
const MinVersion = 15

// Names of the environment variables that choose a server.
const (
	EnvURL     = "TEST_DATABASE_URL"   // use this server
	EnvImage   = "TEST_POSTGRES_IMAGE" // where a container is taken, use this image or fail
	EnvRequire = "PGTEST_REQUIRE"      // take this rung or fail: url, container, binaries or package
	EnvDurable = "PGTEST_DURABLE"      // 1: leave fsync and its kin on
)

// What every server that this package starts has.
const (
	userName = "postgres"
	password = "pgtest"
	database = "pgtest"

	startTimeout = time.Minute      // for one server, its image and files being there
	closeTimeout = 30 * time.Second // for removing one
)

// Server is a PostgreSQL server. One that was found and not started, by TEST_DATABASE_URL, refuses to be stopped or killed. Its
// methods are not for concurrent use, but for URL and Description.
type Server struct {
	url         string
	description string
	machine     machine
}

// machine is what a server runs on.
type machine interface {
	start(ctx context.Context) error
	stop(ctx context.Context) error // fast shutdown: sessions are cut, what was committed is written
	kill(ctx context.Context) error // as after a power cut
	close(ctx context.Context) error
}

// URL returns the address of the server's test database, with the right to do everything.
func (s *Server) URL() string { return s.url }

// Description says in one line which server this is, and why others were passed over.
func (s *Server) Description() string { return s.description }

// Stop shuts the server down and returns when it is: sessions are cut, and what was committed is written.
func (s *Server) Stop(ctx context.Context) error { return s.machine.stop(ctx) }

// Kill stops the server as a power cut would, and returns when it is gone: it recovers from its log when it starts again. A server
// without [Durable] may lose its last commits.
func (s *Server) Kill(ctx context.Context) error { return s.machine.kill(ctx) }

// Start starts the stopped server again, with its data and at its address, and returns when it answers.
func (s *Server) Start(ctx context.Context) error {
	if err := s.machine.start(ctx); err != nil {
		return err
	}
	_, err := awaitAnswer(ctx, s.url, startTimeout)
	return err
}

// Restart stops the server and starts it again.
func (s *Server) Restart(ctx context.Context) error {
	if err := s.Stop(ctx); err != nil {
		return err
	}
	return s.Start(ctx)
}

// Close stops the server and removes it with its data, within half a minute, also when ctx has ended. A server that was found, not
// started, is left alone.
func (s *Server) Close(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
	defer cancel()
	return s.machine.close(ctx)
}

// ServerOption configures [Start] and [NewServer].
type ServerOption func(*serverOptions)

type serverOptions struct {
	settings map[string]string
	own      bool
}

// WithSetting sets a parameter of the server that is started. It has no effect on one that was found.
func WithSetting(name, value string) ServerOption {
	return func(o *serverOptions) { o.settings[name] = value }
}

// Durable leaves fsync, synchronous_commit and full_page_writes on, for tests that kill the server. It has no effect on one that was
// found.
func Durable() ServerOption {
	return func(o *serverOptions) { o.durable() }
}

// Own asks for a server of one's own, one that may be stopped and killed, also where TEST_DATABASE_URL names another.
func Own() ServerOption {
	return func(o *serverOptions) { o.own = true }
}

func (o *serverOptions) durable() {
	for _, name := range []string{"fsync", "synchronous_commit", "full_page_writes"} {
		o.settings[name] = "on"
	}
}

// Not every server has pg_stat_statements; where it is missing the server starts without.
const preload = "shared_preload_libraries"

var statistics = "pg_stat_statements"

func newServerOptions(opts []ServerOption) *serverOptions {
	o := &serverOptions{settings: map[string]string{
		"fsync":              "off", // the data need not outlive the test
		"synchronous_commit": "off",
		"full_page_writes":   "off",
		"max_connections":    "200",
		"shared_buffers":     "128MB",
		"max_wal_senders":    "4",
		"wal_level":          "replica",
		"TimeZone":           "UTC",
		"lc_messages":        "C",
		preload:              statistics,
	}}
	if os.Getenv(EnvDurable) == "1" {
		o.durable()
	}
	for _, opt := range opts {
		opt(o)
	}
	return o
}

// withoutStatistics returns the options for a server that has no pg_stat_statements, or nil if they did not ask for it.
func (o *serverOptions) withoutStatistics() *serverOptions {
	if o.settings[preload] != statistics {
		return nil
	}
	without := &serverOptions{settings: maps.Clone(o.settings), own: o.own}
	delete(without.settings, preload)
	return without
}

// names returns the settings' names in order.
func (o *serverOptions) names() []string {
	return slices.Sorted(maps.Keys(o.settings))
}

// address returns the URL of a database on a port of this machine.
func address(port int, database string) string {
	u := url.URL{
		Scheme:   "postgres",
		User:     url.UserPassword(userName, password),
		Host:     net.JoinHostPort("127.0.0.1", strconv.Itoa(port)),
		Path:     database,
		RawQuery: "sslmode=disable",
	}
	return u.String()
}

// Ports from which systems do not take those of outgoing connections: while a server is stopped, its port stays free.
const (
	minPort = 20000
	maxPort = 32000
)

// freePort returns a port of 127.0.0.1 that nobody listens on. Somebody may take it before the server does, so callers try
// again with another.
func freePort(ctx context.Context) (int, error) {
	var config net.ListenConfig
	var lastErr error
	for range 100 {
		port := minPort + rand.IntN(maxPort-minPort) //nolint:gosec // no secret
		listener, err := config.Listen(ctx, "tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
		if err == nil {
			listener.Close() //nolint:errcheck,gosec // nobody came
			return port, nil
		}
		lastErr = err
	}
	return 0, fmt.Errorf("find a free port: %w", lastErr)
}
