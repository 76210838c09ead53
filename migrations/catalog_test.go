package migrations_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/archlab/idempotency/internal/pgtest"
	"github.com/archlab/idempotency/migrations"
)

// describe returns what the server's catalog says about the objects of a schema, with nothing in it that names the schema.
func describe(tb testing.TB, db database, schema string) []string {
	tb.Helper()
	return rows[string](tb, db, `
WITH mine AS (
    SELECT c.oid, c.relname, c.relkind, c.relpersistence, c.reloptions FROM pg_catalog.pg_class c
    JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = $1::pg_catalog.text AND c.relname ^@ 'idempotency_keys'
), facts (kind, place, fact) AS (
    SELECT 1, relname::pg_catalog.text, pg_catalog.format('%s %s %s %s', relkind, relname, relpersistence,
        pg_catalog.regexp_replace(reloptions::pg_catalog.text, 'fillfactor=[1-9][0-9]', 'fillfactor=measured')) FROM mine
UNION ALL
    SELECT 2, pg_catalog.format('%s %s', c.relname, pg_catalog.lpad(a.attnum::pg_catalog.text, 3)),
        pg_catalog.format('%s.%s %s.%s %s.%s %s%s', c.relname, a.attname, tn.nspname, t.typname,
            cn.nspname, coalesce(co.collname, '-'), CASE WHEN a.attnotnull THEN 'not null' ELSE 'null' END,
            CASE WHEN a.atthasdef THEN ' default' END)
    FROM mine c
    JOIN pg_catalog.pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
    JOIN pg_catalog.pg_type t ON t.oid = a.atttypid JOIN pg_catalog.pg_namespace tn ON tn.oid = t.typnamespace
    LEFT JOIN pg_catalog.pg_collation co ON co.oid = a.attcollation
    LEFT JOIN pg_catalog.pg_namespace cn ON cn.oid = co.collnamespace
    WHERE c.relkind = 'r'
UNION ALL
    SELECT 3, co.conname::pg_catalog.text, pg_catalog.format('%s %s%s', co.conname, pg_catalog.pg_get_constraintdef(co.oid),
        CASE WHEN co.condeferrable OR NOT co.convalidated THEN ' deferrable or not valid' END)
    FROM mine c JOIN pg_catalog.pg_constraint co ON co.conrelid = c.oid
    WHERE co.contype <> 'n' -- from 18 on, NOT NULL is a constraint too
UNION ALL
    SELECT 4, c.relname::pg_catalog.text, pg_catalog.format('%s unique=%s primary=%s immediate=%s valid=%s ready=%s partial=%s expression=%s deterministic=%s',
        c.relname, i.indisunique, i.indisprimary, i.indimmediate, i.indisvalid, i.indisready,
        i.indpred IS NOT NULL, i.indexprs IS NOT NULL,
        NOT EXISTS (SELECT FROM pg_catalog.pg_collation WHERE oid = ANY (i.indcollation) AND NOT collisdeterministic))
    FROM mine c JOIN pg_catalog.pg_index i ON i.indexrelid = c.oid
UNION ALL
    SELECT 5, c.relname::pg_catalog.text, pg_catalog.format('%s %s start=%s increment=%s min=%s max=%s cache=%s cycle=%s', c.relname,
        pg_catalog.format_type(s.seqtypid, NULL), s.seqstart, s.seqincrement, s.seqmin, s.seqmax, s.seqcache, s.seqcycle)
    FROM mine c JOIN pg_catalog.pg_sequence s ON s.seqrelid = c.oid
UNION ALL
    SELECT 6, c.relname::pg_catalog.text, pg_catalog.format('%s is owned by a column', c.relname)
    FROM mine c JOIN pg_catalog.pg_depend d ON d.objid = c.oid AND d.deptype IN ('a', 'i') AND d.refobjsubid > 0
    WHERE c.relkind = 'S'
UNION ALL
    SELECT 7, t.tgname::pg_catalog.text, pg_catalog.format('trigger %s', t.tgname)
    FROM mine c JOIN pg_catalog.pg_trigger t ON t.tgrelid = c.oid
)
SELECT fact FROM facts ORDER BY kind, place COLLATE pg_catalog."C"`, schema)
}

// catalog is what every migrated schema must be: one unique index on exactly the key, valid, immediate and whole; the order of bytes;
// one further index; names that start with the table's; tokens that only go up.
var catalog = []string{
	"r idempotency_keys p {fillfactor=measured,autovacuum_vacuum_scale_factor=0.02,autovacuum_vacuum_threshold=1000," +
		"autovacuum_vacuum_insert_scale_factor=0.1,autovacuum_vacuum_insert_threshold=1000," +
		"autovacuum_analyze_scale_factor=0.05,autovacuum_analyze_threshold=500,vacuum_truncate=off}",
	"S idempotency_keys_attempt_seq p ",
	"i idempotency_keys_pkey p ",
	"i idempotency_keys_purge_after_idx p ",

	"idempotency_keys.tenant pg_catalog.text pg_catalog.C not null",
	"idempotency_keys.operation pg_catalog.text pg_catalog.C not null",
	"idempotency_keys.key pg_catalog.text pg_catalog.C not null",
	"idempotency_keys.state pg_catalog.text pg_catalog.C not null",
	"idempotency_keys.fingerprint pg_catalog.bytea .- not null",
	"idempotency_keys.response pg_catalog.bytea .- null",
	"idempotency_keys.attempt pg_catalog.int8 .- not null",
	"idempotency_keys.claim pg_catalog.int8 .- not null",
	"idempotency_keys.abandoned pg_catalog.int8 .- null",
	"idempotency_keys.begun_at pg_catalog.timestamptz .- not null",
	"idempotency_keys.expires_at pg_catalog.timestamptz .- not null",
	"idempotency_keys.purge_after pg_catalog.timestamptz .- not null",

	"idempotency_keys_attempt_check CHECK ((attempt > 0))",
	"idempotency_keys_pkey PRIMARY KEY (tenant, operation, key)",
	"idempotency_keys_purge_after_check CHECK ((purge_after >= expires_at))",
	"idempotency_keys_response_check CHECK (((response IS NOT NULL) = (state = 'done'::text)))",
	"idempotency_keys_state_check CHECK ((state = ANY (ARRAY['in_progress'::text, 'done'::text, 'failed'::text, 'retryable'::text])))",

	"idempotency_keys_pkey unique=t primary=t immediate=t valid=t ready=t partial=f expression=f deterministic=t",
	"idempotency_keys_purge_after_idx unique=f primary=f immediate=t valid=t ready=t partial=f expression=f deterministic=t",

	"idempotency_keys_attempt_seq bigint start=1 increment=1 min=1 max=9223372036854775807 cache=1 cycle=f",
}

