package pgtest

import (
	"bufio"
	"bytes"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
)

// takeBinaries starts a server from the newest binaries on the machine.
func takeBinaries(ctx context.Context, o serverOptions) (*Server, error) {
	bins := findBinaries(ctx)
	if len(bins) == 0 {
		return nil, pass("no PostgreSQL binaries of version %d or later (looked with pg_config, in PATH and /usr/lib/postgresql)", MinVersion)
	}
	return runBinaries(ctx, bins[0].dir, nil, "from "+bins[0].dir, o)
}

// binaries is a folder with initdb and postgres in it.
type binaries struct {
	dir   string
	major int
}

// findBinaries lists the folders with a server that is new enough, the newest first.
func findBinaries(ctx context.Context) []binaries {
	var dirs []string
	if out, err := exec.CommandContext(ctx, "pg_config", "--bindir").Output(); err == nil {
		dirs = append(dirs, strings.TrimSpace(string(out)))
	}
	if path, err := exec.LookPath("postgres"); err == nil {
		dirs = append(dirs, filepath.Dir(path))
	}
	installed, _ := filepath.Glob("/usr/lib/postgresql/*/bin") // the pattern is well-formed
	var found []binaries
	for _, dir := range append(dirs, installed...) {
		if major := majorOf(ctx, dir, nil); major >= MinVersion {
			found = append(found, binaries{dir, major})
		}
	}
	slices.SortStableFunc(found, func(a, b binaries) int { return b.major - a.major })
	return found
}

// majorOf returns the version of the server in dir, or 0 if there is none that runs.
func majorOf(ctx context.Context, dir string, env []string) int {
	if _, err := os.Stat(filepath.Join(dir, "initdb")); err != nil {
		return 0
	}
	cmd := exec.CommandContext(ctx, filepath.Join(dir, "postgres"), "--version") //nolint:gosec // a folder of binaries
	cmd.Env = append(os.Environ(), env...)
	out, err := cmd.Output()
	if err != nil {
		return 0
	}
	for field := range strings.FieldsSeq(string(out)) {
		digits := field[:len(field)-len(strings.TrimLeft(field, "0123456789"))]
		if major, err := strconv.Atoi(digits); err == nil {
			return major
		}
	}
	return 0
}

// runBinaries makes a cluster in a temporary directory and starts its server.
func runBinaries(ctx context.Context, bin string, env []string, from string, o serverOptions) (*Server, error) {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	m, err := newProcessMachine(ctx, bin, env)
	if err != nil {
		return nil, err
	}
	url, version, err := m.firstStart(ctx, o)
	if err != nil {
		log := m.logTail()
		return nil, errors.Join(fmt.Errorf("the server %s does not start: %w%s", from, err, log), m.close(ctx))
	}
	return &Server{url: url, description: "PostgreSQL " + version + " " + from, machine: m}, nil
}

// processMachine is a server that runs as a process, under a supervisor that lives no longer than this process.
type processMachine struct {
	bin, dir string
	env      []string
	as       *syscall.Credential // nil: as we are
	cmd      *exec.Cmd           // the supervisor
	commands io.WriteCloser
	answers  *bufio.Reader
	args     []string
}

//go:embed supervise.sh
var supervise string

func newProcessMachine(ctx context.Context, bin string, env []string) (*processMachine, error) {
	dir, err := os.MkdirTemp("", "pgtest-")
	if err != nil {
		return nil, fmt.Errorf("make a folder for the server: %w", err)
	}
	m := &processMachine{bin: bin, dir: dir, env: env}
	if err := m.prepare(ctx); err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	return m, nil
}

// prepare makes the cluster and starts the supervisor.
func (m *processMachine) prepare(ctx context.Context) error {
	if os.Geteuid() == 0 { // PostgreSQL refuses to run as root
		as, err := unprivileged()
		if err != nil {
			return err
		}
		m.as = as
		if err := os.Chown(m.dir, int(as.Uid), int(as.Gid)); err != nil {
			return fmt.Errorf("give the folder to the server's user: %w", err)
		}
	}
	passwordFile := filepath.Join(m.dir, "password")
	if err := os.WriteFile(passwordFile, []byte(password+"\n"), 0o600); err != nil {
		return fmt.Errorf("write the password: %w", err)
	}
	if m.as != nil {
		if err := os.Chown(passwordFile, int(m.as.Uid), int(m.as.Gid)); err != nil {
			return fmt.Errorf("give the password to the server's user: %w", err)
		}
	}
	initdb := m.command(ctx, filepath.Join(m.bin, "initdb"), "--pgdata="+m.data(), "--username="+userName,
		"--pwfile="+passwordFile, "--auth=scram-sha-256", "--encoding=UTF8", "--locale=C.UTF-8", "--no-sync")
	if out, err := initdb.CombinedOutput(); err != nil {
		return fmt.Errorf("initdb: %w: %s", err, bytes.TrimSpace(out))
	}
	return m.startSupervisor()
}

