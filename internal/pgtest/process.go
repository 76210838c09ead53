package pgtest

import (
	"bufio"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
)

// processMachine is a server that runs as a process, under a supervisor that lives no longer than this process.
type processMachine struct {
	dir      string
	cmd      *exec.Cmd // the supervisor
	commands io.WriteCloser
	answers  <-chan string // closed when the supervisor ends
	lost     error         // an answer did not come in time, so the next one may be its
}

//go:embed supervise.sh
var supervise string

// newProcessMachine makes a folder and starts the supervisor: a shell that reads commands from a pipe whose other end only this
// process holds. When the process ends, however it ends, the shell reads the pipe's end, stops the server and removes the folder. It
// has a process group of its own, since Ctrl-C in a terminal must not reach it.
func newProcessMachine(ctx context.Context, bin string, env []string) (*processMachine, error) {
	as, err := unprivileged()
	if err != nil {
		return nil, err
	}
	dir, err := temporaryFolder(as)
	if err != nil {
		return nil, err
	}
	m := &processMachine{dir: dir}
	m.cmd = exec.CommandContext(context.WithoutCancel(ctx), "/bin/sh", "-c", supervise, "supervise", dir, bin, userName) //nolint:gosec // ours
	m.cmd.Dir = dir
	m.cmd.Env = append(append(os.Environ(), env...), "LC_ALL=C")
	m.cmd.SysProcAttr = &syscall.SysProcAttr{Credential: as, Setpgid: true}
	if err := m.startSupervisor(); err != nil {
		return nil, errors.Join(fmt.Errorf("supervise the server: %w", err), os.RemoveAll(dir))
	}
	return m, nil
}

func (m *processMachine) startSupervisor() error {
	var err error
	if m.commands, err = m.cmd.StdinPipe(); err != nil {
		return err //nolint:wrapcheck // by the caller
	}
	out, err := m.cmd.StdoutPipe()
	if err != nil {
		return err //nolint:wrapcheck // by the caller
	}
	if err := m.cmd.Start(); err != nil {
		return err //nolint:wrapcheck // by the caller
	}
	answers := make(chan string, 1)
	m.answers = answers
	go func() {
		defer close(answers)
		for lines := bufio.NewScanner(out); lines.Scan(); {
			answers <- lines.Text()
		}
	}()
	return nil
}

func (m *processMachine) data() string { return filepath.Join(m.dir, "data") }

// firstStart makes the cluster, starts the server on a free port and creates the test database.
func (m *processMachine) firstStart(ctx context.Context, o *serverOptions) (url, version string, err error) {
	if err := m.writePassword(); err != nil {
		return "", "", err
	}
	if err := m.tell(ctx, "init"); err != nil {
		return "", "", err
	}
	var port int
	for range 3 {
		if port, err = freePort(ctx); err != nil {
			return "", "", err
		}
		if err = m.configure(o, port); err != nil {
			return "", "", err
		}
		if err = m.start(ctx); err == nil {
			break
		}
		without := o.withoutStatistics()
		switch {
		case isPreloadMissing(err.Error()) && without != nil:
			o = without
		case !strings.Contains(err.Error(), "Address already in use"): // somebody took the port in between
			return "", "", err
		}
	}
	if err != nil {
		return "", "", err
	}
	version, err = awaitAnswer(ctx, address(port, "postgres"), startTimeout)
	if err != nil {
		return "", "", err
	}
	return address(port, database), version, execute(ctx, address(port, "postgres"), "CREATE DATABASE "+database)
}

// isPreloadMissing recognizes the log of a server that ended because it does not have pg_stat_statements.
func isPreloadMissing(log string) bool {
	return strings.Contains(log, `could not access file "`+statistics+`"`)
}

// writePassword leaves the superuser's password where only the server's user, who owns the folder, reads it.
func (m *processMachine) writePassword() error {
	path := filepath.Join(m.dir, "password")
	if err := os.WriteFile(path, []byte(password+"\n"), 0o600); err != nil {
		return fmt.Errorf("write the password: %w", err)
	}
	if as := m.cmd.SysProcAttr.Credential; as != nil {
		if err := os.Chown(path, int(as.Uid), int(as.Gid)); err != nil {
			return fmt.Errorf("give the password to the server's user: %w", err)
		}
	}
	return nil
}

// configure appends the settings to those of initdb; of two for one name the server takes the later.
func (m *processMachine) configure(o *serverOptions, port int) error {
	file, err := os.OpenFile(filepath.Join(m.data(), "postgresql.conf"), os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		return fmt.Errorf("configure the server: %w", err)
	}
	var b strings.Builder
	fmt.Fprintf(&b, "\nlisten_addresses = '127.0.0.1'\nport = %d\nunix_socket_directories = ''\n%s = ''\n", port, preload)
	quote := strings.NewReplacer("'", "''", `\`, `\\`, "\n", `\n`)
	for _, name := range o.names() {
		fmt.Fprintf(&b, "%s = '%s'\n", name, quote.Replace(o.settings[name]))
	}
	_, err = file.WriteString(b.String())
	if err := errors.Join(err, file.Close()); err != nil {
		return fmt.Errorf("configure the server: %w", err)
	}
	return nil
}

// start implements machine.
func (m *processMachine) start(ctx context.Context) error { return m.tell(ctx, "start") }

// stop implements machine.
func (m *processMachine) stop(ctx context.Context) error { return m.tell(ctx, "stop fast") }

// kill implements machine. An immediate shutdown leaves the files as a power cut would, but takes the sessions along; a
// SIGKILL of the first process would leave them behind for a while.
func (m *processMachine) kill(ctx context.Context) error { return m.tell(ctx, "stop immediate") }

// tell gives the supervisor a command and waits until it is done.
func (m *processMachine) tell(ctx context.Context, command string) error {
	if m.lost != nil {
		return m.lost
	}
	if _, err := io.WriteString(m.commands, command+"\n"); err != nil {
		return fmt.Errorf("tell the supervisor to %s: %w", command, err)
	}
	select {
	case answer := <-m.answers:
		if answer != "done" {
			return fmt.Errorf("%s: it failed%s", command, m.logTail())
		}
		return nil
	case <-ctx.Done():
		m.lost = fmt.Errorf("%s: no answer in time: %w", command, ctx.Err())
		return m.lost
	}
}

// close implements machine.
func (m *processMachine) close(ctx context.Context) error {
	_ = m.commands.Close() // from here on the supervisor does it all
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for range m.answers {
		}
	}()
	var late error
	select {
	case <-ended:
	case <-ctx.Done():
		// A server whose files have gone ends by itself within a minute.
		late = errors.Join(fmt.Errorf("it takes too long: %w", ctx.Err()), syscall.Kill(-m.cmd.Process.Pid, syscall.SIGKILL))
		<-ended
		late = errors.Join(late, os.RemoveAll(m.dir))
	}
	if err := errors.Join(late, m.cmd.Wait()); err != nil {
		return fmt.Errorf("stop the server and remove it: %w", err)
	}
	return nil
}

// logTail returns the last lines of the server's log, for an error.
func (m *processMachine) logTail() string {
	log, err := os.ReadFile(filepath.Join(m.dir, "log"))
	if err != nil || len(log) == 0 {
		return ""
	}
	lines := strings.Split(strings.TrimSpace(string(log)), "\n")
	return "\nIts log ends with:\n" + strings.Join(lines[max(0, len(lines)-15):], "\n")
}
