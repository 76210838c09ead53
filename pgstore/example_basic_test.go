package pgstore_test

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"time"

	"github.com/archlab/idempotency/migrations"
	"github.com/archlab/idempotency/pgstore"
)

func pay(ctx context.Context, store *pgstore.Store, clientKey, body string) (string, error) {
	key := pgstore.Key{Tenant: "acct_7", Operation: "payment.create", Value: clientKey}
	sum := sha256.Sum256([]byte(body))
	fingerprint := string(sum[:])

	record, created, err := store.Begin(ctx, key, fingerprint)
	if err != nil {
		return "", err // ErrInProgress, ErrConflict, or the store is down: do not execute
	}
	if record.State == pgstore.StateFailed {
		return "", errors.New("failed for good, as it was told before")
	}
	if !created {
		return record.Response, nil // executed before: the same bytes for everyone
	}
	response, err := charge(ctx, body) // the key is ours, and nobody else's, for the lease
	if errors.Is(err, errDeclined) {   // certainly no effect: free the key for the next try
		return "", errors.Join(err, store.Fail(ctx, key, fingerprint, record.Attempt, true))
	}
	if err != nil {
		return "", err // nobody knows: the lease lapses, and the next attempt is told
	}
	return response, store.Complete(ctx, key, fingerprint, record.Attempt, response)
}

// The whole life of an operation: reserved once, executed once, replayed to whoever repeats it, refused to whoever reuses its
// key.
func ExampleStore_Begin() {
	ctx := context.Background()
	pool, leave := exampleDatabase(ctx) // pgxpool.New(ctx, os.Getenv("DATABASE_URL"))
	defer leave()

	if _, err := migrations.Up(ctx, pool); err != nil { // once, when you deploy
		fmt.Println(err)
		return
	}
	store, err := pgstore.New(pool, 30*time.Second, 24*time.Hour) // lease, retention
	if err != nil {
		fmt.Println(err)
		return
	}

	for range 2 {
		response, err := pay(ctx, store, "req-1001", `{"amount":4200,"currency":"EUR"}`)
		fmt.Println(response, err)
	}
	_, err = pay(ctx, store, "req-1001", `{"amount":9900,"currency":"EUR"}`)
	fmt.Println(err)

	// Output:
	// charging the card
	// {"payment":"pay_1"} <nil>
	// {"payment":"pay_1"} <nil>
	// idempotency: begin "acct_7"/"payment.create"/"req-1001": idempotency: key reused with different payload
}

var errDeclined = errors.New("card declined")

func charge(context.Context, string) (string, error) {
	fmt.Println("charging the card")
	return `{"payment":"pay_1"}`, nil
}
