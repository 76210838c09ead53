package pgtest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// packageTimeout is for downloading and unpacking.
const packageTimeout = 2 * time.Minute

// takePackage downloads the distribution's server package and its libraries into the cache folder, where Debian and its kin have
// them, and starts the server from there. Nothing is installed, and it needs no root.
func takePackage(ctx context.Context, o *serverOptions) (*Server, error) {
	for _, tool := range []string{"apt-get", "apt-cache", "dpkg", "dpkg-deb", "dpkg-query"} {
		if _, err := exec.LookPath(tool); err != nil {
			return nil, pass("no packages of Debian's to unpack (%s is missing)", tool)
		}
	}
	cache, err := cacheFolder()
	if err != nil {
		return nil, pass("no folder to unpack a package into (%v)", err)
	}
	p, err := unpacked(ctx, cache)
	if err != nil {
		return nil, pass("no server package (%v)", err)
	}
	return runBinaries(ctx, p.bin, p.env, "from Debian's package, unpacked in "+p.tree, o)
}

// serverPackage is a server package that lies unpacked in tree.
type serverPackage struct {
	tree, bin string
	env       []string
}

// unpacked returns the newest server package in the cache folder, or downloads the newest that there is.
func unpacked(ctx context.Context, cache string) (*serverPackage, error) {
	trees, _ := filepath.Glob(filepath.Join(cache, "postgresql-*")) // the pattern is well-formed
	slices.Sort(trees)
	for _, tree := range slices.Backward(trees) {
		version, err := strconv.Atoi(strings.TrimPrefix(filepath.Base(tree), "postgresql-"))
		if err != nil {
			continue
		}
		if p, err := packageIn(ctx, cache, version); err == nil {
			return p, nil
		}
	}
	ctx, cancel := context.WithTimeout(ctx, packageTimeout)
	defer cancel()
	versions, err := packagedVersions(ctx, cache)
	if err != nil {
		return nil, err
	}
	reason := errors.New("the package sources have none; `apt-get update` may help")
	for _, version := range versions {
		if err := unpack(ctx, cache, version); err != nil {
			reason = err
			continue
		}
		p, err := packageIn(ctx, cache, version)
		if err == nil {
			return p, nil
		}
		reason = err
	}
	return nil, reason
}

// packagedVersions lists the versions that the package sources have, the newest first.
func packagedVersions(ctx context.Context, dir string) ([]int, error) {
	const prefix = "postgresql-"
	names, err := output(ctx, dir, "apt-cache", "pkgnames", prefix)
	if err != nil {
		return nil, err
	}
	var versions []int
	for name := range strings.FieldsSeq(names) {
		if version, err := strconv.Atoi(strings.TrimPrefix(name, prefix)); err == nil && version >= MinVersion {
			versions = append(versions, version)
		}
	}
	slices.Sort(versions)
	slices.Reverse(versions)
	return versions, nil
}

// packageIn returns the server package of a version, if it is there and runs.
func packageIn(ctx context.Context, cache string, version int) (*serverPackage, error) {
	tree := filepath.Join(cache, "postgresql-"+strconv.Itoa(version))
	p := &serverPackage{
		tree: tree,
		bin:  filepath.Join(tree, "usr/lib/postgresql", strconv.Itoa(version), "bin"),
		env:  []string{"LD_LIBRARY_PATH=" + libraries(tree)},
	}
	if _, err := majorOf(ctx, p.bin, p.env); err != nil {
		return nil, err
	}
	return p, nil
}

// cacheFolder returns the project's cache folder. Root's own is usually where the server's user may not go; then it is the system's.
func cacheFolder() (string, error) {
	base, err := os.UserCacheDir()
	if os.Geteuid() == 0 && (err != nil || !passable(filepath.Dir(base))) {
		base, err = "/var/cache", nil
	}
	if err != nil {
		return "", fmt.Errorf("find the cache folder: %w", err)
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

// unpack downloads a server package and the libraries that it needs and that are not installed, and unpacks them. It works in a
// folder beside the final one, so that an interrupted download never passes for a finished one.
func unpack(ctx context.Context, cache string, version int) (err error) {
	name := "postgresql-" + strconv.Itoa(version)
	tree := filepath.Join(cache, name)
	work, err := os.MkdirTemp(cache, "unpacking-")
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
	err = os.Rename(root, tree)
	if err == nil {
		return nil
	}
	// Somebody was quicker, whose server may run already; or what is there is broken.
	if _, err := packageIn(ctx, cache, version); err == nil {
		return nil
	}
	if err := errors.Join(os.RemoveAll(tree), os.Rename(root, tree)); err != nil {
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
