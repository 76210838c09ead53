package main

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

// closeTimeout bounds each step of tidying up.
const closeTimeout = 15 * time.Second

// database is a schema of this run's own, on a server that was found or started.
type database struct {
	server *pgtest.Server
	pool   *pgxpool.Pool
	schema string
	ledger ledger
	keep   bool // the schema, at the end
}

// openDatabase finds or starts a server. Nothing in it is touched but a schema that did not exist before.
func openDatabase(ctx context.Context, keep bool, say func(format string, args ...any)) (*database, error) {
	server, err := pgtest.Start(ctx, pgtest.Durable())
	if err != nil {
		return nil, err
	}
	say("Using %s.\n", server.Description())
	d := &database{server: server, schema: "payments_demo_" + strings.ToLower(rand.Text()[:8])}
	d.ledger = newLedger(d.schema)
	if err := d.prepare(ctx); err != nil {
		return nil, errors.Join(err, d.close(ctx))
	}
	d.keep = keep
	return d, nil
}

func (d *database) prepare(ctx context.Context) error {
	var err error
	if d.pool, err = pgxpool.New(ctx, d.server.URL()); err != nil {
		return fmt.Errorf("connect: %w", err)
	}
	if _, err := d.pool.Exec(ctx, "CREATE SCHEMA "+pgx.Identifier{d.schema}.Sanitize()); err != nil {
		return fmt.Errorf("create a schema: %w", err)
	}
	if _, err := migrations.Up(ctx, d.pool, migrations.WithSchema(d.schema)); err != nil {
		return err
	}
	return d.ledger.create(ctx, d.pool)
}

// close drops the schema and removes the server if it was started. It does so also when ctx has ended.
func (d *database) close(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
	defer cancel()
	var err error
	if d.pool != nil {
		if !d.keep {
			_, err = d.pool.Exec(ctx, "DROP SCHEMA IF EXISTS "+pgx.Identifier{d.schema}.Sanitize()+" CASCADE")
		}
		d.pool.Close()
	}
	return errors.Join(err, d.server.Close(ctx))
}
