package pgtest

import (
	"context"
	"fmt"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/archlab/idempotency/internal/sqlgen"
	"github.com/archlab/idempotency/migrations"
)

// cleanupTimeout bounds each removal at a test's end.
const cleanupTimeout = 30 * time.Second

// names counts the names that this process has given.
var names atomic.Int64

// unusedName returns a name that no other test uses, also not one of another process on the same server.
func unusedName(prefix string) string {
	return fmt.Sprintf("%s%d_%x_%d", prefix, os.Getpid(), time.Now().UnixNano()&0xffffff, names.Add(1))
}

// EmptySchema creates a schema without anything in it, dropped when the test ends. Its name needs quotes, so that a statement
// which forgets them fails everywhere.
func EmptySchema(tb testing.TB) string {
	tb.Helper()
	pool := Pool(tb)
	schema := unusedName(`Test "É' `)
	quoted := sqlgen.QuoteIdentifier(schema)
	if _, err := pool.Exec(tb.Context(), "CREATE SCHEMA "+quoted); err != nil {
		tb.Fatalf("pgtest: create a schema: %v", err)
	}
	tb.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(tb.Context()), cleanupTimeout)
		defer cancel()
		if _, err := pool.Exec(ctx, "DROP SCHEMA IF EXISTS "+quoted+" CASCADE"); err != nil {
			tb.Errorf("pgtest: drop the schema (does the test still hold a connection or a lock?): %v", err)
		}
	})
	return schema
}

// Schema creates a schema with the real migrations, dropped when the test ends.
func Schema(tb testing.TB) string {
	tb.Helper()
	schema := EmptySchema(tb)
	if _, err := migrations.Up(tb.Context(), Pool(tb), migrations.WithSchema(schema)); err != nil {
		tb.Fatalf("pgtest: %v", err)
	}
	return schema
}
