package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// message asks for an entry in an account's ledger.
type message struct {
	Delivery int64 // the row of the queue; one message has several
	ID       string
	Account  string
	Amount   int64
}

// queue is a table whose rows are deliveries, and the ledger that they are booked in.
type queue struct{ deliveries, ledger, balances string }

func newQueue(schema string) queue {
	name := func(table string) string { return pgx.Identifier{schema, table}.Sanitize() }
	return queue{name("deliveries"), name("ledger"), name("balances")}
}

// invisible is how long a delivery that was taken stays away from the others: if it is not acknowledged by then, its consumer is
// taken for dead, and it comes again.
const invisible = "500 milliseconds"

// create makes the tables. The ledger has no unique constraint on purpose: a second booking shall be seen, not refused. A ledger of
// yours has one on (account, message), as a second line of defence.
func (q queue) create(ctx context.Context, pool *pgxpool.Pool) error {
	_, err := pool.Exec(ctx, `
		CREATE TABLE `+q.deliveries+` (
			delivery   bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
			message    text NOT NULL,
			account    text NOT NULL,
			amount     bigint NOT NULL,
			visible_at timestamptz NOT NULL DEFAULT now());
		CREATE TABLE `+q.ledger+` (message text NOT NULL, account text NOT NULL, amount bigint NOT NULL);
		CREATE TABLE `+q.balances+` (account text PRIMARY KEY, balance bigint NOT NULL)`)
	if err != nil {
		return fmt.Errorf("create the tables: %w", err)
	}
	return nil
}

// take takes one delivery. SKIP LOCKED lets each consumer pass by what another is taking at the same moment.
func (q queue) take(ctx context.Context, pool *pgxpool.Pool) (message, bool, error) {
	var m message
	err := pool.QueryRow(ctx, `
		UPDATE `+q.deliveries+` SET visible_at = clock_timestamp() + interval '`+invisible+`'
		WHERE delivery = (
			SELECT delivery FROM `+q.deliveries+` WHERE visible_at <= clock_timestamp()
			ORDER BY delivery LIMIT 1 FOR UPDATE SKIP LOCKED)
		RETURNING delivery, message, account, amount`).Scan(&m.Delivery, &m.ID, &m.Account, &m.Amount)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return message{}, false, nil
	case err != nil:
		return message{}, false, fmt.Errorf("take a message: %w", err)
	}
	return m, true, nil
}

func (q queue) acknowledge(ctx context.Context, pool *pgxpool.Pool, m message) error {
	if _, err := pool.Exec(ctx, `DELETE FROM `+q.deliveries+` WHERE delivery = $1`, m.Delivery); err != nil {
		return fmt.Errorf("acknowledge: %w", err)
	}
	return nil
}

func (q queue) length(ctx context.Context, pool *pgxpool.Pool) (n int, err error) {
	if err := pool.QueryRow(ctx, `SELECT count(*) FROM `+q.deliveries).Scan(&n); err != nil {
		return 0, fmt.Errorf("count the messages: %w", err)
	}
	return n, nil
}

// bookEntry is the effect: an entry in the ledger, and the balance that goes with it.
func (q queue) bookEntry(ctx context.Context, tx pgx.Tx, m message) error {
	if _, err := tx.Exec(ctx, `INSERT INTO `+q.ledger+` VALUES ($1, $2, $3)`, m.ID, m.Account, m.Amount); err != nil {
		return fmt.Errorf("write the ledger: %w", err)
	}
	_, err := tx.Exec(ctx, `INSERT INTO `+q.balances+` AS b VALUES ($1, $2)
		ON CONFLICT (account) DO UPDATE SET balance = b.balance + EXCLUDED.balance`, m.Account, m.Amount)
	if err != nil {
		return fmt.Errorf("write the balance: %w", err)
	}
	return nil
}

// sent is what the producer sent.
type sent struct {
	messages   map[string]message
	deliveries int
	poisonous  int
}

// produce sends messages as a sender does that is never sure: each one to three times. The seed is fixed, so runs compare.
func produce(ctx context.Context, pool *pgxpool.Pool, q queue, n int) (*sent, error) {
	random := rand.New(rand.NewPCG(1, 2)) //nolint:gosec // a demonstration
	s := &sent{messages: map[string]message{}}
	var rows [][]any
	for i := range n {
		m := message{ID: fmt.Sprintf("msg-%04d", i), Account: fmt.Sprintf("acct_%d", random.IntN(5)), Amount: 1 + random.Int64N(9999)}
		if i%50 == 7 {
			m.Amount = -m.Amount
			s.poisonous++
		}
		s.messages[m.ID] = m
		for range 1 + random.IntN(3) {
			rows = append(rows, []any{m.ID, m.Account, m.Amount})
		}
	}
	// Neighbours are taken at the same moment by different consumers; others are far apart.
	random.Shuffle(len(rows)/2, func(i, j int) { rows[i], rows[j] = rows[j], rows[i] })
	s.deliveries = len(rows)
	var batch pgx.Batch
	for _, row := range rows {
		batch.Queue(`INSERT INTO `+q.deliveries+` (message, account, amount) VALUES ($1, $2, $3)`, row...)
	}
	if err := pool.SendBatch(ctx, &batch).Close(); err != nil {
		return nil, fmt.Errorf("send: %w", err)
	}
	return s, nil
}
