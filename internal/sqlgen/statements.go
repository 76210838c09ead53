package sqlgen

import "strings"

// Names of the objects that the migrations create, unqualified.
const (
	Table    = "idempotency_keys"
	Sequence = "idempotency_keys_attempt_seq"
)

// Config selects what the rendered statements talk to.
type Config struct {
	// Schema holds the table and the sequence. It must pass [ValidateSchema].
	Schema string
	// Clock replaces the database's clock: each statement takes the current time as one more parameter, the last, in
	// place of statement_timestamp(). For tests.
	Clock bool
	// NoTakeover parks an attempt whose lease lapsed: until its purge_after it blocks Begin, and Get reads it.
	NoTakeover bool
	// LateCompletion lets Complete and Fail end an attempt whose lease lapsed, until its purge_after, unless another has begun.
	LateCompletion bool
}

// Statements are the texts that a store runs. Each field's comment says what the statement guarantees by itself, its
// parameters in order, and its result's columns.
type Statements struct {
	// Begin reserves a key, or reports what stands in the way; one round trip either way.
	//
	// Of any number of concurrent calls at most one gets a row that says created for the same lease. A call that finds a
	// finished, running or conflicting record reads it by an ordinary snapshot read: it writes nothing, takes no row lock,
	// uses no value of the sequence, and does not wait for a transaction that holds the row. No row at all means that
	// another session won in between: run it again. A repeat with the claim of an earlier call whose answer was lost finds
	// that call's own record, and says created. A record in progress whose remaining time is not positive is a parked one.
	//
	// Parameters: tenant, operation, key, fingerprint, claim, lease, retention.
	// Columns: created, same_fingerprint, state, response, attempt, abandoned, expires_at in microseconds since 1970,
	// remaining in microseconds.
	Begin string

	// Complete stores the response of the attempt that holds the key. It changes one row, or none when any condition of
	// ownership fails; then Inspect tells which. It changes no indexed column within the lease, so it is a HOT update.
	//
	// Parameters: tenant, operation, key, fingerprint, attempt, response, retention.
	Complete string

	// CompleteHeld is Complete for the transaction that began the attempt and has not committed yet: it holds the row, so
	// nobody else can own the key, and no lease matters.
	//
	// Parameters as Complete.
	CompleteHeld string

	// Fail ends the attempt that holds the key without a response, in the state given: failed or retryable. Otherwise as
	// Complete.
	//
	// Parameters: tenant, operation, key, fingerprint, attempt, state, retention.
	Fail string

	// Extend gives the attempt that holds the key a fresh lease, counted from this statement. It moves purge_after along,
	// so that a lease that lapses later is remembered for a whole retention, however often it was extended.
	//
	// Parameters: tenant, operation, key, fingerprint, attempt, lease, retention.
	// Columns: abandoned, expires_at in microseconds since 1970, remaining in microseconds; no row as Complete.
	Extend string

	// Resolve ends an attempt in the name of whoever found out what became of it: in the state given, with the response if
	// that is done, and else null. Neither its lease nor its fingerprint matters; it changes one row, or none if the attempt
	// is not the key's latest, has ended, or has been forgotten.
	//
	// Parameters: tenant, operation, key, attempt, state, response, retention.
	Resolve string

	// Inspect says why Complete, Fail, Extend or Resolve changed nothing. It is a statement of its own: inside theirs it would read
	// the snapshot from before the change that made them fail. The response is compared by its SHA-256, so that a long one
	// does not travel again.
	//
	// Parameters: tenant, operation, key, fingerprint, attempt, digest of the response.
	// Columns: live, same_fingerprint, same_attempt, state, same_response; no row when there is neither a live record nor an
	// attempt whose lease lapsed and which is not forgotten yet.
	Inspect string

	// Get reads the live record of a key, or the parked one, without a lock.
	//
	// Parameters: tenant, operation, key.
	// Columns: state, fingerprint, response, attempt, abandoned, expires_at in microseconds since 1970, remaining in
	// microseconds.
	Get string

	// Sweep deletes the records whose purge_after has passed, the oldest first, at most limit of them. It skips rows that
	// another session holds. FOR UPDATE checks the condition again on the version of the row that it locked, so a key that
	// is taken over meanwhile stays. The rows are deleted by their physical position, which cannot change while they
	// are locked, and which is unique together with the partition where the table has some.
	//
	// Parameters: limit.
	Sweep string

	// Purgeable lists the keys that Sweep would delete after a position, in the order of Sweep. It serves the sweep that
	// goes around a row whose deletion fails.
	//
	// Parameters: purge_after in microseconds since 1970, tenant, operation, key of the position; limit.
	// Columns: purge_after in microseconds since 1970, tenant, operation, key.
	Purgeable string

	// Purge deletes one key under the conditions of Sweep.
	//
	// Parameters: tenant, operation, key.
	Purge string
}

