package pgstore_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/archlab/idempotency/internal/pgtest"
	"github.com/archlab/idempotency/internal/sqlgen"
	"github.com/archlab/idempotency/pgstore"
)

// mutantVariable names the mutant that every store of a test process runs, or mutantNone.
const (
	mutantVariable = "IDEMPOTENCY_MUTANT"
	mutantNone     = "none"
)

// mutantOfModes begins the names of the mutants of what pgstore.WithoutTakeover and pgstore.WithLateCompletion render.
const mutantOfModes = "modes:"

// mutated returns the store with the mutant that the environment names, where it applies to the store's statements: those
// with a clock of their own have no mutants of kind mutantTime, and a statement that the store's modes have changed has the
// mutants of the modes only.
func mutated(store *pgstore.Store) *pgstore.Store {
	id := os.Getenv(mutantVariable)
	if id == "" || id == mutantNone {
		return store
	}
	mutants := mutate(store.Statements(), strings.TrimPrefix(id, mutantOfModes))
	if mutants == nil || mutationChanged(store, id) != strings.HasPrefix(id, mutantOfModes) {
		return store
	}
	return store.WithStatements(mutants)
}

// mutationChanged reports whether the store's modes have changed the statement that the mutant is of.
func mutationChanged(store *pgstore.Store, id string) bool {
	config := store.Config()
	config.NoTakeover, config.LateCompletion = false, false
	statement, _, _ := strings.Cut(strings.TrimPrefix(id, mutantOfModes), "/")
	return mutationText(store.Statements(), statement) != mutationText(sqlgen.Render(config), statement)
}

func mutationText(statements *sqlgen.Statements, name string) string {
	return reflect.ValueOf(*statements).FieldByName(name).String()
}

// mutationAll returns the mutants of the statements, and those that only the modes' conditions have.
func mutationAll(config sqlgen.Config) []mutant {
	plain := sqlgen.Render(config)
	config.NoTakeover, config.LateCompletion = true, true
	modes := sqlgen.Render(config)
	all := mutants(plain)
	known := map[[3]string]bool{}
	for _, m := range all {
		known[[3]string{m.Statement, m.Kind, m.What}] = true
	}
	for _, m := range mutants(modes) {
		if mutationText(plain, m.Statement) != mutationText(modes, m.Statement) && !known[[3]string{m.Statement, m.Kind, m.What}] {
			m.Modes = mutantOfModes
			all = append(all, m)
		}
	}
	return all
}

// Who has to find the mutants: the property test and the tests of single situations, one after the other until one fails.
var (
	mutationProperty = []string{"TestStoreAgreesWithModel"}
	mutationDirected = []string{
		"TestAnAttemptEndsNoRecordButItsOwn",
		"TestAnAttemptHoldsItsKeyToTheLastMicrosecondOfItsLease",
		"TestAbandonedTellsOfTheLapsedAttempt",
		"TestSweepDeletesExactlyWhatMayBeForgotten",
		"TestBeginThatWaitedForAnotherSessionObeysWhatItLeft",
		"TestAttemptsOfAKeyNeverGoBackwards",
		"TestAnAttemptThatIsDrawnAgainIsNotHandedOutAgain",
		"TestBeginThatWaitedLongerThanItsLeaseGetsAFreshOne",
		"TestBeginRecognisesItsOwnRecord",
		"TestBeginNeverReadsTheResponseToAnotherRequest",
		"TestSweepSkipsRowsThatAnotherSessionHolds",
		"TestSweepTakesTheEarliestFirst",
		"TestSweepOfAPartitionedTableDeletesOnlyWhatItChose",
		"TestPurgeInAPartitionedTableDeletesOnlyItsKey",
		"TestPurgeableListsInOrderWhatIsDueBehindAPosition",
		"TestPurgeDeletesOneKeyAndOnlyWhenItIsDue",
		"TestInsideAnOldTransactionEveryStatementReadsItsOwnTime",
		"TestParkedAttemptBlocksUntilItIsForgotten",
		"TestBeginWithoutTakeoverThatWaitedObeysWhatItFinds",
		"TestAttemptsEndLateUntilTheyAreForgotten",
		"TestResolveEndsTheAttemptItNames",
		"TestDoTxCompletesWhatItBeganAndNothingElse",
	}
)