func requireCatalog(tb testing.TB, db database, schema string) {
	tb.Helper()
	require.Equal(tb, catalog, describe(tb, db, schema))
}

func TestCatalog(t *testing.T) {
	t.Parallel()
	pool, schema := pgtest.Pool(t), pgtest.Schema(t)
	requireMigrated(t, pool, schema)
	requireCatalog(t, pool, schema)
	require.Equal(t, []string{"CREATE INDEX idempotency_keys_purge_after_idx ON idempotency_keys USING btree (purge_after)"},
		inSchema(t, schema, `SELECT pg_get_indexdef(indexrelid, 0, true) FROM pg_index WHERE NOT indisunique AND indrelid = 'idempotency_keys'::regclass`))
	require.Equal(t, []string{"tenant", "operation", "key"}, inSchema(t, schema, `SELECT pg_get_indexdef(indexrelid, n, true)
FROM pg_index, generate_series(1, indnatts) n WHERE indisunique AND indrelid = 'idempotency_keys'::regclass ORDER BY n`))
}

// inSchema runs a query where the search path leads to the schema, so that the server leaves its name out.
func inSchema(tb testing.TB, schema, sql string) []string {
	tb.Helper()
	tx, err := pgtest.Pool(tb).Begin(tb.Context())
	require.NoError(tb, err)
	defer tx.Rollback(tb.Context()) //nolint:errcheck // it only reads
	execute(tb, tx, `SELECT set_config('search_path', $1, true)`, quoted(schema))
	return rows[string](tb, tx, sql)
}

// A person who looks at the table in psql reads what each column means.
func TestEveryObjectExplainsItself(t *testing.T) {
	t.Parallel()
	require.Empty(t, rows[string](t, pgtest.Pool(t), `SELECT c.relname || coalesce('.' || a.attname, '') FROM pg_class c
JOIN pg_namespace n ON n.oid = c.relnamespace
LEFT JOIN pg_attribute a ON a.attrelid = c.oid AND c.relkind = 'r' AND a.attnum > 0
WHERE n.nspname = $1::text AND c.relname ^@ 'idempotency_keys' AND c.relname <> 'idempotency_keys_pkey'
    AND coalesce(CASE WHEN a.attnum IS NULL THEN obj_description(c.oid, 'pg_class') ELSE col_description(c.oid, a.attnum) END, '') = ''`,
		pgtest.Schema(t)))
}

// Two keys that a language's order takes for the same, or for neighbours, are two keys, in the order of their bytes.
func TestKeysAreOrderedByBytesInAnyDatabase(t *testing.T) {
	t.Parallel()
	pool := openPool(t, pgtest.Database(t, pgtest.WithCollation()))
	require.True(t, one[bool](t, pool, `SELECT 'a' < 'B'`), "the database has a language's order")
	_, err := migrations.Up(t.Context(), pool)
	require.NoError(t, err)
	requireCatalog(t, pool, migrations.SchemaDefault)
	want := []string{"1-1", "11", "A", "a", "ae", "e\u0301", "\u00e4", "\u00e9"}
	for _, key := range want {
		execute(t, pool, `INSERT INTO public.idempotency_keys
(tenant, operation, key, state, fingerprint, attempt, claim, begun_at, expires_at, purge_after)
VALUES ($1, $1, $1, 'in_progress', 'f', nextval('public.idempotency_keys_attempt_seq'), 1, now(), now(), now())`, key)
	}
	require.Equal(t, want, rows[string](t, pool, `SELECT key FROM public.idempotency_keys ORDER BY key`))
	for _, key := range want {
		require.Equal(t, []string{key}, rows[string](t, pool, `SELECT key FROM public.idempotency_keys WHERE (tenant, operation, key) = ($1, $1, $1)`, key))
	}
}

// A table that was emptied, or dropped and made again, does not make old fencing tokens valid once more.
func TestTokensOnlyGoUp(t *testing.T) {
	t.Parallel()
	pool, schema := pgtest.Pool(t), pgtest.Schema(t)
	require.EqualValues(t, 1, insert(t, pool, schema))
	execute(t, pool, "TRUNCATE "+qualified(schema, "idempotency_keys")+" RESTART IDENTITY")
	require.EqualValues(t, 2, insert(t, pool, schema))
	execute(t, pool, "CREATE TABLE "+qualified(schema, "again")+" (LIKE "+qualified(schema, "idempotency_keys")+" INCLUDING ALL)")
	execute(t, pool, "DROP TABLE "+qualified(schema, "idempotency_keys"))
	execute(t, pool, "ALTER TABLE "+qualified(schema, "again")+" RENAME TO idempotency_keys")
	require.EqualValues(t, 3, insert(t, pool, schema))
}