// Render returns the statements for c. The caller validates c.Schema first.
func Render(c Config) *Statements {
	schema := QuoteIdentifier(c.Schema)
	modes := strings.NewReplacer(
		"{there}", choose(c.NoTakeover, thereOrParked, "expires_at > {now}"),
		"{lapsed}", choose(c.NoTakeover, lapsedNotParked, "held.expires_at <= EXCLUDED.begun_at"),
		"{in time}", choose(c.LateCompletion, "purge_after > {now}", "expires_at > {now}"),
	)
	// Clock's parameter is the last of each statement, so its number depends on the statement: parameters counts the others.
	render := func(parameters, text string) string {
		now, current := "statement_timestamp()", "clock_timestamp()"
		if c.Clock {
			now = "$" + parameters + "::timestamptz"
			current = now
		}
		return strings.NewReplacer(
			"{table}", schema+"."+Table,
			"{sequence}", quoteLiteral(schema+"."+Sequence),
			"{now}", now,
			"{current}", current,
		).Replace(modes.Replace(strings.TrimSpace(text)))
	}
	return &Statements{
		Begin:        render("8", begin),
		Complete:     render("8", complete+inTime),
		CompleteHeld: render("8", complete),
		Fail:         render("8", fail),
		Extend:       render("8", extend),
		Resolve:      render("8", resolve),
		Inspect:      render("7", inspect),
		Get:          render("4", get),
		Sweep:        render("2", sweep),
		Purgeable:    render("6", purgeable),
		Purge:        render("4", purge),
	}
}

func choose(yes bool, chosen, otherwise string) string {
	if yes {
		return chosen
	}
	return otherwise
}

// What NoTakeover makes of the conditions on a record that is there, and on one that may be taken over.
const (
	thereOrParked = `(expires_at > {now}
            OR (state = 'in_progress'
                AND purge_after > {now}))`
	lapsedNotParked = `(held.expires_at <= EXCLUDED.begun_at
                AND (held.state <> 'in_progress'
                    OR held.purge_after <= EXCLUDED.begun_at))`
)

// Remaining is taken from clock_timestamp() where a record is created: the statement may have waited for another
// session's transaction, and statement_timestamp() would promise a lease that has lapsed meanwhile.
//
// held.attempt < EXCLUDED.attempt keeps attempts of one key increasing: a call that drew its number and was then
// overtaken by a whole life of the key must draw again.
const begin = `
WITH blocking AS (
    SELECT state, fingerprint, response, attempt, claim, abandoned, expires_at
    FROM {table}
    WHERE tenant = $1::text
        AND operation = $2::text
        AND key = $3::text
        AND {there}
        AND (state <> 'retryable'
            OR fingerprint <> $4::bytea)
), claimed AS (
    INSERT INTO {table} AS held
        (tenant, operation, key, state, fingerprint, attempt, claim, begun_at, expires_at, purge_after)
    SELECT $1::text, $2::text, $3::text, 'in_progress', $4::bytea, nextval({sequence}::regclass), $5::bigint,
        {now}, {now} + $6::interval, {now} + $6::interval + $7::interval
    WHERE NOT EXISTS (SELECT FROM blocking)
    ON CONFLICT (tenant, operation, key) DO UPDATE
    SET state = EXCLUDED.state, fingerprint = EXCLUDED.fingerprint, response = NULL, attempt = EXCLUDED.attempt,
        claim = EXCLUDED.claim, begun_at = EXCLUDED.begun_at, expires_at = EXCLUDED.expires_at,
        purge_after = EXCLUDED.purge_after,
        abandoned = CASE
            WHEN held.purge_after <= EXCLUDED.begun_at THEN NULL
            WHEN held.claim = EXCLUDED.claim THEN held.abandoned
            WHEN held.state = 'in_progress' THEN held.attempt
            WHEN held.state = 'retryable' THEN held.abandoned
        END
    WHERE held.attempt < EXCLUDED.attempt
        AND ({lapsed}
            OR (held.state = 'retryable'
                AND held.fingerprint = EXCLUDED.fingerprint))
    RETURNING attempt, abandoned, expires_at
)
SELECT true AS created,
    true AS same_fingerprint,
    'in_progress' AS state,
    NULL::bytea AS response,
    attempt,
    abandoned,
    (extract(epoch FROM expires_at) * 1000000)::bigint AS expires_at,
    (extract(epoch FROM expires_at - {current}) * 1000000)::bigint AS remaining
FROM claimed
UNION ALL
SELECT state = 'in_progress'
        AND claim = $5::bigint,
    fingerprint = $4::bytea,
    state,
    CASE
        WHEN fingerprint = $4::bytea THEN response
    END,
    attempt,
    abandoned,
    (extract(epoch FROM expires_at) * 1000000)::bigint,
    (extract(epoch FROM expires_at - {now}) * 1000000)::bigint
FROM blocking
`

