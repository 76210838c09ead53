package pgtest

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/network"
	"github.com/moby/moby/client"
	"github.com/testcontainers/testcontainers-go"
	"github.com/testcontainers/testcontainers-go/log"
	"github.com/testcontainers/testcontainers-go/modules/postgres"
	"github.com/testcontainers/testcontainers-go/wait"
)

// Images, in the order in which they are looked for. The first is built by `make image`.
const (
	ImageBuilt  = "archlab-idempotency/postgres:17"
	ImagePublic = "postgres:17"
)

const (
	engineTimeout = 5 * time.Second  // for an engine that answers at all
	pullTimeout   = 10 * time.Second // for a registry, where no image is there
	stopTimeout   = 20 * time.Second
)

// Labels of the containers that this package starts: which process they belong to, so that a later one can tell which were
// left behind.
const labelOwner = "archlab-idempotency.pgtest.owner"

// takeContainer starts a container where an engine answers and an image can be had.
func takeContainer(ctx context.Context, o serverOptions) (*Server, error) {
	prepareTestcontainers(ctx)
	engine, err := connectEngine(ctx)
	if err != nil {
		return nil, fmt.Errorf("no Docker engine answers (%s)%w", firstLine(err), errPass)
	}
	defer engine.Close() //nolint:errcheck // nothing was written
	removeLeftBehind(ctx, engine)
	image, err := chooseImage(ctx, engine)
	if err != nil {
		return nil, err
	}
	var server *Server
	for range 3 { // somebody may take the port in between
		server, err = runContainer(ctx, image, o)
		if err == nil || !strings.Contains(err.Error(), "port is already allocated") {
			break
		}
	}
	return server, err
}

// prepareTestcontainers sets what testcontainers cannot find out, where nobody has set anything else. On a machine that looks
// like the inside of a container it would dial the default gateway and wait for a minute; our ports are published on this
// machine's loopback only. Its reaper comes from a registry; where it is not there, this package removes what it started.
var prepareTestcontainers = func() func(ctx context.Context) {
	var once sync.Once
	return func(ctx context.Context) {
		once.Do(func() {
			log.SetDefault(quiet{})
			host := os.Getenv("DOCKER_HOST")
			if host != "" && !strings.HasPrefix(host, "unix://") {
				return
			}
			setDefault("TESTCONTAINERS_HOST_OVERRIDE", "127.0.0.1")
			// Not through testcontainers, which reads the environment once, when it is first used.
			engine, err := client.New(client.FromEnv)
			if err != nil {
				return
			}
			defer engine.Close() //nolint:errcheck // nothing was written
			ctx, cancel := context.WithTimeout(ctx, engineTimeout)
			defer cancel()
			images, err := engine.ImageList(ctx, client.ImageListOptions{
				Filters: make(client.Filters).Add("reference", "testcontainers/ryuk"),
			})
			if err == nil && len(images.Items) == 0 {
				setDefault("TESTCONTAINERS_RYUK_DISABLED", "true")
			}
		})
	}
}()

func setDefault(name, value string) {
	if os.Getenv(name) == "" {
		_ = os.Setenv(name, value) // the name and the value are constants that are valid
	}
}

// quiet swallows testcontainers' progress; what goes wrong comes as an error.
type quiet struct{}

func (quiet) Printf(string, ...any) {}

func connectEngine(ctx context.Context) (*testcontainers.DockerClient, error) {
	ctx, cancel := context.WithTimeout(ctx, engineTimeout)
	defer cancel()
	engine, err := testcontainers.NewDockerClientWithOpts(ctx)
	if err != nil {
		return nil, fmt.Errorf("find the engine: %w", err)
	}
	if _, err := engine.Ping(ctx, client.PingOptions{}); err != nil {
		return nil, errors.Join(fmt.Errorf("reach the engine: %w", err), engine.Close())
	}
	return engine, nil
}

// chooseImage returns an image that is there. An image that the environment asks for must be.
func chooseImage(ctx context.Context, engine *testcontainers.DockerClient) (string, error) {
	if image := os.Getenv(EnvImage); image != "" {
		if _, err := engine.ImageInspect(ctx, image); err == nil {
			return image, nil
		}
		if err := pull(ctx, image); err != nil {
			return "", fmt.Errorf("%s=%s: the image is not here and cannot be pulled; `make image` builds those of %s: %w",
				EnvImage, image, ImageBuilt, err)
		}
		return image, nil
	}
	for _, image := range []string{ImageBuilt, ImagePublic} {
		if _, err := engine.ImageInspect(ctx, image); err == nil {
			return image, nil
		}
	}
	if err := pull(ctx, ImagePublic); err != nil {
		return "", pass("no image %s or %s, and no registry to pull from; `make image` builds one", ImageBuilt, ImagePublic)
	}
	return ImagePublic, nil
}

