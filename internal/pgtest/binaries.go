package pgtest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// installed is where Debian and its kin put the binaries of each version.
var installed = "/usr/lib/postgresql/*/bin"

// versionTimeout is for a program to say its version.
const versionTimeout = 10 * time.Second

// takeBinaries starts a server from the newest binaries on the machine.
func takeBinaries(ctx context.Context, o *serverOptions) (*Server, error) {
	bins, reasons := findBinaries(ctx)
	if len(bins) == 0 {
		return nil, pass("no PostgreSQL binaries of version %d or later (%s)", MinVersion, strings.Join(reasons, ", "))
	}
	return runBinaries(ctx, bins[0].dir, nil, "from "+bins[0].dir, o)
}

// binaries is a folder with initdb, pg_ctl and postgres in it.
type binaries struct {
	dir   string
	major int
}

// findBinaries lists the folders with a server that is new enough, the newest first, and says what is wrong with others.
func findBinaries(ctx context.Context) (found []binaries, reasons []string) {
	var dirs []string
	ctx, cancel := context.WithTimeout(ctx, versionTimeout)
	defer cancel()
	if out, err := exec.CommandContext(ctx, "pg_config", "--bindir").Output(); err == nil {
		dirs = append(dirs, strings.TrimSpace(string(out)))
	}
	if path, err := exec.LookPath("postgres"); err == nil {
		dirs = append(dirs, filepath.Dir(path))
	}
	matches, _ := filepath.Glob(installed) // the pattern is well-formed
	for _, dir := range append(dirs, matches...) {
		if slices.ContainsFunc(found, func(b binaries) bool { return b.dir == dir }) {
			continue
		}
		major, err := majorOf(ctx, dir, nil)
		switch {
		case errors.Is(err, os.ErrNotExist):
			// The client's programs alone.
		case err != nil:
			reasons = append(reasons, oneLine(err.Error()))
		case major < MinVersion:
			reasons = append(reasons, fmt.Sprintf("%s has %d", dir, major))
		default:
			found = append(found, binaries{dir, major})
		}
	}
	slices.SortStableFunc(found, func(a, b binaries) int { return b.major - a.major })
	if reasons == nil {
		reasons = []string{"looked with pg_config, in PATH and " + installed}
	}
	return found, reasons
}

// majorOf returns the version of the server in dir.
func majorOf(ctx context.Context, dir string, env []string) (int, error) {
	for _, program := range []string{"initdb", "pg_ctl", "postgres"} {
		if _, err := os.Stat(filepath.Join(dir, program)); err != nil {
			return 0, fmt.Errorf("look for %s: %w", program, err)
		}
	}
	if os.Geteuid() == 0 && !passable(dir) {
		return 0, fmt.Errorf("%s lies where only root may go, and PostgreSQL does not run as root", dir)
	}
	ctx, cancel := context.WithTimeout(ctx, versionTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, filepath.Join(dir, "postgres"), "--version") //nolint:gosec // a folder of binaries
	cmd.Env = append(os.Environ(), env...)
	out, err := cmd.CombinedOutput()
	if err != nil {
		return 0, fmt.Errorf("%s/postgres does not run: %w: %s", dir, err, out)
	}
	for field := range strings.FieldsSeq(string(out)) {
		if major := leadingNumber(field); major != 0 {
			return major, nil
		}
	}
	return 0, fmt.Errorf("%s/postgres does not say its version: %s", dir, out)
}

// runBinaries makes a cluster in a temporary folder and starts its server.
func runBinaries(ctx context.Context, bin string, env []string, from string, o *serverOptions) (*Server, error) {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	m, err := newProcessMachine(ctx, bin, env)
	if err != nil {
		return nil, err
	}
	url, version, err := m.firstStart(ctx, o)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("the server %s does not start: %w", from, err), m.close(ctx))
	}
	return &Server{url: url, description: "PostgreSQL " + version + " " + from, machine: m}, nil
}

// unprivileged returns the user that a server runs as, or nil for the one that we are: PostgreSQL refuses to run as root.
func unprivileged() (*syscall.Credential, error) {
	if os.Geteuid() != 0 {
		return nil, nil //nolint:nilnil // as the comment says
	}
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

// temporaryFolder makes a folder that the server's user can reach.
func temporaryFolder(as *syscall.Credential) (string, error) {
	base := os.TempDir()
	if as != nil && !passable(base) {
		base = "/tmp"
	}
	dir, err := os.MkdirTemp(base, "pgtest-")
	if err != nil {
		return "", fmt.Errorf("make a folder for the server: %w", err)
	}
	if as != nil {
		if err := os.Chown(dir, int(as.Uid), int(as.Gid)); err != nil {
			return "", errors.Join(fmt.Errorf("give the folder to the server's user: %w", err), os.RemoveAll(dir))
		}
	}
	return dir, nil
}

// passable reports whether every user may go to dir.
func passable(dir string) bool {
	dir, err := filepath.EvalSymlinks(dir)
	if err == nil {
		dir, err = filepath.Abs(dir)
	}
	for ; err == nil; dir = filepath.Dir(dir) {
		var info os.FileInfo
		if info, err = os.Stat(dir); err != nil || info.Mode()&0o001 == 0 {
			return false
		}
		if dir == filepath.Dir(dir) {
			return true
		}
	}
	return false
}
