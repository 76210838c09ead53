package main

import (
	"fmt"
	"strings"

	"github.com/archlab/idempotency/pgstore"
)

// paymentKey is what a request is unique by: two tenants may choose the same key. A unique constraint of a business table
// has to contain both, too.
type paymentKey struct{ tenant, key string }

// String quotes what a client chose.
func (k paymentKey) String() string { return fmt.Sprintf("%q/%q", k.tenant, k.key) }

// intended is a payment that the input asks for.
type intended struct {
	payment
	lines     []line // the first line that asks for it, and its repeats
	conflicts []line // lines that use its key for something else
}

func (i *intended) key() paymentKey { return paymentKey{i.Tenant, i.IdempotencyKey} }

// rejection is a line that asks for nothing that could be done.
type rejection struct {
	line
	reason string
}

// intent is what the input asks for, found out from its lines alone, before any worker or database has had a say. What the
// workers answer and what the ledger holds is compared with it at the end.
type intent struct {
	payments []*intended // in the order of their first lines
	rejected []rejection
	byKey    map[paymentKey]*intended
	lines    int // that are not blank
	blank    int
}

// intentOf sorts the lines. The first valid body under a key is the intended one; the same members again are a repeat,
// anything else is a conflict.
func intentOf(lines []line, blank int) *intent {
	in := &intent{byKey: map[paymentKey]*intended{}, lines: len(lines), blank: blank}
	for _, l := range lines {
		if l.tooLong {
			in.rejected = append(in.rejected, rejection{l, fmt.Sprintf("longer than %d bytes", maxLine)})
			continue
		}
		p, err := parse(l.body)
		if err != nil {
			in.rejected = append(in.rejected, rejection{l, err.Error()})
			continue
		}
		if reason := keyFault(p); reason != "" {
			in.rejected = append(in.rejected, rejection{l, reason})
			continue
		}
		key := paymentKey{p.Tenant, p.IdempotencyKey}
		switch known := in.byKey[key]; {
		case known == nil:
			known = &intended{payment: p, lines: []line{l}}
			in.byKey[key] = known
			in.payments = append(in.payments, known)
		case known.payment == p:
			known.lines = append(known.lines, l)
		default:
			known.conflicts = append(known.conflicts, l)
		}
	}
	return in
}

// keyFault says why the store will refuse a key. The workers leave it to the store; this is what it is checked against.
func keyFault(p payment) string {
	for _, component := range [...]string{p.Tenant, p.IdempotencyKey} {
		switch {
		case component == "":
			return "tenant or idempotency_key is missing"
		case len(component) > pgstore.MaxKeyComponentBytes:
			return fmt.Sprintf("tenant or idempotency_key has more than %d bytes", pgstore.MaxKeyComponentBytes)
		case strings.Contains(component, "\x00"):
			return "tenant or idempotency_key holds a NUL"
		}
	}
	return ""
}

// repeats and conflicts count lines.
func (in *intent) repeats() (n int) {
	for _, p := range in.payments {
		n += len(p.lines) - 1
	}
	return n
}

func (in *intent) conflicts() (n int) {
	for _, p := range in.payments {
		n += len(p.conflicts)
	}
	return n
}
