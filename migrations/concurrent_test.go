package migrations_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/fstest"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pressly/goose/v3"
	"github.com/stretchr/testify/require"

	"github.com/archlab/idempotency/internal/pgtest"
	"github.com/archlab/idempotency/migrations"
)

func TestManyProcessesMigrateAnEmptyDatabaseAtOnce(t *testing.T) {
	t.Parallel()
	const rounds = 20
	processes := make([]*process, 8)
	for i := range processes {
		processes[i] = startProcess(t)
	}
	var longest, all time.Duration
	for round := range rounds {
		url := pgtest.Database(t)
		schema := migrations.SchemaDefault
		if round%2 == 1 {
			schema = `Not "there" yet` // then the schema is made in the race, too
		}
		for _, p := range processes {
			p.prepare(t, job{URL: url, Schema: schema})
		}
		started := time.Now()
		for _, p := range processes {
			p.start(t)
		}
		appliedBy := 0
		for _, p := range processes {
			a := p.answer(t)
			require.Empty(t, a.Err, "round %d", round)
			appliedBy += a.Applied
		}
		took := time.Since(started)
		longest, all = max(longest, took), all+took
		require.Equal(t, 1, appliedBy, "round %d: one process applied it", round)
		pool := openPool(t, url)
		requireMigrated(t, pool, schema)
		requireCatalog(t, pool, schema)
		require.Zero(t, advisoryLocks(t, pool))
		pool.Close()
	}
	t.Logf("rounds=%d processes=%d mean=%s longest=%s", rounds, len(processes), (all / rounds).Round(time.Millisecond), longest.Round(time.Millisecond))
}

// advisoryLocks counts those of the pool's database.
func advisoryLocks(tb testing.TB, db database) int {
	tb.Helper()
	return one[int](tb, db, `SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'
AND database = (SELECT oid FROM pg_database WHERE datname = current_database())`)
}

// The package-level functions of goose keep their settings in variables without a lock. An application that uses them, for whatever
// database, at whatever moment, changes nothing for this package, and does not race with it.
func TestHostMaySetGooseGlobals(t *testing.T) {
	t.Parallel()
	registerHostMigration()
	urls := []string{pgtest.Database(t), pgtest.Database(t)}
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	stopped := make(chan error, 1)
	go func() {
		again := time.NewTicker(100 * time.Microsecond)
		defer again.Stop()
		host := fstest.MapFS{"00001_theirs.sql": {Data: []byte("-- +goose Up\nCREATE TABLE theirs ();\n")}}
		for {
			goose.SetBaseFS(host)
			goose.SetTableName("theirs")
			goose.SetVerbose(true)
			goose.SetLogger(goose.NopLogger())
			if err := goose.SetDialect("sqlite3"); err != nil {
				stopped <- err
				return
			}
			select {
			case <-ctx.Done():
				stopped <- nil
				return
			case <-again.C:
			}
		}
	}()
	results := make(chan error, len(urls))
	for _, url := range urls {
		pool := openPool(t, url)
		go func() {
			var errs []error
			for range 5 {
				_, upErr := migrations.Up(t.Context(), pool)
				_, statusErr := migrations.Status(t.Context(), pool)
				_, downErr := migrations.Down(t.Context(), pool)
				errs = append(errs, upErr, statusErr, downErr)
			}
			_, err := migrations.Up(t.Context(), pool)
			results <- errors.Join(append(errs, err)...)
		}()
	}
	for range urls {
		require.NoError(t, <-results)
	}
	stop()
	require.NoError(t, <-stopped)
	for _, url := range urls {
		pool := openPool(t, url)
		requireMigrated(t, pool, migrations.SchemaDefault)
		require.Zero(t, one[int](t, pool, `SELECT count(*) FROM pg_class WHERE relname IN ('theirs', 'goose_db_version')`))
	}
}

