package sqlgen_test

import (
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/archlab/idempotency/internal/pgtest"
	"github.com/archlab/idempotency/internal/sqlgen"
)

// identifierSeeds are names of schemas that somebody may have, or may try.
var identifierSeeds = []string{
	"public", "Public", "PUBLIC", "order", "select", "a b", " ", "\t\n", "a.b", "a..b", `a"b`, `"`, `""`, `"a"`, `a"; DROP SCHEMA x; --`,
	"a'b", "''", `a\b`, `\'`, `\`, "$1", "$$", "%s", "{table}", "{now}", "été", "e\u0301", "日本語", "🧾", "\u202e", "\x01", "\x7f",
	strings.Repeat("x", 63), strings.Repeat("é", 31) + "x", strings.Repeat(`"`, 63), "information_schema", "PG_", "pg", "-", "1", "a--b", "/*", "U&",
}

// identifierRefused are names that PostgreSQL does not take, or not as they are.
var identifierRefused = []string{
	"", "pg_", "pg_temp", "pg_catalog", "\x00", "a\x00b", "\xff", "a\xed\xa0\x80", strings.Repeat("x", 64), strings.Repeat("é", 32),
}

// identifierWant is the rule: what PostgreSQL takes as the name of a schema, as it is.
func identifierWant(name string) bool {
	return name != "" && len(name) <= 63 && utf8.ValidString(name) && !strings.ContainsRune(name, 0) && !strings.HasPrefix(name, "pg_")
}

func TestSchemaNamesThatPostgreSQLDoesNotTakeAreRefused(t *testing.T) {
	t.Parallel()
	for _, name := range identifierSeeds {
		require.NoError(t, sqlgen.ValidateSchema(name), "%q", name)
	}
	for _, name := range identifierRefused {
		require.Error(t, sqlgen.ValidateSchema(name), "%q", name)
	}
}

// The server has the same opinion of what is valid UTF-8 of the right length and would be refused all the same.
func TestServerReservesWhatIsRefusedAsReserved(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"pg_", "pg_x", "PG_", "Pg_x", "pg"} {
		err := pgx.BeginFunc(t.Context(), pgtest.Pool(t), func(tx pgx.Tx) error {
			_, err := tx.Exec(t.Context(), `CREATE SCHEMA `+sqlgen.QuoteIdentifier(name))
			require.Equal(t, sqlgen.ValidateSchema(name) == nil, err == nil, "%q: %v", name, err)
			return pgx.ErrTxClosed // rolls back
		})
		require.ErrorIs(t, err, pgx.ErrTxClosed)
	}
}

// FuzzQuoteIdentifier takes any name through a real server and back: as the name of a column, through the server's own
// parser and quoting of identifiers, and as the schema of the store's table and sequence.
func FuzzQuoteIdentifier(f *testing.F) {
	for _, name := range identifierSeeds {
		f.Add(name)
	}
	for _, name := range identifierRefused {
		f.Add(name)
	}
	pool := pgtest.Pool(f)
	template := sqlgen.QuoteIdentifier(pgtest.Schema(f)) + "." + sqlgen.Table
	f.Fuzz(func(t *testing.T, name string) {
		require.Equal(t, identifierWant(name), sqlgen.ValidateSchema(name) == nil)
		quoted := sqlgen.QuoteIdentifier(name)
		require.Zero(t, strings.Count(strings.ReplaceAll(quoted[1:len(quoted)-1], `""`, ``), `"`), "a quote that ends the identifier")
		if name == "" || len(name) > 63 || !utf8.ValidString(name) || strings.ContainsRune(name, 0) {
			return // nothing that could be sent
		}
		tx, err := pool.Begin(t.Context())
		require.NoError(t, err)
		defer func() { require.NoError(t, tx.Rollback(t.Context())) }()

		rows, err := tx.Query(t.Context(), `SELECT parse_ident($1::text), parse_ident(quote_ident($2::text)) AS `+quoted, quoted, name)
		require.NoError(t, err)
		require.Equal(t, name, rows.FieldDescriptions()[1].Name)
		require.True(t, rows.Next(), "%v", rows.Err())
		var parsed, servers []string
		require.NoError(t, rows.Scan(&parsed, &servers))
		rows.Close()
		require.Equal(t, []string{name}, parsed)
		require.Equal(t, []string{name}, servers)
		if sqlgen.ValidateSchema(name) != nil {
			return
		}

		_, err = tx.Exec(t.Context(), `CREATE SCHEMA IF NOT EXISTS `+quoted)
		require.NoError(t, err)
		var found string
		require.NoError(t, tx.QueryRow(t.Context(), `SELECT nspname FROM pg_namespace WHERE oid = to_regnamespace($1::text)::oid`,
			quoted).Scan(&found))
		require.Equal(t, name, found)
		_, err = tx.Exec(t.Context(), `CREATE TABLE `+quoted+`.`+sqlgen.Table+` (LIKE `+template+` INCLUDING ALL)`)
		require.NoError(t, err)
		_, err = tx.Exec(t.Context(), `CREATE SEQUENCE `+quoted+`.`+sqlgen.Sequence)
		require.NoError(t, err)
		begin := sqlgen.Render(sqlgen.Config{Schema: name}).Begin
		for _, conforming := range []string{"on", "off"} { // what a backslash in a string constant means
			_, err = tx.Exec(t.Context(), `SELECT set_config('standard_conforming_strings', $1, true)`, conforming)
			require.NoError(t, err)
			_, err = tx.Conn().PgConn().Prepare(t.Context(), "", begin, nil)
			require.NoError(t, err)
		}
	})
}
