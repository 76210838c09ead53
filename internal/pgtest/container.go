package pgtest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/network"
	"github.com/moby/moby/client"
	"github.com/testcontainers/testcontainers-go"
	"github.com/testcontainers/testcontainers-go/modules/postgres"
	"github.com/testcontainers/testcontainers-go/wait"
)

const (
	stopTimeout  = 20 * time.Second
	reachTimeout = 15 * time.Second // for a container whose server says that it is ready
)

// labelOwner says which process a container belongs to, so that a later one can tell whether it was left behind.
const labelOwner = "archlab-idempotency.pgtest.owner"

// takeContainer starts a container where an engine answers and an image can be had. Where the environment names an image, anything
// else is an error.
func takeContainer(ctx context.Context, o *serverOptions) (*Server, error) {
	server, err := findContainer(ctx, o)
	if image := os.Getenv(EnvImage); err != nil && image != "" {
		return nil, fmt.Errorf("%s=%s: %s", EnvImage, image, err.Error()) // not wrapped, or it would be passed over
	}
	return server, err
}

func findContainer(ctx context.Context, o *serverOptions) (*Server, error) {
	engine, err := connectEngine(ctx)
	if err != nil {
		return nil, pass("no Docker engine answers (%v)", err)
	}
	defer engine.Close() //nolint:errcheck // nothing was written
	removeLeftBehind(ctx, engine)
	image, err := chooseImage(ctx, engine)
	if err != nil {
		return nil, err
	}
	for range 3 {
		var server *Server
		if server, err = runContainer(ctx, engine.DaemonHost(), image, o); err == nil {
			return server, nil
		}
		without := o.withoutStatistics()
		switch {
		case isPreloadMissing(err.Error()) && without != nil:
			o = without
		case !strings.Contains(err.Error(), "port is already allocated") && !strings.Contains(err.Error(), "address already in use"):
			return nil, pass("a container of %s does not run (%v)", image, err)
		}
	}
	return nil, pass("a container of %s does not run (%v)", image, err)
}

func runContainer(ctx context.Context, engine, image string, o *serverOptions) (_ *Server, err error) {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	port, err := freePort(ctx)
	if err != nil {
		return nil, err
	}
	m := &containerMachine{}
	defer func() {
		if err != nil {
			err = errors.Join(err, m.close(ctx))
		}
	}()
	name := fmt.Sprintf("pgtest-%d-%d", os.Getpid(), port)
	m.watchdog = watchContainer(ctx, engine, name)
	var args []string
	for _, setting := range o.names() {
		args = append(args, "-c", setting+"="+o.settings[setting])
	}
	c, err := postgres.Run(ctx, image,
		postgres.WithUsername(userName), postgres.WithPassword(password), postgres.WithDatabase(database),
		testcontainers.WithName(name),
		testcontainers.WithCmd(append([]string{"postgres"}, args...)...),
		testcontainers.WithLabels(map[string]string{labelOwner: thisProcess()}),
		testcontainers.WithHostConfigModifier(func(host *container.HostConfig) {
			// A port of our choice, so that it is the same after a restart, and on the loopback only.
			host.PortBindings = network.PortMap{network.MustParsePort("5432/tcp"): {
				{HostIP: netip.MustParseAddr("127.0.0.1"), HostPort: strconv.Itoa(port)},
			}}
			host.ShmSize = 256 << 20
		}),
		// The set-up's server writes the same line once before.
		testcontainers.WithWaitStrategyAndDeadline(startTimeout,
			wait.ForLog("database system is ready to accept connections").WithOccurrence(2).WithPollInterval(50*time.Millisecond)),
	)
	if c != nil {
		m.Container = c
	}
	if err != nil {
		return nil, fmt.Errorf("run it: %w%s", err, m.logTail(ctx))
	}
	url := address(port, database)
	version, err := awaitAnswer(ctx, url, reachTimeout)
	if err != nil {
		return nil, err
	}
	return &Server{url: url, description: "PostgreSQL " + version + " in a container of " + image, machine: m}, nil
}

// containerMachine is a server in a container.
type containerMachine struct {
	testcontainers.Container

	watchdog *watchdog
}

func (c *containerMachine) start(ctx context.Context) error {
	if err := c.Start(ctx); err != nil {
		return fmt.Errorf("start the container: %w", err)
	}
	return nil
}

func (c *containerMachine) stop(ctx context.Context) error {
	timeout := stopTimeout
	if err := c.Stop(ctx, &timeout); err != nil {
		return fmt.Errorf("stop the container: %w", err)
	}
	return nil
}

func (c *containerMachine) kill(ctx context.Context) error {
	engine, err := connectEngine(ctx)
	if err != nil {
		return err
	}
	defer engine.Close() //nolint:errcheck // nothing was written
	// Waiting begins before the end, or it might be missed.
	waited := engine.ContainerWait(ctx, c.GetContainerID(), client.ContainerWaitOptions{Condition: container.WaitConditionNotRunning})
	if _, err := engine.ContainerKill(ctx, c.GetContainerID(), client.ContainerKillOptions{Signal: "SIGKILL"}); err != nil {
		return fmt.Errorf("kill the container: %w", err)
	}
	select {
	case err := <-waited.Error:
		return fmt.Errorf("wait for the container's end: %w", err)
	case <-waited.Result:
		return nil
	}
}

func (c *containerMachine) close(ctx context.Context) error {
	defer c.watchdog.dismiss()
	if c.Container == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
	defer cancel()
	if err := c.Terminate(ctx, testcontainers.StopTimeout(time.Second)); err != nil {
		return fmt.Errorf("remove the container: %w", err)
	}
	return nil
}

// logTail returns the last lines of the container's log, for an error.
func (c *containerMachine) logTail(ctx context.Context) string {
	if c.Container == nil {
		return ""
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), engineTimeout)
	defer cancel()
	logs, err := c.Logs(ctx)
	if err != nil {
		return ""
	}
	defer logs.Close() //nolint:errcheck // nothing was written
	text, err := io.ReadAll(logs)
	if err != nil || len(text) == 0 {
		return ""
	}
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	return "\nIts log ends with:\n" + strings.Join(lines[max(0, len(lines)-15):], "\n")
}
