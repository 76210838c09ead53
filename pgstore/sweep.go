package pgstore

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"
)

// Sweep deletes records whose outcome has been forgotten, those first that were forgotten first, and returns how many. It
// deletes limit records at the most, in one statement and one transaction: a thousand or so is a good limit, and a result
// below it says that nothing was left that it could take.
//
// Sweep never touches a live record. It also leaves a lapsed attempt alone until its retention is over, so that the next
// attempt learns of it. Any number of sweeps may run at once: each skips the rows that another session holds. Nothing but
// disk space depends on it: Begin treats an expired record as none.
//
// Where the deletion of a row fails, because a trigger or a foreign key of somebody's forbids it, Sweep deletes the others
// one by one and returns their number together with the errors. Inside a caller's transaction (see [Store.WithTx]) such a
// failure aborts the transaction instead. If a connection is lost in the middle, Sweep runs again and the number is that of
// the last run.
func (s *Store) Sweep(ctx context.Context, limit int) (int64, error) {
	if limit < 1 {
		return 0, fmt.Errorf("idempotency: sweep: the limit is %d: it must be at least 1", limit)
	}
	deleted, err := s.sweep(ctx, limit)
	if err != nil {
		return deleted, fmt.Errorf("idempotency: sweep: %w", err)
	}
	return deleted, nil
}

func (s *Store) sweep(ctx context.Context, limit int) (int64, error) {
	var deleted int64
	err := s.retry(ctx, func(ctx context.Context) (err error) {
		deleted, err = s.exec(ctx, s.sql.Sweep, s.arguments(int64(limit)))
		return err
	})
	if err != nil && s.refusesDeletion(ctx, err) {
		return s.sweepOneByOne(ctx, limit)
	}
	return deleted, err
}

// refusesDeletion reports whether err may be about a single row, so that the rows beside it can still be deleted.
func (s *Store) refusesDeletion(ctx context.Context, err error) bool {
	if ctx.Err() != nil || !s.autocommit() {
		return false
	}
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	if !ok {
		return false
	}
	return slices.ContainsFunc(rowErrorClasses, func(class string) bool { return strings.HasPrefix(pgErr.Code, class) })
}

// rowErrorClasses are the classes of SQLSTATE in which a trigger, a foreign key or a damaged row speaks.
var rowErrorClasses = []string{
	"22", // data exception
	"23", // integrity constraint violation
	"27", // triggered data change violation
	"2F", // SQL routine exception
	"38", // external routine exception
	"39", // external routine invocation exception
	"P0", // PL/pgSQL error
	"XX", // internal error, such as data corrupted
}

// position is a place in the order in which sweeps delete.
type position struct {
	purgeAfter int64 // microseconds since 1970
	key        Key
}

// beforeAll lies before every record: in the year 1684, as far back as microseconds in a float64 are exact.
var beforeAll = position{purgeAfter: -1 << 53}

const (
	maxSweepErrors = 10   // how many refused rows one sweep reports by name
	sweepPage      = 1000 // how many keys it holds in memory while it goes around them
)

// sweepOneByOne deletes each record in a statement of its own and goes around those that refuse, however many lie in
// front, until limit records are gone or none is left.
func (s *Store) sweepOneByOne(ctx context.Context, limit int) (int64, error) {
	var (
		deleted int64
		refused int
		errs    []error
		from    = beforeAll
	)
	for deleted < int64(limit) {
		candidates, err := s.purgeable(ctx, from)
		if err != nil {
			return deleted, errors.Join(append(errs, err)...)
		}
		if len(candidates) == 0 {
			break
		}
		for _, c := range candidates {
			if deleted == int64(limit) {
				break
			}
			n, err := s.purge(ctx, c.key)
			switch {
			case err == nil:
				deleted += n
			case s.refusesDeletion(ctx, err):
				if refused++; refused <= maxSweepErrors {
					errs = append(errs, fmt.Errorf("%s stays: %w", c.key, err))
				}
			default:
				return deleted, errors.Join(append(errs, err)...)
			}
		}
		from = candidates[len(candidates)-1]
	}
	if refused > maxSweepErrors {
		errs = append(errs, fmt.Errorf("and %d more stay", refused-maxSweepErrors))
	}
	return deleted, errors.Join(errs...)
}

// purgeable lists up to sweepPage records behind from that a sweep may delete.
func (s *Store) purgeable(ctx context.Context, from position) ([]position, error) {
	var found []position
	err := s.retry(ctx, func(ctx context.Context) error {
		found = found[:0]
		rows, err := s.db.Query(ctx, s.sql.Purgeable, s.arguments(
			from.purgeAfter, from.key.Tenant, from.key.Operation, from.key.Value, int64(sweepPage))...)
		if err != nil {
			return s.interpret(err)
		}
		defer rows.Close()
		for rows.Next() {
			var p position
			if err := rows.Scan(&p.purgeAfter, &p.key.Tenant, &p.key.Operation, &p.key.Value); err != nil {
				return s.interpret(err)
			}
			found = append(found, p)
		}
		if err := rows.Err(); err != nil {
			return s.interpret(err)
		}
		return nil
	})
	return found, err
}

// purge deletes the record of one key if its purge_after has passed and no other session holds it.
func (s *Store) purge(ctx context.Context, k Key) (int64, error) {
	var deleted int64
	err := s.retry(ctx, func(ctx context.Context) (err error) {
		deleted, err = s.exec(ctx, s.sql.Purge, s.arguments(k.Tenant, k.Operation, k.Value))
		return err
	})
	return deleted, err
}
