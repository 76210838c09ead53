package pgstore_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/archlab/idempotency/migrations"
	"github.com/archlab/idempotency/pgstore"
)

// An attempt that had no effect releases its key: the next one gets it at once. An attempt that can never succeed fails for
// good: repeats are told so.
func ExampleStore_Fail() {
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
	key := pgstore.Key{Tenant: "acct_7", Operation: "mail.send", Value: "welcome-42"}
	const fingerprint = "sha256 of the mail"

	for _, retryable := range []bool{true, false} {
		record, created, err := store.Begin(ctx, key, fingerprint)
		if err != nil {
			fmt.Println(err)
			return
		}
		fmt.Println("ours:", created)
		if err := store.Fail(ctx, key, fingerprint, record.Attempt, retryable); err != nil {
			fmt.Println(err)
			return
		}
	}
	record, created, err := store.Begin(ctx, key, fingerprint)
	fmt.Println("ours:", created, "state:", record.State, "error:", err)

	// Output:
	// ours: true
	// ours: true
	// ours: false state: failed error: <nil>
}

// While another attempt holds the key, the error says how long to wait.
func ExampleInProgressError() {
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
	key := pgstore.Key{Tenant: "acct_7", Operation: "report.build", Value: "2031-02"}
	if _, _, err := store.Begin(ctx, key, "sha256"); err != nil {
		fmt.Println(err)
		return
	}

	_, _, err = store.Begin(ctx, key, "sha256")
	if running, ok := errors.AsType[*pgstore.InProgressError](err); ok {
		fmt.Println("Retry-After:", running.RetryAfter.Round(10*time.Second))
	}

	// Output:
	// Retry-After: 30s
}
