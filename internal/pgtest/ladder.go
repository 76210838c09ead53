package pgtest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// rung is one way to come by a server.
type rung struct {
	name string
	take func(ctx context.Context, o *serverOptions) (*Server, error)
}

const (
	rungURL       = "url"
	rungContainer = "container"
	rungBinaries  = "binaries"
	rungPackage   = "package"
)

var ladder = []rung{{rungURL, takeURL}, {rungContainer, takeContainer}, {rungBinaries, takeBinaries}, {rungPackage, takePackage}}

// passError says why there is nothing to take on a rung, and the next one should be tried. Any other error means that it should have
// worked.
type passError struct{ reason string }

func (e *passError) Error() string { return e.reason }

// pass returns the reason for going on to the next rung.
func pass(format string, args ...any) error {
	return &passError{oneLine(fmt.Sprintf(format, args...))}
}

// oneLine joins the lines of an error that goes into a sentence.
func oneLine(text string) string { return strings.Join(strings.Fields(text), " ") }

// Start finds or starts a server, by the first of these that works: the one that TEST_DATABASE_URL names; a container; the
// binaries on the machine; Debian's server package, unpacked into the cache folder. The error says what to install. It takes at most
// a few minutes, and usually two seconds.
//
// The caller closes it. If the process dies before that, what was started goes with it.
func Start(ctx context.Context, opts ...ServerOption) (*Server, error) {
	o := newServerOptions(opts)
	required, err := requirement(o)
	if err != nil {
		return nil, err
	}
	var reasons []string
	for _, r := range ladder {
		if required != "" && r.name != required {
			continue
		}
		server, err := r.take(ctx, o)
		if err == nil {
			if required != "" {
				reasons = append(reasons, "because of "+EnvRequire+"="+required)
			}
			server.description = strings.Join(append([]string{server.description}, reasons...), "; ")
			return server, nil
		}
		if _, ok := errors.AsType[*passError](err); !ok || ctx.Err() != nil {
			return nil, fmt.Errorf("pgtest: PostgreSQL by %s: %w", r.name, err)
		}
		reasons = append(reasons, err.Error())
	}
	if required != "" {
		return nil, fmt.Errorf("pgtest: %s=%s, but: %s", EnvRequire, required, strings.Join(reasons, "; "))
	}
	return nil, fmt.Errorf("pgtest: there is no PostgreSQL here: %s.\n%s", strings.Join(reasons, "; "), advice())
}

// requirement returns the rung that the environment demands, or nothing. Demands that contradict each other are an error: whichever
// was dropped, somebody would believe in a test that was not run.
func requirement(o *serverOptions) (string, error) {
	required := os.Getenv(EnvRequire)
	switch {
	case required == "":
		return "", nil
	case !slices.ContainsFunc(ladder, func(r rung) bool { return r.name == required }):
		return "", fmt.Errorf("pgtest: %s is %q: it must be url, container, binaries or package", EnvRequire, required)
	case required == rungURL && o.own:
		return "", nil // that server must not be stopped, so it takes another
	case required != rungURL && os.Getenv(EnvURL) != "" && !o.own:
		return "", fmt.Errorf("pgtest: %s names a server, but %s is %q: unset one of them", EnvURL, EnvRequire, required)
	case required != rungURL && required != rungContainer && os.Getenv(EnvImage) != "":
		return "", fmt.Errorf("pgtest: %s names an image, but %s is %q: unset one of them", EnvImage, EnvRequire, required)
	}
	return required, nil
}

// awaitAnswer waits until the server at address answers a query, and returns its version. A log line or an open port is not
// enough: the set-up of a container opens both, and closes them again.
func awaitAnswer(ctx context.Context, address string, timeout time.Duration) (version string, err error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	for {
		version, err = ask(ctx, address)
		if err == nil {
			return version, checkVersion(version)
		}
		select {
		case <-ctx.Done():
			return "", fmt.Errorf("it does not answer: %w", err)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// ask asks a server for its version.
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

// checkVersion refuses a server that is too old.
func checkVersion(version string) error {
	if major := leadingNumber(version); major != 0 && major < MinVersion {
		return fmt.Errorf("it is PostgreSQL %s: the library needs %d or later", version, MinVersion)
	}
	return nil
}

// leadingNumber returns the number that text starts with, or 0.
func leadingNumber(text string) int {
	n, err := strconv.Atoi(text[:len(text)-len(strings.TrimLeft(text, "0123456789"))])
	if err != nil {
		return 0
	}
	return n
}

// isStartingUp reports whether a server said that it will be there soon.
func isStartingUp(err error) bool {
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	return ok && pgErr.Code == "57P03" // cannot_connect_now
}
