package main

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"

	"github.com/jackc/pgx/v5/pgxpool"
)

// evidence is what the run has left behind: the answers that clients got, and the ledger.
type evidence struct {
	answers map[int]message // by line
	lost    map[int]bool    // lines in the hands of a worker that was killed
	entries []entry
	totals  []total
}

// audit reads the ledger, and checks it together with the answers in e.
func audit(ctx context.Context, pool *pgxpool.Pool, l ledger, in *intent, e evidence) (res result, err error) {
	res.evidence = e
	if res.entries, err = l.read(ctx, pool); err != nil {
		return res, err
	}
	if res.totals, err = l.totals(ctx, pool); err != nil {
		return res, err
	}
	if res.rolledBack, err = l.rolledBack(ctx, pool); err != nil {
		return res, err
	}
	res.problems = check(in, res.evidence)
	if err := l.constrain(ctx, pool); err != nil {
		res.problems = append(res.problems, err.Error())
	}
	return res, nil
}

// check compares the evidence with the input and returns what is wrong, in the order of the input. Nothing here has asked a
// worker or the store whether it did well.
func check(in *intent, e evidence) (problems []string) {
	wrong := func(format string, args ...any) { problems = append(problems, fmt.Sprintf(format, args...)) }
	booked := map[paymentKey][]entry{}
	for _, b := range e.entries {
		key := paymentKey{b.Tenant, b.IdempotencyKey}
		if in.byKey[key] == nil {
			wrong("the ledger has a payment that nobody asked for: %v", key)
		}
		booked[key] = append(booked[key], b)
	}
	for _, p := range in.payments {
		checkLedger(p, booked[p.key()], wrong)
		checkAnswers(p, booked[p.key()], e, wrong)
	}
	for _, r := range in.rejected {
		if a := e.answers[r.number]; a.Outcome != rejected {
			wrong("line %d should have been rejected (%s) but was answered %q", r.number, r.reason, a.Outcome)
		}
	}
	if len(e.answers) != in.lines {
		wrong("there are %d requests but %d answers", in.lines, len(e.answers))
	}
	checkTotals(in, e.totals, wrong)
	return problems
}

// checkLedger expects one entry with what the first line asked for.
func checkLedger(p *intended, booked []entry, wrong func(format string, args ...any)) {
	if len(booked) != 1 {
		wrong("line %d: %v is in the ledger %d times, not once", p.lines[0].number, p.key(), len(booked))
	}
	for _, b := range booked {
		if b.payment != p.payment {
			wrong("line %d: %v is in the ledger as %d %s of %q for %q, not %d %s of %q for %q", p.lines[0].number, p.key(),
				b.Amount, b.Currency, b.Customer, b.Description, p.Amount, p.Currency, p.Customer, p.Description)
		}
	}
}

// checkAnswers expects the same response for the payment and all its repeats, the one that belongs to the ledger's entry. One
// of them was executed, or none if the answer to it died with a worker. Every conflict was refused.
func checkAnswers(p *intended, booked []entry, e evidence, wrong func(format string, args ...any)) {
	var (
		executions int
		excused    bool
		first      = e.answers[p.lines[0].number]
	)
	for _, l := range p.lines {
		a := e.answers[l.number]
		switch a.Outcome {
		case executed, takenOver:
			executions++
		case replayed, waitedReplayed:
		default:
			wrong("line %d: a payment was answered %q", l.number, a.Outcome)
			continue
		}
		excused = excused || e.lost[l.number]
		if string(a.Response) != string(first.Response) {
			wrong("line %d: the response is not, byte for byte, that of line %d", l.number, p.lines[0].number)
		}
	}
	if executions > 1 || executions == 0 && !excused {
		wrong("line %d: %v was answered as executed %d times, not once", p.lines[0].number, p.key(), executions)
	}
	var response struct{ ID string }
	if err := json.Unmarshal(first.Response, &response); err != nil {
		wrong("line %d: the response is no JSON: %v", p.lines[0].number, err)
	} else if len(booked) == 1 && booked[0].PaymentID != response.ID {
		wrong("line %d: the response names %q, the ledger has %q", p.lines[0].number, response.ID, booked[0].PaymentID)
	}
	for _, l := range p.conflicts {
		if a := e.answers[l.number]; a.Outcome != conflict {
			wrong("line %d conflicts with line %d but was answered %q", l.number, p.lines[0].number, a.Outcome)
		}
	}
}

// checkTotals compares the sums, the ledger's as the database added them up.
func checkTotals(in *intent, totals []total, wrong func(format string, args ...any)) {
	expected := in.totals()
	found := map[string]total{}
	for _, t := range totals {
		found[t.Currency] = t
		if _, ok := expected[t.Currency]; !ok {
			expected[t.Currency] = total{Currency: t.Currency}
		}
	}
	for _, currency := range slices.Sorted(maps.Keys(expected)) {
		if want, got := expected[currency], found[currency]; got.Payments != want.Payments || got.Amount != want.Amount {
			wrong("%s: the ledger has %d payments of %d minor units, the input asks for %d of %d",
				currency, got.Payments, got.Amount, want.Payments, want.Amount)
		}
	}
}

// totals adds up what the input asks for.
func (in *intent) totals() map[string]total {
	totals := map[string]total{}
	for _, p := range in.payments {
		t := totals[p.Currency]
		totals[p.Currency] = total{p.Currency, t.Payments + 1, t.Amount + p.Amount}
	}
	return totals
}
