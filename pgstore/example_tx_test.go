package pgstore_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/archlab/idempotency/migrations"
	"github.com/archlab/idempotency/pgstore"
)

// The effect and the response are committed together. An attempt that lost its lease while it worked is refused, and its
// effect goes with its transaction: exactly once, whatever dies at whatever moment.
func ExampleStore_WithTx() {
	ctx := context.Background()
	pool, leave := exampleDatabase(ctx)
	defer leave()
	if _, err := migrations.Up(ctx, pool); err != nil {
		fmt.Println(err)
		return
	}
	if _, err := pool.Exec(ctx, `CREATE TABLE orders (tenant text, key text, item text)`); err != nil {
		fmt.Println(err)
		return
	}
	store, err := pgstore.New(pool, 30*time.Second, 24*time.Hour)
	if err != nil {
		fmt.Println(err)
		return
	}
	hasty, err := pgstore.New(pool, 300*time.Millisecond, 24*time.Hour) // for a lease that lapses while you read this
	if err != nil {
		fmt.Println(err)
		return
	}

	key := pgstore.Key{Tenant: "acct_7", Operation: "order.create", Value: "req-1001"}
	const fingerprint = "sha256 of the request"
	order := func(attempt uint64, item string) error {
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			_, err := tx.Exec(ctx, `INSERT INTO orders VALUES ($1, $2, $3)`, key.Tenant, key.Value, item)
			if err != nil {
				return err
			}
			return store.WithTx(tx).Complete(ctx, key, fingerprint, attempt, "ordered "+item)
		})
	}

	slow, _, err := hasty.Begin(ctx, key, fingerprint)
	if err != nil {
		fmt.Println(err)
		return
	}
	// The slow one hangs, its lease lapses, and a repeat of the request takes over.
	var next pgstore.Record
	for created := false; !created; {
		next, created, err = store.Begin(ctx, key, fingerprint)
		if err != nil && !errors.Is(err, pgstore.ErrInProgress) {
			fmt.Println(err)
			return
		}
	}
	fmt.Println("took over:", next.Abandoned == slow.Attempt)
	fmt.Println("second:", order(next.Attempt, "a book"))
	err = order(slow.Attempt, "a book, again")
	fmt.Println("first, late:", errors.Is(err, pgstore.ErrStaleAttempt))

	var orders int
	if err := pool.QueryRow(ctx, `SELECT count(*) FROM orders`).Scan(&orders); err != nil {
		fmt.Println(err)
	}
	fmt.Println("orders:", orders)

	// Output:
	// took over: true
	// second: <nil>
	// first, late: true
	// orders: 1
}
