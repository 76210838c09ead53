// Package scratch gives an example a PostgreSQL to work in: a schema of its own, migrated, on a server that is found or started, and
// nothing of it left behind.
package scratch

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/archlab/idempotency/internal/pgtest"
	"github.com/archlab/idempotency/migrations"
)

// closeTimeout bounds tidying up.
const closeTimeout = 15 * time.Second

// Database is a schema of one run's own.
type Database struct {
	Pool   *pgxpool.Pool
	URL    string
	Schema string
	Keep   bool // the schema, at the end

	server *pgtest.Server
}

// Open finds or starts a server, says which, and migrates a schema whose name begins with prefix. Nothing else on the server is touched.
func Open(ctx context.Context, prefix string, say func(format string, args ...any)) (*Database, error) {
	say("Looking for a PostgreSQL: %s, a container, the binaries on this machine.\n", pgtest.EnvURL)
	server, err := pgtest.Start(ctx, pgtest.Durable())
	if err != nil {
		return nil, err
	}
	say("Using %s.\n", server.Description())
	d := &Database{URL: server.URL(), Schema: prefix + "_" + strings.ToLower(rand.Text()[:8]), server: server}
	if err := d.prepare(ctx); err != nil {
		return nil, errors.Join(err, d.Close(ctx))
	}
	return d, nil
}

func (d *Database) prepare(ctx context.Context) error {
	var err error
	if d.Pool, err = pgxpool.New(ctx, d.URL); err != nil {
		return fmt.Errorf("connect: %w", err)
	}
	if _, err := d.Pool.Exec(ctx, "CREATE SCHEMA "+pgx.Identifier{d.Schema}.Sanitize()); err != nil {
		return fmt.Errorf("create a schema: %w", err)
	}
	_, err = migrations.Up(ctx, d.Pool, migrations.WithSchema(d.Schema))
	return err
}

// Close drops the schema and removes the server if it was started. It does so also when ctx has ended.
func (d *Database) Close(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
	defer cancel()
	var err error
	if d.Pool != nil {
		if !d.Keep {
			_, err = d.Pool.Exec(ctx, "DROP SCHEMA IF EXISTS "+pgx.Identifier{d.Schema}.Sanitize()+" CASCADE")
		}
		d.Pool.Close()
	}
	return errors.Join(err, d.server.Close(ctx))
}
