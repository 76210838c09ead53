package migrations

import (
	"context"
	"database/sql"
	"embed"
	"errors"
	"fmt"
	"slices"
	"time"

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
	Version   int64     // from 1
	Name      string    // the file's name
	Applied   bool      // what it is after the call
	AppliedAt time.Time // on the database's clock, in UTC; zero unless Status found it applied
}

// Option configures a call of this package.
type Option func(*config)

type config struct {
	schema string
	to     int64
	toSet  bool
	all    []Migration // every one that is embedded, by version
}

// WithSchema names the schema of the table. It is created if it is missing. Any name that PostgreSQL takes will do; it is
// quoted. Defaults to [SchemaDefault].
func WithSchema(name string) Option {
	return func(c *config) { c.schema = name }
}

// To stops at a version: Up and SQL go up to and with it, Down and DownSQL roll back what is above it. It is 0 or the version of
// a migration; another one is an error. Status does not look at it. Defaults to the latest version on the way up, to 0 on the
// way down.
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
	var err error
	if c.all, err = sources(); err != nil {
		return c, err
	}
	if c.to != 0 && !slices.ContainsFunc(c.all, func(m Migration) bool { return m.Version == c.to }) {
		return c, fmt.Errorf("there is no version %d: this package knows 1 to %d, and 0 for none", c.to, c.all[len(c.all)-1].Version)
	}
	return c, nil
}

// Up applies what has not been applied yet, in order, each migration in a transaction of its own, and returns what this call
// applied, also when it fails. Any number of processes may call it at once: one works, the others wait for it and then find nothing
// to do. Where nothing is pending it takes no lock and writes nothing.
//
// It needs the right to create tables in the schema, and to create schemas in the database if the schema is missing. It uses one
// connection of the pool at a time, which must reach the server directly or through a pooler in session mode, since the lock
// belongs to the session. A process that dies in the middle leaves neither the lock nor half a migration.
//
// The server's error is reachable as *pgconn.PgError.
func Up(ctx context.Context, pool *pgxpool.Pool, opts ...Option) ([]Migration, error) {
	return run(ctx, pool, "up", opts, func(ctx context.Context, db *sql.DB, c config) ([]*goose.MigrationResult, error) {
		if c.toSet && c.to == 0 {
			return nil, nil
		}
		if err := prepare(ctx, db, c.schema); err != nil {
			return nil, err
		}
		p, err := newProvider(db, c.schema)
		if err != nil {
			return nil, err
		}
		if c.toSet {
			return p.UpTo(ctx, c.to)
		}
		return p.Up(ctx)
	})
}

// Down rolls back all migrations, or those above [To], the latest first, and returns them. Rolled back to 0 it drops the table
// and the sequence and with them EVERY KEY: what is repeated afterwards is executed again, and fencing tokens begin again at 1.
//
// The schema stays, since it may hold other things, and so does the version table, which says then that nothing has been
// applied: to drop it would pull it from under a migrator that waits for its turn. DROP TABLE it if you are leaving.
//
// It needs what [Up] needs, and waits until running transactions have let go of the table.
func Down(ctx context.Context, pool *pgxpool.Pool, opts ...Option) ([]Migration, error) {
	return run(ctx, pool, "down", opts, func(ctx context.Context, db *sql.DB, c config) ([]*goose.MigrationResult, error) {
		exists, err := versionStore{schema: c.schema}.TableExists(ctx, db)
		if err != nil || !exists {
			return nil, err
		}
		p, err := newProvider(db, c.schema)
		if err != nil {
			return nil, err
		}
		return p.DownTo(ctx, c.to)
	})
}

func newProvider(db *sql.DB, schema string) (*goose.Provider, error) {
	p, err := goose.NewProvider(goose.DialectCustom, db, rendered(schema),
		goose.WithStore(versionStore{schema: schema}),
		goose.WithSessionLocker(sessionLocker{schema: schema}),
		goose.WithDisableGlobalRegistry(true),
		goose.WithLogger(goose.NopLogger()),
	)
	if err != nil {
		return nil, fmt.Errorf("set goose up: %w", err)
	}
	return p, nil
}

func run(
	ctx context.Context, pool *pgxpool.Pool, direction string, opts []Option,
	migrate func(ctx context.Context, db *sql.DB, c config) ([]*goose.MigrationResult, error),
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
	results, err := migrate(ctx, db, c)
	if partial, ok := errors.AsType[*goose.PartialError](err); ok {
		results = partial.Applied
	}
	changed := make([]Migration, 0, len(results))
	for _, r := range results {
		changed = append(changed, Migration{Version: r.Source.Version, Name: r.Source.Path, Applied: direction == "up"})
	}
	if err != nil {
		return changed, fmt.Errorf("migrations: %s in schema %q: %w", direction, c.schema, explain(err, adviceMigrate))
	}
	return changed, nil
}

// Status returns every migration that this package knows, by version, and whether it has been applied. It takes no lock and
// changes nothing, and needs no more than the right to read the version table; where there is none, nothing has been applied.
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
	if err := addStatus(ctx, db, c); err != nil {
		return nil, fmt.Errorf("migrations: status of schema %q: %w", c.schema, explain(err, adviceStatus))
	}
	return c.all, nil
}

// addStatus marks those in c.all that have been applied.
func addStatus(ctx context.Context, db *sql.DB, c config) error {
	store := versionStore{schema: c.schema}
	exists, err := store.TableExists(ctx, db)
	if err != nil || !exists {
		return err
	}
	for i := range c.all {
		found, err := store.GetMigration(ctx, db, c.all[i].Version)
		switch {
		case errors.Is(err, database.ErrVersionNotFound):
			continue
		case err != nil:
			return err
		case found.IsApplied:
			c.all[i].Applied, c.all[i].AppliedAt = true, found.Timestamp
		}
	}
	return nil
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
