// Command provider shows payments through an external provider that can time out after it has charged. No transaction holds both the
// charge and our record of it; what makes the payment happen once is Do, a key of the provider's derived from ours, and asking the
// provider before an attempt that follows a lost one.
//
// The part to copy is in client.go.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/archlab/idempotency/examples/internal/scratch"
	"github.com/archlab/idempotency/pgstore"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second Ctrl-C ends the program at once
	os.Exit(run(ctx, os.Args[1:], os.Stdout, os.Stderr))
}

type options struct {
	payments int
	clients  int
	blind    bool
}

// run is the whole program, and returns its exit code: 1 if a charge is missing or doubled, 2 for wrong flags.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	var o options
	flags := flag.NewFlagSet("provider", flag.ContinueOnError)
	flags.SetOutput(stderr)
	flags.IntVar(&o.payments, "payments", 60, "make this `number` of payments")
	flags.IntVar(&o.clients, "clients", 8, "run this `number` of clients at once")
	flags.BoolVar(&o.blind, "blind", false, "charge again without a look, and under a new key, to see what happens then")
	if err := flags.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return 0
		}
		return 2 // the flag set has said why
	}
	if o.payments < 1 || o.clients < 1 || flags.NArg() > 0 {
		fmt.Fprintln(stderr, "provider: -payments and -clients must be at least 1, and nothing else may follow; -h shows the flags")
		return 2
	}
	if err := demonstrate(ctx, o, stdout); err != nil {
		fmt.Fprintln(stderr, "provider:", err)
		return 1
	}
	return 0
}

const (
	lease     = time.Second // as short as it is only for the demonstration
	retention = 24 * time.Hour
	timeout   = 150 * time.Millisecond // of a call to the provider
)

func demonstrate(ctx context.Context, o options, stdout io.Writer) (err error) {
	say := func(format string, args ...any) { fmt.Fprintf(stdout, format, args...) }
	db, err := scratch.Open(ctx, "provider_example", say)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, db.Close(ctx)) }()
	provider := newProvider()
	server := httptest.NewServer(provider)
	defer server.Close()
	store, err := pgstore.New(db.Pool, lease, retention, pgstore.WithSchema(db.Schema))
	if err != nil {
		return err
	}
	careful, err := pgstore.New(db.Pool, lease, retention, pgstore.WithSchema(db.Schema), pgstore.WithoutTakeover())
	if err != nil {
		return err
	}
	say("A payment provider listens on %s. It is not a good one: it charges and then hangs, or hangs up, or is overloaded.\n", server.URL)
	say("Payments: %d, by %d clients at once, each repeating its request until it has an answer. A lease is %v.\n", o.payments, o.clients, lease)
	// net/http sends a request with an Idempotency-Key again by itself where a connection that it had kept breaks. Without such
	// connections the accidents of this demonstration stay the same in each run.
	transport := &http.Transport{DisableKeepAlives: true}
	c := &client{store: store, provider: &api{server.URL, &http.Client{Transport: transport}}, blind: o.blind}
	answers, err := payAll(ctx, o, c)
	if err != nil {
		return err
	}
	say("\n")
	for _, line := range []struct {
		what, meaning string
		n             int64
	}{
		{"charged", "by an attempt that got the provider's answer", c.charged.Load() - c.chargedLate.Load()},
		{"found", "by asking the provider first: a lost attempt had charged", c.found.Load()},
		{"charged late", "after asking: a lost attempt had not charged", c.chargedLate.Load()},
		{"declined", "for good; every repeat is told so", c.declined.Load()},
		{"released", "the provider was overloaded before it did anything: free at once", c.released.Load()},
		{"lost", "attempts whose effect nobody knew: held until the lease lapsed", c.lost.Load()},
	} {
		say("  %-13s %4d  %s\n", line.what, line.n, line.meaning)
	}
	say("\n")
	if err := settleByHand(ctx, careful, c.provider, provider, say); err != nil {
		return err
	}
	problems := check(provider, answers)
	for _, problem := range problems {
		say("WRONG: %s\n", problem)
	}
	if len(problems) > 0 {
		return fmt.Errorf("the provider's books are wrong: %d problems", len(problems))
	}
	say("OK: each of %d accepted payments charged exactly once, %d declined ones never, and every client knows the truth.\n",
		int64(o.payments)-c.declined.Load(), c.declined.Load())
	return nil
}
