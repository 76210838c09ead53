package pgtest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// MinVersion is the oldest major version of PostgreSQL that the library supports.
const MinVersion = 15

// Names of the environment variables that choose a server.
const (
	EnvURL     = "TEST_DATABASE_URL"   // use this server
	EnvImage   = "TEST_POSTGRES_IMAGE" // use this image, or fail
	EnvRequire = "PGTEST_REQUIRE"      // take this rung, or fail: url, container, binaries or package
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

// Server is a PostgreSQL server.
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

// Stop shuts the server down: sessions are cut, and what was committed is on disk.
func (s *Server) Stop(ctx context.Context) error { return s.machine.stop(ctx) }

// Kill stops the server as a power cut would: it recovers from its log when it starts again.
func (s *Server) Kill(ctx context.Context) error { return s.machine.kill(ctx) }

// Start starts the stopped server again, with its data and at its address, and waits until it answers.
func (s *Server) Start(ctx context.Context) error {
	if err := s.machine.start(ctx); err != nil {
		return err
	}
	_, err := awaitAnswer(ctx, s.url)
	return err
}

// Close stops the server and removes it with its data. A server that was found, not started, is left alone.
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

// Durable leaves fsync, synchronous_commit and full_page_writes on, for tests that kill the server.
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

func newServerOptions(opts []ServerOption) serverOptions {
	o := serverOptions{settings: map[string]string{
		"fsync":              "off", // the data need not outlive the test
		"synchronous_commit": "off",
		"full_page_writes":   "off",
		"max_connections":    "200",
		"shared_buffers":     "128MB",
		"max_wal_senders":    "4",
		"wal_level":          "replica",
		"TimeZone":           "UTC",
		"lc_messages":        "C",
	}}
	if os.Getenv(EnvDurable) == "1" {
		o.durable()
	}
	for _, opt := range opts {
		opt(&o)
	}
	return o
}

// arguments returns the settings as arguments of the postgres program.
func (o serverOptions) arguments() []string {
	names := make([]string, 0, len(o.settings))
	for name := range o.settings {
		names = append(names, name)
	}
	slices.Sort(names)
	args := make([]string, 0, 2*len(names))
	for _, name := range names {
		args = append(args, "-c", name+"="+o.settings[name])
	}
	return args
}

// rung is one way to come by a server.
type rung struct {
	name string
	take func(ctx context.Context, o serverOptions) (*Server, error)
}

// errPass is wrapped by a rung's error if there is nothing to take, and the next one should be tried. Any other error means that
// it should have worked.
var errPass = errors.New("")

// pass returns the reason for going on to the next rung.
func pass(format string, args ...any) error {
	return fmt.Errorf(format+"%w", append(args, errPass)...)
}

// Start finds or starts a server, by the first of these that works: the one that TEST_DATABASE_URL names; a container; the
// binaries on the machine; Debian's server package, unpacked into the cache folder. The error says what to install.
//
// The caller closes it. If the process dies before that, what was started from binaries goes with it, and a container is removed
// by the next process that comes this way.
func Start(ctx context.Context, opts ...ServerOption) (*Server, error) {
	o := newServerOptions(opts)
	rungs := []rung{{"url", takeURL}, {"container", takeContainer}, {"binaries", takeBinaries}, {"package", takePackage}}
	required := os.Getenv(EnvRequire)
	if required != "" && !slices.ContainsFunc(rungs, func(r rung) bool { return r.name == required }) {
		return nil, fmt.Errorf("pgtest: %s is %q: it must be url, container, binaries or package", EnvRequire, required)
	}
	var reasons []string
	for _, r := range rungs {
		if required != "" && r.name != required && (r.name != "url" || !o.own) {
			continue
		}
		server, err := r.take(ctx, o)
		switch {
		case err == nil:
			server.description = strings.Join(append([]string{server.description}, reasons...), "; ")
			return server, nil
		case !errors.Is(err, errPass) || ctx.Err() != nil:
			return nil, fmt.Errorf("pgtest: PostgreSQL by %s: %w", r.name, err)
		}
		reasons = append(reasons, err.Error())
	}
	if required != "" {
		return nil, fmt.Errorf("pgtest: %s=%s: %s", EnvRequire, required, strings.Join(reasons, "; "))
	}
	return nil, fmt.Errorf("pgtest: there is no PostgreSQL here: %s.\n%s", strings.Join(reasons, "; "), advice())
}

// takeURL takes the server that the environment names.
func takeURL(ctx context.Context, o serverOptions) (*Server, error) {
	address := os.Getenv(EnvURL)
	switch {
	case address == "":
		return nil, pass("%s is not set", EnvURL)
	case o.own:
		return nil, pass("%s names a server that must not be stopped", EnvURL)
	}
	version, err := awaitAnswer(ctx, address)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", EnvURL, err)
	}
	return &Server{url: address, description: "PostgreSQL " + version + ", as " + EnvURL + " says", machine: found{}}, nil
}

// found is the machine of a server that belongs to somebody else.
type found struct{}

var errNotOurs = errors.New("pgtest: this server was found, not started: it is not ours to stop")

func (found) start(context.Context) error { return errNotOurs }
func (found) stop(context.Context) error  { return errNotOurs }
func (found) kill(context.Context) error  { return errNotOurs }
func (found) close(context.Context) error { return nil }

// awaitAnswer waits until the server at address answers a query, and returns its version. A log line or an open port is not
// enough: the set-up of a container opens both, and closes them again.
func awaitAnswer(ctx context.Context, address string) (version string, err error) {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	for {
		version, err = ask(ctx, address)
		if err == nil {
			return version, checkVersion(version)
		}
		if parseErr, ok := errors.AsType[*pgconn.ParseConfigError](err); ok {
			return "", parseErr // waiting does not help
		}
		select {
		case <-ctx.Done():
			return "", fmt.Errorf("it does not answer: %w", err)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

func ask(ctx context.Context, address string) (version string, err error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	conn, err := pgx.Connect(ctx, address)
	if err != nil {
		return "", fmt.Errorf("connect: %w", err)
	}
	defer conn.Close(ctx) //nolint:errcheck // it has answered
	if err := conn.QueryRow(ctx, `SELECT current_setting('server_version')`).Scan(&version); err != nil {
		return "", fmt.Errorf("ask for the version: %w", err)
	}
	version, _, _ = strings.Cut(version, " ")
	return version, nil
}

func checkVersion(version string) error {
	major, err := strconv.Atoi(version[:len(version)-len(strings.TrimLeft(version, "0123456789"))])
	if err == nil && major < MinVersion {
		return fmt.Errorf("it is PostgreSQL %s: the library needs %d or later", version, MinVersion)
	}
	return nil
}

// address returns the URL of the test database on a port of this machine.
func address(port int) string {
	u := url.URL{
		Scheme:   "postgres",
		User:     url.UserPassword(userName, password),
		Host:     net.JoinHostPort("127.0.0.1", strconv.Itoa(port)),
		Path:     database,
		RawQuery: "sslmode=disable",
	}
	return u.String()
}

// freePort returns a port of 127.0.0.1 that nobody listens on. Somebody may take it before the server does, so callers try
// again with another.
func freePort(ctx context.Context) (int, error) {
	var config net.ListenConfig
	listener, err := config.Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return 0, fmt.Errorf("find a free port: %w", err)
	}
	defer listener.Close()                          //nolint:errcheck // nobody came
	return listener.Addr().(*net.TCPAddr).Port, nil //nolint:forcetypeassert,errcheck // a TCP listener's
}
