package pgstore_test

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
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
		closing := conn.Close(ctx)
		_, err := f.Pool.Exec(ctx, `DROP OWNED BY `+role+`; DROP ROLE `+role)
		if err = errors.Join(closing, err); err != nil {
			t.Error(err) // not require, which would end the cleanup without a word
		}
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

// rolesCalls makes every call, in each situation in which it sends something else, and returns the answers by call and
// situation.
func rolesCalls(t *testing.T, f *fixture, store *pgstore.Store) map[string]faultAnswer {
	t.Helper()
	answers := map[string]faultAnswer{}
	for _, call := range faultCalls() {
		k := recordKey(call.name)
		answers[call.name] = call.do(t.Context(), store, k, call.put(t, f, k))
	}
	begin := func(situation string, put func(k pgstore.Key)) {
		t.Helper()
		k := recordKey(situation)
		put(k)
		answers["begin "+situation] = faultCalls()[0].do(t.Context(), store, k, 0)
	}
	begin("finished", func(k pgstore.Key) { recordPut(t, f, k, pgstore.StateDone) })
	begin("running", func(k pgstore.Key) { recordPut(t, f, k, pgstore.StateInProgress) })
	begin("lapsed", func(k pgstore.Key) {
		recordPut(t, f, k, pgstore.StateInProgress)
		recordAge(t, f, k, lease)
	})
	attempt := recordPut(t, f, recordKey("stale"), pgstore.StateInProgress)
	answers["complete stale"] = faultAnswer{err: store.Complete(t.Context(), recordKey("stale"), fingerprint, attempt+1, "")}
	faultDue(t, f, recordKey("due"))
	sweepPoison(t, f, "OLD.key = 'due'")
	answers["sweep around a refusal"] = faultCalls()[6].do(t.Context(), store, key, 0)
	return answers
}

// rolesExpected are the errors that calls of rolesCalls return when nothing is missing.
func rolesExpected(t *testing.T, situation string, answer faultAnswer) {
	t.Helper()
	switch situation {
	case "begin running":
		require.ErrorIs(t, answer.err, pgstore.ErrInProgress)
	case "complete stale":
		require.ErrorIs(t, answer.err, pgstore.ErrStaleAttempt)
	case "sweep around a refusal":
		require.Equal(t, "P0001", faultCode(t, answer.err))
		require.ErrorContains(t, answer.err, `"due" stays`)
	default:
		require.NoError(t, answer.err, situation)
	}
}

// A role that may neither create nor own anything does all but migrate, and each grant that is missing is an error that names
// what may not be used.
func TestServiceNeedsNoMoreThanTheDocumentedGrants(t *testing.T) {
	t.Parallel()
	t.Run("all", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		for situation, answer := range rolesCalls(t, f, rolesStore(t, f, "")) {
			rolesExpected(t, situation, answer)
		}
	})
	for grant, needs := range map[string]struct { // who needs it, and what the error names
		calls  []string
		object string
	}{
		rolesGrants[0]: {[]string{"begin", "complete", "release", "fail", "extend", "get", "sweep"}, "schema"},
		// Only where an attempt is drawn: a repeat of a finished or running key draws none.
		rolesGrants[1]: {[]string{"begin"}, "sequence idempotency_keys_attempt_seq"},
		rolesGrants[2]: {[]string{"begin", "complete", "release", "fail", "extend", "get", "sweep"}, "table idempotency_keys"},
		rolesGrants[3]: {[]string{"begin"}, "table idempotency_keys"},
		rolesGrants[4]: {[]string{"begin", "complete", "release", "fail", "extend", "sweep"}, "table idempotency_keys"},
		rolesGrants[5]: {[]string{"sweep"}, "table idempotency_keys"},
	} {
		t.Run("without "+grant, func(t *testing.T) {
			t.Parallel()
			f := setup(t)
			for situation, answer := range rolesCalls(t, f, rolesStore(t, f, grant)) {
				call, _, _ := strings.Cut(situation, " ")
				drawsNone := situation == "begin finished" || situation == "begin running"
				if !slices.Contains(needs.calls, call) || grant == rolesGrants[1] && drawsNone {
					rolesExpected(t, situation, answer)
					continue
				}
				faultIsNoSentinel(t, answer.err)
				require.Equal(t, "42501", faultCode(t, answer.err), situation)
				require.ErrorContains(t, answer.err, "permission denied for "+needs.object, situation)
				require.NotContains(t, answer.err.Error(), "gave up", situation)
				require.False(t, answer.is, situation)
				require.Zero(t, answer.record, situation)
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
