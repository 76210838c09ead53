package pgtest

import (
	"os"
	"runtime"
	"strings"
)

// advice says what to install on this system.
func advice() string {
	const rest = "\nOr start Docker and run `make image`, or set " + EnvURL + " to a server on which you may create schemas and databases."
	if runtime.GOOS == "darwin" {
		return "Install one with: brew install postgresql@17" + rest
	}
	release, _ := os.ReadFile("/etc/os-release") // without it: the general advice
	return install(string(release)) + rest
}

// install returns the command for the distribution that os-release describes.
func install(release string) string {
	var family []string
	for line := range strings.Lines(release) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), "=")
		if name == "ID" || name == "ID_LIKE" {
			family = append(family, strings.Fields(strings.Trim(value, `"'`))...)
		}
	}
	for _, id := range family {
		switch id {
		case "debian", "ubuntu":
			return "Install one with: sudo apt-get install postgresql"
		case "fedora", "rhel", "centos":
			return "Install one with: sudo dnf install postgresql-server"
		case "alpine":
			return "Install one with: sudo apk add postgresql17"
		case "arch":
			return "Install one with: sudo pacman -S postgresql"
		case "suse", "opensuse":
			return "Install one with: sudo zypper install postgresql-server"
		}
	}
	return "Install the PostgreSQL server, 15 or later, with your system's package manager."
}