// registerHostMigration registers a migration of the application's with goose, in the list that providers use by default.
var registerHostMigration = sync.OnceFunc(func() {
	fails := func(context.Context, *sql.Tx) error { return errors.New("this is the application's") }
	goose.AddNamedMigrationContext("00007_theirs.go", fails, fails)
})

// holdUp opens a transaction that has made something of the given name in the schema, so that a migrator has to wait for its end in the
// middle of its work. It returns the pid of the server's process, and how to roll back.
func holdUp(tb testing.TB, url, schema, name string) (pid int, rollback func()) {
	tb.Helper()
	tx, err := openPool(tb, url).Begin(tb.Context())
	require.NoError(tb, err)
	execute(tb, tx, "CREATE TABLE "+qualified(schema, name)+" (in_the_way int)")
	rollback = sync.OnceFunc(func() { require.NoError(tb, tx.Rollback(contextAfter(tb))) })
	tb.Cleanup(rollback) // also when the test fails, or its pool would wait for the connection
	return one[int](tb, tx, `SELECT pg_backend_pid()`), rollback
}

// migrate is Up or Down.
type migrate = func(context.Context, *pgxpool.Pool, ...migrations.Option) ([]migrations.Migration, error)

// requireKeptOut checks that a migrator is kept out by the lock until its context ends, and returns what it says. A slow machine may need
// the time for something else, so it is tried until it says that it was the lock.
func requireKeptOut(tb testing.TB, call migrate, pool *pgxpool.Pool) (message string) {
	tb.Helper()
	await(tb, "a migrator is kept out by the lock", func() bool {
		ctx, cancel := context.WithTimeout(tb.Context(), 5*migrations.LockPoll/2)
		defer cancel()
		changed, err := call(ctx, pool)
		require.ErrorIs(tb, err, context.DeadlineExceeded)
		require.Empty(tb, changed)
		message = err.Error()
		return strings.Contains(message, "get the lock against other migrators, held by")
	})
	return message
}

// blockedBy waits for a server's process that waits for another one.
func blockedBy(tb testing.TB, db database, pid int) int {
	tb.Helper()
	var blocked []int
	await(tb, "somebody waits", func() bool {
		blocked = rows[int](tb, db, `SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND $1 = ANY (pg_blocking_pids(pid))`, pid)
		return len(blocked) > 0
	})
	require.Len(tb, blocked, 1)
	return blocked[0]
}

// A migrator that dies leaves no lock behind and nothing half done, wherever it dies.
func TestKilledMigratorLeavesNothing(t *testing.T) {
	t.Parallel()
	for _, at := range []string{"idempotency_keys", migrations.VersionTable} {
		for _, death := range []string{"its session is terminated", "its process is killed"} {
			t.Run(fmt.Sprintf("%s at %s", death, at), func(t *testing.T) {
				t.Parallel()
				url, schema := pgtest.Database(t), `A "schema"`
				pool := openPool(t, url)
				execute(t, pool, "CREATE SCHEMA "+quoted(schema))
				migrator := startProcess(t)
				migrator.prepare(t, job{URL: url, Schema: schema})
				holder, rollback := holdUp(t, url, schema, at)
				migrator.start(t)
				pid := blockedBy(t, pool, holder)
				require.Equal(t, 1, one[int](t, pool, `SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = $1`, pid),
					"it works under the lock")

				if death == "its process is killed" {
					migrator.kill(t)
				} else {
					require.True(t, one[bool](t, pool, `SELECT pg_terminate_backend($1)`, pid))
					require.Contains(t, migrator.answer(t).Err, "57P01")
				}
				rollback() // the server's process sees only now that nobody listens any more
				await(t, "the session has ended", func() bool {
					return one[int](t, pool, `SELECT count(*) FROM pg_stat_activity WHERE pid = $1`, pid) == 0
				})
				require.Zero(t, advisoryLocks(t, pool))
				requireEmpty(t, pool, schema)

				up, err := migrations.Up(t.Context(), pool, migrations.WithSchema(schema))
				require.NoError(t, err)
				require.Equal(t, everything, numbers(up))
				requireMigrated(t, pool, schema)
				requireCatalog(t, pool, schema)
			})
		}
	}
}

