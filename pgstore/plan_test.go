package pgstore_test

import (
	"encoding/json"
	"slices"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

// planStatement is one of the store's statements, with arguments of the kind that the store sends.
type planStatement struct{ sql, arguments string }

func planStatements(f *fixture) map[string]planStatement {
	s := f.Statements()
	const keyArguments = `'tenant-a', 'order.create', '0050000'`
	own := keyArguments + `, '\x01', 50000`
	return map[string]planStatement{
		"Begin":     {s.Begin, own + `, '1 min', '1 day'`},
		"Complete":  {s.Complete, own + `, '\x02', '1 day'`},
		"Fail":      {s.Fail, own + `, 'failed', '1 day'`},
		"Extend":    {s.Extend, own + `, '1 min', '1 day'`},
		"Inspect":   {s.Inspect, own + `, '\x02'`},
		"Get":       {s.Get, keyArguments},
		"Sweep":     {s.Sweep, `1000`},
		"Purgeable": {s.Purgeable, `0, '', '', '', 1000`},
		"Purge":     {s.Purge, keyArguments},
	}
}

const (
	planPrimary = "idempotency_keys_pkey"
	planPurge   = "idempotency_keys_purge_after_idx"
)

// planNode is a node of a plan as EXPLAIN (FORMAT JSON) writes it.
type planNode struct {
	Type     string     `json:"Node Type"`
	Relation string     `json:"Relation Name"`
	Index    string     `json:"Index Name"`
	Plans    []planNode `json:"Plans"`
}

// scans returns how the plan comes to its rows: each scan, with the index that it uses. A bitmap made from an index counts as a
// scan of it.
func (n planNode) scans() []string {
	var all []string
	switch {
	case n.Index != "":
		all = append(all, "Index Scan on "+n.Index)
	case n.Relation != "" && n.Type != "ModifyTable" && n.Type != "Bitmap Heap Scan":
		all = append(all, n.Type)
	}
	for _, child := range n.Plans {
		all = append(all, child.scans()...)
	}
	slices.Sort(all)
	return all
}

// planSession prepares every statement on one connection.
func planSession(t *testing.T, f *fixture) *pgx.Conn {
	t.Helper()
	conn, err := f.Pool.Acquire(t.Context())
	require.NoError(t, err)
	t.Cleanup(conn.Release)
	for name, s := range planStatements(f) {
		planExec(t, conn.Conn(), `PREPARE "`+name+`" AS `+s.sql)
	}
	return conn.Conn()
}

func planExec(t *testing.T, conn *pgx.Conn, sql string) {
	t.Helper()
	_, err := conn.Exec(t.Context(), sql, pgx.QueryExecModeSimpleProtocol)
	require.NoError(t, err)
}

// planScans says how the session would run its prepared statement now.
func planScans(t *testing.T, conn *pgx.Conn, name string, s planStatement) []string {
	t.Helper()
	rows, err := conn.Query(t.Context(), `EXPLAIN (FORMAT JSON) EXECUTE "`+name+`"(`+s.arguments+`)`,
		pgx.QueryExecModeSimpleProtocol)
	require.NoError(t, err)
	text, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[string])
	require.NoError(t, err)
	var plans []struct {
		Plan planNode `json:"Plan"`
	}
	require.NoError(t, json.Unmarshal([]byte(text), &plans))
	require.Len(t, plans, 1)
	return plans[0].Plan.scans()
}

// planWarm runs every prepared statement so often that the session settles on a plan, and leaves nothing behind but that plan.
func planWarm(t *testing.T, conn *pgx.Conn, f *fixture) {
	t.Helper()
	for name, s := range planStatements(f) {
		planExec(t, conn, `BEGIN`)
		for range 10 {
			planExec(t, conn, `EXECUTE "`+name+`"(`+s.arguments+`)`)
		}
		planExec(t, conn, `ROLLBACK`)
		var generic int
		require.NoError(t, conn.QueryRow(t.Context(),
			`SELECT generic_plans FROM pg_prepared_statements WHERE name = $1`, name).Scan(&generic))
		require.Positive(t, generic, "%s: the session plans every run anew, and this test says nothing", name)
	}
}

// planRows is the size of the table behind the plans.
const planRows = 100_000

// planFill inserts finished records, some of them due.
func planFill(t *testing.T, f *fixture) {
	t.Helper()
	require.EqualValues(t, planRows, recordExec(t, f, `INSERT INTO %s
			(tenant, operation, key, state, fingerprint, response, attempt, claim, begun_at, expires_at, purge_after)
		SELECT 'tenant-a', 'order.create', to_char(n, 'FM0000000'), 'done', '\x01', decode(repeat('61', 200), 'hex'), n, n,
			statement_timestamp() - interval '1 day', statement_timestamp() + (n - 3600) * interval '1 s',
			statement_timestamp() + (n - 3600) * interval '1 s'
		FROM generate_series(1, $1::bigint) n`, planRows))
}

// planDatabase is a fixture whose table only the test vacuums and analyzes.
func planDatabase(t *testing.T) *fixture {
	t.Helper()
	f := hotDatabase(t)
	recordExec(t, f, `ALTER TABLE %s SET (autovacuum_enabled = off)`)
	return f
}

