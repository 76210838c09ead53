package main

import (
	"context"
	"io"

	"github.com/jackc/pgx/v5/pgxpool"
)

// What the tests, which are a package of their own, see of the program.
type (
	Payment = payment
	Message = message
	Outcome = outcome
)

const (
	Executed       = executed
	Replayed       = replayed
	WaitedReplayed = waitedReplayed
	TakenOver      = takenOver
	Conflict       = conflict
	Rejected       = rejected

	MaxLine = maxLine
	Moments = len(moments)
)

var (
	Main  = main
	Parse = parse
)

func (p Payment) Fingerprint() string { return p.fingerprint() }

// Line is one line as ReadLines found it.
type Line struct {
	Number  int
	Body    string
	TooLong bool
}

func ReadLines(r io.Reader) (lines []Line, blank int, err error) {
	found, blank, err := readLines(r)
	for _, l := range found {
		lines = append(lines, Line{l.number, string(l.body), l.tooLong})
	}
	return lines, blank, err
}

// Audit makes the ledger with prepare, and checks it together with the answers to the input, as the program does in the end.
func Audit(
	ctx context.Context, pool *pgxpool.Pool, schema string, input io.Reader,
	answers map[int]Message, lost map[int]bool, prepare func(table string),
) ([]string, error) {
	lines, blank, err := readLines(input)
	if err != nil {
		return nil, err
	}
	l := newLedger(schema)
	if err := l.create(ctx, pool); err != nil {
		return nil, err
	}
	prepare(l.table)
	res, err := audit(ctx, pool, l, intentOf(lines, blank), evidence{answers: answers, lost: lost})
	return res.problems, err
}

// Intent is what a list of lines asks for, by the numbers of the lines.
type Intent struct {
	Payments  [][]int // a payment and its repeats
	Conflicts []int
	Rejected  map[int]string
	Blank     int
}

func ReadIntent(r io.Reader) (Intent, error) {
	lines, blank, err := readLines(r)
	if err != nil {
		return Intent{}, err
	}
	in := intentOf(lines, blank)
	out := Intent{Blank: in.blank, Rejected: map[int]string{}}
	for _, p := range in.payments {
		var numbers []int
		for _, l := range p.lines {
			numbers = append(numbers, l.number)
		}
		out.Payments = append(out.Payments, numbers)
		for _, l := range p.conflicts {
			out.Conflicts = append(out.Conflicts, l.number)
		}
	}
	for _, r := range in.rejected {
		out.Rejected[r.number] = r.reason
	}
	return out, nil
}
