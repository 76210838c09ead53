package pgstore_test

import (
	"context"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/archlab/idempotency/internal/pgtest"
	"github.com/archlab/idempotency/pgstore"
)

func TestErrorsNameTheCallTheKeyAndTheReason(t *testing.T) {
	t.Parallel()
	f := setup(t)
	k := pgstore.Key{Tenant: `tenant "A"`, Operation: "order\ncreate", Value: "réq-1001"}
	const quoted = `"tenant \"A\""/"order\ncreate"/"réq-1001"`
	says := func(err error, call string, sentinel error) {
		t.Helper()
		require.ErrorIs(t, err, sentinel)
		require.EqualError(t, err, "idempotency: "+call+" "+quoted+": "+sentinel.Error())
	}
	every := func(asked string, attempt uint64, sentinel error) {
		t.Helper()
		says(f.Complete(t.Context(), k, asked, attempt, recordResponse), "complete", sentinel)
		says(f.Fail(t.Context(), k, asked, attempt, true), "fail", sentinel)
		says(f.Fail(t.Context(), k, asked, attempt, false), "fail", sentinel)
		_, err := f.Extend(t.Context(), k, asked, attempt)
		says(err, "extend", sentinel)
	}

	every(fingerprint, 1, pgstore.ErrLeaseExpired)
	attempt := recordPut(t, f, k, pgstore.StateInProgress)
	every("sha256:of another", attempt, pgstore.ErrConflict)
	every(fingerprint, attempt+1, pgstore.ErrStaleAttempt)
	_, _, err := f.Begin(t.Context(), k, fingerprint)
	says(err, "begin", pgstore.ErrInProgress)
	_, _, err = f.Begin(t.Context(), k, "sha256:of another")
	says(err, "begin", pgstore.ErrConflict)
}

func TestSentinelsHaveTheirTexts(t *testing.T) {
	t.Parallel()
	for text, sentinel := range map[string]error{
		"idempotency: key reused with different payload": pgstore.ErrConflict,
		"idempotency: request already in progress":       pgstore.ErrInProgress,
		"idempotency: lease expired before completion":   pgstore.ErrLeaseExpired,
		"idempotency: attempt no longer owns the key":    pgstore.ErrStaleAttempt,
		"idempotency: empty key component":               pgstore.ErrKeyEmpty,
		"idempotency: invalid key component":             pgstore.ErrKeyInvalid,
		"idempotency: invalid fingerprint":               pgstore.ErrFingerprintInvalid,
		"idempotency: response too large":                pgstore.ErrResponseTooLarge,
		"idempotency: database not migrated":             pgstore.ErrNotMigrated,
	} {
		require.EqualError(t, sentinel, text)
	}
}

