// Package pgstore makes an operation safe to repeat. Its state lives in one table of PostgreSQL, so any number of services
// and processes that share the database agree on what has been done.
//
// A caller names the operation with a [Key], and the request with a fingerprint. [Store.Begin] lets exactly one caller
// execute; [Store.Complete] stores the response; everyone who repeats the key gets it, for a retention that the store
// chooses:
//
//	record, created, err := store.Begin(ctx, key, fingerprint)
//	switch {
//	case errors.Is(err, pgstore.ErrInProgress): // answer 409 with Retry-After
//	case errors.Is(err, pgstore.ErrConflict):   // answer 422
//	case err != nil:                            // answer 503; do not execute
//	case !created:                              // replay record.Response, or the failure
//	default:                                    // execute, then Complete or Fail as record.Attempt
//	}
//
// # Leases and attempts
//
// An execution holds its key for a lease. One that needs longer calls [Store.Extend] before it is over. When the lease
// lapses, because the process died or hung, the next Begin gets the key with a new attempt, and learns from
// Record.Abandoned that an attempt before it got lost in the middle. The attempt is a fencing token: a late Complete, Fail or
// Extend of the old one is refused, whatever it has done meanwhile outside the database. Pass the attempt on to systems that
// can refuse an older one; the store cannot take back an effect in a system that does not ask.
//
// # Transactions
//
// Where the effect lives in the same database, write it in the transaction that completes the key:
//
//	tx, err := pool.Begin(ctx)
//	... the caller's writes on tx ...
//	err = store.WithTx(tx).Complete(ctx, key, fingerprint, record.Attempt, response)
//	err = tx.Commit(ctx)
//
// Either both are there or neither. If the lease was lost, Complete fails, and the rollback undoes the writes: then the
// effect happens exactly once, whatever dies at whatever moment. See [Store.WithTx].
//
// # Errors
//
// Errors are wrapped once, as "idempotency: <call> <quoted key>: <sentinel or cause>". Branch on the sentinels with errors.Is,
// reach the server's error with errors.As and *pgconn.PgError. Messages hold the key but never the fingerprint or the
// response. An error that is none of the sentinels means that the store does not know: do not execute.
//
// Serialization failures, deadlocks and lost connections are handled inside, bounded in number and time, wherever each
// statement commits by itself; a lost answer is no reason to fear, since every call can be repeated. Inside a caller's
// transaction nothing is retried.
//
// # Time
//
// The database's clock decides, once for each statement. The clocks of the processes play no part, and may be wrong. Instants in
// a [Record] are the database's; durations beside them were measured by it.
//
// # Migrations
//
// Package migrations creates the table. The store never runs DDL.
package pgstore