const complete = `
UPDATE {table}
SET state = 'done', response = $6::bytea, expires_at = {now} + $7::interval,
    purge_after = GREATEST(purge_after, {now} + $7::interval)
WHERE tenant = $1::text
    AND operation = $2::text
    AND key = $3::text
    AND fingerprint = $4::bytea
    AND attempt = $5::bigint
    AND state = 'in_progress'`

const inTime = `
    AND {in time}`

const fail = `
UPDATE {table}
SET state = $6::text, expires_at = {now} + $7::interval,
    purge_after = GREATEST(purge_after, {now} + $7::interval)
WHERE tenant = $1::text
    AND operation = $2::text
    AND key = $3::text
    AND fingerprint = $4::bytea
    AND attempt = $5::bigint
    AND state = 'in_progress'` + inTime + `
`

const extend = `
UPDATE {table}
SET expires_at = {now} + $6::interval,
    purge_after = GREATEST(purge_after, {now} + $6::interval + $7::interval)
WHERE tenant = $1::text
    AND operation = $2::text
    AND key = $3::text
    AND fingerprint = $4::bytea
    AND attempt = $5::bigint
    AND state = 'in_progress'
    AND expires_at > {now}
RETURNING abandoned,
    (extract(epoch FROM expires_at) * 1000000)::bigint AS expires_at,
    (extract(epoch FROM expires_at - {now}) * 1000000)::bigint AS remaining
`

const resolve = `
UPDATE {table}
SET state = $5::text, response = $6::bytea, expires_at = {now} + $7::interval,
    purge_after = GREATEST(purge_after, {now} + $7::interval)
WHERE tenant = $1::text
    AND operation = $2::text
    AND key = $3::text
    AND attempt = $4::bigint
    AND state = 'in_progress'
    AND purge_after > {now}
`

const inspect = `
SELECT expires_at > {now} AS live,
    fingerprint = $4::bytea AS same_fingerprint,
    attempt = $5::bigint AS same_attempt,
    state,
    coalesce(sha256(response) = $6::bytea, false) AS same_response
FROM {table}
WHERE tenant = $1::text
    AND operation = $2::text
    AND key = $3::text
    AND (expires_at > {now}
        OR (state = 'in_progress'
            AND purge_after > {now}))
`

const get = `
SELECT state,
    fingerprint,
    response,
    attempt,
    abandoned,
    (extract(epoch FROM expires_at) * 1000000)::bigint AS expires_at,
    (extract(epoch FROM expires_at - {now}) * 1000000)::bigint AS remaining
FROM {table}
WHERE tenant = $1::text
    AND operation = $2::text
    AND key = $3::text
    AND {there}
`

// The positions go through arrays because the planner then always expects ten of them, and fetches each by its position. It
// would join the rows of due as they are by reading the whole table, wherever it expects many of them.
const sweep = `
WITH due AS (
    SELECT tableoid AS part, ctid AS place
    FROM {table}
    WHERE purge_after <= {now}
    ORDER BY purge_after
    LIMIT $1::bigint
    FOR UPDATE SKIP LOCKED
)
DELETE FROM {table} AS old
USING unnest(ARRAY(SELECT part FROM due), ARRAY(SELECT place FROM due)) AS locked (part, place)
WHERE old.tableoid = locked.part
    AND old.ctid = locked.place
`

// ORDER BY names the table's columns: purge_after alone would be the result's, which no index has in order.
const purgeable = `
SELECT (extract(epoch FROM purge_after) * 1000000)::bigint AS purge_after,
    tenant,
    operation,
    key
FROM {table} AS due
WHERE purge_after <= {now}
    AND (purge_after, tenant, operation, key) >
        (timestamptz 'epoch' + $1::bigint * interval '1 microsecond', $2::text, $3::text, $4::text)
ORDER BY due.purge_after, due.tenant, due.operation, due.key
LIMIT $5::bigint
`

const purge = `
WITH due AS (
    SELECT tableoid AS part, ctid AS place
    FROM {table}
    WHERE tenant = $1::text
        AND operation = $2::text
        AND key = $3::text
        AND purge_after <= {now}
    FOR UPDATE SKIP LOCKED
)
DELETE FROM {table} AS old
USING unnest(ARRAY(SELECT part FROM due), ARRAY(SELECT place FROM due)) AS locked (part, place)
WHERE old.tableoid = locked.part
    AND old.ctid = locked.place
`
