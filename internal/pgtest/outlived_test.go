package pgtest_test

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/moby/moby/client"
	"github.com/stretchr/testify/require"

	"github.com/archlab/idempotency/internal/pgtest"
)

func TestServerDoesNotOutliveItsProcess(t *testing.T) {
	t.Parallel()
	for _, demand := range started {
		t.Run(demand, func(t *testing.T) {
			t.Parallel()
			for name, end := range map[string]func(c *child) error{
				"killed":      func(c *child) error { return syscall.Kill(-c.Process.Pid, syscall.SIGKILL) },
				"interrupted": func(c *child) error { return syscall.Kill(-c.Process.Pid, syscall.SIGINT) },
				"panic":       func(c *child) error { return c.stdin.Close() },
			} {
				t.Run(name, func(t *testing.T) {
					t.Parallel()
					c := startChild(t, name, demand)
					data := show(t, c.url, "data_directory")
					if demand == demandContainer {
						require.Len(t, containersOf(t, c.Process.Pid), 1)
					} else {
						require.DirExists(t, data)
					}
					require.NoError(t, end(c))
					require.Error(t, c.Wait())
					require.Eventually(t, func() bool {
						conn, err := pgx.Connect(t.Context(), c.url)
						if err == nil {
							require.NoError(t, conn.Close(t.Context()))
						}
						return err != nil
					}, patience, glance, "the server has gone")
					require.Eventually(t, func() bool {
						if demand == demandContainer {
							return len(containersOf(t, c.Process.Pid)) == 0
						}
						_, err := os.Stat(filepath.Dir(data))
						return os.IsNotExist(err)
					}, patience, glance, "and its data")
				})
			}
		})
	}
}

func TestContainerThatWasLeftBehindIsRemovedByTheNextProcess(t *testing.T) {
	t.Parallel()
	c := startChild(t, "killed", demandContainer)
	watchdogs := childrenOf(t, c.Process.Pid)
	require.Len(t, watchdogs, 1)
	for _, pid := range append(watchdogs, c.Process.Pid) {
		require.NoError(t, syscall.Kill(pid, syscall.SIGKILL))
	}
	require.Error(t, c.Wait())
	startChild(t, "start", demandContainer).end(t)
	require.Empty(t, containersOf(t, c.Process.Pid))
}

func TestOwnerHasGoneWhenItsProcessHas(t *testing.T) {
	t.Parallel()
	self := pgtest.ThisProcess()
	require.False(t, pgtest.HasGone(self, true))
	boot, rest, found := strings.Cut(self, " ")
	require.True(t, found, "this test needs Linux' /proc")
	namespace, pid, found := strings.Cut(rest, "/")
	require.True(t, found)
	number, start, found := strings.Cut(pid, "/")
	require.True(t, found)
	require.Equal(t, strconv.Itoa(os.Getpid()), number)

	for name, c := range map[string]struct {
		owner    string
		idle     bool
		expected bool
	}{
		"another process with the number":        {boot + " " + namespace + "/" + number + "/1" + start, false, true},
		"no process with the number":             {boot + " " + namespace + "/4194999/" + start, false, true},
		"unknown namespace of process numbers":   {boot + " pid:[1]/" + number + "/1" + start, true, false},
		"another boot or machine, and it runs":   {"b" + boot + " " + namespace + "/" + number + "/" + start, false, false},
		"another boot or machine, and it is off": {"b" + boot + " " + namespace + "/" + number + "/" + start, true, true},
		"nothing":                                {"", true, false},
		"something else":                         {"somebody/else/entirely", true, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			require.Equal(t, c.expected, pgtest.HasGone(c.owner, c.idle))
		})
	}
}

// containersOf lists the containers that a process has started.
func containersOf(t *testing.T, pid int) []string {
	t.Helper()
	engine, err := client.New(client.FromEnv)
	require.NoError(t, err)
	defer engine.Close()
	list, err := engine.ContainerList(t.Context(), client.ContainerListOptions{
		All: true, Filters: make(client.Filters).Add("label", pgtest.LabelOwner),
	})
	require.NoError(t, err)
	var ids []string
	for _, c := range list.Items {
		if strings.Contains(c.Labels[pgtest.LabelOwner], "/"+strconv.Itoa(pid)+"/") {
			ids = append(ids, c.ID)
		}
	}
	return ids
}

// childrenOf lists the processes that a process has started.
func childrenOf(t *testing.T, parent int) []int {
	t.Helper()
	stats, err := filepath.Glob("/proc/[0-9]*/stat")
	require.NoError(t, err)
	var children []int
	for _, path := range stats {
		stat, err := os.ReadFile(path) //nolint:gosec // below /proc
		if err != nil {
			continue // it has ended
		}
		number, rest, _ := strings.Cut(string(stat), " ")
		fields := strings.Fields(rest[strings.LastIndexByte(rest, ')')+1:])
		if fields[1] == strconv.Itoa(parent) {
			pid, err := strconv.Atoi(number)
			require.NoError(t, err)
			children = append(children, pid)
		}
	}
	return children
}
