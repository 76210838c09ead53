package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"syscall"
)

// process is a worker process as the program sees it.
type process struct {
	seat     *seat
	cmd      *exec.Cmd
	in       io.WriteCloser
	requests *json.Encoder
}

// event is what happens to a process: it says something, or it has exited.
type event struct {
	*process
	message
	exited bool
	err    error // of the exit: nil for a peaceful one
}

// startProcess starts this program again as a worker. Its messages, and at last its exit, go to events, in this order: what a
// process had said before it was killed is not lost.
func startProcess(ctx context.Context, s *seat, conf setup, stderr io.Writer, events chan<- event) (*process, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("find this program: %w", err)
	}
	p := &process{seat: s, cmd: exec.CommandContext(ctx, self, workerCommand)} //nolint:gosec // ourselves
	p.cmd.Stderr = stderr
	if p.in, err = p.cmd.StdinPipe(); err != nil {
		return nil, fmt.Errorf("start a worker: %w", err)
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, fmt.Errorf("start a worker: %w", err)
	}
	if err := p.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start a worker: %w", err)
	}
	p.requests = json.NewEncoder(p.in)
	go func() {
		messages := json.NewDecoder(out)
		for {
			var m message
			if messages.Decode(&m) != nil { // it has ended, perhaps in the middle of a message
				break
			}
			events <- event{process: p, message: m}
		}
		events <- event{process: p, exited: true, err: p.cmd.Wait()}
	}()
	_ = p.requests.Encode(conf) // if it has died already, its exit will say so
	return p, nil
}

func (p *process) pid() int { return p.cmd.Process.Pid }

// send gives the worker a request. If it has died, its exit is on its way, and the request is lost with it.
func (p *process) send(r request) { _ = p.requests.Encode(r) }

// kill sends SIGKILL, which no process can see coming.
func (p *process) kill() { _ = p.cmd.Process.Kill() } // fails if it has died already

// finish lets the worker end in peace once it has answered everything.
func (p *process) finish() { _ = p.in.Close() }

// wasKilled reports whether the error of an exit says that a process died of SIGKILL.
func wasKilled(err error) bool {
	exit, ok := errors.AsType[*exec.ExitError](err)
	if !ok {
		return false
	}
	status, ok := exit.Sys().(syscall.WaitStatus)
	return ok && status.Signaled() && status.Signal() == syscall.SIGKILL
}