// A migrator obeys its context while another one works, and says which session that is; other schemas go on.
func TestWaitForAnotherMigratorEndsWithTheContext(t *testing.T) {
	t.Parallel()
	url, schema := pgtest.Database(t), migrations.SchemaDefault
	pool := openPool(t, url)
	holder, rollback := holdUp(t, url, schema, "idempotency_keys")
	first, working := make(chan error, 1), openPool(t, url)
	go func() {
		_, err := migrations.Up(t.Context(), working)
		first <- err
	}()
	pid := blockedBy(t, pool, holder)

	for name, call := range map[string]migrate{"up": migrations.Up, "down": migrations.Down} {
		message := requireKeptOut(t, call, pool)
		require.Contains(t, message, fmt.Sprintf("migrations: %s in schema %q: ", name, schema))
		require.Contains(t, message, fmt.Sprintf("held by pid %d in pg_stat_activity", pid))
	}
	require.Empty(t, applied(t, pool, schema), "status does not wait")
	_, err := migrations.Up(t.Context(), pool, migrations.WithSchema("another"))
	require.NoError(t, err)
	requireMigrated(t, pool, "another")

	rollback()
	require.NoError(t, <-first)
	requireMigrated(t, pool, schema)
	require.Zero(t, advisoryLocks(t, pool))
}

// Two sessions that hold the lock of goose's own default number, as migrators of the application do, delay nobody here.
func TestApplicationsMigratorIsNotWaitedFor(t *testing.T) {
	t.Parallel()
	url := pgtest.Database(t)
	tx, err := openPool(t, url).Begin(t.Context())
	require.NoError(t, err)
	defer tx.Rollback(t.Context()) //nolint:errcheck // it only holds a lock
	execute(t, tx, `SELECT pg_advisory_xact_lock($1)`, goosesDefaultLock)
	_, err = migrations.Up(t.Context(), openPool(t, url))
	require.NoError(t, err)
}

// Not even the version table is made by one who has to wait: goose would make it before it takes the lock.
func TestUpMakesNothingWithoutTheLock(t *testing.T) {
	t.Parallel()
	url := pgtest.Database(t)
	tx, err := openPool(t, url).Begin(t.Context())
	require.NoError(t, err)
	defer tx.Rollback(t.Context()) //nolint:errcheck // it only holds a lock
	execute(t, tx, `SELECT pg_advisory_xact_lock($1)`, lockOfPublic)
	requireKeptOut(t, migrations.Up, openPool(t, url))
	require.Empty(t, rows[string](t, tx, `SELECT relname FROM pg_class WHERE relname ^@ 'idempotency'`))
}

// Every process may call Up at its start: where nothing is pending it waits for nobody and writes nothing.
func TestUpWithNothingPendingTakesNoLock(t *testing.T) {
	t.Parallel()
	url := pgtest.Database(t)
	_, err := migrations.Up(t.Context(), openPool(t, url))
	require.NoError(t, err)

	tx, err := openPool(t, url).Begin(t.Context())
	require.NoError(t, err)
	defer tx.Rollback(t.Context()) //nolint:errcheck // it only holds a lock
	execute(t, tx, `SELECT pg_advisory_xact_lock($1)`, lockOfPublic)
	readOnly := openPool(t, url, withSettings(map[string]string{"default_transaction_read_only": "on"}))
	up, err := migrations.Up(t.Context(), readOnly)
	require.NoError(t, err)
	require.Empty(t, up)

	requireKeptOut(t, migrations.Down, openPool(t, url)) // so the lock that is held is the right one
}

const (
	// goosesDefaultLock is lock.DefaultLockID.
	goosesDefaultLock int64 = 4097083626
	// lockOfPublic is the number for schema public. It must never change, or two versions of this package migrate at the same time.
	lockOfPublic int64 = -5730282749097179216
)
