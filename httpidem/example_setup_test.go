package httpidem_test

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/archlab/idempotency/internal/pgtest"
	"github.com/archlab/idempotency/migrations"
	"github.com/archlab/idempotency/pgstore"
)

// exampleStore stands for the reader's own: it returns a store on a fresh database, and how to leave it.
func exampleStore() (*pgstore.Store, func()) {
	ctx := context.Background()
	url, drop, err := pgtest.CreateDatabase(ctx)
	if err != nil {
		panic(err)
	}
	pool, err := pgxpool.New(ctx, url)
	if err != nil {
		panic(errors.Join(err, drop(ctx)))
	}
	_, err = migrations.Up(ctx, pool)
	if err != nil {
		panic(err)
	}
	store, err := pgstore.New(pool, 30*time.Second, 24*time.Hour)
	if err != nil {
		panic(err)
	}
	return store, func() {
		pool.Close()
		if err := drop(ctx); err != nil {
			panic(err)
		}
	}
}