// startSupervisor starts the shell that runs the server. It reads commands from a pipe whose other end only this process holds:
// when the process ends, however it ends, the shell reads the pipe's end, stops the server and removes the folder. It has a
// process group of its own, since Ctrl-C in a terminal must not reach it.
func (m *processMachine) startSupervisor() error {
	cmd := m.command(context.Background(), "/bin/sh", "-c", supervise, "supervise", m.dir, filepath.Join(m.bin, "postgres"))
	cmd.SysProcAttr.Setpgid = true
	commands, err := cmd.StdinPipe()
	if err != nil {
		return fmt.Errorf("supervise the server: %w", err)
	}
	answers, err := cmd.StdoutPipe()
	if err != nil {
		return fmt.Errorf("supervise the server: %w", err)
	}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("supervise the server: %w", err)
	}
	m.cmd, m.commands, m.answers = cmd, commands, bufio.NewReader(answers)
	return nil
}

func (m *processMachine) command(ctx context.Context, name string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, name, args...) //nolint:gosec // the server's own programs
	cmd.Dir = m.dir
	cmd.Env = append(append(os.Environ(), m.env...), "LC_ALL=C")
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: m.as}
	return cmd
}

func (m *processMachine) data() string { return filepath.Join(m.dir, "data") }

// firstStart starts the server on a free port and creates the test database.
func (m *processMachine) firstStart(ctx context.Context, o serverOptions) (url, version string, err error) {
	for range 3 { // somebody may take the port in between
		port, err := freePort(ctx)
		if err != nil {
			return "", "", err
		}
		m.args = append(o.arguments(), "-D", m.data(), "-p", strconv.Itoa(port),
			"-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories=")
		if err := m.start(ctx); err != nil {
			return "", "", err
		}
		url = address(port)
		version, err = m.createDatabase(ctx, url)
		if err == nil || ctx.Err() != nil {
			return url, version, err
		}
		if stopErr := m.stop(ctx); stopErr != nil {
			return "", "", errors.Join(err, stopErr)
		}
	}
	return url, version, err
}

func (m *processMachine) createDatabase(ctx context.Context, url string) (version string, err error) {
	ctx, cancel := context.WithTimeout(ctx, startTimeout/3)
	defer cancel()
	maintenance := strings.Replace(url, "/"+database+"?", "/postgres?", 1)
	version, err = awaitAnswer(ctx, maintenance)
	if err != nil {
		return "", err
	}
	return version, execute(ctx, maintenance, "CREATE DATABASE "+database)
}

// start implements machine.
func (m *processMachine) start(ctx context.Context) error {
	return m.tell(ctx, "start "+strings.Join(m.args, " "))
}

// stop implements machine.
func (m *processMachine) stop(ctx context.Context) error { return m.tell(ctx, "stop INT") }

// kill implements machine. An immediate shutdown leaves the files as a power cut would, but takes the sessions along; a
// SIGKILL of the first process would leave them behind.
func (m *processMachine) kill(ctx context.Context) error { return m.tell(ctx, "stop QUIT") }

// tell gives the supervisor a command and waits until it is done.
func (m *processMachine) tell(ctx context.Context, command string) error {
	if _, err := io.WriteString(m.commands, command+"\n"); err != nil {
		return fmt.Errorf("tell the supervisor %q: %w", command, err)
	}
	answer := make(chan error, 1)
	go func() {
		_, err := m.answers.ReadString('\n')
		answer <- err
	}()
	select {
	case err := <-answer:
		if err != nil {
			return fmt.Errorf("the supervisor does not answer %q: %w", command, err)
		}
		return nil
	case <-ctx.Done():
		return fmt.Errorf("the supervisor takes too long to %q: %w", command, ctx.Err())
	}
}

// close implements machine.
func (m *processMachine) close(ctx context.Context) error {
	_ = m.commands.Close() // from here on the supervisor does it all
	done := make(chan error, 1)
	go func() { done <- m.cmd.Wait() }()
	select {
	case err := <-done:
		if err != nil {
			return fmt.Errorf("the supervisor of the server: %w", err)
		}
		return nil
	case <-ctx.Done():
		return errors.Join(fmt.Errorf("the server takes too long to stop: %w", ctx.Err()),
			syscall.Kill(-m.cmd.Process.Pid, syscall.SIGKILL), <-done)
	}
}

// logTail returns the last lines of the server's log, for an error.
func (m *processMachine) logTail() string {
	log, err := os.ReadFile(filepath.Join(m.dir, "log"))
	if err != nil || len(log) == 0 {
		return ""
	}
	lines := strings.Split(strings.TrimSpace(string(log)), "\n")
	return "\nIts log ends with:\n" + strings.Join(lines[max(0, len(lines)-10):], "\n")
}

// unprivileged returns the user that a server started by root runs as.
func unprivileged() (*syscall.Credential, error) {
	for _, name := range []string{"postgres", "nobody"} {
		account, err := user.Lookup(name)
		if err != nil {
			continue
		}
		uid, err := strconv.ParseUint(account.Uid, 10, 32)
		if err != nil {
			continue
		}
		gid, err := strconv.ParseUint(account.Gid, 10, 32)
		if err != nil {
			continue
		}
		return &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}, nil
	}
	return nil, errors.New("PostgreSQL does not run as root, and there is neither a user postgres nor nobody: run as another user")
}
