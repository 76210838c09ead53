// Command orders is a small order service with the middleware before its one unsafe route: what it takes to put idempotency keys into
// an HTTP service, and something to send requests to.
//
// The part to copy is in service.go.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/archlab/idempotency/examples/internal/scratch"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second Ctrl-C ends the program at once
	os.Exit(run(ctx, os.Args[1:], os.Stdout, os.Stderr))
}

// run is the whole program, and returns its exit code: 1 if it could not serve, 2 for wrong flags.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	flags := flag.NewFlagSet("orders", flag.ContinueOnError)
	flags.SetOutput(stderr)
	address := flags.String("addr", "127.0.0.1:8080", "listen on this `address`")
	if err := flags.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return 0
		}
		return 2 // the flag set has said why
	}
	if flags.NArg() > 0 {
		fmt.Fprintln(stderr, "orders: nothing may follow the flags; -h shows them")
		return 2
	}
	if err := serve(ctx, *address, stdout, slog.New(slog.NewJSONHandler(stderr, nil))); err != nil {
		fmt.Fprintln(stderr, "orders:", err)
		return 1
	}
	return 0
}

const (
	lease     = 30 * time.Second // how long a crashed request holds its key
	retention = 24 * time.Hour   // how long a response can be repeated

	// Longer than any handler may take, so that a shutdown cuts none off.
	shutdownTimeout = handlerTimeout + 5*time.Second
)

// serve serves until ctx ends, and then until the requests that are running have been answered.
func serve(ctx context.Context, address string, stdout io.Writer, log *slog.Logger) (err error) {
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", address)
	if err != nil {
		return fmt.Errorf("%w: -addr takes another address", err)
	}
	defer func() { _ = listener.Close() }() // again, where the server has done so
	db, err := scratch.Open(ctx, "orders_example", func(format string, args ...any) { fmt.Fprintf(stdout, format, args...) })
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, db.Close(ctx)) }()
	handler, err := newService(ctx, db.Pool, db.Schema, log)
	if err != nil {
		return err
	}
	server := &http.Server{
		Handler: handler, ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 30 * time.Second, ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelError),
	}
	fmt.Fprintf(stdout, "Serving orders on http://%s; its specification is at http://%[1]s/idempotency. Ctrl-C ends it, and removes its data.\n",
		listener.Addr())

	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	select {
	case err := <-served:
		return err
	case <-ctx.Done():
	}
	fmt.Fprintln(stdout, "Waiting for the requests that are running.")
	ending, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownTimeout)
	defer cancel()
	if err := server.Shutdown(ending); err != nil {
		return fmt.Errorf("some requests were cut off: %w", err)
	}
	return nil
}