// mutationEquivalent holds the mutants that no test can tell from the original, with the reason.
var mutationEquivalent = map[string]string{}

// TestEveryConditionOfTheSQLMatters removes the conditions of the store's statements one at a time, moves comparisons by
// their edge, drops assignments, and so on (see mutants), and expects that a test fails for each.
//
// Each mutant runs in a process of its own: this package's tests on the same server. PostgreSQL has to accept it first:
// a statement that cannot be parsed proves nothing.
func TestEveryConditionOfTheSQLMatters(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("runs some hundred processes")
	}
	if os.Getenv(mutantVariable) != "" {
		t.Skip("this is one of those processes")
	}
	all := mutationPrepared(t)
	runner := newMutationRunner(t)
	runner.passesWithoutMutant(t)

	var (
		queue   = make(chan mutant)
		mu      sync.Mutex
		lines   = map[string]string{} // by mutant
		killers = map[string]int{}    // mutants by test
		missed  []string
		wg      sync.WaitGroup
		started = time.Now()
	)
	for range mutationProcesses {
		wg.Go(func() {
			for m := range queue {
				killer, err := runner.killer(t.Context(), m)
				mu.Lock()
				switch reason, equivalent := mutationEquivalent[m.ID()]; {
				case err != nil:
					missed = append(missed, fmt.Sprintf("%s: %s\n%v", m.ID(), m.What, err))
				case equivalent && killer == "":
					killer = "equivalent: " + reason
				case equivalent:
					missed = append(missed, fmt.Sprintf("%s: %s\nis listed as equivalent, but fails %s", m.ID(), m.What, killer))
				case killer == "":
					missed = append(missed, fmt.Sprintf("%s: %s\nno test fails", m.ID(), m.What))
				}
				lines[m.ID()] = fmt.Sprintf("%-22s %-55s %s", m.ID(), killer, m.What)
				killers[killer]++
				mu.Unlock()
			}
		})
	}
	for _, m := range all {
		queue <- m
	}
	close(queue)
	wg.Wait()

	var report strings.Builder
	for _, m := range all {
		report.WriteString(lines[m.ID()] + "\n")
	}
	for killer, n := range killers {
		fmt.Fprintf(&report, "%4d by %s\n", n, cmp.Or(killer, "nobody"))
	}
	t.Logf("%d mutants, %d missed, in %v\n%s", len(all), len(missed), time.Since(started).Round(time.Second), report.String())
	require.Empty(t, missed, strings.Join(missed, "\n\n"))
}

// mutationProcesses is how many mutants run at a time. Some wait more than they work, so it is more than the processors.
const mutationProcesses = 4

// mutationPrepared returns all mutants, each accepted by the server in both renderings.
func mutationPrepared(t *testing.T) []mutant {
	t.Helper()
	f := setup(t)
	conn, err := f.Pool.Acquire(t.Context())
	require.NoError(t, err)
	defer conn.Release()
	clocked := f.NewStore(t, f.Pool, lease, retention, pgstore.WithClock(time.Now))
	names := map[string]bool{}
	for _, m := range slices.Concat(mutationAll(f.Config()), mutationAll(clocked.Config())) {
		_, err := conn.Conn().PgConn().Prepare(t.Context(), "", m.SQL, nil)
		require.NoError(t, err, "%s: %s\n%s", m.ID(), m.What, m.SQL)
		names[m.ID()] = true
	}
	all := mutationAll(sqlgen.Config{Schema: pgstore.SchemaDefault}) // whose texts are easy to read
	require.Len(t, names, len(all), "the renderings differ in their mutants")
	for id := range mutationEquivalent {
		require.True(t, names[id], "%s is listed as equivalent, but there is no such mutant", id)
	}
	return all
}

