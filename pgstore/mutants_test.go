package pgstore_test

import (
	"fmt"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/archlab/idempotency/internal/sqlgen"
)

// mutant is one statement with one thing changed: a condition removed, a comparison moved by its edge, an assignment not
// made.
type mutant struct {
	Statement string // the field of sqlgen.Statements
	Kind      string
	Number    int    // among those of the statement and the kind
	Modes     string // mutantOfModes for one of a condition that only the modes render
	What      string // the text that was changed
	SQL       string
}

// ID names the mutant: the same in every rendering of the statements.
func (m mutant) ID() string { return fmt.Sprintf("%s%s/%s/%d", m.Modes, m.Statement, m.Kind, m.Number) }

// Kinds of mutants. A condition is whatever stands between WHERE, WHEN, SELECT, a comma, AND, OR and the end of these, and
// compares or asks for existence, and each group of conditions in parentheses. Parameters stay in the text, so that the
// statement keeps its arguments.
const (
	mutantAlways   = "always"   // a condition is true: the AND before it, or its WHERE, is gone
	mutantNever    = "never"    // a condition is false: the OR before it, or its WHEN, is gone
	mutantEdge     = "edge"     // > is >=, <= is <, and the reverse
	mutantKeep     = "keep"     // an assignment of SET keeps what the column had
	mutantOnly     = "only"     // one argument stands for GREATEST or coalesce
	mutantTerm     = "term"     // a duration is not added
	mutantUnsorted = "unsorted" // no ORDER BY, or one without one of its columns
	mutantLimit    = "limit"    // no LIMIT
	mutantLock     = "lock"     // FOR UPDATE waits, or is not there
	mutantSequence = "sequence" // the next attempt is the highest in the table and one
	mutantTime     = "time"     // the transaction's time for the statement's, the statement's for the clock's
)

// mutants returns every mutant of every statement. It finds them in the text, so a condition that is added later has
// its mutants at once.
func mutants(statements *sqlgen.Statements) []mutant {
	var all []mutant
	fields := reflect.ValueOf(*statements)
	for i := range fields.NumField() {
		m := newMutator(fields.Type().Field(i).Name, fields.Field(i).String())
		m.conditions()
		m.edges()
		m.assignments()
		m.functions()
		m.clauses()
		m.times()
		all = append(all, m.found...)
	}
	return all
}

// mutate returns a copy of the statements with the mutant's in its place, or nil if there is none of this name.
func mutate(statements *sqlgen.Statements, id string) *sqlgen.Statements {
	for _, m := range mutants(statements) {
		if m.ID() == id {
			mutated := *statements
			reflect.ValueOf(&mutated).Elem().FieldByName(m.Statement).SetString(m.SQL)
			return &mutated
		}
	}
	return nil
}

// mutator finds the mutants of one statement.
type mutator struct {
	statement, sql string
	tokens         []mutatorToken
	found          []mutant
}

type mutatorToken struct {
	text       string
	start, end int // bytes in the statement
	partner    int // of a parenthesis: the token of the other one
}

// mutatorTokens matches quoted identifiers, strings, parameters, numbers, words and operators. The statements hold no comments.
var mutatorTokens = regexp.MustCompile(`"(?:[^"]|"")*"|E?'(?:[^']|'')*'|\$\d+|\d+|[A-Za-z_]\w*|::|<>|<=|>=|\S`)

func newMutator(statement, sql string) *mutator {
	m := &mutator{statement: statement, sql: sql}
	var open []int
	for i, at := range mutatorTokens.FindAllStringIndex(sql, -1) {
		token := mutatorToken{text: sql[at[0]:at[1]], start: at[0], end: at[1]}
		switch token.text {
		case "(":
			open = append(open, i)
		case ")":
			token.partner = open[len(open)-1]
			m.tokens[token.partner].partner = i
			open = open[:len(open)-1]
		}
		m.tokens = append(m.tokens, token)
	}
	return m
}

// text returns the token at i, or nothing behind the last.
func (m *mutator) text(i int) string {
	if i < len(m.tokens) {
		return m.tokens[i].text
	}
	return ""
}

// source returns the tokens from i to before j as they stand in the statement.
func (m *mutator) source(i, j int) string { return m.sql[m.tokens[i].start:m.tokens[j-1].end] }

// add records the mutant in which the tokens from i to before j are replaced.
func (m *mutator) add(kind string, i, j int, replacement string) {
	number := 1
	for _, other := range m.found {
		if other.Kind == kind {
			number++
		}
	}
	m.found = append(m.found, mutant{
		Statement: m.statement, Kind: kind, Number: number,
		What: strings.Join(strings.Fields(m.source(i, j)), " "),
		SQL:  m.sql[:m.tokens[i].start] + replacement + m.sql[m.tokens[j-1].end:],
	})
}

