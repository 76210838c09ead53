package httpidem_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// Every demand in the table has a test, and every test that the page names is here.
func TestEveryDemandOfTheDraftHasATest(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile("../docs/http.md")
	require.NoError(t, err)
	files, err := filepath.Glob("*_test.go")
	require.NoError(t, err)
	var code strings.Builder
	for _, file := range files {
		text, err := os.ReadFile(file) //nolint:gosec // our own tests
		require.NoError(t, err)
		code.Write(text)
	}
	name := regexp.MustCompile("`((?:Test|Fuzz)[A-Za-z0-9]+)`")
	for _, match := range name.FindAllStringSubmatch(string(page), -1) {
		require.Contains(t, code.String(), "\nfunc "+match[1]+"(", "docs/http.md names it")
	}
	_, table, _ := strings.Cut(string(page), "| § |")
	table, _, _ = strings.Cut(table, "\n\n")
	demands := strings.Split(strings.TrimSpace(table), "\n")[2:]
	require.Len(t, demands, 30)
	for _, demand := range demands {
		require.Regexp(t, name, demand)
	}
}
