package sqlgen_test

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/archlab/idempotency/internal/pgtest"
	"github.com/archlab/idempotency/internal/sqlgen"
	"github.com/archlab/idempotency/migrations"
)

var update = flag.Bool("update", false, "write the golden files anew")

// hostileSchema holds what a name of a schema may hold and what quoting could get wrong.
const hostileSchema = `Käufer's "Idem. Keys" \ $1 {now};--`

// goldens are the configurations whose statements are held in files, in a form that psql takes: one PREPARE for each.
var goldens = map[string]sqlgen.Config{
	"public":         {Schema: "public"},
	"public_clock":   {Schema: "public", Clock: true},
	"public_modes":   {Schema: "public", NoTakeover: true, LateCompletion: true},
	"hostile_schema": {Schema: hostileSchema},
}

// statement is one field of sqlgen.Statements.
type statement struct{ name, sql string }

// statements returns the fields of Statements in their order, so that a new one is in every test here.
func statements(c sqlgen.Config) []statement {
	var all []statement
	value := reflect.ValueOf(*sqlgen.Render(c))
	for i := range value.NumField() {
		all = append(all, statement{value.Type().Field(i).Name, value.Field(i).String()})
	}
	return all
}

// everyStatement runs check on each statement of each configuration.
func everyStatement(t *testing.T, check func(t *testing.T, c sqlgen.Config, s statement)) {
	t.Helper()
	for golden, c := range goldens {
		for _, s := range statements(c) {
			t.Run(golden+"/"+s.name, func(t *testing.T) {
				t.Parallel()
				check(t, c, s)
			})
		}
	}
}

func goldenFile(golden string) string { return filepath.Join("testdata", "statements_"+golden+".sql") }

func TestStatementsAreTheGoldenOnes(t *testing.T) {
	t.Parallel()
	for golden, c := range goldens {
		t.Run(golden, func(t *testing.T) {
			t.Parallel()
			var text strings.Builder
			fmt.Fprintf(&text, "-- The statements for schema %q. Written by go test ./internal/sqlgen -update.\n", c.Schema)
			for _, s := range statements(c) {
				fmt.Fprintf(&text, "\nPREPARE %q AS\n%s;\n", s.name, s.sql)
			}
			if *update {
				require.NoError(t, os.WriteFile(goldenFile(golden), []byte(text.String()), 0o600))
			}
			want, err := os.ReadFile(goldenFile(golden))
			require.NoError(t, err)
			require.Equal(t, string(want), text.String(), "run go test ./internal/sqlgen -update, and look at the difference")
		})
	}
}

// migrated returns a pool of one connection on a database of its own, with the library's objects in the schema and an empty
// search path.
func migrated(t *testing.T, schema string) *pgxpool.Pool {
	t.Helper()
	config, err := pgxpool.ParseConfig(pgtest.Database(t))
	require.NoError(t, err)
	config.MaxConns = 1
	config.ConnConfig.RuntimeParams["search_path"] = ""
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	_, err = pool.Exec(t.Context(), `CREATE SCHEMA IF NOT EXISTS `+sqlgen.QuoteIdentifier(schema))
	require.NoError(t, err)
	_, err = migrations.Up(t.Context(), pool, migrations.WithSchema(schema))
	require.NoError(t, err)
	return pool
}

// The files as they lie there, with the migrations as they lie there, and no search path to help.
func TestGoldenStatementsArePreparedByTheServer(t *testing.T) {
	t.Parallel()
	for golden, c := range goldens {
		t.Run(golden, func(t *testing.T) {
			t.Parallel()
			text, err := os.ReadFile(goldenFile(golden))
			require.NoError(t, err)
			pool := migrated(t, c.Schema)
			_, err = pool.Exec(t.Context(), string(text), pgx.QueryExecModeSimpleProtocol)
			require.NoError(t, err)
			rows, err := pool.Query(t.Context(), `SELECT name FROM pg_catalog.pg_prepared_statements WHERE from_sql ORDER BY prepare_time, name`)
			require.NoError(t, err)
			prepared, err := pgx.CollectRows(rows, pgx.RowTo[string])
			require.NoError(t, err)
			var names []string
			for _, s := range statements(c) {
				names = append(names, s.name)
			}
			require.ElementsMatch(t, names, prepared)
		})
	}
}