// planWanted is how each statement is to reach its rows in a large table.
func planWanted(name string) []string {
	switch name {
	case "Sweep":
		return []string{"Index Scan on " + planPurge, "Tid Scan"}
	case "Purgeable":
		return []string{"Index Scan on " + planPurge}
	case "Purge":
		return []string{"Index Scan on " + planPrimary, "Tid Scan"}
	}
	return []string{"Index Scan on " + planPrimary}
}

func TestEveryStatementUsesItsIndexInALargeTable(t *testing.T) {
	t.Parallel()
	f := planDatabase(t)
	planFill(t, f)
	recordExec(t, f, `VACUUM ANALYZE %s`)
	conn := planSession(t, f)
	for _, mode := range []string{"force_custom_plan", "force_generic_plan"} {
		planExec(t, conn, `SET plan_cache_mode = `+mode)
		for name, s := range planStatements(f) {
			require.Equal(t, planWanted(name), planScans(t, conn, name, s), "%s, %s", name, mode)
		}
	}
	planExec(t, conn, `SET plan_cache_mode = auto`)
	planWarm(t, conn, f)
	for name, s := range planStatements(f) {
		require.Equal(t, planWanted(name), planScans(t, conn, name, s), name)
	}
}

// planEmpty are the ways in which a table comes to have no rows, or so few that they tell the planner nothing.
var planEmpty = []struct {
	name string
	make func(t *testing.T, f *fixture)
}{
	{"just created", func(*testing.T, *fixture) {}},
	{"vacuumed", planVacuum("VACUUM")},
	{"analyzed", planVacuum("ANALYZE")},
	{"vacuumed and analyzed", planVacuum("VACUUM ANALYZE")},
	{"swept and vacuumed", func(t *testing.T, f *fixture) {
		t.Helper()
		sweepFill(t, f, 0, 5000)
		deleted, err := f.Sweep(t.Context(), 5000)
		require.NoError(t, err)
		require.EqualValues(t, 5000, deleted)
		recordExec(t, f, `VACUUM ANALYZE %s`)
	}},
	{"with ten rows, analyzed", func(t *testing.T, f *fixture) {
		t.Helper()
		sweepFill(t, f, planRows+1, 10) // beside those that planFill adds
		recordExec(t, f, `VACUUM ANALYZE %s`)
	}},
}

func planVacuum(command string) func(*testing.T, *fixture) {
	return func(t *testing.T, f *fixture) {
		t.Helper()
		recordExec(t, f, command+` %s`)
	}
}

// A service that starts on an empty table keeps the plans that its connections cached for it until the next ANALYZE. They must
// do for whatever comes in until then, and that may be a lot, or a long time.
func TestPlansCachedForAnEmptyTableStayRightWhileItGrows(t *testing.T) {
	t.Parallel()
	for _, empty := range planEmpty {
		t.Run(empty.name, func(t *testing.T) {
			t.Parallel()
			f := planDatabase(t)
			empty.make(t, f)
			conn := planSession(t, f)
			planWarm(t, conn, f)
			for name, s := range planStatements(f) {
				require.Equal(t, planWanted(name), planScans(t, conn, name, s), "%s, for the empty table", name)
			}
			planFill(t, f)
			for name, s := range planStatements(f) {
				require.Equal(t, planWanted(name), planScans(t, conn, name, s), name)
				require.Zero(t, planWholeReads(t, conn, f, name, s), name)
			}
		})
	}
}

// planWholeReads runs the prepared statement and counts how often that read the whole table.
func planWholeReads(t *testing.T, conn *pgx.Conn, f *fixture, name string, s planStatement) int64 {
	t.Helper()
	count := func() (n int64) {
		require.NoError(t, conn.QueryRow(t.Context(), `SELECT pg_stat_get_xact_numscans($1::text::regclass)`, recordTable(f)).Scan(&n))
		return n
	}
	planExec(t, conn, `BEGIN`)
	before := count()
	planExec(t, conn, `EXECUTE "`+name+`"(`+s.arguments+`)`)
	after := count()
	planExec(t, conn, `ROLLBACK`)
	return after - before
}

// Where somebody has taken away the pages that the migration leaves, by TRUNCATE or VACUUM FULL, PostgreSQL reads all of a table that was
// analyzed with less than some nine pages in it, and a session keeps such a plan while the table grows. Nothing in a statement
// changes that. What ends it, in every session at once, is the next ANALYZE, autovacuum's too: the migration lets that come after
// 500 rows.
func TestAnalyzeEndsPlansThatWereCachedForATableWithoutPages(t *testing.T) {
	t.Parallel()
	f := planDatabase(t)
	recordExec(t, f, `TRUNCATE %s`)
	recordExec(t, f, `ANALYZE %s`)
	conn := planSession(t, f)
	planWarm(t, conn, f)
	// That the session keeps this plan cannot be shown reliably beside tests which make so many objects that it forgets all.
	get := planStatements(f)["Get"]
	require.Equal(t, []string{"Seq Scan"}, planScans(t, conn, "Get", get))
	require.EqualValues(t, 1, planWholeReads(t, conn, f, "Get", get))
	planFill(t, f)
	recordExec(t, f, `ANALYZE %s`)
	for name, s := range planStatements(f) {
		require.Equal(t, planWanted(name), planScans(t, conn, name, s), name)
		require.Zero(t, planWholeReads(t, conn, f, name, s), name)
	}
}
