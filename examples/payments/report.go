package main

import (
	"fmt"
	"io"
	"time"
)

const (
	progressInterval = 500 * time.Millisecond
	shownRejections  = 5  // without -v
	shownProblems    = 20 // more say no more
)

// report prints what happens.
type report struct {
	out     io.Writer
	verbose bool
	began   time.Time
	in      *intent
	last    int // answers at the last sign of progress
}

func newReport(out io.Writer, verbose bool, in *intent) *report {
	return &report{out: out, verbose: verbose, began: time.Now(), in: in}
}

func (r *report) say(format string, args ...any) {
	_, _ = fmt.Fprintf(r.out, format, args...) // a reader who has gone away needs no report
}

// now says something with the time since the beginning in front.
func (r *report) now(format string, args ...any) {
	r.say("%6.1fs  "+format, append([]any{time.Since(r.began).Seconds()}, args...)...)
}

func (r *report) input(name string) {
	if name == "" {
		name = "the demo's own requests"
	}
	r.say("Read %s: %d requests. They ask for %d payments and repeat them %d times;\n%d use a key again for something else, and %d are malformed or incomplete.",
		name, r.in.lines, len(r.in.payments), r.in.repeats(), r.in.conflicts(), len(r.in.rejected))
	if r.in.blank > 0 {
		r.say(" Blank lines: %d.", r.in.blank)
	}
	r.say("\n")
}

// progress is called at an interval, and keeps quiet where nothing has changed.
func (r *report) progress(answers, inFlight int) {
	if answers == r.last {
		return
	}
	r.last = answers
	r.now("%4d of %d answered, %d being worked on\n", answers, r.in.lines, inFlight)
}

func (r *report) answer(seat int, m message) {
	switch {
	case m.Outcome == takenOver:
		r.now("worker %d took over line %d: attempt %d replaces %d\n", seat, m.Line, m.Attempt, m.Abandoned)
	case r.verbose && m.Reason != "":
		r.now("worker %d, line %d: %s: %s\n", seat, m.Line, m.Outcome, m.Reason)
	case r.verbose:
		r.now("worker %d, line %d: %s\n", seat, m.Line, m.Outcome)
	}
}

func (r *report) killed(k kill) {
	if k.moment == "" {
		r.now("worker %d (process %d) was killed, not by us; %s\n", k.seat, k.pid, sentAgain(k.lost))
		return
	}
	r.now("worker %d (process %d) killed %s of line %d; %s\n", k.seat, k.pid, k.moment, k.line, sentAgain(k.lost))
}

func sentAgain(requests int) string {
	if requests == 1 {
		return "1 request is sent again"
	}
	return fmt.Sprintf("%d requests are sent again", requests)
}

// result is all that is known when everything has been answered.
type result struct {
	evidence

	kills      []kill
	killsAsked int
	rolledBack int64
	problems   []string
}

// conclude prints what became of the requests, and as the last line the verdict.
func (r *report) conclude(res result) {
	r.rejections(res.answers)
	r.table(res)
	r.ledger(res)
	r.verdict(res)
}

// rejections lists the lines that were refused as they are, with what the worker said about them.
func (r *report) rejections(answers map[int]message) {
	if len(r.in.rejected) == 0 {
		return
	}
	r.say("\nRejected:\n")
	for i, refused := range r.in.rejected {
		if i == shownRejections && !r.verbose {
			r.say("  and %d more, which -v shows\n", len(r.in.rejected)-i)
			return
		}
		r.say("  line %d: %s\n", refused.number, answers[refused.number].Reason)
	}
}

func (r *report) table(res result) {
	counts := map[outcome]int{}
	for _, a := range res.answers {
		counts[a.Outcome]++
	}
	deaths := "workers, in the middle of work; " + sentAgain(len(res.lost))
	if len(res.kills) < res.killsAsked {
		deaths = fmt.Sprintf("of the %d that were asked for: there are not as many payments", res.killsAsked)
	}
	r.say("\n")
	for _, row := range [...]struct {
		name    string
		n       int
		meaning string
	}{
		{string(executed), counts[executed], "the ledger's row and the response, in one commit"},
		{string(replayed), counts[replayed], "repeats that got the stored response, byte for byte"},
		{string(conflict), counts[conflict], "the key belongs to another request: refused"},
		{string(waitedReplayed), counts[waitedReplayed], "repeats that met the first at work, waited, and got its response"},
		{string(takenOver), counts[takenOver], "the lease of a killed worker lapsed: executed by another"},
		{string(rejected), counts[rejected], "malformed, or without a usable key"},
		{"killed", len(res.kills), deaths},
	} {
		r.say("  %-26s %5d   %s\n", row.name, row.n, row.meaning)
	}
	if unheard := len(r.in.payments) - counts[executed] - counts[takenOver]; unheard > 0 {
		r.say("  Of the payments, %d had been committed when the worker died before it could answer.\n", unheard)
	}
}

func (r *report) ledger(res result) {
	r.say("\nLedger: %d rows; %d more were written and rolled back.", len(res.entries), res.rolledBack)
	for i, t := range res.totals {
		r.say("%s%s %d", []string{" ", ", "}[min(i, 1)], t.Currency, t.Amount)
	}
	if len(res.totals) > 0 {
		r.say(" in minor units.")
	}
	r.say("\n")
}

func (r *report) verdict(res result) {
	for _, p := range res.problems[:min(len(res.problems), shownProblems)] {
		r.say("  wrong: %s\n", p)
	}
	if more := len(res.problems) - shownProblems; more > 0 {
		r.say("  and %d problems more\n", more)
	}
	if len(res.problems) > 0 {
		r.say("WRONG: what was done is not what the input asks for.\n")
		return
	}
	r.say("OK: each of %d payments exactly once, %d conflicts refused, %d lines rejected, %d workers killed, in %.1f s.\n",
		len(r.in.payments), r.in.conflicts(), len(r.in.rejected), len(res.kills), time.Since(r.began).Seconds())
}
