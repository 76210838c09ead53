package pgtest_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/archlab/idempotency/internal/pgtest"
)

func TestAdviceFitsTheDistribution(t *testing.T) {
	t.Parallel()
	for release, advice := range map[string]string{
		"PRETTY_NAME=\"Debian GNU/Linux 12 (bookworm)\"\nID=debian\n": "apt-get install postgresql",
		"ID=ubuntu\nID_LIKE=debian\n":                                 "apt-get install postgresql",
		"ID=linuxmint\nID_LIKE=\"ubuntu debian\"\n":                   "apt-get install postgresql",
		"NAME=\"Fedora Linux\"\nID=fedora\n":                          "dnf install postgresql-server",
		"ID=\"rocky\"\nID_LIKE=\"rhel centos fedora\"\n":              "dnf install postgresql-server",
		"ID=alpine\n":  "apk add postgresql17",
		"ID='arch'\n":  "pacman -S postgresql",
		"ID=haiku\n":   "with your system's package manager",
		"not=anything": "with your system's package manager",
		"":             "with your system's package manager",
	} {
		require.Contains(t, pgtest.Install(release), advice, release)
	}
}
