package main

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// check compares the books with what was sent, and returns what is wrong.
func check(ctx context.Context, pool *pgxpool.Pool, q queue, sent *sent) ([]string, error) {
	rows, err := pool.Query(ctx, `SELECT message, account, amount FROM `+q.ledger+` ORDER BY message`)
	if err != nil {
		return nil, fmt.Errorf("read the ledger: %w", err)
	}
	booked, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (m message, err error) {
		return m, row.Scan(&m.ID, &m.Account, &m.Amount)
	})
	if err != nil {
		return nil, fmt.Errorf("read the ledger: %w", err)
	}
	rows, err = pool.Query(ctx, `SELECT account, balance FROM `+q.balances)
	if err != nil {
		return nil, fmt.Errorf("read the balances: %w", err)
	}
	balances := map[string]int64{}
	var (
		account string
		balance int64
	)
	if _, err := pgx.ForEachRow(rows, []any{&account, &balance}, func() error { balances[account] = balance; return nil }); err != nil {
		return nil, fmt.Errorf("read the balances: %w", err)
	}

	var problems []string
	wrong := func(format string, args ...any) { problems = append(problems, fmt.Sprintf(format, args...)) }
	times := map[string]int{}
	for _, m := range booked {
		times[m.ID]++
		if of := sent.messages[m.ID]; of.Account != m.Account || of.Amount != m.Amount {
			wrong("%s is booked as %d for %s, and was sent as %d for %s", m.ID, m.Amount, m.Account, of.Amount, of.Account)
		}
	}
	due := map[string]int64{}
	for _, id := range slices.Sorted(maps.Keys(sent.messages)) {
		m, want := sent.messages[id], 1
		if m.Amount <= 0 {
			want = 0
		} else {
			due[m.Account] += m.Amount
		}
		if times[id] != want {
			wrong("%s is booked %d times instead of %d", id, times[id], want)
		}
	}
	for _, account := range slices.Sorted(maps.Keys(due)) {
		if balances[account] != due[account] {
			wrong("the balance of %s is %d instead of %d", account, balances[account], due[account])
		}
	}
	return problems, nil
}