// What the comments of the fields say of parameters and columns.
var (
	key        = []uint32{pgtype.TextOID, pgtype.TextOID, pgtype.TextOID}
	own        = slices.Concat(key, []uint32{pgtype.ByteaOID, pgtype.Int8OID}) // fingerprint, attempt
	interfaces = map[string]struct {
		parameters []uint32
		columns    []string
	}{
		"Begin": {
			slices.Concat(key, []uint32{pgtype.ByteaOID, pgtype.Int8OID, pgtype.IntervalOID, pgtype.IntervalOID}),
			[]string{
				"created bool", "same_fingerprint bool", "state text", "response bytea", "attempt int8", "abandoned int8",
				"expires_at int8", "remaining int8",
			},
		},
		"Complete":     {slices.Concat(own, []uint32{pgtype.ByteaOID, pgtype.IntervalOID}), nil},
		"CompleteHeld": {slices.Concat(own, []uint32{pgtype.ByteaOID, pgtype.IntervalOID}), nil},
		"Fail":         {slices.Concat(own, []uint32{pgtype.TextOID, pgtype.IntervalOID}), nil},
		"Extend": {
			slices.Concat(own, []uint32{pgtype.IntervalOID, pgtype.IntervalOID}),
			[]string{"abandoned int8", "expires_at int8", "remaining int8"},
		},
		"Resolve": {slices.Concat(key, []uint32{pgtype.Int8OID, pgtype.TextOID, pgtype.ByteaOID, pgtype.IntervalOID}), nil},
		"Inspect": {
			slices.Concat(own, []uint32{pgtype.ByteaOID}),
			[]string{"live bool", "same_fingerprint bool", "same_attempt bool", "state text", "same_response bool"},
		},
		"Get": {key, []string{
			"state text", "fingerprint bytea", "response bytea", "attempt int8", "abandoned int8", "expires_at int8", "remaining int8",
		}},
		"Sweep": {[]uint32{pgtype.Int8OID}, nil},
		"Purgeable": {
			slices.Concat([]uint32{pgtype.Int8OID}, key, []uint32{pgtype.Int8OID}),
			[]string{"purge_after int8", "tenant text", "operation text", "key text"},
		},
		"Purge": {key, nil},
	}
)

// No type is left to the server to guess or to the driver to know: the server finds those that the comments say.
func TestParametersAndColumnsHaveTheirTypes(t *testing.T) {
	t.Parallel()
	for golden, c := range goldens {
		t.Run(golden, func(t *testing.T) {
			t.Parallel()
			conn, err := migrated(t, c.Schema).Acquire(t.Context())
			require.NoError(t, err)
			defer conn.Release()
			for _, s := range statements(c) {
				described, err := conn.Conn().PgConn().Prepare(t.Context(), s.name, s.sql, nil)
				require.NoError(t, err, s.name)
				want, known := interfaces[s.name]
				require.True(t, known, "%s: say here what its parameters and columns are", s.name)
				parameters := want.parameters
				if c.Clock {
					parameters = append(slices.Clone(parameters), pgtype.TimestamptzOID)
				}
				require.Equal(t, parameters, described.ParamOIDs, s.name)
				var columns []string
				for _, field := range described.Fields {
					columnType, ok := conn.Conn().TypeMap().TypeForOID(field.DataTypeOID)
					require.True(t, ok)
					columns = append(columns, field.Name+" "+columnType.Name)
				}
				require.Equal(t, want.columns, columns, s.name)
			}
		})
	}
}

