package pgstore_test

import (
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// What a service links when it imports the library: nothing that belongs to tests, and goose only if it migrates by itself.
func TestLibraryLinksNothingThatAServiceDoesNotNeed(t *testing.T) {
	t.Parallel()
	const module = "github.com/archlab/idempotency/"
	unwanted := []string{
		"testing", "github.com/stretchr/testify", "github.com/testcontainers", "github.com/moby", "pgregory.net/rapid",
		"go.uber.org/goleak", module + "internal/pgtest", module + "internal/refstore",
	}
	for name, more := range map[string][]string{
		"pgstore":         {"github.com/pressly/goose"},
		"httpidem":        {"github.com/pressly/goose", "github.com/go-chi", "github.com/labstack", "github.com/klauspost"},
		"migrations":      nil,
		"internal/sqlgen": {"github.com", "golang.org"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			out, err := exec.CommandContext(t.Context(), "go", "list", "-deps", module+name).Output() //nolint:gosec // our own packages
			require.NoError(t, err)
			for dependency := range strings.FieldsSeq(string(out)) {
				if strings.HasPrefix(dependency, module) && name == "internal/sqlgen" {
					continue // itself
				}
				for _, path := range slices.Concat(unwanted, more) {
					require.False(t, dependency == path || strings.HasPrefix(dependency, path+"/"), "%s links %s", name, dependency)
				}
			}
		})
	}
}
