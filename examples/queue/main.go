// Command queue shows a consumer of messages that arrive more than once: a table as a queue, consumer processes that crash in the
// middle, and effects that happen exactly once all the same, because each is committed together with the record of its message.
//
// The part to copy is in consumer.go.
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

	"github.com/archlab/idempotency/examples/internal/scratch"
)

func main() {
	if len(os.Args) > 1 && os.Args[1] == consumerCommand {
		signal.Ignore(os.Interrupt) // Ctrl-C in a terminal reaches every process; the program ends its consumers
		if err := consumerMain(context.Background(), os.Stdin, os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, "queue: consumer:", err)
			os.Exit(1)
		}
		return
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second Ctrl-C ends the program at once
	os.Exit(run(ctx, os.Args[1:], os.Stdout, os.Stderr))
}

type options struct {
	messages    int
	consumers   int
	crashes     int
	unprotected bool
}

// run is the whole program, and returns its exit code: 1 if an effect is missing or doubled, 2 for wrong flags.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	var o options
	flags := flag.NewFlagSet("queue", flag.ContinueOnError)
	flags.SetOutput(stderr)
	flags.IntVar(&o.messages, "messages", 300, "send this `number` of messages, each one to three times")
	flags.IntVar(&o.consumers, "consumers", 4, "run this `number` of consumer processes")
	flags.IntVar(&o.crashes, "crashes", 6, "let this `number` of them crash, one after the other")
	flags.BoolVar(&o.unprotected, "unprotected", false, "book without the store, to see what happens then")
	if err := flags.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return 0
		}
		return 2 // the flag set has said why
	}
	if o.messages < 1 || o.consumers < 1 || o.crashes < 0 || flags.NArg() > 0 {
		fmt.Fprintln(stderr, "queue: -messages and -consumers must be at least 1, -crashes at least 0, and nothing else may follow; -h shows the flags")
		return 2
	}
	if err := demonstrate(ctx, o, stdout, stderr); err != nil {
		fmt.Fprintln(stderr, "queue:", err)
		return 1
	}
	return 0
}

func demonstrate(ctx context.Context, o options, stdout, stderr io.Writer) (err error) {
	say := func(format string, args ...any) { fmt.Fprintf(stdout, format, args...) }
	db, err := scratch.Open(ctx, "queue_example", say)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, db.Close(ctx)) }()
	q := newQueue(db.Schema)
	if err := q.create(ctx, db.Pool); err != nil {
		return err
	}
	sent, err := produce(ctx, db.Pool, q, o.messages)
	if err != nil {
		return err
	}
	say("Sent %d messages in %d deliveries; %d can never be booked.\n", len(sent.messages), sent.deliveries, sent.poisonous)
	say("Consumer processes: %d. Crashes: %d, by SIGKILL, in turn before COMMIT and between COMMIT and the acknowledgement.\n", o.consumers, o.crashes)

	total, err := consume(ctx, o, setup{URL: db.URL, Schema: db.Schema, Unprotected: o.unprotected}, stderr, say)
	if err != nil {
		return err
	}
	say("\n  executed  %4d  booked now, in one commit with the record of the message\n", total[executed])
	say("  replayed  %4d  booked before: a second delivery, or one after a crash\n", total[replayed])
	say("  failed    %4d  can never be booked: said once, and known to every repeat\n", total[failed])
	say("  crashed   %4d  consumers, in the middle of a message\n\n", total[crashed])

	problems, err := check(ctx, db.Pool, q, sent)
	if err != nil {
		return err
	}
	for _, problem := range problems {
		say("WRONG: %s\n", problem)
	}
	if len(problems) > 0 {
		return fmt.Errorf("the books are wrong: %d problems", len(problems))
	}
	say("OK: each of %d messages booked exactly once, %d refused, no matter how often they came; the balances add up.\n",
		len(sent.messages)-sent.poisonous, sent.poisonous)
	return nil
}
