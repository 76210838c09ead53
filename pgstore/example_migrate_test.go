package pgstore_test

import (
	"context"
	"fmt"
	"time"

	"github.com/archlab/idempotency/migrations"
	"github.com/archlab/idempotency/pgstore"
)

// The table lives in whichever schema you name, to the migrations and to the store.
func ExampleWithSchema() {
	ctx := context.Background()
	pool, leave := exampleDatabase(ctx)
	defer leave()

	store, err := pgstore.New(pool, 30*time.Second, 24*time.Hour, pgstore.WithSchema("payments"))
	if err != nil {
		fmt.Println(err)
		return
	}
	key := pgstore.Key{Tenant: "acct_7", Operation: "payment.create", Value: "req-1001"}
	_, _, err = store.Begin(ctx, key, "sha256")
	fmt.Println(err)

	applied, err := migrations.Up(ctx, pool, migrations.WithSchema("payments"))
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, m := range applied {
		fmt.Println("applied", m.Version, m.Name)
	}
	_, created, err := store.Begin(ctx, key, "sha256")
	fmt.Println(created, err)

	// Output:
	// idempotency: begin "acct_7"/"payment.create"/"req-1001": idempotency: database not migrated: run migrations.Up, or the SQL that migrations.SQL prints, for schema "payments": ERROR: relation "payments.idempotency_keys" does not exist (SQLSTATE 42P01)
	// applied 1 00001_create_idempotency_keys.sql
	// true <nil>
}
