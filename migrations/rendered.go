package migrations

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"

	"github.com/pressly/goose/v3"
)

// qualifier stands before every name in the files, which are usable as they lie there for the schema public.
const qualifier = SchemaDefault + "."

// render puts the quoted name of another schema in place of public. The files qualify every object and say "public." nowhere
// else, which a test holds.
func render(text, quoted string) string {
	return strings.ReplaceAll(text, qualifier, quoted+".")
}

// escapeIdentifier quotes name as [sqlgen.QuoteIdentifier] does, for text that goose reads line by line. It knows nothing of
// quotes: a line break or two hyphens in a name would cut a statement, or read as a comment. So each ASCII character but letters
// and digits is written by its number.
func escapeIdentifier(name string) string {
	var b strings.Builder
	b.WriteString(`U&"`)
	for _, r := range name {
		switch {
		case r >= 0x80, '0' <= r && r <= '9', 'a' <= r && r <= 'z', 'A' <= r && r <= 'Z':
			b.WriteRune(r)
		default:
			fmt.Fprintf(&b, `\%04X`, r)
		}
	}
	b.WriteString(`"`)
	return b.String()
}

// rendered is the embedded files for a schema, as goose reads them. (fstest.MapFS would do the same, but links package testing
// into every program that migrates.)
type rendered string

// Open implements fs.FS.
func (schema rendered) Open(name string) (fs.File, error) {
	file, err := files.Open(name)
	if err != nil || !strings.HasSuffix(name, ".sql") || schema == SchemaDefault {
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
	return &renderedFile{Reader: strings.NewReader(render(string(text), escapeIdentifier(string(schema)))), info: info}, nil
}

type renderedFile struct {
	*strings.Reader

	info fs.FileInfo // of the embedded file
}

// Stat implements fs.File.
func (f *renderedFile) Stat() (fs.FileInfo, error) { return f.info, nil }

// Close implements fs.File.
func (f *renderedFile) Close() error { return nil }

// sources lists the embedded migrations by version.
func sources() ([]Migration, error) {
	names, err := fs.Glob(files, "*.sql")
	if err != nil {
		return nil, fmt.Errorf("list the migrations: %w", err)
	}
	all := make([]Migration, 0, len(names))
	for _, name := range names {
		version, err := goose.NumericComponent(name)
		if err != nil {
			return nil, fmt.Errorf("the number of %s: %w", name, err)
		}
		all = append(all, Migration{Version: version, Name: name})
	}
	if len(all) == 0 {
		return nil, errors.New("no migration is embedded")
	}
	slices.SortFunc(all, func(a, b Migration) int { return cmp.Compare(a.Version, b.Version) })
	return all, nil
}
