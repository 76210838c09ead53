package main_test

import (
	"fmt"
	"maps"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	payments "github.com/archlab/idempotency/examples/payments"
	"github.com/archlab/idempotency/internal/pgtest"
)

// What a run leaves behind when all goes well: two payments of 1.00, the first repeated and conflicted with, one of 2.00, and a
// line that is rejected.
var (
	goodInput = strings.Join([]string{
		1: line("a", "k", 100),
		2: line("a", "k", 100),
		3: line("a", "k", 150),
		4: line("b", "k", 100),
		5: line("a", "other", 200),
		6: "{",
	}[1:], "\n")

	goodAnswers = map[int]payments.Message{
		1: {Outcome: payments.Executed, Response: []byte(`{"id":"pay_1"}`)},
		2: {Outcome: payments.WaitedReplayed, Response: []byte(`{"id":"pay_1"}`)},
		3: {Outcome: payments.Conflict},
		4: {Outcome: payments.TakenOver, Response: []byte(`{"id":"pay_2"}`)},
		5: {Outcome: payments.Executed, Response: []byte(`{"id":"pay_3"}`)},
		6: {Outcome: payments.Rejected},
	}
)

const goodLedger = `
INSERT INTO %[1]s (tenant, payment_key, amount, currency, customer, description, payment_id, attempt) VALUES
	('a', 'k', 100, 'EUR', 'cus_1', 'Tee', 'pay_1', 1),
	('b', 'k', 100, 'EUR', 'cus_1', 'Tee', 'pay_2', 2),
	('a', 'other', 200, 'EUR', 'cus_1', 'Tee', 'pay_3', 3);`

const columns = "tenant, payment_key, amount, currency, customer, description, payment_id, attempt"

