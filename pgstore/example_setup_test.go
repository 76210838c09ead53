package pgstore_test

import (
	"context"
	"errors"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/archlab/idempotency/internal/pgtest"
)

// exampleDatabase stands for the reader's own database: it returns a pool on a fresh one, and how to leave it.
func exampleDatabase(ctx context.Context) (*pgxpool.Pool, func()) {
	url, drop, err := pgtest.CreateDatabase(ctx)
	if err != nil {
		panic(err)
	}
	pool, err := pgxpool.New(ctx, url)
	if err != nil {
		panic(errors.Join(err, drop(ctx)))
	}
	return pool, func() {
		pool.Close()
		if err := drop(ctx); err != nil {
			panic(err)
		}
	}
}