// What a client stores may be a card number, and a fingerprint may be the request itself: whatever fails, neither gets into
// a log. Each failure below is a real one, with the secrets in the call.
func TestErrorsNeverTellTheResponseOrTheFingerprint(t *testing.T) {
	t.Parallel()
	const (
		secretFingerprint = "FINGERPRINT-4929-1234-5678"
		otherFingerprint  = "OTHERPRINT-4929-8765-4321"
		secretResponse    = "RESPONSE-PAN-4929123456789"
		storedResponse    = "STORED-PAN-4929987654321"
	)
	// all runs every call with the secrets, as an attempt and with a response that may fit, and returns their errors.
	all := func(ctx context.Context, s *pgstore.Store, k pgstore.Key, fingerprint string, attempt uint64) []error {
		_, _, begin := s.Begin(ctx, k, fingerprint)
		complete := s.Complete(ctx, k, fingerprint, attempt, secretResponse)
		released := s.Fail(ctx, k, fingerprint, attempt, true)
		failed := s.Fail(ctx, k, fingerprint, attempt, false)
		_, extend := s.Extend(ctx, k, fingerprint, attempt)
		_, _, get := s.Get(ctx, k)
		_, sweep := s.Sweep(ctx, 10)
		return []error{begin, complete, released, failed, extend, get, sweep}
	}
	put := func(t *testing.T, f *fixture) uint64 {
		t.Helper()
		record, created, err := f.Begin(t.Context(), key, secretFingerprint)
		require.NoError(t, err)
		require.True(t, created)
		return record.Attempt
	}
	conn := func(t *testing.T, f *fixture) (*pgx.Conn, *pgstore.Store) {
		t.Helper()
		conn := recordConn(t, pgx.QueryExecModeCacheStatement)
		return conn, f.NewStore(t, conn, lease, retention)
	}
	exec := func(t *testing.T, db pgstore.DB, sql string) {
		t.Helper()
		_, err := db.Exec(t.Context(), sql)
		require.NoError(t, err)
	}

	for name, test := range map[string]struct {
		fails func(t *testing.T, f *fixture) []error
		code  string // of a server's error that one of the calls must have met
		is    error  // that one of the calls must have returned
	}{
		"another request": {is: pgstore.ErrConflict, fails: func(t *testing.T, f *fixture) []error {
			t.Helper()
			require.NoError(t, f.Complete(t.Context(), key, secretFingerprint, put(t, f), storedResponse))
			return all(t.Context(), f.Store, key, otherFingerprint, 1)
		}},
		"another attempt": {is: pgstore.ErrStaleAttempt, fails: func(t *testing.T, f *fixture) []error {
			t.Helper()
			require.NoError(t, f.Complete(t.Context(), key, secretFingerprint, put(t, f), storedResponse))
			return all(t.Context(), f.Store, key, secretFingerprint, 99)
		}},
		"another response": {is: pgstore.ErrStaleAttempt, fails: func(t *testing.T, f *fixture) []error {
			t.Helper()
			attempt := put(t, f)
			require.NoError(t, f.Complete(t.Context(), key, secretFingerprint, attempt, storedResponse))
			return all(t.Context(), f.Store, key, secretFingerprint, attempt)
		}},
		"in progress": {is: pgstore.ErrInProgress, fails: func(t *testing.T, f *fixture) []error {
			t.Helper()
			put(t, f)
			return all(t.Context(), f.Store, key, secretFingerprint, 99)
		}},
		"no live record": {is: pgstore.ErrLeaseExpired, fails: func(t *testing.T, f *fixture) []error {
			t.Helper()
			attempt := put(t, f)
			recordAge(t, f, key, lease)
			return []error{f.Complete(t.Context(), key, secretFingerprint, attempt, secretResponse)}
		}},
		"an invalid key": {is: pgstore.ErrKeyInvalid, fails: func(t *testing.T, f *fixture) []error {
			t.Helper()
			return all(t.Context(), f.Store, pgstore.Key{Tenant: "t\xff", Operation: "o", Value: "v"}, secretFingerprint, 1)
		}},
		"a long fingerprint": {is: pgstore.ErrFingerprintInvalid, fails: func(t *testing.T, f *fixture) []error {
			t.Helper()
			return all(t.Context(), f.Store, key, strings.Repeat(secretFingerprint, 50), 1)
		}},
		"a long response": {is: pgstore.ErrResponseTooLarge, fails: func(t *testing.T, f *fixture) []error {
			t.Helper()
			tight := f.NewStore(t, f.Pool, lease, retention, pgstore.WithMaxResponse(5))
			return []error{tight.Complete(t.Context(), key, secretFingerprint, put(t, f), secretResponse)}
		}},
		// Details of this error repeat the whole row.
		"a constraint of somebody's": {code: "23514", fails: func(t *testing.T, f *fixture) []error {
			t.Helper()
			attempt := put(t, f)
			recordExec(t, f, `ALTER TABLE %s ADD CONSTRAINT nobody CHECK (attempt < 0) NOT VALID`)
			return append(all(t.Context(), f.Store, key, secretFingerprint, attempt),
				all(t.Context(), f.Store, recordKey("another"), secretFingerprint, attempt)...)
		}},
		"a value that is missing": {code: "23502", fails: func(t *testing.T, f *fixture) []error {
			t.Helper()
			recordExec(t, f, `ALTER TABLE %s ADD COLUMN required int NOT NULL`)
			return all(t.Context(), f.Store, key, secretFingerprint, 1)
		}},
		"a unique index of somebody's": {code: "23505", fails: func(t *testing.T, f *fixture) []error {
			t.Helper()
			put(t, f)
			recordExec(t, f, `CREATE UNIQUE INDEX somebodys ON %s (fingerprint)`)
			return all(t.Context(), f.Store, recordKey("another"), secretFingerprint, 1)
		}},
		"a trigger of somebody's": {code: "P0001", fails: func(t *testing.T, f *fixture) []error {
			t.Helper()
			put(t, f)
			recordAge(t, f, key, 3*retention)
			sweepPoison(t, f, "true")
			return all(t.Context(), f.Store, recordKey("another"), secretFingerprint, 1)
		}},
		"no table": {is: pgstore.ErrNotMigrated, code: "42P01", fails: func(t *testing.T, f *fixture) []error {
			t.Helper()
			store, err := pgstore.New(f.Pool, lease, retention, pgstore.WithSchema(pgtest.EmptySchema(t)))
			require.NoError(t, err)
			return all(t.Context(), store, key, secretFingerprint, 1)
		}},
		"no column": {is: pgstore.ErrNotMigrated, code: "42703", fails: func(t *testing.T, f *fixture) []error {
			t.Helper()
			recordExec(t, f, `ALTER TABLE %s DROP COLUMN purge_after`)
			return all(t.Context(), f.Store, key, secretFingerprint, 1)
		}},
		"a lock that is held": {is: pgstore.ErrInProgress, code: "55P03", fails: func(t *testing.T, f *fixture) []error {
			t.Helper()
			attempt := put(t, f)
			tx, err := recordConn(t, pgx.QueryExecModeCacheStatement).Begin(t.Context())
			require.NoError(t, err)
			exec(t, tx, `LOCK TABLE `+recordTable(f)+` IN ACCESS EXCLUSIVE MODE`)
			impatient, store := conn(t, f)
			exec(t, impatient, `SET lock_timeout = '5ms'`)
			return all(t.Context(), store, key, secretFingerprint, attempt)
		}},
		"a read-only server": {code: "25006", fails: func(t *testing.T, f *fixture) []error {
			t.Helper()
			readOnly, store := conn(t, f)
			exec(t, readOnly, `SET default_transaction_read_only = on`)
			return all(t.Context(), store, key, secretFingerprint, 1)
		}},
		"no rights": {code: "42501", fails: func(t *testing.T, f *fixture) []error {
			t.Helper()
			stranger, store := conn(t, f)
			exec(t, stranger, `SET ROLE pg_monitor`)
			return all(t.Context(), store, key, secretFingerprint, 1)
		}},
		"a transaction that is aborted": {code: "25P02", fails: func(t *testing.T, f *fixture) []error {
			t.Helper()
			tx, err := recordConn(t, pgx.QueryExecModeCacheStatement).Begin(t.Context())
			require.NoError(t, err)
			_, err = tx.Exec(t.Context(), `SELECT 1/0`)
			require.Error(t, err)
			return all(t.Context(), f.WithTx(tx), key, secretFingerprint, 1)
		}},
		"a statement that takes too long": {code: "57014", fails: func(t *testing.T, f *fixture) []error {
			t.Helper()
			attempt := put(t, f)
			tx, err := recordConn(t, pgx.QueryExecModeCacheStatement).Begin(t.Context())
			require.NoError(t, err)
			exec(t, tx, `SELECT FROM `+recordTable(f)+` FOR UPDATE`)
			hurried, store := conn(t, f)
			exec(t, hurried, `SET statement_timeout = '20ms'`)
			return all(t.Context(), store, key, secretFingerprint, attempt)
		}},
		"a context that ends": {is: context.DeadlineExceeded, fails: func(t *testing.T, f *fixture) []error {
			t.Helper()
			attempt := put(t, f)
			tx, err := recordConn(t, pgx.QueryExecModeCacheStatement).Begin(t.Context())
			require.NoError(t, err)
			exec(t, tx, `SELECT FROM `+recordTable(f)+` FOR UPDATE`)
			ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
			defer cancel()
			return all(ctx, f.Store, key, secretFingerprint, attempt)
		}},
		"a context that has ended": {is: context.Canceled, fails: func(t *testing.T, f *fixture) []error {
			t.Helper()
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			return all(ctx, f.Store, key, secretFingerprint, 1)
		}},
		"a connection that is closed": {fails: func(t *testing.T, f *fixture) []error {
			t.Helper()
			closed, store := conn(t, f)
			require.NoError(t, closed.Close(t.Context()))
			return all(t.Context(), store, key, secretFingerprint, 1)
		}},
		"a pool that is closed": {fails: func(t *testing.T, f *fixture) []error {
			t.Helper()
			pool, err := pgxpool.New(t.Context(), pgtest.DSN(t))
			require.NoError(t, err)
			pool.Close()
			return all(t.Context(), f.NewStore(t, pool, lease, retention), key, secretFingerprint, 1)
		}},
		"a transaction that is missing": {fails: func(t *testing.T, f *fixture) []error {
			t.Helper()
			return all(t.Context(), f.WithTx(nil), key, secretFingerprint, 1)
		}},
		"a column of another type": {fails: func(t *testing.T, f *fixture) []error {
			t.Helper()
			require.NoError(t, f.Complete(t.Context(), key, secretFingerprint, put(t, f), storedResponse))
			statements := *f.Statements()
			statements.Get = strings.Replace(statements.Get, "    attempt,", "    convert_from(response, 'UTF8') AS attempt,", 1)
			_, _, err := f.WithStatements(&statements).Get(t.Context(), key)
			require.ErrorContains(t, err, "cannot scan")
			return []error{err}
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := setup(t)
			var codes []string
			errs := test.fails(t, f)
			joined := errors.Join(errs...)
			require.Error(t, joined)
			for _, err := range errs {
				if err == nil {
					continue
				}
				text := err.Error()
				require.True(t, strings.HasPrefix(text, "idempotency: "), text)
				for _, secret := range []string{secretFingerprint, otherFingerprint, secretResponse, storedResponse} {
					for _, form := range []string{
						secret, hex.EncodeToString([]byte(secret)), base64.StdEncoding.EncodeToString([]byte(secret)), secret[:12],
					} {
						require.NotContains(t, strings.ToLower(text), strings.ToLower(form))
					}
				}
				if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok {
					codes = append(codes, pgErr.Code)
				}
			}
			if test.code != "" {
				require.Contains(t, codes, test.code)
			}
			if test.is != nil {
				require.ErrorIs(t, joined, test.is)
			}
		})
	}
}