func TestTheCheckFindsWhatIsWrong(t *testing.T) {
	t.Parallel()
	answer := func(line int, m payments.Message) func(map[int]payments.Message) {
		return func(answers map[int]payments.Message) { answers[line] = m }
	}
	for name, c := range map[string]struct {
		tamper   string                         // SQL on the ledger
		answer   func(map[int]payments.Message) // a change of the answers
		lost     map[int]bool
		problems []string
	}{
		"nothing": {},
		"an execution whose answer died with the worker is right": {
			answer: answer(5, payments.Message{Outcome: payments.Replayed, Response: []byte(`{"id":"pay_3"}`)}),
			lost:   map[int]bool{5: true},
		},
		"a payment booked twice": {
			tamper: `INSERT INTO %[1]s (` + columns + `) SELECT ` + columns + ` FROM %[1]s WHERE tenant = 'b'`,
			problems: []string{
				`line 4: "b"/"k" is in the ledger 2 times, not once`,
				"EUR: the ledger has 4 payments of 500 minor units, the input asks for 3 of 400",
				"no unique constraint on tenant and payment_key",
			},
		},
		"a payment booked twice by two executions": {
			tamper: `INSERT INTO %[1]s (` + columns + `) SELECT tenant, payment_key, amount, currency, customer, description, 'pay_4', 9 FROM %[1]s WHERE tenant = 'b'`,
			problems: []string{
				`line 4: "b"/"k" is in the ledger 2 times, not once`,
				"EUR: the ledger has 4 payments of 500 minor units, the input asks for 3 of 400",
				"no unique constraint on tenant and payment_key",
			},
		},
		"a payment missing": {
			tamper: `DELETE FROM %[1]s WHERE tenant = 'b'`,
			problems: []string{
				`line 4: "b"/"k" is in the ledger 0 times, not once`,
				"EUR: the ledger has 2 payments of 300 minor units, the input asks for 3 of 400",
			},
		},
		"a payment that nobody asked for": {
			tamper: `INSERT INTO %[1]s (` + columns + `) SELECT 'mallory', payment_key, 1, 'XXX', customer, description, payment_id, attempt FROM %[1]s WHERE tenant = 'b'`,
			problems: []string{
				`the ledger has a payment that nobody asked for: "mallory"/"k"`,
				"XXX: the ledger has 1 payments of 1 minor units, the input asks for 0 of 0",
			},
		},
		"the conflicting amount booked": {
			tamper: `UPDATE %[1]s SET amount = 150 WHERE tenant = 'a' AND payment_key = 'k'`,
			problems: []string{
				`line 1: "a"/"k" is in the ledger as 150 EUR of "cus_1" for "Tee", not 100 EUR of "cus_1" for "Tee"`,
				"EUR: the ledger has 3 payments of 450 minor units, the input asks for 3 of 400",
			},
		},
		"another currency booked": {
			tamper: `UPDATE %[1]s SET currency = 'USD' WHERE tenant = 'a' AND payment_key = 'k'`,
			problems: []string{
				`line 1: "a"/"k" is in the ledger as 100 USD of`,
				"EUR: the ledger has 2 payments of 300 minor units, the input asks for 3 of 400",
				"USD: the ledger has 1 payments of 100 minor units, the input asks for 0 of 0",
			},
		},
		"another customer booked": {
			tamper:   `UPDATE %[1]s SET customer = 'cus_2' WHERE tenant = 'b'`,
			problems: []string{`line 4: "b"/"k" is in the ledger as 100 EUR of "cus_2"`},
		},
		"another description booked": {
			tamper:   `UPDATE %[1]s SET description = 'Kaffee' WHERE tenant = 'b'`,
			problems: []string{`line 4: "b"/"k" is in the ledger as 100 EUR of "cus_1" for "Kaffee"`},
		},
		"a response that belongs to another payment": {
			tamper:   `UPDATE %[1]s SET payment_id = 'pay_9' WHERE tenant = 'b'`,
			problems: []string{`line 4: the response names "pay_2", the ledger has "pay_9"`},
		},
		"a replay of something else": {
			answer:   answer(2, payments.Message{Outcome: payments.Replayed, Response: []byte(`{"id":"pay_1"} `)}),
			problems: []string{"line 2: the response is not, byte for byte, that of line 1"},
		},
		"a response that is none": {
			answer:   answer(5, payments.Message{Outcome: payments.Executed, Response: []byte("pay_3")}),
			problems: []string{"line 5: the response is no JSON"},
		},
		"executed for two clients": {
			answer:   answer(2, payments.Message{Outcome: payments.Executed, Response: []byte(`{"id":"pay_1"}`)}),
			problems: []string{`line 1: "a"/"k" was answered as executed 2 times, not once`},
		},
		"executed and taken over": {
			answer:   answer(2, payments.Message{Outcome: payments.TakenOver, Response: []byte(`{"id":"pay_1"}`)}),
			problems: []string{`line 1: "a"/"k" was answered as executed 2 times, not once`},
		},
		"executed for nobody": {
			answer:   answer(5, payments.Message{Outcome: payments.Replayed, Response: []byte(`{"id":"pay_3"}`)}),
			problems: []string{`line 5: "a"/"other" was answered as executed 0 times, not once`},
		},
		"a conflict replayed": {
			answer:   answer(3, payments.Message{Outcome: payments.Replayed, Response: []byte(`{"id":"pay_1"}`)}),
			problems: []string{`line 3 conflicts with line 1 but was answered "replayed"`},
		},
		"a repeat refused": {
			answer:   answer(2, payments.Message{Outcome: payments.Conflict}),
			problems: []string{`line 2: a payment was answered "conflict"`},
		},
		"a malformed line executed": {
			answer:   answer(6, payments.Message{Outcome: payments.Executed}),
			problems: []string{`line 6 should have been rejected (not JSON: it ends in the middle) but was answered "executed"`},
		},
		"a line never answered": {
			answer:   func(answers map[int]payments.Message) { delete(answers, 3) },
			problems: []string{`line 3 conflicts with line 1 but was answered ""`, "there are 6 requests but 5 answers"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.Pool(t)
			answers := maps.Clone(goodAnswers)
			if c.answer != nil {
				c.answer(answers)
			}
			problems, err := payments.Audit(t.Context(), pool, pgtest.EmptySchema(t), strings.NewReader(goodInput), answers, c.lost,
				func(table string) {
					_, err := pool.Exec(t.Context(), fmt.Sprintf(goodLedger, table))
					require.NoError(t, err)
					if c.tamper != "" {
						_, err := pool.Exec(t.Context(), fmt.Sprintf(c.tamper, table))
						require.NoError(t, err)
					}
				})
			require.NoError(t, err)
			require.Len(t, problems, len(c.problems), "%q", problems)
			for i, p := range c.problems {
				require.Contains(t, problems[i], p)
			}
		})
	}
}
