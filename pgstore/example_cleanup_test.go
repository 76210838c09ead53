package pgstore_test

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/archlab/idempotency/migrations"
	"github.com/archlab/idempotency/pgstore"
)

// Sweep deletes what has been forgotten, in portions. Call it from a ticker; any number of processes may.
func ExampleStore_Sweep() {
	ctx := context.Background()
	pool, leave := exampleDatabase(ctx)
	defer leave()
	if _, err := migrations.Up(ctx, pool); err != nil {
		fmt.Println(err)
		return
	}
	store, err := pgstore.New(pool, 30*time.Second, 24*time.Hour)
	if err != nil {
		fmt.Println(err)
		return
	}
	for n := range 25 {
		key := pgstore.Key{Tenant: "acct_7", Operation: "order.create", Value: strconv.Itoa(n)}
		if _, _, err := store.Begin(ctx, key, "sha256"); err != nil {
			fmt.Println(err)
			return
		}
	}
	// Two days pass.
	if _, err := pool.Exec(ctx, `UPDATE idempotency_keys SET begun_at = begun_at - interval '2 days',
		expires_at = expires_at - interval '2 days', purge_after = purge_after - interval '2 days'`); err != nil {
		fmt.Println(err)
		return
	}

	const limit = 10
	for {
		deleted, err := store.Sweep(ctx, limit)
		if err != nil {
			fmt.Println(err)
			return
		}
		fmt.Println("deleted", deleted)
		if deleted < limit {
			break // nothing left for now
		}
	}

	// Output:
	// deleted 10
	// deleted 10
	// deleted 5
}
