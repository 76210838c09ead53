package migrations_test

import (
	"crypto/sha256"
	"encoding/hex"
	"io/fs"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/archlab/idempotency/internal/pgtest"
)

// released holds the SHA-256 of each file. A file that has been released never changes: what changes the table is a new file. So a
// new file gets a new line here, and no line is ever edited.
var released = map[string]string{
	"00001_create_idempotency_keys.sql": "a8fd30a161ec6a4ed8cfa0023345b54bed912f1488e45f92d69c11fe02324b85",
}

// onDisk is the folder that the goose program reads.
func onDisk(tb testing.TB) fs.FS {
	tb.Helper()
	return os.DirFS(".")
}

// texts returns the files by name.
func texts(tb testing.TB) map[string]string {
	tb.Helper()
	names, err := fs.Glob(onDisk(tb), "*.sql")
	require.NoError(tb, err)
	require.Len(tb, names, len(everything))
	found := make(map[string]string, len(names))
	for _, name := range names {
		text, err := fs.ReadFile(onDisk(tb), name)
		require.NoError(tb, err)
		found[name] = string(text)
	}
	return found
}

func TestReleasedFilesNeverChange(t *testing.T) {
	t.Parallel()
	found := map[string]string{}
	for name, text := range texts(t) {
		sum := sha256.Sum256([]byte(text))
		found[name] = hex.EncodeToString(sum[:])
	}
	require.Equal(t, released, found)
}

func TestFilesSayWhatTheyLockAndForHowLong(t *testing.T) {
	t.Parallel()
	for name, text := range texts(t) {
		require.Regexp(t, `^-- [A-Z][^\n]+\.\n`, text, name)
		up, down, found := strings.Cut(text, "\n-- +goose Down\n")
		require.True(t, found, name)
		for _, part := range []string{up, down} {
			require.Regexp(t, `(?m)^-- Locks: .+ Duration: .+\.$`, part, name)
		}
	}
}

// What a file says "public." to is what another schema is put in place of, so it says so to every object and to nothing else.
func TestFilesQualifyEveryObjectAndNothingElse(t *testing.T) {
	t.Parallel()
	comment := regexp.MustCompile(`--[^\n]*`)
	text := regexp.MustCompile(`'[^']*'`)
	// What names an object: the statements in use, and those that a later file may need. What they say of columns or of parts of
	// the table is not qualified.
	object := regexp.MustCompile(`(?i)\b(?:(?:CREATE|ALTER|DROP|COMMENT ON|TRUNCATE)\s+` +
		`(?:(?:UNIQUE\s+)?INDEX\s+\w+\s+ON|SEQUENCE|TABLE|COLUMN|INDEX|TYPE|FUNCTION|VIEW)\s+(?:IF\s+(?:NOT\s+)?EXISTS\s+)?` +
		`|(?:REFERENCES|INTO|UPDATE|FROM|JOIN)\s+)(?:pg_catalog\.|(\S+))`)
	for name, whole := range texts(t) {
		require.True(t, isASCII(whole), "%s: a database need not be UTF-8", name)
		code := comment.ReplaceAllString(whole, "")
		require.Equal(t, strings.Count(whole, "public."), strings.Count(code, "public."), "%s: no comment is rendered", name)
		code = text.ReplaceAllString(code, "''")
		require.Equal(t, strings.Count(whole, "public."), strings.Count(code, "public."), "%s: no text is rendered", name)
		objects := slices.DeleteFunc(object.FindAllStringSubmatch(code, -1), func(match []string) bool { return match[1] == "" })
		require.Len(t, objects, strings.Count(code, "public."), "%s: each %q belongs to an object: %q", name, "public.", objects)
		for _, match := range objects {
			require.Regexp(t, `^public\.idempotency_keys`, match[1], "%s: %s", name, match[0])
		}
	}
}

func isASCII(s string) bool {
	return !strings.ContainsFunc(s, func(r rune) bool { return r >= 0x80 })
}

// No program that migrates links testing code; goose's examples do, by way of fstest.
func TestPackageLinksNoTestingCode(t *testing.T) {
	t.Parallel()
	out, err := exec.CommandContext(t.Context(), "go", "list", "-deps", ".").Output()
	require.NoError(t, err)
	deps := strings.Fields(string(out))
	require.Contains(t, deps, "github.com/pressly/goose/v3")
	require.False(t, slices.ContainsFunc(deps, func(dep string) bool {
		return dep == "testing" || strings.HasPrefix(dep, "testing/") || strings.HasPrefix(dep, "github.com/stretchr/") ||
			strings.HasPrefix(dep, "github.com/testcontainers/") || strings.HasSuffix(dep, "/internal/pgtest")
	}), deps)
}

// The names of all objects start with the table's, so that they are found together and collide with nobody's.
func TestNamesStartWithTheTables(t *testing.T) {
	t.Parallel()
	require.Empty(t, rows[string](t, pgtest.Pool(t), `WITH s AS (SELECT oid FROM pg_namespace WHERE nspname = $1::text)
SELECT relname FROM pg_class, s WHERE relnamespace = s.oid AND NOT relname ^@ 'idempotency_'
UNION ALL SELECT conname FROM pg_constraint, s WHERE connamespace = s.oid AND NOT conname ^@ 'idempotency_'
UNION ALL SELECT typname FROM pg_type, s WHERE typnamespace = s.oid AND NOT typname ^@ 'idempotency_' AND NOT typname ^@ '_idempotency_'
UNION ALL SELECT proname FROM pg_proc, s WHERE pronamespace = s.oid`, pgtest.Schema(t)))
}
