// Package pgstore makes an operation safe to repeat. Its state lives in one table of PostgreSQL, so any number of services
// and processes that share the database agree on what has been done.
//
// A caller names the operation with a [Key], and the request with a fingerprint; exactly one caller executes, and everyone who
// repeats the key gets the stored response, for a retention that the store chooses. There are three ways to use it:
//
//	the effect is                      use                 because
//	in another system (a payment       Store.Do            no transaction can hold both: the key is kept alive while you
//	provider, a mail, a file)                              call, and a lost attempt is known to the next one
//	in this database, written at once  Store.DoTx          one commit for effect and response: exactly once, whatever dies
//	in this database, after work       Store.Begin, then   the key is held by its lease while you work, and the lease's loss
//	outside of a transaction           Complete in your    undoes what you write
//	                                   own transaction
//
// For instance:
//
//	outcome, err := store.Do(ctx, key, pgstore.Fingerprint(body), func(ctx context.Context, r pgstore.Record) (string, error) {
//		return charge(ctx, body)
//	})
//	switch {
//	case errors.Is(err, pgstore.ErrInProgress): // answer 409 with Retry-After
//	case errors.Is(err, pgstore.ErrConflict):   // answer 422
//	case errors.Is(err, pgstore.ErrFailed):     // it has failed for good
//	case err != nil:                            // the function's own error, or the store is down: answer 5xx
//	default:                                    // outcome.Response, executed now or before
//	}
//
// # How an operation ends
//
// The three endings are never guessed. A response says that the effect has happened: it is stored and replayed. [Retryable] around
// an error promises that no effect has: the key is free at once. [Permanent] says that it never will: repeats get [ErrFailed]. Any
// other error, a panic, a Goexit or the death of the process says nothing: the key is held until its lease lapses, and the next
// attempt sees Record.Abandoned and can find out first.
//
// # What is guaranteed
//
// If the process dies, the connection breaks, the database stops, the context ends, the function panics, or the lease is lost:
//
//	                      Do                                        DoTx
//	before Begin          nothing has happened                      nothing has happened
//	from Begin to the     the key is held until its lease lapses,   rolled back, and free at once
//	end of the function   then Abandoned tells the next attempt
//	from there until      recorded as long as the lease lasts,      COMMIT decides, and its answer is read from the record
//	it is recorded        else as above: Abandoned tells            when it gets lost
//	after that            replayed                                  replayed
//
// docs/guarantees.md has each combination, with the test that makes it happen.
//
// # Leases and attempts
//
// An execution holds its key for a lease. Do extends it while the function runs; who calls Begin also calls [Store.Extend]. When the lease
// lapses, because the process died or hung, the next Begin gets the key with a new attempt, and learns from
// Record.Abandoned that an attempt before it got lost in the middle. The attempt is a fencing token: a late Complete, Fail or
// Extend of the old one is refused, whatever it has done meanwhile outside the database. Pass the attempt on to systems that
// can refuse an older one, or a key derived from yours to those that know keys; the store cannot take back an effect in a system that
// does not ask.
//
// [WithoutTakeover] parks a lapsed attempt instead, until [Store.Resolve] says what became of it.
//
// # Transactions
//
// [Store.DoTx] begins, writes and completes in one transaction of its own. In a transaction of the caller's:
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
// response. An error of Begin that is none of the sentinels means that the store does not know: do not execute.
//
// Serialization failures, deadlocks and lost connections are handled inside, bounded in number and time, wherever each
// statement commits by itself; a lost answer is no reason to fear, since every call can be repeated. Inside a caller's
// transaction nothing is retried.
//
// # Time
//
// The database's clock decides, once for each statement. The clocks of the processes play no part, and may be wrong or jump: Do counts
// what is left of a lease on the local monotonic clock. Instants in a [Record] are the database's; durations beside them were measured by it.
//
// # Migrations
//
// Package migrations creates the table. The store never runs DDL.
package pgstore