// skip returns the token behind the one at i, behind the whole of what a parenthesis or a CASE opens.
func (m *mutator) skip(i int) int {
	switch m.text(i) {
	case "(":
		return m.tokens[i].partner + 1
	case "CASE":
		for i++; m.text(i) != "END"; {
			i = m.skip(i)
		}
	}
	return i + 1
}

// until returns the first token from i on that is one of these, or closes the parenthesis around it, or the end.
func (m *mutator) until(i int, texts ...string) int {
	for i < len(m.tokens) && m.text(i) != ")" && !slices.Contains(texts, m.text(i)) {
		i = m.skip(i)
	}
	return i
}

func (m *mutator) conditions() {
	for i := range m.tokens {
		switch m.text(i) {
		case "WHERE", "WHEN":
			m.expression(i + 1)
		case "SELECT":
			for i++; ; i++ { // over the list's items
				m.expression(i)
				if i = m.until(i, ",", "FROM", "WHERE"); m.text(i) != "," {
					break
				}
			}
		}
	}
}

// expression finds the conditions of the expression that starts at i.
func (m *mutator) expression(i int) {
	i = m.operand(i)
	for m.text(i) == "AND" || m.text(i) == "OR" {
		i = m.operand(i + 1)
	}
}

// operand finds the conditions of the operand that starts at i, and returns the token behind it.
func (m *mutator) operand(i int) int {
	start := i
	if m.text(i) == "(" && m.isGroup(i) {
		m.expression(i + 1)
		i = m.skip(i)
	} else {
		i = m.until(i, "AND", "OR", "THEN", ",", "AS", "FROM", "WHERE", "RETURNING", "ON", "ORDER", "LIMIT", "FOR", "UNION")
	}
	if i > start && m.isCondition(start, i) {
		m.add(mutantAlways, start, i, "("+m.source(start, i)+" OR true)")
		m.add(mutantNever, start, i, "("+m.source(start, i)+" AND false)")
	}
	return i
}

// isGroup reports whether the parenthesis at i holds several conditions.
func (m *mutator) isGroup(i int) bool {
	connective := m.until(i+1, "AND", "OR")
	return m.text(connective) == "AND" || m.text(connective) == "OR"
}

func (m *mutator) isCondition(i, j int) bool {
	if m.text(i) == "CASE" {
		return false
	}
	return slices.ContainsFunc(m.tokens[i:j], func(t mutatorToken) bool {
		return slices.Contains([]string{"=", "<>", "<", "<=", ">", ">=", "EXISTS", "IS", "IN", "LIKE", "BETWEEN"}, t.text)
	})
}

func (m *mutator) edges() {
	moved := map[string]string{"<": "<=", "<=": "<", ">": ">=", ">=": ">"}
	for i, token := range m.tokens {
		if replacement, ok := moved[token.text]; ok {
			m.add(mutantEdge, i, i+1, replacement)
			from, to := max(0, i-1), min(len(m.tokens), i+2)
			m.found[len(m.found)-1].What = strings.Join(strings.Fields(m.source(from, to)), " ")
		}
	}
}

func (m *mutator) assignments() {
	qualifier := ""
	if table := regexp.MustCompile(`INSERT INTO .* AS (\w+)`).FindStringSubmatch(m.sql); table != nil {
		qualifier = table[1] + "."
	}
	for i := range m.tokens {
		if m.text(i) != "SET" {
			continue
		}
		for more := true; more; i++ {
			column, value, end := i+1, i+3, m.until(i+1, ",", "WHERE", "RETURNING")
			m.add(mutantKeep, value, end,
				"CASE WHEN true THEN "+qualifier+m.text(column)+" ELSE "+m.source(value, end)+" END")
			m.found[len(m.found)-1].What = strings.Join(strings.Fields(m.source(column, end)), " ")
			more = m.text(end) == ","
			i = end - 1
		}
	}
}

func (m *mutator) functions() {
	for i := range m.tokens {
		switch strings.ToUpper(m.text(i)) {
		case "GREATEST", "LEAST", "COALESCE":
			call := m.source(i, m.skip(i+1))
			for argument, more := i+2, true; more; {
				end := m.until(argument, ",")
				m.add(mutantOnly, i, m.skip(i+1), "CASE WHEN true THEN "+m.source(argument, end)+" ELSE "+call+" END")
				more = m.text(end) == ","
				argument = end + 1
			}
		case "NEXTVAL":
			into := slices.IndexFunc(m.tokens, func(t mutatorToken) bool { return t.text == "INTO" })
			table := m.source(into+1, into+4) // schema, dot, name
			m.add(mutantSequence, i, m.skip(i+1), "(SELECT coalesce(max(attempt), 0) + 1 FROM "+table+")")
		case "INTERVAL": // the end of + $6::interval
			if i >= 3 && m.text(i-1) == "::" && m.text(i-3) == "+" {
				m.add(mutantTerm, i-3, i+1, "+ 0 * "+m.source(i-2, i+1))
			}
		}
	}
}

