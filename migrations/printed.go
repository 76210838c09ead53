package migrations

import (
	"fmt"
	"slices"
	"strings"

	"github.com/archlab/idempotency/internal/sqlgen"
)

// Marks of goose that divide a file.
const (
	markUp   = "-- +goose Up\n"
	markDown = "-- +goose Down\n"
)

// sections returns the two halves of a migration for a schema.
func sections(m Migration, schema string) (up, down string, err error) {
	text, err := files.ReadFile(m.Name)
	if err != nil {
		return "", "", fmt.Errorf("read a migration: %w", err)
	}
	head, rest, hasUp := strings.Cut(string(text), markUp)
	up, down, hasDown := strings.Cut(rest, markDown)
	if !hasUp || !hasDown {
		return "", "", fmt.Errorf("the file %s lacks %q or %q", m.Name, markUp, markDown)
	}
	up, down = strings.TrimSpace(up)+"\n", strings.TrimSpace(down)+"\n"
	if schema != SchemaDefault {
		quoted := sqlgen.QuoteIdentifier(schema)
		up, down = render(up, quoted), render(down, quoted)
	}
	return head + up, down, nil
}

// SQL returns the text of all migrations, or those up to [To], for teams whose migrations run elsewhere. It is one transaction, works
// on a database without any of it, creates the schema if it is missing (not public, which every database has), and records the
// versions, so that a later Up knows of them. Where something of it is there already it fails and changes nothing. Give it to psql
// with ON_ERROR_STOP, or paste it into a migration of your own without BEGIN and COMMIT.
func SQL(opts ...Option) (string, error) {
	c, err := newConfig(opts)
	if err != nil {
		return "", fmt.Errorf("migrations: SQL: %w", err)
	}
	store := versionStore{schema: c.schema}
	var b strings.Builder
	b.WriteString("BEGIN;\n\n")
	if c.schema != SchemaDefault {
		fmt.Fprintf(&b, "-- Asks for the right to create schemas even where this one is there: then leave it out.\n%s;\n\n", store.createSchema())
	}
	fmt.Fprintf(&b, "%s;\n", store.createTable("IF NOT EXISTS "))
	fmt.Fprintf(&b, "INSERT INTO %[1]s (version_id, is_applied)\n    SELECT 0, true WHERE NOT EXISTS (SELECT FROM %[1]s);\n\n",
		store.Tablename())
	for _, m := range c.all {
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

// DownSQL returns the text that rolls back all migrations, or those above [To], in one transaction. It drops every key with the
// table, and leaves the schema and the version table; see [Down].
func DownSQL(opts ...Option) (string, error) {
	c, err := newConfig(opts)
	if err != nil {
		return "", fmt.Errorf("migrations: down SQL: %w", err)
	}
	store := versionStore{schema: c.schema}
	var b strings.Builder
	b.WriteString("BEGIN;\n\n")
	for _, m := range slices.Backward(c.all) {
		if m.Version <= c.to {
			break
		}
		_, down, err := sections(m, c.schema)
		if err != nil {
			return "", fmt.Errorf("migrations: down SQL: %w", err)
		}
		fmt.Fprintf(&b, "%sDELETE FROM %s WHERE version_id = %d;\n\n", down, store.Tablename(), m.Version)
	}
	b.WriteString("COMMIT;\n")
	return b.String(), nil
}
