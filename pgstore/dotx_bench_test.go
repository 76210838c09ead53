package pgstore_test

import (
	"context"
	"fmt"
	"strconv"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/archlab/idempotency/pgstore"
)

// BenchmarkDoTx puts one business transaction (an account is debited, an entry written) beside itself: bare; guarded by hand, with an
// INSERT ... ON CONFLICT DO NOTHING of its key and without a stored response; and through DoTx and Do. Compare within one run, on a
// server that waits for its disk (PGTEST_DURABLE=1): what a commit costs there is most of it.
func BenchmarkDoTx(b *testing.B) {
	f := setup(b)
	schema := pgx.Identifier{f.Schema}.Sanitize()
	_, err := f.Pool.Exec(b.Context(), fmt.Sprintf(`
		CREATE TABLE %[1]s.account (id int PRIMARY KEY, balance bigint NOT NULL);
		CREATE TABLE %[1]s.entry (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, account int NOT NULL, amount bigint NOT NULL);
		CREATE TABLE %[1]s.seen (tenant text, operation text, key text, PRIMARY KEY (tenant, operation, key));
		INSERT INTO %[1]s.account SELECT n, 1000000 FROM generate_series(1, 1000) AS n`, schema))
	require.NoError(b, err)
	var (
		debit = `UPDATE ` + schema + `.account SET balance = balance - 1 WHERE id = $1`
		enter = `INSERT INTO ` + schema + `.entry (account, amount) VALUES ($1, -1)`
		seen  = `INSERT INTO ` + schema + `.seen VALUES ($1, $2, $3) ON CONFLICT DO NOTHING`
		keys  = 0
	)
	effect := func(ctx context.Context, tx pgx.Tx) error {
		account := keys % 1000
		if _, err := tx.Exec(ctx, debit, account); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, enter, account)
		return err
	}
	nextKey := func() pgstore.Key {
		keys++
		return pgstore.Key{Tenant: "acct_7", Operation: "payment.create", Value: fmt.Sprintf("%036d", keys)}
	}
	bare := func(ctx context.Context, before func(tx pgx.Tx) error) error {
		return pgx.BeginFunc(ctx, f.Pool, func(tx pgx.Tx) error {
			if err := before(tx); err != nil {
				return err
			}
			return effect(ctx, tx)
		})
	}
	for name, call := range map[string]func(ctx context.Context, k pgstore.Key) error{
		"bare": func(ctx context.Context, _ pgstore.Key) error {
			return bare(ctx, func(pgx.Tx) error { return nil })
		},
		"by_hand": func(ctx context.Context, k pgstore.Key) error {
			return bare(ctx, func(tx pgx.Tx) error {
				_, err := tx.Exec(ctx, seen, k.Tenant, k.Operation, k.Value)
				return err
			})
		},
		"DoTx": func(ctx context.Context, k pgstore.Key) error {
			_, err := f.DoTx(ctx, k, benchmarkFingerprint, func(ctx context.Context, tx pgx.Tx, _ pgstore.Record) (string, error) {
				return recordResponse, effect(ctx, tx)
			})
			return err
		},
		"Do": func(ctx context.Context, k pgstore.Key) error {
			_, err := f.Do(ctx, k, benchmarkFingerprint, func(ctx context.Context, _ pgstore.Record) (string, error) {
				return recordResponse, bare(ctx, func(pgx.Tx) error { return nil })
			})
			return err
		},
	} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if err := call(b.Context(), nextKey()); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkDo is what Do itself costs, around a function that does nothing.
func BenchmarkDo(b *testing.B) {
	f := setup(b)
	b.ReportAllocs()
	n := 0
	for b.Loop() {
		n++
		_, err := f.Do(b.Context(), recordKey(strconv.Itoa(n)), fingerprint, func(context.Context, pgstore.Record) (string, error) {
			return recordResponse, nil
		})
		require.NoError(b, err)
	}
}
