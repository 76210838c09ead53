package pgtest_test

import (
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/archlab/idempotency/internal/pgtest"
)

func TestDatabaseHasALanguagesOrder(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		opts    []pgtest.DatabaseOption
		ordered bool
	}{
		"by default":  {nil, false},
		"as a person": {[]pgtest.DatabaseOption{pgtest.WithCollation()}, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var ordered bool
			require.NoError(t, connect(t, pgtest.Database(t, c.opts...), pgx.QueryExecModeExec).QueryRow(t.Context(), "SELECT 'a' < 'B'").Scan(&ordered))
			require.Equal(t, c.ordered, ordered, "in the order of bytes, capitals come first")
		})
	}
}

func TestDatabaseTakesItsCollationFromTheProviderThatIsAskedFor(t *testing.T) {
	t.Parallel()
	for provider, letter := range map[pgtest.Provider]string{pgtest.ICU: "i", pgtest.Libc: "c"} {
		t.Run(string(provider), func(t *testing.T) {
			t.Parallel()
			var has bool
			require.NoError(t, pgtest.Pool(t).QueryRow(t.Context(),
				`SELECT EXISTS (SELECT 1 FROM pg_collation WHERE collprovider = $1::"char" AND collname ~ '^[a-z]{2}[-_]')`, letter).Scan(&has))
			url, drop, err := pgtest.CreateDatabase(t.Context(), pgtest.WithCollation(provider))
			if !has {
				require.ErrorContains(t, err, "the server has no language's collation from ["+string(provider)+"]")
				return
			}
			require.NoError(t, err)
			defer func() { require.NoError(t, drop(t.Context())) }()
			var got string
			require.NoError(t, connect(t, url, pgx.QueryExecModeExec).QueryRow(t.Context(),
				"SELECT datlocprovider::text FROM pg_database WHERE datname = current_database()").Scan(&got))
			require.Equal(t, letter, got)
		})
	}
}
