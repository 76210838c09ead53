package migrations

import (
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/pressly/goose/v3"
)

// What to do about a missing right.
const (
	adviceMigrate = "this role may not do that; migrate as the owner of the schema, " +
		"or let somebody who may apply what migrations.SQL prints"
	adviceStatus = "this role may not read " + VersionTable + "; grant it USAGE on the schema and SELECT on that table"
)

// explain says what to do where the server's or goose's message alone does not. adviceOnRights is for a missing right.
func explain(err error, adviceOnRights string) error {
	if errors.Is(err, goose.ErrVersionNotFound) {
		return fmt.Errorf("the database was migrated by a later version of this package; use that one: %w", err)
	}
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	if !ok {
		return err
	}
	switch pgErr.Code {
	case "42501": // insufficient_privilege
		return fmt.Errorf("%s: %w", adviceOnRights, err)
	case "42P07", "42710": // duplicate_table, duplicate_object
		return fmt.Errorf("something of that name is there, but %s does not say that it was migrated: %w", VersionTable, err)
	case "42P01", "42704": // undefined_table, undefined_object
		return fmt.Errorf("something is missing although %s says that it was migrated: %w", VersionTable, err)
	case "25006": // read_only_sql_transaction
		return fmt.Errorf("the database is read-only on this connection; connect to the primary, "+
			"without default_transaction_read_only: %w", err)
	}
	return err
}
