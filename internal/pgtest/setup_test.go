package pgtest_test

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/archlab/idempotency/internal/pgtest"
)

// What makes a process of this program another one than that of the tests: the server that it must start, what it does, and where it
// differs.
const (
	demandContainer = pgtest.EnvRequire + "=container"
	demandBinaries  = pgtest.EnvRequire + "=binaries"

	envChild      = "PGTEST_CHILD"
	envInstalled  = "PGTEST_CHILD_INSTALLED"
	envStatistics = "PGTEST_CHILD_STATISTICS"
)

func TestMain(m *testing.M) {
	if pattern := os.Getenv(envInstalled); pattern != "" {
		pgtest.SetInstalled(pattern)
	}
	if library := os.Getenv(envStatistics); library != "" {
		pgtest.SetStatistics(library)
	}
	switch what := os.Getenv(envChild); what {
	case "":
		pgtest.Main(m)
	case "leak":
		go func() { select {} }()
		pgtest.Main(m)
	default:
		if err := beChild(what); err != nil {
			_, _ = fmt.Fprintln(os.Stdout, strings.ReplaceAll(err.Error(), "\n", " "))
			os.Exit(1)
		}
	}
}

// started are the demands for each way to start a server, of which a machine may not have all.
var started = []string{demandContainer, demandBinaries}

// beChild starts a server, says which, does what it is told at the end of its input, and closes the server.
func beChild(what string) error {
	var opts []pgtest.ServerOption
	if what == "own" {
		opts = append(opts, pgtest.Own())
	}
	ctx := context.Background()
	server, err := pgtest.Start(ctx, opts...)
	if err != nil {
		return err
	}
	_, _ = fmt.Fprintf(os.Stdout, "%s\n%s\n", server.Description(), server.URL())
	if _, err := io.Copy(io.Discard, os.Stdin); err != nil {
		return err
	}
	switch what {
	case "stop":
		if err := server.Stop(ctx); err != nil {
			_, _ = fmt.Fprintln(os.Stdout, err)
		}
	case "panic":
		panic("as told")
	}
	return server.Close(ctx)
}

// command returns this program as another process, in an environment without what chooses a server, but for env.
func command(t *testing.T, env []string, args ...string) *exec.Cmd {
	t.Helper()
	self, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.CommandContext(t.Context(), self, args...) //nolint:gosec // ourselves
	cmd.Env = slices.DeleteFunc(os.Environ(), func(v string) bool {
		name, _, _ := strings.Cut(v, "=")
		return slices.Contains([]string{pgtest.EnvURL, pgtest.EnvImage, pgtest.EnvRequire, pgtest.EnvDurable}, name)
	})
	cmd.Env = append(cmd.Env, env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // for signals to it and what it started alone
	return cmd
}

// child is a process that has started a server.
type child struct {
	*exec.Cmd

	stdin            io.Closer
	out              *bufio.Reader
	description, url string
}

// startChild starts a process that starts a server. The test is skipped if the environment of the child demands a way to start it
// that this machine does not have, unless our own demands it too.
func startChild(t *testing.T, what string, env ...string) *child {
	t.Helper()
	c := &child{Cmd: command(t, append(env, envChild+"="+what))}
	stdin, err := c.StdinPipe()
	require.NoError(t, err)
	out, err := c.StdoutPipe()
	require.NoError(t, err)
	c.Stderr = os.Stderr
	if what == "panic" {
		c.Stderr = nil
	}
	require.NoError(t, c.Start())
	c.stdin, c.out = stdin, bufio.NewReader(out)
	c.description, err = c.out.ReadString('\n')
	require.NoError(t, err)
	if strings.HasPrefix(c.description, "pgtest: ") {
		require.Error(t, c.Wait())
		for _, demand := range env {
			if strings.HasPrefix(c.description, "pgtest: "+demand+", but: ") && demand != pgtest.EnvRequire+"="+os.Getenv(pgtest.EnvRequire) {
				t.Skip(c.description)
			}
		}
		require.Fail(t, "no server", c.description)
	}
	c.url, err = c.out.ReadString('\n')
	require.NoError(t, err)
	c.description, c.url = strings.TrimSpace(c.description), strings.TrimSpace(c.url)
	return c
}

// end lets the process end, and returns what else it said.
func (c *child) end(t *testing.T) string {
	t.Helper()
	require.NoError(t, c.stdin.Close())
	rest, err := io.ReadAll(c.out)
	require.NoError(t, err)
	require.NoError(t, c.Wait())
	return string(rest)
}

// failChild returns the error of a process that gets no server.
func failChild(t *testing.T, env ...string) string {
	t.Helper()
	cmd := command(t, append(env, envChild+"=start"))
	cmd.Stdin = new(bytes.Buffer)
	out, err := cmd.Output()
	require.Error(t, err, "%s", out)
	require.Equal(t, 1, cmd.ProcessState.ExitCode(), "%s", out)
	return string(out)
}

const patience = 30 * time.Second // for what must come about

const glance = 10 * time.Millisecond // between looks whether it has
