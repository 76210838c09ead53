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

func payOnce(ctx context.Context, store *pgstore.Store, clientKey, body string) (string, error) {
	key := pgstore.Key{Tenant: "acct_7", Operation: "payment.create", Value: clientKey}
	outcome, err := store.Do(ctx, key, pgstore.Fingerprint(body), func(ctx context.Context, r pgstore.Record) (string, error) {
		if r.Abandoned != 0 { // an attempt before this one was lost in the middle: it may have charged
			return "", errors.New("ask the provider first")
		}
		response, err := charge(ctx, body) // ctx ends when the key is lost
		if errors.Is(err, errDeclined) {
			return "", pgstore.Permanent(err) // repeats get ErrFailed
		}
		return response, err // an error that says nothing about effects: the key is held, and the next attempt is told
	})
	return outcome.Response, err
}

// The whole life of an operation in one call: reserved, executed once, replayed to whoever repeats it, refused to whoever reuses its
// key.
func ExampleStore_Do() {
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
		response, err := payOnce(ctx, store, "req-1001", `{"amount":4200,"currency":"EUR"}`)
		fmt.Println(response, err)
	}
	_, err = payOnce(ctx, store, "req-1001", `{"amount":9900,"currency":"EUR"}`)
	fmt.Println(err)

	// Output:
	// charging the card
	// {"payment":"pay_1"} <nil>
	// {"payment":"pay_1"} <nil>
	// idempotency: do "acct_7"/"payment.create"/"req-1001": idempotency: key reused with different payload
}

// Where the effect is in the same database, it is committed together with the response: exactly once, whatever dies when.
func ExampleStore_DoTx() {
	ctx := context.Background()
	pool, leave := exampleDatabase(ctx)
	defer leave()
	if _, err := migrations.Up(ctx, pool); err != nil {
		fmt.Println(err)
		return
	}
	if _, err := pool.Exec(ctx, `CREATE TABLE orders (id int GENERATED ALWAYS AS IDENTITY, item text)`); err != nil {
		fmt.Println(err)
		return
	}
	store, err := pgstore.New(pool, 30*time.Second, 24*time.Hour)
	if err != nil {
		fmt.Println(err)
		return
	}
	key := pgstore.Key{Tenant: "acct_7", Operation: "order.create", Value: "req-1001"}
	order := func(ctx context.Context, tx pgx.Tx, _ pgstore.Record) (string, error) {
		var id int
		err := tx.QueryRow(ctx, `INSERT INTO orders (item) VALUES ('a book') RETURNING id`).Scan(&id)
		return fmt.Sprint("order ", id), err
	}
	for range 2 {
		outcome, err := store.DoTx(ctx, key, pgstore.Fingerprint("a book"), order)
		fmt.Println(outcome.Response, "replayed:", outcome.Replayed, err)
	}

	// Output:
	// order 1 replayed: false <nil>
	// order 1 replayed: true <nil>
}

// What a function returns is stored as JSON, and comes back as what it was.
func ExampleDoValue() {
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
	type shipment struct{ Tracking string }
	key := pgstore.Key{Tenant: "acct_7", Operation: "shipment.create", Value: "req-1001"}
	for range 2 {
		s, outcome, err := pgstore.DoValue(ctx, store, key, pgstore.Fingerprint("a book", "Berlin"),
			func(context.Context, pgstore.Record) (shipment, error) { return shipment{"XY 123"}, nil })
		fmt.Println(s.Tracking, "replayed:", outcome.Replayed, err)
	}

	// Output:
	// XY 123 replayed: false <nil>
	// XY 123 replayed: true <nil>
}

// An attempt was lost, and the store was told not to take over: somebody finds out what became of it, and says so.
func ExampleStore_Resolve() {
	ctx := context.Background()
	pool, leave := exampleDatabase(ctx)
	defer leave()
	if _, err := migrations.Up(ctx, pool); err != nil {
		fmt.Println(err)
		return
	}
	store, err := pgstore.New(pool, time.Millisecond, 24*time.Hour, pgstore.WithoutTakeover()) // a lease that has lapsed when you read on
	if err != nil {
		fmt.Println(err)
		return
	}
	key := pgstore.Key{Tenant: "acct_7", Operation: "payout.create", Value: "req-1001"}
	if _, _, err := store.Begin(ctx, key, "sha256"); err != nil { // and the process dies
		fmt.Println(err)
		return
	}
	for errors.Is(err, pgstore.ErrInProgress) || err == nil {
		_, _, err = store.Begin(ctx, key, "sha256")
	}
	fmt.Println(errors.Is(err, pgstore.ErrAbandoned))

	lost, _, err := store.Get(ctx, key)
	fmt.Println(lost.State, "remaining:", lost.Remaining, err)
	// The bank says that it has paid.
	fmt.Println(store.Resolve(ctx, key, lost.Attempt, pgstore.AsDone("paid, says the bank")))

	record, created, err := store.Begin(ctx, key, "sha256")
	fmt.Println(record.Response, "created:", created, err)

	// Output:
	// true
	// in_progress remaining: 0s <nil>
	// <nil>
	// paid, says the bank created: false <nil>
}