// mutationRunner starts the processes.
type mutationRunner struct{ program, database string }

// newMutationRunner takes this very program; or, where that was built with the race detector, which makes each process
// several times slower and has nothing to look for here, a plain build of it.
func newMutationRunner(t *testing.T) mutationRunner {
	t.Helper()
	program, err := os.Executable()
	require.NoError(t, err)
	runner := mutationRunner{program, pgtest.DSN(t)}
	info, ok := debug.ReadBuildInfo()
	if !ok || !slices.Contains(info.Settings, debug.BuildSetting{Key: "-race", Value: "true"}) {
		return runner
	}
	if _, err := exec.LookPath("go"); err != nil {
		return runner
	}
	runner.program = filepath.Join(t.TempDir(), "plain.test")
	build := exec.CommandContext(t.Context(), "go", "test", "-c", "-race=false", "-o", runner.program, ".") //nolint:gosec // a temporary file
	output, err := build.CombinedOutput()
	require.NoError(t, err, string(output))
	return runner
}

// passesWithoutMutant shows that what fails with a mutant passes without one, and that no name has gone stale.
func (r mutationRunner) passesWithoutMutant(t *testing.T) {
	t.Helper()
	for _, tests := range [][]string{mutationProperty, mutationDirected} {
		output, err := r.run(t.Context(), mutantNone, tests, "-test.v")
		require.NoError(t, err, output)
		for _, test := range tests {
			require.Contains(t, output, "--- PASS: "+test+" ")
		}
	}
}

// killer returns a test that fails with the mutant, or nothing.
func (r mutationRunner) killer(ctx context.Context, m mutant) (string, error) {
	stages := [][]string{mutationProperty, mutationDirected}
	if m.rarelyFoundByChance() {
		slices.Reverse(stages)
	}
	for _, tests := range stages {
		output, err := r.run(ctx, m.ID(), tests)
		if err == nil {
			continue
		}
		failed := mutationFailed.FindStringSubmatch(output)
		if exit, ok := errors.AsType[*exec.ExitError](err); !ok || exit.ExitCode() != 1 || failed == nil || strings.Contains(output, "panic: ") {
			return "", fmt.Errorf("the tests broke: %w\n%s", err, output)
		}
		return failed[1], nil
	}
	return "", nil
}

var mutationFailed = regexp.MustCompile(`(?m)^--- FAIL: (\w+)`)

// rarelyFoundByChance reports whether the property test is unlikely to find the mutant, so that others should go first: it
// runs neither the statements of a sweep that is refused or of DoTx, nor the database's clock, and meets no other session.
func (m mutant) rarelyFoundByChance() bool {
	return m.Kind == mutantTime || m.Kind == mutantLock || m.Kind == mutantUnsorted ||
		m.Statement == "Purgeable" || m.Statement == "Purge" || m.Statement == "CompleteHeld"
}

// run runs the tests in a process whose stores run the mutant. The seed is fixed: what it finds today it finds tomorrow.
func (r mutationRunner) run(ctx context.Context, id string, tests []string, flags ...string) (string, error) {
	pattern := "^(" + strings.Join(tests, "|") + ")$"
	if tests[0] == mutationProperty[0] {
		pattern += "/^cache_statement$"
	}
	command := exec.CommandContext(ctx, r.program, append([]string{ //nolint:gosec // a build of this package
		"-test.run=" + pattern, "-test.failfast", "-test.timeout=2m",
		"-rapid.seed=20", "-rapid.checks=60", "-rapid.steps=40", "-rapid.nofailfile", "-rapid.shrinktime=0s",
	}, flags...)...)
	command.Env = append(os.Environ(), mutantVariable+"="+id, pgtest.EnvURL+"="+r.database, pgtest.EnvRequire+"=url")
	output, err := command.CombinedOutput()
	if err != nil {
		return string(output), fmt.Errorf("mutant %s: %w", id, err)
	}
	return string(output), nil
}
