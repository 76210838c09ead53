package pgtest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/client"
	"github.com/testcontainers/testcontainers-go"
	"github.com/testcontainers/testcontainers-go/log"
)

// Images, in the order in which they are looked for. The first is built by `make image`.
const (
	ImageBuilt  = "archlab-idempotency/postgres:17"
	ImagePublic = "postgres:17"
)

const (
	engineTimeout   = 5 * time.Second  // for an engine to answer at all
	registryTimeout = 10 * time.Second // for a registry to answer, where no image is there
	pullTimeout     = 90 * time.Second // for the image, from a registry that has answered
)

// reaperImage is what testcontainers removes containers with. It comes from a registry.
const reaperImage = "testcontainers/ryuk"

// prepareTestcontainers sets what testcontainers cannot find out, where nobody has set anything else. On a machine that looks
// like the inside of a container it would dial the default gateway and wait for a minute; our ports are published on this
// machine's loopback only. Where its reaper's image is not there, this package removes what it started.
//
// All that before testcontainers is used, which reads the environment once.
func prepareTestcontainers(ctx context.Context, engine *client.Client) error {
	preparing.Lock()
	defer preparing.Unlock()
	if prepared {
		return nil
	}
	log.SetDefault(quiet{})
	images, err := engine.ImageList(ctx, client.ImageListOptions{Filters: make(client.Filters).Add("reference", reaperImage)})
	if err != nil {
		return fmt.Errorf("list the images: %w", err)
	}
	settings := map[string]string{"TESTCONTAINERS_HOST_OVERRIDE": "127.0.0.1"}
	if len(images.Items) == 0 {
		settings["TESTCONTAINERS_RYUK_DISABLED"] = "true"
	}
	for name, value := range settings {
		if os.Getenv(name) == "" {
			if err := os.Setenv(name, value); err != nil {
				return fmt.Errorf("prepare testcontainers: %w", err)
			}
		}
	}
	err = warmUp(ctx)
	prepared = err == nil
	return err
}

var (
	preparing sync.Mutex
	prepared  bool // guarded by preparing
)

// warmUp lets testcontainers find and ask the engine while somebody bounds that: later it goes by what it knows. Where it has no way to
// return an error it panics.
func warmUp(ctx context.Context) (err error) {
	defer func() {
		if reason := recover(); reason != nil {
			err = fmt.Errorf("testcontainers: %v", reason)
		}
	}()
	engine, err := testcontainers.NewDockerClientWithOpts(ctx)
	if err != nil {
		return fmt.Errorf("testcontainers: %w", err)
	}
	if err := engine.Close(); err != nil {
		return fmt.Errorf("testcontainers: %w", err)
	}
	return nil
}

// quiet swallows testcontainers' progress; what goes wrong comes as an error.
type quiet struct{}

func (quiet) Printf(string, ...any) {}

// engineHost returns where a Docker engine would be.
func engineHost() string {
	if host := os.Getenv("DOCKER_HOST"); host != "" {
		return host
	}
	home := os.Getenv("HOME")
	for _, socket := range []string{
		"/var/run/docker.sock",
		filepath.Join(os.Getenv("XDG_RUNTIME_DIR"), "docker.sock"),
		filepath.Join(home, ".docker/run/docker.sock"),
		filepath.Join(home, ".docker/desktop/docker.sock"),
		filepath.Join("/run/user", strconv.Itoa(os.Getuid()), "docker.sock"),
	} {
		if info, err := os.Stat(socket); err == nil && info.Mode()&os.ModeSocket != 0 { //nolint:gosec // the user's own
			return "unix://" + socket
		}
	}
	return client.DefaultDockerHost
}

// isLocal reports whether an engine's published ports are on this machine's loopback.
func isLocal(host string) bool {
	u, err := url.Parse(host)
	if err != nil {
		return false
	}
	ip := net.ParseIP(u.Hostname())
	return u.Scheme == "unix" || u.Hostname() == "localhost" || ip != nil && ip.IsLoopback()
}

// connectEngine connects to the engine, and sees that it answers: testcontainers would take another one instead, or wait for long.
func connectEngine(ctx context.Context) (_ *client.Client, err error) {
	host := engineHost()
	if !isLocal(host) {
		return nil, fmt.Errorf("%s is on another machine", host)
	}
	engine, err := client.New(client.FromEnv, client.WithHost(host))
	if err != nil {
		return nil, fmt.Errorf("find the engine: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, engineTimeout)
	defer cancel()
	if _, err = engine.Ping(ctx, client.PingOptions{}); err != nil {
		err = fmt.Errorf("ask for an answer: %w", err)
	} else {
		err = prepareTestcontainers(ctx, engine)
	}
	if err != nil {
		return nil, errors.Join(err, engine.Close())
	}
	return engine, nil
}

// chooseImage returns an image that is there. An image that the environment asks for must be.
func chooseImage(ctx context.Context, engine *client.Client) (string, error) {
	if image := os.Getenv(EnvImage); image != "" {
		if err := inspect(ctx, engine, image); err == nil {
			return image, nil
		}
		if err := pull(ctx, image); err != nil {
			return "", fmt.Errorf("the image is not here and cannot be pulled; `make image` builds those of %s: %w", ImageBuilt, err)
		}
		return image, nil
	}
	for _, image := range []string{ImageBuilt, ImagePublic} {
		if err := inspect(ctx, engine, image); err == nil {
			return image, nil
		}
	}
	if err := askRegistry(ctx, engine, ImagePublic); err != nil {
		return "", pass("no image %s or %s, and no registry to pull from; `make image` builds one", ImageBuilt, ImagePublic)
	}
	if err := pull(ctx, ImagePublic); err != nil {
		return "", pass("no image %s or %s, and it cannot be pulled (%v); `make image` builds one", ImageBuilt, ImagePublic, err)
	}
	return ImagePublic, nil
}

func inspect(ctx context.Context, engine *client.Client, image string) error {
	ctx, cancel := context.WithTimeout(ctx, engineTimeout)
	defer cancel()
	if _, err := engine.ImageInspect(ctx, image); err != nil {
		return fmt.Errorf("look for the image: %w", err)
	}
	return nil
}

// askRegistry asks whether the image is to be had, but not for long: where there is no registry, an answer may never come.
func askRegistry(ctx context.Context, engine *client.Client, image string) error {
	ctx, cancel := context.WithTimeout(ctx, registryTimeout)
	defer cancel()
	if _, err := engine.DistributionInspect(ctx, image, client.DistributionInspectOptions{}); err != nil {
		return fmt.Errorf("ask the registry: %w", err)
	}
	return nil
}

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

// removeLeftBehind removes containers whose process has gone without removing them. Whatever goes wrong there is no reason not to
// test.
func removeLeftBehind(ctx context.Context, engine *client.Client) {
	ctx, cancel := context.WithTimeout(ctx, closeTimeout)
	defer cancel()
	list, err := engine.ContainerList(ctx, client.ContainerListOptions{
		All: true, Filters: make(client.Filters).Add("label", labelOwner),
	})
	if err != nil {
		return
	}
	for _, c := range list.Items {
		idle := c.State != container.StateRunning && time.Since(time.Unix(c.Created, 0)) > time.Hour
		if hasGone(c.Labels[labelOwner], idle) {
			_, _ = engine.ContainerRemove(ctx, c.ID, client.ContainerRemoveOptions{Force: true, RemoveVolumes: true})
		}
	}
}