var (
	parameter     = regexp.MustCompile(`\$(\d+)(::[a-z]+)?`)
	doubleQuoted  = regexp.MustCompile(`"(?:[^"]|"")*"`)
	singleQuoted  = regexp.MustCompile(`E?'(?:[^']|'')*'`)
	functionCall  = regexp.MustCompile(`\b[a-z_0-9]+\(`)
	arithmetic    = regexp.MustCompile(`[-+*/%|]`)
	timeOfServer  = regexp.MustCompile(`(?i)\b(now\(\)|transaction_timestamp|statement_timestamp|clock_timestamp|timeofday|current_\w+|localtime\w*)`)
	connective    = regexp.MustCompile(`\b(WHERE|AND|OR|WHEN)\b`)
	conflictPart  = regexp.MustCompile(`(?s)ON CONFLICT.*?RETURNING`)
	starSelected  = regexp.MustCompile(`(?i)\bSELECT\s+(\w+\.)?\*|RETURNING\s+(\w+\.)?\*`)
	sessionBound  = regexp.MustCompile(`(?i)advisory|set_config|\bSET (LOCAL|SESSION)\b|pg_temp|LISTEN|DECLARE|PREPARE`)
	placeholder   = regexp.MustCompile(`\{\w*\}`)
	trailingSpace = regexp.MustCompile(`(?m)[ \t]+$`)
)

// code returns the statement without what the schema's name and constants say.
func code(sql string) string {
	return singleQuoted.ReplaceAllString(doubleQuoted.ReplaceAllString(sql, `"schema"`), "''")
}

func TestEveryParameterIsCastWhereverItStands(t *testing.T) {
	t.Parallel()
	everyStatement(t, func(t *testing.T, c sqlgen.Config, s statement) {
		t.Helper()
		types := map[int]string{}
		for _, match := range parameter.FindAllStringSubmatch(code(s.sql), -1) {
			number, err := strconv.Atoi(match[1])
			require.NoError(t, err)
			require.NotEmpty(t, match[2], "$%d without a cast", number)
			if known, seen := types[number]; seen {
				require.Equal(t, known, match[2], "$%d is two things", number)
			}
			types[number] = match[2]
		}
		count := len(interfaces[s.name].parameters)
		if c.Clock {
			count++
			require.Equal(t, "::timestamptz", types[count], "the clock is not the last parameter")
		}
		require.Len(t, types, count)
		for number := 1; number <= count; number++ {
			require.Contains(t, types, number)
		}
	})
}

func TestTimeIsTheStatements(t *testing.T) {
	t.Parallel()
	everyStatement(t, func(t *testing.T, c sqlgen.Config, s statement) {
		t.Helper()
		times := timeOfServer.FindAllString(code(s.sql), -1)
		if c.Clock {
			require.Empty(t, times)
			return
		}
		times = slices.DeleteFunc(times, func(word string) bool { return word == "statement_timestamp" })
		if s.name == "Begin" {
			require.Equal(t, []string{"clock_timestamp"}, times, "remaining, and nothing else")
			return
		}
		require.Empty(t, times)
	})
}

// What shards a table refuses more than this in an ON CONFLICT clause.
func TestConflictClauseHoldsColumnsAndConstantsOnly(t *testing.T) {
	t.Parallel()
	found := 0
	for _, c := range goldens {
		for _, s := range statements(c) {
			clause := conflictPart.FindString(code(s.sql))
			if clause == "" {
				require.NotContains(t, s.sql, "ON CONFLICT")
				continue
			}
			found++
			require.Empty(t, functionCall.FindAllString(clause, -1))
			require.Empty(t, arithmetic.FindAllString(clause, -1))
			require.NotContains(t, clause, "$")
		}
	}
	require.Equal(t, len(goldens), found)
}

func TestStatementsKeepTheRules(t *testing.T) {
	t.Parallel()
	everyStatement(t, func(t *testing.T, _ sqlgen.Config, s statement) {
		t.Helper()
		text := code(s.sql)
		require.Empty(t, starSelected.FindAllString(text, -1), "a column that is added later would come along")
		require.Empty(t, sessionBound.FindAllString(text, -1), "a pooler gives the next statement another session")
		require.Empty(t, placeholder.FindAllString(text, -1))
		require.Empty(t, trailingSpace.FindAllString(s.sql, -1))
		require.Equal(t, strings.TrimSpace(s.sql), s.sql)
		for line := range strings.Lines(text) {
			require.LessOrEqual(t, len(connective.FindAllString(line, -1)), 1, "one condition stands on one line: %s", line)
		}
	})
}
