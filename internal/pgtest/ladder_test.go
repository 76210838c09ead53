package pgtest_test

import (
	"context"
	"errors"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/archlab/idempotency/internal/pgtest"
)

func TestURLIsTakenFirst(t *testing.T) {
	t.Parallel()
	c := startChild(t, "stop", pgtest.EnvURL+"="+pgtest.DSN(t), pgtest.EnvImage+"=no-such-image")
	require.Equal(t, pgtest.DSN(t), c.url)
	require.Contains(t, c.description, ", as TEST_DATABASE_URL says")
	require.Contains(t, c.end(t), "not ours to stop")
	require.NoError(t, pgtest.Pool(t).Ping(t.Context()))
}

func TestServerOfOnesOwnIsNeverThatOfTheURL(t *testing.T) {
	t.Parallel()
	for _, env := range [][]string{nil, {pgtest.EnvRequire + "=url"}} {
		c := startChild(t, "own", append(env, pgtest.EnvURL+"="+pgtest.DSN(t))...)
		require.NotEqual(t, pgtest.DSN(t), c.url)
		require.Contains(t, c.description, "TEST_DATABASE_URL names a server that must not be stopped")
		c.end(t)
	}
}

func TestTheLineSaysWhyOthersWerePassedOver(t *testing.T) {
	t.Parallel()
	for _, demand := range started {
		t.Run(demand, func(t *testing.T) {
			t.Parallel()
			c := startChild(t, "start", demand)
			require.Regexp(t, `^PostgreSQL \d+\.\d+ (in a container of \S+|from \S+/bin); because of `+regexp.QuoteMeta(demand)+`$`, c.description)
			c.end(t)
			if demand == demandBinaries {
				c := startChild(t, "start", "DOCKER_HOST=unix:///nowhere.sock")
				require.Regexp(t, `^PostgreSQL \d+\.\d+ from \S+/bin; TEST_DATABASE_URL is not set; no Docker engine answers \(.+\)$`, c.description)
				c.end(t)
			}
		})
	}
}

func TestWithoutAnyServerTheErrorSaysWhatToInstall(t *testing.T) {
	t.Parallel()
	says := failChild(t, "DOCKER_HOST=unix:///nowhere.sock", "PATH=/nowhere", envInstalled+"=/nowhere/*")
	require.Regexp(t, `^pgtest: there is no PostgreSQL here: TEST_DATABASE_URL is not set; no Docker engine answers \(.+\); `+
		`no PostgreSQL binaries of version 15 or later \(.+\); no packages of Debian's to unpack \(apt-get is missing\)\. Install .+ TEST_DATABASE_URL`, says)
}

func TestDemandsThatCannotBeMetAreErrors(t *testing.T) {
	t.Parallel()
	listener, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	nobody := "postgres://u:secret@" + listener.Addr().String() + "/d?sslmode=disable"
	require.NoError(t, listener.Close())
	other, err := url.Parse(pgtest.DSN(t))
	require.NoError(t, err)
	other.Path = "/no_such_database"

	for name, c := range map[string]struct {
		env  []string
		says string
	}{
		"unknown rung":              {[]string{"PGTEST_REQUIRE=docker"}, `PGTEST_REQUIRE is "docker": it must be url, container, binaries or package`},
		"no url":                    {[]string{"PGTEST_REQUIRE=url"}, "PGTEST_REQUIRE=url, but: TEST_DATABASE_URL is not set"},
		"url and container":         {[]string{"PGTEST_REQUIRE=container", "TEST_DATABASE_URL=" + nobody}, "unset one of them"},
		"image and binaries":        {[]string{"PGTEST_REQUIRE=binaries", "TEST_POSTGRES_IMAGE=postgres:17"}, "unset one of them"},
		"no url but words":          {[]string{"TEST_DATABASE_URL=host=localhost password=secret"}, "TEST_DATABASE_URL is not a URL like"},
		"no valid url":              {[]string{"TEST_DATABASE_URL=postgres://u:secret%zz@h/d"}, "TEST_DATABASE_URL is not a URL like"},
		"nobody at the url":         {[]string{"TEST_DATABASE_URL=" + nobody}, "TEST_DATABASE_URL: connect: "},
		"no such database":          {[]string{"TEST_DATABASE_URL=" + other.String()}, "no_such_database"},
		"no engine for the image":   {[]string{"TEST_POSTGRES_IMAGE=postgres:17", "DOCKER_HOST=unix:///nowhere.sock"}, "TEST_POSTGRES_IMAGE=postgres:17: no Docker engine answers"},
		"engine on another machine": {[]string{"PGTEST_REQUIRE=container", "DOCKER_HOST=tcp://192.0.2.1:2375"}, "no Docker engine answers (tcp://192.0.2.1:2375 is on another machine)"},
		"no binaries":               {[]string{"PGTEST_REQUIRE=binaries", "PATH=/nowhere", envInstalled + "=/nowhere/*"}, "no PostgreSQL binaries of version 15 or later"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			begun := time.Now()
			says := failChild(t, c.env...)
			require.Contains(t, says, "pgtest: ")
			require.Contains(t, says, c.says)
			require.NotContains(t, says, "secret")
			require.Less(t, time.Since(begun), patience, "nobody waits for what will not come")
		})
	}
}

