package migrations_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/archlab/idempotency/internal/pgtest"
	"github.com/archlab/idempotency/internal/sqlgen"
	"github.com/archlab/idempotency/migrations"
)

// Names that say something to SQL, to goose, or to whoever puts them into a text.
var oddNames = []string{
	"Capitals and spaces", `"`, `""`, `'`, `'; DROP SCHEMA public; --`, `\`, `\0041`, `a.b`, `public.x`, `"public".`, `Public`, `PUBLIC.`,
	"a\nb", "a\n-- b", "a;\nb", "a -- b", "a;", ";", "--", "/* */", "a\r\nb", "\t", " ", "x\n-- +goose Down\n", "-- +goose StatementBegin",
	"-- +goose NO TRANSACTION\nx", "$1", "$$", "%s", "%", "${HOME}", `U&""`, "e\u0301", "\u00e9", "\u4e2d\u6587", "\U0001F4B0", "\u2028", "\u0085;",
	"\x01\x7f", "select", "information_schema2", strings.Repeat("x", 63), strings.Repeat(`"`, 63), strings.Repeat("\u00e9", 31),
}

func TestAnySchemaNameThatPostgreSQLTakes(t *testing.T) {
	t.Parallel()
	pool := openPool(t, pgtest.Database(t))
	for _, name := range oddNames {
		require.NoError(t, migrateAndBack(t.Context(), pool, name))
	}
	letters := rapid.SampledFrom([]rune("aA0 \"'\\;-\n\r\t.$&%+/*_\u00e9\u4e2d\u2028"))
	words := rapid.SampledFrom([]string{"public.", "-- +goose Up\n", "-- +goose Down\n", ";\n", `"."`, `\000A`})
	rapid.Check(t, func(r *rapid.T) {
		name := rapid.StringOfN(letters, 0, 12, -1).Draw(r, "start") + words.Draw(r, "word") + rapid.StringOfN(letters, 0, 12, -1).Draw(r, "end")
		require.NoError(r, sqlgen.ValidateSchema(name))
		require.NoError(r, migrateAndBack(t.Context(), pool, name))
	})
	require.Equal(t, []string{"public"}, rows[string](t, pool,
		`SELECT nspname FROM pg_namespace WHERE nspname <> 'information_schema' AND NOT nspname ^@ 'pg_'`), "no other schema was touched")
	require.Empty(t, objects(t, pool, "public"))
}

// migrateAndBack does it by Up and Down and by the printed text, and says if something lands elsewhere than in the schema.
func migrateAndBack(ctx context.Context, pool *pgxpool.Pool, name string) error {
	in := migrations.WithSchema(name)
	run := func(printed func(...migrations.Option) (string, error)) error {
		text, err := printed(in)
		if err != nil {
			return err
		}
		_, err = pool.Exec(ctx, text)
		return err
	}
	for _, step := range []struct {
		name string
		do   func() error
		want []string
	}{
		{"up", func() error { _, err := migrations.Up(ctx, pool, in); return err }, allObjects},
		{"printed down", func() error { return run(migrations.DownSQL) }, nil},
		{"drop", func() error {
			_, err := pool.Exec(ctx, "DROP SCHEMA "+sqlgen.QuoteIdentifier(name)+" CASCADE")
			return err
		}, nil},
		{"printed up", func() error { return run(migrations.SQL) }, allObjects},
		{"down", func() error { _, err := migrations.Down(ctx, pool, in); return err }, nil},
		{"drop", func() error {
			_, err := pool.Exec(ctx, "DROP SCHEMA "+sqlgen.QuoteIdentifier(name)+" CASCADE")
			return err
		}, nil},
	} {
		err := step.do()
		found, queryErr := pool.Query(ctx, `SELECT c.relkind::text || ' ' || c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = $1::text AND c.relname ^@ 'idempotency_keys' ORDER BY 1`, name)
		got, collectErr := pgx.CollectRows(found, pgx.RowTo[string])
		if err := errors.Join(err, queryErr, collectErr); err != nil {
			return fmt.Errorf("%s of schema %q: %w", step.name, name, err)
		}
		if !slices.Equal(got, step.want) {
			return fmt.Errorf("after %s, schema %q holds %q", step.name, name, got)
		}
	}
	return nil
}
