-- The statements for schema "public". Written by go test ./internal/sqlgen -update.

PREPARE "Begin" AS
WITH blocking AS (
    SELECT state, fingerprint, response, attempt, claim, abandoned, expires_at
    FROM "public".idempotency_keys
    WHERE tenant = $1::text
        AND operation = $2::text
        AND key = $3::text
        AND expires_at > statement_timestamp()
        AND (state <> 'retryable'
            OR fingerprint <> $4::bytea)
), claimed AS (
    INSERT INTO "public".idempotency_keys AS held
        (tenant, operation, key, state, fingerprint, attempt, claim, begun_at, expires_at, purge_after)
    SELECT $1::text, $2::text, $3::text, 'in_progress', $4::bytea, nextval('"public".idempotency_keys_attempt_seq'::regclass), $5::bigint,
        statement_timestamp(), statement_timestamp() + $6::interval, statement_timestamp() + $6::interval + $7::interval
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
        AND (held.expires_at <= EXCLUDED.begun_at
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
    (extract(epoch FROM expires_at - clock_timestamp()) * 1000000)::bigint AS remaining
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
    (extract(epoch FROM expires_at - statement_timestamp()) * 1000000)::bigint
FROM blocking;

PREPARE "Complete" AS
UPDATE "public".idempotency_keys
SET state = 'done', response = $6::bytea, expires_at = statement_timestamp() + $7::interval,
    purge_after = GREATEST(purge_after, statement_timestamp() + $7::interval)
WHERE tenant = $1::text
    AND operation = $2::text
    AND key = $3::text
    AND fingerprint = $4::bytea
    AND attempt = $5::bigint
    AND state = 'in_progress'
    AND expires_at > statement_timestamp();

PREPARE "CompleteHeld" AS
UPDATE "public".idempotency_keys
SET state = 'done', response = $6::bytea, expires_at = statement_timestamp() + $7::interval,
    purge_after = GREATEST(purge_after, statement_timestamp() + $7::interval)
WHERE tenant = $1::text
    AND operation = $2::text
    AND key = $3::text
    AND fingerprint = $4::bytea
    AND attempt = $5::bigint
    AND state = 'in_progress';

PREPARE "Fail" AS
UPDATE "public".idempotency_keys
SET state = $6::text, expires_at = statement_timestamp() + $7::interval,
    purge_after = GREATEST(purge_after, statement_timestamp() + $7::interval)
WHERE tenant = $1::text
    AND operation = $2::text
    AND key = $3::text
    AND fingerprint = $4::bytea
    AND attempt = $5::bigint
    AND state = 'in_progress'
    AND expires_at > statement_timestamp();

PREPARE "Extend" AS
UPDATE "public".idempotency_keys
SET expires_at = statement_timestamp() + $6::interval,
    purge_after = GREATEST(purge_after, statement_timestamp() + $6::interval + $7::interval)
WHERE tenant = $1::text
    AND operation = $2::text
    AND key = $3::text
    AND fingerprint = $4::bytea
    AND attempt = $5::bigint
    AND state = 'in_progress'
    AND expires_at > statement_timestamp()
RETURNING abandoned,
    (extract(epoch FROM expires_at) * 1000000)::bigint AS expires_at,
    (extract(epoch FROM expires_at - statement_timestamp()) * 1000000)::bigint AS remaining;

PREPARE "Resolve" AS
UPDATE "public".idempotency_keys
SET state = $5::text, response = $6::bytea, expires_at = statement_timestamp() + $7::interval,
    purge_after = GREATEST(purge_after, statement_timestamp() + $7::interval)
WHERE tenant = $1::text
    AND operation = $2::text
    AND key = $3::text
    AND attempt = $4::bigint
    AND state = 'in_progress'
    AND purge_after > statement_timestamp();

PREPARE "Inspect" AS
SELECT expires_at > statement_timestamp() AS live,
    fingerprint = $4::bytea AS same_fingerprint,
    attempt = $5::bigint AS same_attempt,
    state,
    coalesce(sha256(response) = $6::bytea, false) AS same_response
FROM "public".idempotency_keys
WHERE tenant = $1::text
    AND operation = $2::text
    AND key = $3::text
    AND (expires_at > statement_timestamp()
        OR (state = 'in_progress'
            AND purge_after > statement_timestamp()));

PREPARE "Get" AS
SELECT state,
    fingerprint,
    response,
    attempt,
    abandoned,
    (extract(epoch FROM expires_at) * 1000000)::bigint AS expires_at,
    (extract(epoch FROM expires_at - statement_timestamp()) * 1000000)::bigint AS remaining
FROM "public".idempotency_keys
WHERE tenant = $1::text
    AND operation = $2::text
    AND key = $3::text
    AND expires_at > statement_timestamp();

PREPARE "Sweep" AS
WITH due AS (
    SELECT tableoid AS part, ctid AS place
    FROM "public".idempotency_keys
    WHERE purge_after <= statement_timestamp()
    ORDER BY purge_after
    LIMIT $1::bigint
    FOR UPDATE SKIP LOCKED
)
DELETE FROM "public".idempotency_keys AS old
USING unnest(ARRAY(SELECT part FROM due), ARRAY(SELECT place FROM due)) AS locked (part, place)
WHERE old.tableoid = locked.part
    AND old.ctid = locked.place;

PREPARE "Purgeable" AS
SELECT (extract(epoch FROM purge_after) * 1000000)::bigint AS purge_after,
    tenant,
    operation,
    key
FROM "public".idempotency_keys AS due
WHERE purge_after <= statement_timestamp()
    AND (purge_after, tenant, operation, key) >
        (timestamptz 'epoch' + $1::bigint * interval '1 microsecond', $2::text, $3::text, $4::text)
ORDER BY due.purge_after, due.tenant, due.operation, due.key
LIMIT $5::bigint;

PREPARE "Purge" AS
WITH due AS (
    SELECT tableoid AS part, ctid AS place
    FROM "public".idempotency_keys
    WHERE tenant = $1::text
        AND operation = $2::text
        AND key = $3::text
        AND purge_after <= statement_timestamp()
    FOR UPDATE SKIP LOCKED
)
DELETE FROM "public".idempotency_keys AS old
USING unnest(ARRAY(SELECT part FROM due), ARRAY(SELECT place FROM due)) AS locked (part, place)
WHERE old.tableoid = locked.part
    AND old.ctid = locked.place;
