package pgtest

import (
	"context"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"syscall"

	"github.com/moby/moby/client"
)

// envWatch makes a process of this program the watchdog of a container: "name at host".
const envWatch = "PGTEST_WATCH_CONTAINER"

// A container does not end with the process that started it: not after a panic, a test's time-out, or a kill. So this program runs
// once more, waits for the end of its standard input, whose other end the first process holds, and removes the container.
func init() {
	if name, host, ok := strings.Cut(os.Getenv(envWatch), " at "); ok {
		watch(name, host)
		os.Exit(0)
	}
}

func watch(name, host string) {
	signal.Ignore(syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP) // they are for the other process
	_, _ = io.Copy(io.Discard, os.Stdin)
	engine, err := client.New(client.FromEnv, client.WithHost(host))
	if err != nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
	defer cancel()
	_, _ = engine.ContainerRemove(ctx, name, client.ContainerRemoveOptions{Force: true, RemoveVolumes: true})
}

// watchdog is the other process.
type watchdog struct{ cmd *exec.Cmd }

// watchContainer starts a watchdog. There is none, nil, where this program cannot be run again; then the next process that comes
// this way removes what was left behind.
func watchContainer(ctx context.Context, host, name string) *watchdog {
	self, err := os.Executable()
	if err != nil {
		return nil
	}
	cmd := exec.CommandContext(context.WithoutCancel(ctx), self) //nolint:gosec // ourselves
	cmd.Dir = "/"
	cmd.Env = append(os.Environ(), envWatch+"="+name+" at "+host)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if _, err := cmd.StdinPipe(); err != nil { // held until this process ends
		return nil
	}
	if err := cmd.Start(); err != nil {
		return nil
	}
	return &watchdog{cmd}
}

// dismiss ends the watchdog when its container is gone.
func (w *watchdog) dismiss() {
	if w != nil {
		_ = w.cmd.Process.Kill()
		_ = w.cmd.Wait() // killed
	}
}
