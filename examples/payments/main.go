// Command payments shows the store at work on real input: about a thousand payment requests, with the repeats and mistakes that
// clients make, taken by several worker processes at once, some of which are killed in the middle. The effect of a payment is a
// row in a ledger, written in the transaction that completes the key. At the end the ledger is compared with the input.
//
// The part to copy is the method pay in worker.go.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/archlab/idempotency/examples/internal/scratch"
	"github.com/archlab/idempotency/internal/pgtest"
)

// Exit codes.
const (
	exitWrong       = 1   // the ledger, or something that went wrong before
	exitUsage       = 2   // flags, or the input
	exitInterrupted = 130 // Ctrl-C
)

func main() {
	if len(os.Args) > 1 && os.Args[1] == workerCommand {
		os.Exit(workerMain())
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second Ctrl-C ends the program at once
	os.Exit(run(ctx, os.Args[1:], os.Stdout, os.Stderr))
}

// workerMain is main in a worker process.
func workerMain() int {
	signal.Ignore(os.Interrupt) // Ctrl-C in a terminal reaches every process; the program decides when its workers end
	if err := work(context.Background(), os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "payments: worker:", err)
		return 1
	}
	return 0
}

type options struct {
	file    string
	workers int
	kills   int
	lease   time.Duration
	work    time.Duration
	keep    bool
	verbose bool
}

// run is the whole program, and returns its exit code.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	fail := func(code int, err error) int {
		_, _ = fmt.Fprintln(stderr, "payments:", err)
		return code
	}
	o, err := parseFlags(args, stdout)
	switch {
	case errors.Is(err, flag.ErrHelp):
		return 0
	case err != nil:
		return fail(exitUsage, fmt.Errorf("%w; -h shows the flags", err))
	}
	lines, blank, err := readInput(o.file)
	if err != nil {
		return fail(exitUsage, err)
	}
	in := intentOf(lines, blank)
	err = demonstrate(ctx, o, in, newReport(stdout, o.verbose, in), stderr)
	switch {
	case err != nil && ctx.Err() != nil:
		return fail(exitInterrupted, errors.New("interrupted; the workers are stopped, and what was created is removed"))
	case err != nil:
		return fail(exitWrong, err)
	}
	return 0
}

const usage = `Usage: payments [flags]

Takes payment requests in several worker processes that share a PostgreSQL, kills workers in the middle, and checks at the
end that every payment was made exactly once. The PostgreSQL is the one that %s names, or one that is started
for the purpose and removed: in a container, or from the binaries on this machine.

A request is a line of JSON:
  {"tenant":"acct_1","idempotency_key":"order-7","amount":1999,"currency":"EUR","customer":"cus_1","description":"Café"}

`

func parseFlags(args []string, help io.Writer) (options, error) {
	var o options
	flags := flag.NewFlagSet("payments", flag.ContinueOnError)
	flags.SetOutput(io.Discard) // errors are printed by run
	flags.StringVar(&o.file, "file", "", "read the requests from this `file`, one JSON object a line, instead of the demo's own")
	flags.IntVar(&o.workers, "workers", 6, "run this `number` of worker processes")
	flags.IntVar(&o.kills, "kills", 4, "kill this `number` of them while they hold a key")
	flags.DurationVar(&o.lease, "lease", 2*time.Second, "how long a worker that was killed keeps its key from the others")
	flags.DurationVar(&o.work, "work", 40*time.Millisecond, "how long a payment takes, outside of its transaction")
	flags.BoolVar(&o.keep, "keep", false, "leave the schema behind, to look into; only with "+pgtest.EnvURL)
	flags.BoolVar(&o.verbose, "v", false, "print every answer, and all rejected lines")
	flags.Usage = func() {} // not the whole page for a mistyped flag
	err := flags.Parse(args)
	switch {
	case errors.Is(err, flag.ErrHelp):
		_, _ = fmt.Fprintf(help, usage, pgtest.EnvURL)
		flags.SetOutput(help)
		flags.PrintDefaults()
		return o, flag.ErrHelp
	case err != nil:
		return o, err //nolint:wrapcheck // it names the flag
	case flags.NArg() > 0:
		return o, fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}
	return o, o.validate()
}

func (o options) validate() error {
	switch {
	case o.workers < 1 || o.workers > 50:
		return fmt.Errorf("-workers is %d: it must be between 1 and 50", o.workers)
	case o.kills < 0 || o.kills > 1000:
		return fmt.Errorf("-kills is %d: it must be between 0 and 1000", o.kills)
	case o.lease < 100*time.Millisecond || o.lease > time.Minute:
		return fmt.Errorf("-lease is %v: it must be between 100ms and 1m", o.lease)
	case o.work < 0 || o.work > o.lease/2:
		return fmt.Errorf("-work is %v: it must be between 0 and half the lease, %v", o.work, o.lease/2)
	case o.keep && os.Getenv(pgtest.EnvURL) == "":
		return fmt.Errorf("-keep needs a server that outlives the program: set %s", pgtest.EnvURL)
	}
	return nil
}

// demonstrate does it all once the input is known.
func demonstrate(ctx context.Context, o options, in *intent, r *report, stderr io.Writer) (err error) {
	r.input(o.file)
	db, err := scratch.Open(ctx, "payments_demo", r.say)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, db.Close(ctx)) }()
	ledger := newLedger(db.Schema)
	if err := ledger.create(ctx, db.Pool); err != nil {
		return err
	}
	db.Keep = o.keep
	r.say("Schema %s: migrated, with a ledger beside the keys.\n", db.Schema)
	r.say("Worker processes: %d, each with up to %d requests at once. A lease is %v. Kills: %d.\n",
		o.workers, slots, o.lease, min(o.kills, len(in.payments)))

	conf := setup{URL: db.URL, Schema: db.Schema, Lease: o.lease, Work: o.work}
	d := newDispatcher(conf, o.workers, in, o.kills, r, stderr)
	if err := d.run(ctx); err != nil {
		return err
	}
	res, err := audit(ctx, db.Pool, ledger, in, evidence{answers: d.answers, lost: d.lost})
	if err != nil {
		return err
	}
	res.kills, res.killsAsked = d.kills, o.kills
	r.conclude(res)
	if len(res.problems) > 0 {
		return fmt.Errorf("the ledger or the answers are wrong: %d problems, the first: %s", len(res.problems), res.problems[0])
	}
	return nil
}
