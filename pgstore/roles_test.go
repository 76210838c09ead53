package pgstore_test

import (
	"context"
	"crypto/rand"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/archlab/idempotency/internal/pgtest"
	"github.com/archlab/idempotency/migrations"
	"github.com/archlab/idempotency/pgstore"
)

// rolesGrants is what docs/operations.md tells to grant, without the schema's name.
var rolesGrants = []string{
	"USAGE ON SCHEMA %s",
	"USAGE ON SEQUENCE %s.idempotency_keys_attempt_seq",
	"SELECT ON %s.idempotency_keys",
	"INSERT ON %s.idempotency_keys",
	"UPDATE ON %s.idempotency_keys",
	"DELETE ON %s.idempotency_keys",
}

// rolesStore returns a store on a session of a role that has all of the grants but one.
func rolesStore(t *testing.T, f *fixture, without string) *pgstore.Store {
	t.Helper()
	role := "service_" + strings.ToLower(rand.Text())
	exec := func(statement string) {
		t.Helper()
		_, err := f.Pool.Exec(t.Context(), statement)
		require.NoError(t, err)
	}
	exec(`CREATE ROLE ` + role)
	conn, err := pgx.Connect(t.Context(), pgtest.DSN(t))
	require.NoError(t, err)
	t.Cleanup(func() {
		ctx := context.WithoutCancel(t.Context())
		require.NoError(t, conn.Close(ctx))
		_, err := f.Pool.Exec(ctx, `DROP OWNED BY `+role+`; DROP ROLE `+role)
		require.NoError(t, err)
	})
	for _, grant := range rolesGrants {
		if grant != without {
			exec(`GRANT ` + fmt.Sprintf(grant, pgx.Identifier{f.Schema}.Sanitize()) + ` TO ` + role)
		}
	}
	_, err = conn.Exec(t.Context(), `SET ROLE `+role)
	require.NoError(t, err)
	return f.NewStore(t, conn, lease, retention)
}

// rolesCalls makes every call once, with its name.
func rolesCalls(t *testing.T, f *fixture, store *pgstore.Store) map[string]error {
	t.Helper()
	errs := map[string]error{}
	attempt := func(value string) (pgstore.Key, uint64) {
		k := pgstore.Key{Tenant: "t", Operation: "o", Value: value + rand.Text()}
		record, _, err := f.Begin(t.Context(), k, fingerprint)
		require.NoError(t, err)
		return k, record.Attempt
	}
	_, _, errs["begin"] = store.Begin(t.Context(), pgstore.Key{Tenant: "t", Operation: "o", Value: rand.Text()}, fingerprint)
	k, a := attempt("complete")
	errs["complete"] = store.Complete(t.Context(), k, fingerprint, a, "")
	k, a = attempt("fail")
	errs["fail"] = store.Fail(t.Context(), k, fingerprint, a, true)
	k, a = attempt("extend")
	_, errs["extend"] = store.Extend(t.Context(), k, fingerprint, a)
	_, _, errs["get"] = store.Get(t.Context(), k)
	_, errs["sweep"] = store.Sweep(t.Context(), 1)
	return errs
}

// A role that may neither create nor own anything does all but migrate, and each grant that is missing is an error that names
// what may not be used.
func TestServiceNeedsNoMoreThanTheDocumentedGrants(t *testing.T) {
	t.Parallel()
	t.Run("all", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		for call, err := range rolesCalls(t, f, rolesStore(t, f, "")) {
			require.NoError(t, err, call)
		}
	})
	needs := map[string][]string{ // who fails without it
		rolesGrants[0]: {"begin", "complete", "fail", "extend", "get", "sweep"},
		rolesGrants[1]: {"begin"},
		rolesGrants[2]: {"begin", "complete", "fail", "extend", "get", "sweep"},
		rolesGrants[3]: {"begin"},
		rolesGrants[4]: {"begin", "complete", "fail", "extend", "sweep"},
		rolesGrants[5]: {"sweep"},
	}
	for _, grant := range rolesGrants {
		t.Run("without "+grant, func(t *testing.T) {
			t.Parallel()
			f := setup(t)
			for call, err := range rolesCalls(t, f, rolesStore(t, f, grant)) {
				if !slices.Contains(needs[grant], call) {
					require.NoError(t, err, call)
					continue
				}
				var pgErr *pgconn.PgError
				require.ErrorAs(t, err, &pgErr, call)
				require.Equal(t, "42501", pgErr.Code, call)
				require.Contains(t, err.Error(), "permission denied for ", call)
				require.NotErrorIs(t, err, pgstore.ErrNotMigrated, call)
			}
		})
	}
}

func TestServiceCannotMigrate(t *testing.T) {
	t.Parallel()
	f := setup(t)
	schema := pgtest.EmptySchema(t)
	role := "service_" + strings.ToLower(rand.Text())
	_, err := f.Pool.Exec(t.Context(), `CREATE ROLE `+role+`; GRANT USAGE ON SCHEMA `+pgx.Identifier{schema}.Sanitize()+` TO `+role)
	require.NoError(t, err)
	config := f.Pool.Config()
	config.MaxConns = 1
	config.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
		_, err := conn.Exec(ctx, `SET ROLE `+role)
		return err
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	_, err = migrations.Up(t.Context(), pool, migrations.WithSchema(schema))
	require.ErrorContains(t, err, "permission denied for schema")
	pool.Close()
	_, err = f.Pool.Exec(t.Context(), `DROP OWNED BY `+role+`; DROP ROLE `+role)
	require.NoError(t, err)
}
