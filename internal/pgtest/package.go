package pgtest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// takePackage downloads the distribution's server package and its libraries into the cache folder, where Debian and its kin have
// them, and starts the server from there. Nothing is installed, and it needs no root.
func takePackage(ctx context.Context, o serverOptions) (*Server, error) {
	for _, tool := range []string{"apt-get", "apt-cache", "dpkg", "dpkg-deb"} {
		if _, err := exec.LookPath(tool); err != nil {
			return nil, pass("no packages of Debian's to unpack (%s is missing)", tool)
		}
	}
	cache, err := cacheFolder()
	if err != nil {
		return nil, pass("no folder to unpack a package into (%s)", firstLine(err))
	}
	var reasons []string
	for version := maxPackaged; version >= MinVersion; version-- {
		tree := filepath.Join(cache, fmt.Sprintf("postgresql-%d", version))
		bin := filepath.Join(tree, "usr/lib/postgresql", fmt.Sprint(version), "bin")
		env := []string{"LD_LIBRARY_PATH=" + libraries(tree)}
		if majorOf(ctx, bin, env) != version {
			if err := unpack(ctx, tree, fmt.Sprintf("postgresql-%d", version)); err != nil {
				reasons = append(reasons, firstLine(err))
				continue
			}
			env = []string{"LD_LIBRARY_PATH=" + libraries(tree)}
		}
		if majorOf(ctx, bin, env) == version {
			return runBinaries(ctx, bin, env, "from Debian's package, unpacked in "+tree, o)
		}
		reasons = append(reasons, bin+"/postgres does not run")
	}
	return nil, pass("no server package could be downloaded (%s; `apt-get update` may help)", strings.Join(reasons, ", "))
}

// maxPackaged is the newest version that is asked for.
const maxPackaged = 19

// cacheFolder returns the project's own cache folder. Root's is not under its home, where the server's user may not go.
func cacheFolder() (string, error) {
	base := "/var/cache"
	if os.Geteuid() != 0 {
		var err error
		if base, err = os.UserCacheDir(); err != nil {
			return "", fmt.Errorf("find the cache folder: %w", err)
		}
	}
	dir := filepath.Join(base, "archlab-idempotency")
	if err := os.MkdirAll(dir, 0o755); err != nil { //nolint:gosec // the server's user reads it
		return "", fmt.Errorf("make the cache folder: %w", err)
	}
	return dir, nil
}

// libraries returns the folders of shared libraries in tree.
func libraries(tree string) string {
	dirs, _ := filepath.Glob(filepath.Join(tree, "usr/lib/*-linux-*")) // the pattern is well-formed
	return strings.Join(dirs, ":")
}

// unpack downloads a package and the libraries that it needs and that are not installed, and unpacks them into tree. It works in a
// folder beside it, so that an interrupted download never passes for a finished one.
func unpack(ctx context.Context, tree, name string) (err error) {
	work, err := os.MkdirTemp(filepath.Dir(tree), "unpacking-")
	if err != nil {
		return fmt.Errorf("make a folder to unpack in: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(work)) }()
	root := filepath.Join(work, "root")
	wanted, seen := []string{name}, map[string]bool{}
	for len(wanted) > 0 {
		next := wanted[0]
		wanted = wanted[1:]
		if seen[next] {
			continue
		}
		seen[next] = true
		deb, err := download(ctx, work, next)
		if err != nil {
			return err
		}
		if _, err := output(ctx, work, "dpkg", "-x", deb, root); err != nil {
			return err
		}
		depends, err := output(ctx, work, "dpkg-deb", "--field", deb, "Depends")
		if err != nil {
			return err
		}
		wanted = append(wanted, missingLibraries(ctx, work, depends)...)
	}
	if err := os.Chmod(work, 0o755); err != nil { //nolint:gosec // the server's user reads it
		return fmt.Errorf("open the folder: %w", err)
	}
	if err := os.RemoveAll(tree); err != nil {
		return fmt.Errorf("remove what was unpacked before: %w", err)
	}
	if err := os.Rename(root, tree); err != nil {
		return fmt.Errorf("put the package in place: %w", err)
	}
	return nil
}

// download fetches a package into dir and returns its file.
func download(ctx context.Context, dir, name string) (string, error) {
	if _, err := output(ctx, dir, "apt-get", "download", name); err != nil {
		return "", err
	}
	debs, _ := filepath.Glob(filepath.Join(dir, name+"_*.deb")) // the pattern is well-formed
	if len(debs) == 0 {
		return "", fmt.Errorf("apt-get download %s left no file", name)
	}
	return debs[0], nil
}

// missingLibraries returns the libraries among a package's dependencies that are not installed.
func missingLibraries(ctx context.Context, dir, depends string) []string {
	var missing []string
	for dependency := range strings.SplitSeq(depends, ",") {
		first, _, _ := strings.Cut(dependency, "|")
		fields := strings.Fields(first)
		if len(fields) == 0 || !strings.HasPrefix(fields[0], "lib") {
			continue
		}
		name, _, _ := strings.Cut(fields[0], ":")
		status, err := output(ctx, dir, "dpkg-query", "--show", "--showformat=${db:Status-Abbrev}", name)
		if err != nil || !strings.HasPrefix(status, "ii") {
			missing = append(missing, name)
		}
	}
	return missing
}

// output runs a program in dir and returns what it wrote.
func output(ctx context.Context, dir, name string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, name, args...) //nolint:gosec // the package manager's own programs
	cmd.Dir = dir
	out, err := cmd.Output()
	if err != nil {
		reason := err.Error()
		if exit, ok := errors.AsType[*exec.ExitError](err); ok && len(exit.Stderr) > 0 {
			reason = strings.TrimSpace(string(exit.Stderr))
		}
		return "", fmt.Errorf("%s %s: %s", name, strings.Join(args, " "), reason)
	}
	return string(out), nil
}
