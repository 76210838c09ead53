-- Creates the table of idempotency keys, its sequence and its one further index.
--
-- Locks: only on the new objects, which nobody uses yet. Duration: milliseconds, whatever else is in the database.
--
-- Every name is qualified, the types too, so that no search path leads elsewhere.

-- +goose Up

-- The fencing tokens. No cache: a number drawn later must be larger, in whichever session. Not owned by the column, so that
-- neither TRUNCATE ... RESTART IDENTITY nor a table that is dropped and created again makes old tokens valid once more.
CREATE SEQUENCE public.idempotency_keys_attempt_seq AS bigint CACHE 1 NO CYCLE;

CREATE TABLE public.idempotency_keys (
    -- The order of bytes: a new version of the system's collation library cannot make the unique index admit a duplicate.
    -- No checks of length: the library validates, and a check would be paid for by every write.
    tenant      pg_catalog.text COLLATE pg_catalog."C" NOT NULL,
    operation   pg_catalog.text COLLATE pg_catalog."C" NOT NULL,
    key         pg_catalog.text COLLATE pg_catalog."C" NOT NULL,
    state       pg_catalog.text COLLATE pg_catalog."C" NOT NULL,
    fingerprint pg_catalog.bytea         NOT NULL,
    response    pg_catalog.bytea,
    attempt     bigint                   NOT NULL,
    claim       bigint                   NOT NULL,
    abandoned   bigint,
    begun_at    timestamp with time zone NOT NULL,
    expires_at  timestamp with time zone NOT NULL,
    purge_after timestamp with time zone NOT NULL,
    -- Tenant first: the table can be partitioned or distributed by tenant.
    CONSTRAINT idempotency_keys_pkey PRIMARY KEY (tenant, operation, key),
    CONSTRAINT idempotency_keys_state_check CHECK (state IN ('in_progress', 'done', 'failed', 'retryable')),
    CONSTRAINT idempotency_keys_response_check CHECK ((response IS NOT NULL) = (state = 'done')),
    CONSTRAINT idempotency_keys_attempt_check CHECK (attempt > 0),
    CONSTRAINT idempotency_keys_purge_after_check CHECK (purge_after >= expires_at)
) WITH (
    -- Room on each page for the new version of a row that is completed, so that the update writes no index entry (HOT).
    fillfactor = 70,
    -- Every row is updated once and deleted once: vacuum by the number of rows that changed, not by a fifth of the table.
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_threshold = 1000,
    -- Insertions alone leave nothing to clean up, but freeze and set the visibility map in smaller portions.
    autovacuum_vacuum_insert_scale_factor = 0.1,
    autovacuum_vacuum_insert_threshold = 1000,
    -- Fresh statistics early on: a plan that was cached for the empty table is thrown away by ANALYZE.
    autovacuum_analyze_scale_factor = 0.05,
    autovacuum_analyze_threshold = 500,
    -- Cutting off empty pages takes an ACCESS EXCLUSIVE lock that every call would wait for, and the pages are filled again soon.
    -- It would also undo what the last lines of this migration are for.
    vacuum_truncate = off
);

-- For the sweep. Complete and Fail change no indexed column within the lease, and stay HOT.
CREATE INDEX idempotency_keys_purge_after_idx ON public.idempotency_keys (purge_after);

COMMENT ON SEQUENCE public.idempotency_keys_attempt_seq IS 'Fencing tokens of idempotency_keys. Never set it back: an old token would be valid again.';
COMMENT ON TABLE public.idempotency_keys IS 'Idempotency keys: one row for each operation that must not happen twice. Written by the library only.';
COMMENT ON COLUMN public.idempotency_keys.tenant IS 'Whose key it is: scopes the value that a client chose.';
COMMENT ON COLUMN public.idempotency_keys.operation IS 'What the key is for: scopes the value that a client chose.';
COMMENT ON COLUMN public.idempotency_keys.key IS 'The value that the client chose.';
COMMENT ON COLUMN public.idempotency_keys.state IS 'in_progress: an attempt holds the key until expires_at. done: response is replayed until expires_at. failed: final until expires_at. retryable: free for the same fingerprint.';
COMMENT ON COLUMN public.idempotency_keys.fingerprint IS 'Digest of the request. The same key with another one is a conflict.';
COMMENT ON COLUMN public.idempotency_keys.response IS 'What every repeat gets; null unless done.';
COMMENT ON COLUMN public.idempotency_keys.attempt IS 'Fencing token of the execution that holds, or held, the key.';
COMMENT ON COLUMN public.idempotency_keys.claim IS 'Random number by which one call recognises its own row after a lost answer.';
COMMENT ON COLUMN public.idempotency_keys.abandoned IS 'Attempt whose lease lapsed and which was replaced: nobody knows what became of its effect.';
COMMENT ON COLUMN public.idempotency_keys.begun_at IS 'When the attempt began.';
COMMENT ON COLUMN public.idempotency_keys.expires_at IS 'When the lease lapses (in_progress) or the outcome is forgotten (otherwise). A row past it counts as absent.';
COMMENT ON COLUMN public.idempotency_keys.purge_after IS 'When a sweep may delete the row.';
COMMENT ON INDEX public.idempotency_keys_purge_after_idx IS 'For the sweep.';

-- Leaves 128 empty pages, 1 MB. For a table of a few pages that was analyzed the planner prefers to read all of it, and a session
-- that has cached such a plan keeps it while the table grows, until the next ANALYZE. Two of these rows fill a page to the fill
-- factor. Nobody ever sees them.
INSERT INTO public.idempotency_keys (tenant, operation, key, state, fingerprint, attempt, claim, begun_at, expires_at, purge_after)
SELECT '-', '-', n::pg_catalog.text, 'failed', pg_catalog.repeat('-', 1900)::pg_catalog.bytea, n, n, 'infinity', 'infinity', 'infinity'
FROM pg_catalog.generate_series(1, 256) AS n;
DELETE FROM public.idempotency_keys;

-- +goose Down

-- Every key is forgotten: what is repeated afterwards is executed again, and fencing tokens begin again at 1.
-- Locks: ACCESS EXCLUSIVE on the table, for which it waits until running transactions have let go. Duration: milliseconds then.
DROP TABLE public.idempotency_keys;
DROP SEQUENCE public.idempotency_keys_attempt_seq;
