package pgstore_test

import (
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// The README's code is the example's, which the compiler reads and the tests run.
func TestReadmeShowsTheExampleThatRuns(t *testing.T) {
	t.Parallel()
	readme, err := os.ReadFile("../README.md")
	require.NoError(t, err)
	_, code, found := strings.Cut(string(readme), "```go\n")
	require.True(t, found)
	code, _, found = strings.Cut(code, "```")
	require.True(t, found)

	example, err := os.ReadFile("example_do_test.go")
	require.NoError(t, err)
	require.Contains(t, string(example), code)
}