// engine is a Docker engine, as far as finding images goes.
func engine(t *testing.T, handler http.HandlerFunc) (dockerHost string) {
	t.Helper()
	dir, err := os.MkdirTemp("", "engine-") //nolint:usetesting // the path of a socket must be short
	require.NoError(t, err)
	socket := filepath.Join(dir, "s")
	listener, err := new(net.ListenConfig).Listen(t.Context(), "unix", socket)
	require.NoError(t, err)
	server := &http.Server{Handler: handler, ReadHeaderTimeout: patience}
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	t.Cleanup(func() {
		require.NoError(t, server.Close())
		require.ErrorIs(t, <-served, http.ErrServerClosed)
		require.NoError(t, os.RemoveAll(dir))
	})
	return "DOCKER_HOST=unix://" + socket
}

// hang is an answer that never comes.
func hang(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }

// emptyEngine has no images, and no registry answers it.
func emptyEngine(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Api-Version", "1.41")
	w.Header().Set("Content-Type", "application/json")
	path := regexp.MustCompile(`^/v[0-9.]+`).ReplaceAllString(r.URL.Path, "")
	switch {
	case path == "/_ping":
	case path == "/info":
		_, _ = w.Write([]byte(`{}`))
	case path == "/images/json", path == "/containers/json":
		_, _ = w.Write([]byte(`[]`))
	case strings.HasPrefix(path, "/distribution/"):
		hang(w, r)
	default:
		w.WriteHeader(http.StatusNotFound)
		_, _ = w.Write([]byte(`{"message":"not here"}`))
	}
}

func TestEngineThatHangsDoesNotHangTheTests(t *testing.T) {
	t.Parallel()
	begun := time.Now()
	says := failChild(t, demandContainer, engine(t, hang))
	require.Contains(t, says, "no Docker engine answers")
	require.Less(t, time.Since(begun), patience)
}

func TestRegistryThatHangsDoesNotHangTheTests(t *testing.T) {
	t.Parallel()
	begun := time.Now()
	says := failChild(t, demandContainer, engine(t, emptyEngine))
	require.Contains(t, says, "no image archlab-idempotency/postgres:17 or postgres:17, and no registry to pull from; `make image` builds one")
	require.Less(t, time.Since(begun), patience)
}

func TestImageThatIsAskedForMustBeThere(t *testing.T) {
	t.Parallel()
	says := failChild(t, pgtest.EnvImage+"=example.com/postgres:0", engine(t, emptyEngine))
	require.Contains(t, says, "TEST_POSTGRES_IMAGE=example.com/postgres:0: the image is not here and cannot be pulled")
}

func TestServerStartsWithoutALibraryThatItLacks(t *testing.T) {
	t.Parallel()
	for _, demand := range started {
		t.Run(demand, func(t *testing.T) {
			t.Parallel()
			c := startChild(t, "start", demand, envStatistics+"=no_such_library")
			require.Empty(t, show(t, c.url, "shared_preload_libraries"))
			c.end(t)
		})
	}
}

func TestDebiansPackageIsDownloadedOnceAndRuns(t *testing.T) {
	t.Parallel()
	// A small package shows whether this machine has Debian's sources, and reaches them.
	probe := exec.CommandContext(t.Context(), "apt-get", "download", "postgresql-client-common")
	probe.Dir = t.TempDir()
	if out, err := probe.CombinedOutput(); err != nil {
		if exit := new(exec.ExitError); errors.As(err, &exit) {
			t.Skipf("this machine does not reach Debian's packages: %s", out)
		}
		t.Skipf("this is no Debian: %v", err)
	}
	cache, err := os.MkdirTemp("", "cache-") //nolint:usetesting // the server's user must reach it
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(cache)) })
	require.NoError(t, os.Chmod(cache, 0o755)) //nolint:gosec // the server's user must reach it

	env := []string{pgtest.EnvRequire + "=package", "XDG_CACHE_HOME=" + cache}
	c := startChild(t, "start", env...)
	require.Contains(t, c.description, "from Debian's package, unpacked in "+cache)
	c.end(t)

	tool := filepath.Join(t.TempDir(), "apt-get")
	require.NoError(t, os.WriteFile(tool, []byte("#!/bin/sh\nexit 1\n"), 0o755)) //nolint:gosec // a program
	c = startChild(t, "start", append(env, "PATH="+filepath.Dir(tool)+":"+os.Getenv("PATH"))...)
	require.Contains(t, c.description, "from Debian's package, unpacked in "+cache)
	c.end(t)
	left, err := filepath.Glob(filepath.Join(cache, "archlab-idempotency", "unpacking-*"))
	require.NoError(t, err)
	require.Empty(t, left)
}

// show returns a server's setting.
func show(t *testing.T, address, setting string) string {
	t.Helper()
	conn := connect(t, address, pgx.QueryExecModeExec)
	var value string
	require.NoError(t, conn.QueryRow(t.Context(), "SELECT current_setting($1)", setting).Scan(&value))
	require.NoError(t, conn.Close(context.WithoutCancel(t.Context())))
	return value
}
