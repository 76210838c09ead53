package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"
	"syscall"

	"golang.org/x/sync/errgroup"
)

// What becomes of a delivery, and of a consumer.
const (
	executed = "executed"
	replayed = "replayed"
	failed   = "failed"
	crashed  = "crashed"
)

// tally counts what consumers report.
type tally struct {
	mu      sync.Mutex
	counts  map[string]int
	started int
}

func (t *tally) add(what string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.counts[what]++
}

// start returns the number of the consumer that starts next, from 1.
func (t *tally) start() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.started++
	return t.started
}

// consume runs consumer processes until the queue is empty, and counts what they report. The first ones crash, and are replaced.
func consume(ctx context.Context, o options, s setup, stderr io.Writer, say func(format string, args ...any)) (map[string]int, error) {
	t := &tally{counts: map[string]int{}}
	g, ctx := errgroup.WithContext(ctx)
	for range o.consumers {
		g.Go(func() error {
			for {
				own, n := s, t.start()
				if n <= o.crashes {
					own.Crash, own.After = []moment{beforeAck, beforeCommit}[n%2], 5*n
				}
				err := consumerProcess(ctx, own, stderr, t.add)
				if !wasKilled(err) || ctx.Err() != nil {
					return err
				}
				t.add(crashed)
				say("  consumer %d died %s; another takes its place\n", n, own.Crash)
			}
		})
	}
	if err := g.Wait(); err != nil {
		return nil, err //nolint:wrapcheck // it says where it comes from
	}
	return t.counts, nil
}

// consumerProcess runs this program again as a consumer, and returns when it has ended, with the error of its end.
func consumerProcess(ctx context.Context, s setup, stderr io.Writer, report func(outcome string)) error {
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find this program: %w", err)
	}
	input, err := json.Marshal(s)
	if err != nil {
		return fmt.Errorf("start a consumer: %w", err)
	}
	cmd := exec.CommandContext(ctx, self, consumerCommand) //nolint:gosec // ourselves
	cmd.Stdin, cmd.Stderr = bytes.NewReader(input), stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		return fmt.Errorf("start a consumer: %w", err)
	}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start a consumer: %w", err)
	}
	for lines := bufio.NewScanner(out); lines.Scan(); {
		report(lines.Text())
	}
	if err := cmd.Wait(); err != nil {
		return fmt.Errorf("a consumer ended: %w", err)
	}
	return nil
}

// wasKilled reports whether a process ended by SIGKILL.
func wasKilled(err error) bool {
	exit, ok := errors.AsType[*exec.ExitError](err)
	if !ok {
		return false
	}
	status, ok := exit.Sys().(syscall.WaitStatus)
	return ok && status.Signaled() && status.Signal() == syscall.SIGKILL
}
