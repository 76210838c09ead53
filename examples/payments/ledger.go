package main

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// entry is a row of the ledger: the effect of a payment.
type entry struct {
	payment
	PaymentID string
	Attempt   uint64 // that wrote it
}

// ledger is the business table, in the same database as the keys.
type ledger struct{ table string }

func newLedger(schema string) ledger {
	return ledger{pgx.Identifier{schema, "ledger"}.Sanitize()}
}

// create makes the table. It has no unique constraint on purpose: with one, the database would refuse the second execution of
// a payment, and nobody would see that there was one. Here it is a second row, which check finds. A ledger that is no
// demonstration has the constraint from the beginning, over tenant and key, since tenants choose their keys without asking
// one another; see constrain.
func (l ledger) create(ctx context.Context, pool *pgxpool.Pool) error {
	_, err := pool.Exec(ctx, `CREATE TABLE `+l.table+` (
	id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
	tenant      text NOT NULL,
	payment_key text NOT NULL,
	amount      bigint NOT NULL CHECK (amount > 0),
	currency    text NOT NULL,
	customer    text NOT NULL,
	description text NOT NULL,
	payment_id  text NOT NULL,
	attempt     bigint NOT NULL,
	booked_at   timestamptz NOT NULL DEFAULT now()
)`)
	if err != nil {
		return fmt.Errorf("create the ledger: %w", err)
	}
	return nil
}

func (l ledger) insert(ctx context.Context, tx pgx.Tx, e entry) error {
	_, err := tx.Exec(ctx, `INSERT INTO `+l.table+`
	(tenant, payment_key, amount, currency, customer, description, payment_id, attempt) VALUES ($1, $2, $3, $4, $5, $6, $7, $8)`,
		e.Tenant, e.IdempotencyKey, e.Amount, e.Currency, e.Customer, e.Description, e.PaymentID, e.Attempt)
	if err != nil {
		return fmt.Errorf("write the ledger: %w", err)
	}
	return nil
}

// read returns all entries in the order in which they were written.
func (l ledger) read(ctx context.Context, pool *pgxpool.Pool) ([]entry, error) {
	rows, err := pool.Query(ctx, `
SELECT tenant, payment_key, amount, currency, customer, description, payment_id, attempt FROM `+l.table+` ORDER BY id`)
	if err != nil {
		return nil, fmt.Errorf("read the ledger: %w", err)
	}
	entries, err := pgx.CollectRows(rows, pgx.RowToStructByPos[entry])
	if err != nil {
		return nil, fmt.Errorf("read the ledger: %w", err)
	}
	return entries, nil
}

// total is the sum of a currency's payments in minor units.
type total struct {
	Currency string
	Payments int64
	Amount   int64
}

// totals lets the database add up the ledger.
func (l ledger) totals(ctx context.Context, pool *pgxpool.Pool) ([]total, error) {
	rows, err := pool.Query(ctx, `
SELECT currency, count(*), sum(amount)::bigint FROM `+l.table+` GROUP BY currency ORDER BY currency COLLATE "C"`)
	if err != nil {
		return nil, fmt.Errorf("add up the ledger: %w", err)
	}
	totals, err := pgx.CollectRows(rows, pgx.RowToStructByPos[total])
	if err != nil {
		return nil, fmt.Errorf("add up the ledger: %w", err)
	}
	return totals, nil
}

// rolledBack returns how many rows were written and taken back: the numbers that are missing from the sequence of the ids.
func (l ledger) rolledBack(ctx context.Context, pool *pgxpool.Pool) (n int64, err error) {
	err = pool.QueryRow(ctx, `
SELECT coalesce(pg_sequence_last_value(pg_get_serial_sequence($1, 'id')::regclass), 0) - count(*) FROM `+l.table, l.table).Scan(&n)
	if err != nil {
		return 0, fmt.Errorf("count what was rolled back: %w", err)
	}
	return n, nil
}

// constrain adds the constraint that create has left out. It fails where a payment was executed twice: the database's own word.
func (l ledger) constrain(ctx context.Context, pool *pgxpool.Pool) error {
	if _, err := pool.Exec(ctx, `ALTER TABLE `+l.table+` ADD CONSTRAINT ledger_payment UNIQUE (tenant, payment_key)`); err != nil {
		return fmt.Errorf("no unique constraint on tenant and payment_key: %w", err)
	}
	return nil
}