func (m *mutator) clauses() {
	for i := range m.tokens {
		switch m.text(i) {
		case "ORDER":
			end := m.until(i, "LIMIT", "FOR")
			m.add(mutantUnsorted, i, end, "")
			columns := strings.Split(m.source(i+2, end), ",")
			for c := range columns {
				if rest := slices.Delete(slices.Clone(columns), c, c+1); len(rest) > 0 {
					m.add(mutantUnsorted, i, end, "ORDER BY "+strings.Join(rest, ","))
				}
			}
		case "LIMIT":
			end := m.until(i, "FOR")
			m.add(mutantLimit, i, end, "LIMIT CASE WHEN false THEN "+m.source(i+1, end)+" END")
		case "FOR":
			end := m.until(i)
			m.add(mutantLock, i, end, "")
			m.add(mutantLock, i, end, "FOR UPDATE")
		}
	}
}

func (m *mutator) times() {
	for i := range m.tokens {
		switch m.text(i) {
		case "statement_timestamp":
			m.add(mutantTime, i, i+1, "now")
		case "clock_timestamp":
			m.add(mutantTime, i, i+1, "statement_timestamp")
		}
	}
}

func TestMutantsAreFoundInTheText(t *testing.T) {
	t.Parallel()
	const text = `
UPDATE "a ""(b)"" c".t AS held
SET x = CASE
        WHEN x = 'it''s, AND (' THEN $1::int
    END,
    y = GREATEST(y, statement_timestamp() + $2::interval)
WHERE tenant = $3::text
    AND (expires_at > statement_timestamp()
        OR (state = 'b'
            AND NOT EXISTS (SELECT FROM u WHERE z <= 1)))
ORDER BY a, b
LIMIT $4
FOR UPDATE SKIP LOCKED`
	var found []string
	for _, m := range mutants(&sqlgen.Statements{Begin: text}) {
		found = append(found, m.ID()+": "+m.What)
		require.NotEqual(t, text, m.SQL)
		mutated := mutate(&sqlgen.Statements{Begin: text, Get: "kept"}, m.ID())
		require.Equal(t, &sqlgen.Statements{Begin: m.SQL, Get: "kept"}, mutated)
	}
	require.Nil(t, mutate(&sqlgen.Statements{Begin: text}, "Begin/always/100"))

	group := `(expires_at > statement_timestamp() OR (state = 'b' AND NOT EXISTS (SELECT FROM u WHERE z <= 1)))`
	inner := `(state = 'b' AND NOT EXISTS (SELECT FROM u WHERE z <= 1))`
	want := []string{
		"Begin/edge/1: expires_at > statement_timestamp", "Begin/edge/2: z <= 1",
		"Begin/keep/1: x = CASE WHEN x = 'it''s, AND (' THEN $1::int END",
		"Begin/keep/2: y = GREATEST(y, statement_timestamp() + $2::interval)",
		"Begin/only/1: GREATEST(y, statement_timestamp() + $2::interval)",
		"Begin/only/2: GREATEST(y, statement_timestamp() + $2::interval)",
		"Begin/term/1: + $2::interval",
		"Begin/unsorted/1: ORDER BY a, b", "Begin/unsorted/2: ORDER BY a, b", "Begin/unsorted/3: ORDER BY a, b",
		"Begin/limit/1: LIMIT $4",
		"Begin/lock/1: FOR UPDATE SKIP LOCKED", "Begin/lock/2: FOR UPDATE SKIP LOCKED",
		"Begin/time/1: statement_timestamp", "Begin/time/2: statement_timestamp",
	}
	for i, condition := range []string{
		`x = 'it''s, AND ('`, `tenant = $3::text`, `expires_at > statement_timestamp()`, `state = 'b'`,
		`NOT EXISTS (SELECT FROM u WHERE z <= 1)`, inner, group, `z <= 1`,
	} {
		want = append(want, fmt.Sprintf("Begin/always/%d: %s", i+1, condition), fmt.Sprintf("Begin/never/%d: %s", i+1, condition))
	}
	require.ElementsMatch(t, want, found)
}
