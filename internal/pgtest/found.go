package pgtest

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"time"
)

// foundTimeout is for a server that belongs to somebody else to finish starting.
const foundTimeout = 15 * time.Second

// takeURL takes the server that the environment names.
func takeURL(ctx context.Context, o *serverOptions) (*Server, error) {
	address := os.Getenv(EnvURL)
	switch {
	case address == "":
		return nil, pass("%s is not set", EnvURL)
	case o.own:
		return nil, pass("%s names a server that must not be stopped", EnvURL)
	}
	// Not the error of url.Parse, which repeats the password.
	if u, err := url.Parse(address); err != nil || u.Scheme != "postgres" && u.Scheme != "postgresql" {
		return nil, fmt.Errorf("%s is not a URL like postgres://user:password@host:5432/database", EnvURL)
	}
	// Nobody starts this one for us: unless it says that it is on its way, waiting does not help.
	version, err := ask(ctx, address)
	if isStartingUp(err) {
		version, err = awaitAnswer(ctx, address, foundTimeout)
	}
	if err == nil {
		err = checkVersion(version)
	}
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