// pull asks a registry, but not for long: where there is none the answer may never come.
func pull(ctx context.Context, image string) error {
	ctx, cancel := context.WithTimeout(ctx, pullTimeout)
	defer cancel()
	provider, err := testcontainers.NewDockerProvider()
	if err != nil {
		return fmt.Errorf("pull: %w", err)
	}
	defer provider.Close() //nolint:errcheck // nothing was written
	if err := provider.PullImage(ctx, image); err != nil {
		return fmt.Errorf("pull: %w", err)
	}
	return nil
}

func runContainer(ctx context.Context, image string, o serverOptions) (*Server, error) {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	port, err := freePort(ctx)
	if err != nil {
		return nil, err
	}
	c, err := postgres.Run(ctx, image,
		postgres.WithUsername(userName), postgres.WithPassword(password), postgres.WithDatabase(database),
		testcontainers.WithCmdArgs(o.arguments()...),
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
	if err != nil {
		if c != nil {
			err = errors.Join(err, remove(ctx, c))
		}
		return nil, fmt.Errorf("run %s: %w", image, err)
	}
	url := address(port)
	version, err := awaitAnswer(ctx, url)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("%s: %w", image, err), remove(ctx, c))
	}
	return &Server{
		url:         url,
		description: "PostgreSQL " + version + " in a container of " + image,
		machine:     containerMachine{c},
	}, nil
}

func remove(ctx context.Context, c testcontainers.Container) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
	defer cancel()
	if err := c.Terminate(ctx, testcontainers.StopTimeout(time.Second)); err != nil {
		return fmt.Errorf("remove the container: %w", err)
	}
	return nil
}

type containerMachine struct{ testcontainers.Container }

func (c containerMachine) start(ctx context.Context) error {
	if err := c.Start(ctx); err != nil {
		return fmt.Errorf("start the container: %w", err)
	}
	return nil
}

func (c containerMachine) stop(ctx context.Context) error {
	timeout := stopTimeout
	if err := c.Stop(ctx, &timeout); err != nil {
		return fmt.Errorf("stop the container: %w", err)
	}
	return nil
}

func (c containerMachine) kill(ctx context.Context) error {
	engine, err := connectEngine(ctx)
	if err != nil {
		return err
	}
	defer engine.Close() //nolint:errcheck // nothing was written
	if _, err := engine.ContainerKill(ctx, c.GetContainerID(), client.ContainerKillOptions{Signal: "SIGKILL"}); err != nil {
		return fmt.Errorf("kill the container: %w", err)
	}
	waited := engine.ContainerWait(ctx, c.GetContainerID(), client.ContainerWaitOptions{Condition: container.WaitConditionNotRunning})
	select {
	case err := <-waited.Error:
		return fmt.Errorf("wait for the container's end: %w", err)
	case <-waited.Result:
		return nil
	}
}

func (c containerMachine) close(ctx context.Context) error { return remove(ctx, c.Container) }

// removeLeftBehind removes containers whose process has gone without removing them: after a SIGKILL, say. Whatever goes wrong
// there is no reason not to test.
func removeLeftBehind(ctx context.Context, engine *testcontainers.DockerClient) {
	ctx, cancel := context.WithTimeout(ctx, closeTimeout)
	defer cancel()
	list, err := engine.ContainerList(ctx, client.ContainerListOptions{
		All: true, Filters: make(client.Filters).Add("label", labelOwner),
	})
	if err != nil {
		return
	}
	for _, c := range list.Items {
		if hasGone(c.Labels[labelOwner]) {
			_, _ = engine.ContainerRemove(ctx, c.ID, client.ContainerRemoveOptions{Force: true, RemoveVolumes: true})
		}
	}
}

// firstLine keeps an error that repeats itself over many lines out of a sentence.
func firstLine(err error) string {
	line, _, _ := strings.Cut(err.Error(), "\n")
	return line
}
