package main

import "fmt"

// check compares the provider's ledger with what the clients were told, and returns what is wrong.
func check(p *provider, answers []answer) []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	var problems []string
	wrong := func(format string, args ...any) { problems = append(problems, fmt.Sprintf(format, args...)) }
	times := map[int64]int{} // by amount: each payment of this program has one of its own
	charges := map[int64]string{}
	for i, line := range p.ledger {
		var (
			key    string
			amount int64
		)
		if _, err := fmt.Sscan(line, &key, &amount); err != nil {
			wrong("line %d of the ledger: %v", i+1, err)
		}
		times[amount]++
		charges[amount] = p.charges[key]
	}
	for _, a := range answers {
		switch n := times[a.Amount]; {
		case a.Declined && n > 0:
			wrong("%s was declined, and charged %d times", a.Key, n)
		case !a.Declined && n != 1:
			wrong("%s was charged %d times instead of once", a.Key, n)
		case !a.Declined && charges[a.Amount] != a.Charge:
			wrong("%s was charged as %s, and its client was told %s", a.Key, charges[a.Amount], a.Charge)
		}
	}
	return problems
}
