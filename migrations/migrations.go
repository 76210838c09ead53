package migrations

import (
	"context"
	"database/sql"
	"embed"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3"
	"github.com/pressly/goose/v3/database"

	"github.com/archlab/idempotency/internal/sqlgen"
)

// SchemaDefault is the schema of the table unless [WithSchema] names another.
const SchemaDefault = "public"

// VersionTable records which migrations have been applied, in the schema of the table: not in goose_db_version, which belongs
// to the application and whose numbers would collide with ours.
const VersionTable = "idempotency_schema_migrations"

//go:embed *.sql
var files embed.FS

// Migration is one numbered step of the schema.
type Migration struct {
	Version   int64
	Name      string    // the file's name
	Applied   bool      // after Up or Down: what it is now
	AppliedAt time.Time // zero unless Status found it applied
}

// Option configures a call of this package.
type Option func(*config)

type config struct {
	schema string
	to     int64
	toSet  bool
}

// WithSchema names the schema of the table. It is created if it is missing. Any name that PostgreSQL takes will do; it is
// quoted. Defaults to [SchemaDefault].
func WithSchema(name string) Option {
	return func(c *config) { c.schema = name }
}

// To stops at a version: Up applies up to and with it, Down rolls back what is above it. Defaults to all.
func To(version int64) Option {
	return func(c *config) { c.to, c.toSet = version, true }
}

func newConfig(opts []Option) (config, error) {
	c := config{schema: SchemaDefault}
	for _, opt := range opts {
		opt(&c)
	}
	if err := sqlgen.ValidateSchema(c.schema); err != nil {
		return c, err
	}
	if c.to < 0 {
		return c, fmt.Errorf("the version is %d: it must not be negative", c.to)
	}
	return c, nil
}

// Up applies what has not been applied yet, in order, each migration in a transaction of its own, and returns what this call
// applied. Any number of processes may call it at once: one works, the others wait for it and then find nothing to do.
//
// It needs the right to create tables in the schema, and in the database if the schema is missing. It uses one connection of
// the pool, which must reach the server directly or through a pooler in session mode, since the lock belongs to the
// session. A process that dies in the middle leaves neither the lock nor half a migration.
func Up(ctx context.Context, pool *pgxpool.Pool, opts ...Option) ([]Migration, error) {
	return run(ctx, pool, "up", opts, func(ctx context.Context, c config, p *goose.Provider) ([]*goose.MigrationResult, error) {
		if c.toSet {
			return p.UpTo(ctx, c.to)
		}
		return p.Up(ctx)
	})
}

// Down rolls back all migrations, or those above [To], the latest first, and returns them. Rolled back to 0 it drops the table
// and with it EVERY KEY: what is repeated afterwards is executed again. The schema and the version table stay.
func Down(ctx context.Context, pool *pgxpool.Pool, opts ...Option) ([]Migration, error) {
	return run(ctx, pool, "down", opts, func(ctx context.Context, c config, p *goose.Provider) ([]*goose.MigrationResult, error) {
		return p.DownTo(ctx, c.to)
	})
}

func run(
	ctx context.Context, pool *pgxpool.Pool, direction string, opts []Option,
	migrate func(ctx context.Context, c config, p *goose.Provider) ([]*goose.MigrationResult, error),
) ([]Migration, error) {
	c, err := newConfig(opts)
	if err != nil {
		return nil, fmt.Errorf("migrations: %s: %w", direction, err)
	}
	db, done, err := open(pool)
	if err != nil {
		return nil, fmt.Errorf("migrations: %s: %w", direction, err)
	}
	defer done()
	provider, err := goose.NewProvider("", db, rendered(c.schema),
		goose.WithStore(versionStore{schema: c.schema}),
		goose.WithSessionLocker(sessionLocker{schema: c.schema}),
		goose.WithDisableGlobalRegistry(true),
		goose.WithLogger(goose.NopLogger()),
	)
	if err != nil {
		return nil, fmt.Errorf("migrations: %s: %w", direction, err)
	}
	results, err := migrate(ctx, c, provider)
	if partial, ok := errors.AsType[*goose.PartialError](err); ok {
		results = partial.Applied
	}
	changed := make([]Migration, 0, len(results))
	for _, r := range results {
		changed = append(changed, Migration{Version: r.Source.Version, Name: r.Source.Path, Applied: direction == "up"})
	}
	if err != nil {
		return changed, fmt.Errorf("migrations: %s in schema %q: %w", direction, c.schema, explain(err))
	}
	return changed, nil
}

// Status returns every migration that this package knows and whether it has been applied. It changes nothing, and needs no
// more than the right to read the version table; where there is none, nothing has been applied.
func Status(ctx context.Context, pool *pgxpool.Pool, opts ...Option) ([]Migration, error) {
	c, err := newConfig(opts)
	if err != nil {
		return nil, fmt.Errorf("migrations: status: %w", err)
	}
	db, done, err := open(pool)
	if err != nil {
		return nil, fmt.Errorf("migrations: status: %w", err)
	}
	defer done()
	migrations, err := status(ctx, db, c)
	if err != nil {
		return nil, fmt.Errorf("migrations: status of schema %q: %w", c.schema, explain(err))
	}
	return migrations, nil
}

func status(ctx context.Context, db *sql.DB, c config) ([]Migration, error) {
	all, err := sources()
	if err != nil {
		return nil, err
	}
	store := versionStore{schema: c.schema}
	exists, err := store.TableExists(ctx, db)
	if err != nil || !exists {
		return all, err
	}
	for i := range all {
		found, err := store.GetMigration(ctx, db, all[i].Version)
		switch {
		case errors.Is(err, database.ErrVersionNotFound):
			continue
		case err != nil:
			return nil, err
		}
		all[i].Applied = found.IsApplied
		if found.IsApplied {
			all[i].AppliedAt = found.Timestamp
		}
	}
	return all, nil
}

// open wraps pool for goose, which speaks database/sql, and returns how to let go of the wrapper. It opens no connection of its
// own, and the pool stays open.
func open(pool *pgxpool.Pool) (*sql.DB, func(), error) {
	if pool == nil {
		return nil, nil, errors.New("the pool is nil")
	}
	db := stdlib.OpenDBFromPool(pool)
	return db, func() { _ = db.Close() }, nil
}

// explain says what to do where the server's message alone does not.
func explain(err error) error {
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	if !ok {
		return err
	}
	switch pgErr.Code {
	case "42501": // insufficient_privilege
		return fmt.Errorf("this role may not do that; run the migrations as the owner of the schema, or apply what migrations.SQL prints: %w", err)
	case "42P07", "42710": // duplicate_table, duplicate_object
		return fmt.Errorf("the objects are there, but the version table does not say so: %w", err)
	case "25006": // read_only_sql_transaction
		return fmt.Errorf("the database is read-only on this connection, connect to the primary: %w", err)
	}
	return err
}
