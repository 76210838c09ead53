package migrations

import (
	"bytes"
	"cmp"
	"fmt"
	"io/fs"
	"slices"
	"strconv"
	"strings"

	"github.com/archlab/idempotency/internal/sqlgen"
)

// qualifier stands before every name in the files, which are usable as they lie there for the schema public.
const qualifier = SchemaDefault + "."

// render puts another schema in place of public. The files qualify every object and say "public." nowhere else, which a test
// holds.
func render(text, schema string) string {
	return strings.ReplaceAll(text, qualifier, sqlgen.QuoteIdentifier(schema)+".")
}

// rendered is the embedded files with another schema. (fstest.MapFS would do the same, but links package testing into every
// program that migrates.)
type rendered string

// Open implements fs.FS.
func (schema rendered) Open(name string) (fs.File, error) {
	file, err := files.Open(name)
	if err != nil || !strings.HasSuffix(name, ".sql") {
		return file, err //nolint:wrapcheck // an fs.FS returns *fs.PathError as it is
	}
	info, err := file.Stat()
	if err != nil {
		return nil, err //nolint:wrapcheck // as above
	}
	text, err := files.ReadFile(name)
	if err != nil {
		return nil, err //nolint:wrapcheck // as above
	}
	return &renderedFile{Reader: bytes.NewReader([]byte(render(string(text), string(schema)))), info: info}, nil
}

type renderedFile struct {
	*bytes.Reader

	info fs.FileInfo
}

// Stat implements fs.File.
func (f *renderedFile) Stat() (fs.FileInfo, error) { return f.info, nil }

// Close implements fs.File.
func (f *renderedFile) Close() error { return nil }

// sources lists the embedded migrations in order.
func sources() ([]Migration, error) {
	names, err := fs.Glob(files, "*.sql")
	if err != nil {
		return nil, fmt.Errorf("list the migrations: %w", err)
	}
	all := make([]Migration, 0, len(names))
	for _, name := range names {
		number, _, _ := strings.Cut(name, "_")
		version, err := strconv.ParseInt(number, 10, 64)
		if err != nil {
			return nil, fmt.Errorf("the file %s has no number: %w", name, err)
		}
		all = append(all, Migration{Version: version, Name: name})
	}
	slices.SortFunc(all, func(a, b Migration) int { return cmp.Compare(a.Version, b.Version) })
	return all, nil
}

// Marks of goose that divide a file.
const (
	markUp   = "-- +goose Up\n"
	markDown = "-- +goose Down\n"
)

// sections returns the two halves of a migration for schema.
func sections(m Migration, schema string) (up, down string, err error) {
	text, err := files.ReadFile(m.Name)
	if err != nil {
		return "", "", fmt.Errorf("read a migration: %w", err)
	}
	head, rest, ok := strings.Cut(string(text), markUp)
	up, down, ok2 := strings.Cut(rest, markDown)
	if !ok || !ok2 {
		return "", "", fmt.Errorf("the file %s lacks %q or %q", m.Name, markUp, markDown)
	}
	return head + render(strings.Trim(up, "\n"), schema) + "\n", render(strings.Trim(down, "\n"), schema) + "\n", nil
}

// SQL returns the text of all migrations, or those up to [To], for teams whose migrations run elsewhere. It is one transaction,
// works on a database without any of it, creates the schema if it is missing, and records the versions, so that a later Up
// knows of them. Give it to psql with ON_ERROR_STOP, or paste it into a migration of your own without BEGIN and COMMIT.
func SQL(opts ...Option) (string, error) {
	c, err := newConfig(opts)
	if err != nil {
		return "", fmt.Errorf("migrations: SQL: %w", err)
	}
	all, err := sources()
	if err != nil {
		return "", fmt.Errorf("migrations: SQL: %w", err)
	}
	store := versionStore{schema: c.schema}
	var b strings.Builder
	b.WriteString("BEGIN;\n\n")
	if c.schema != SchemaDefault {
		fmt.Fprintf(&b, "%s;\n\n", store.createSchema())
	}
	fmt.Fprintf(&b, "%s;\n", strings.Replace(store.createTable(), "CREATE TABLE", "CREATE TABLE IF NOT EXISTS", 1))
	fmt.Fprintf(&b, "INSERT INTO %[1]s (version_id, is_applied)\n    SELECT 0, true WHERE NOT EXISTS (SELECT FROM %[1]s);\n\n",
		store.Tablename())
	for _, m := range all {
		if c.toSet && m.Version > c.to {
			break
		}
		up, _, err := sections(m, c.schema)
		if err != nil {
			return "", fmt.Errorf("migrations: SQL: %w", err)
		}
		fmt.Fprintf(&b, "%s\nINSERT INTO %s (version_id, is_applied) VALUES (%d, true);\n\n", up, store.Tablename(), m.Version)
	}
	b.WriteString("COMMIT;\n")
	return b.String(), nil
}

// DownSQL returns the text that rolls back all migrations, or those above [To]. It drops every key with the table; see [Down].
func DownSQL(opts ...Option) (string, error) {
	c, err := newConfig(opts)
	if err != nil {
		return "", fmt.Errorf("migrations: down SQL: %w", err)
	}
	all, err := sources()
	if err != nil {
		return "", fmt.Errorf("migrations: down SQL: %w", err)
	}
	var b strings.Builder
	b.WriteString("BEGIN;\n\n")
	for _, m := range slices.Backward(all) {
		if m.Version <= c.to {
			break
		}
		_, down, err := sections(m, c.schema)
		if err != nil {
			return "", fmt.Errorf("migrations: down SQL: %w", err)
		}
		fmt.Fprintf(&b, "%sDELETE FROM %s WHERE version_id = %d;\n\n", down, versionStore{schema: c.schema}.Tablename(), m.Version)
	}
	b.WriteString("COMMIT;\n")
	return b.String(), nil
}
