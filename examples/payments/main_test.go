package main_test

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	payments "github.com/archlab/idempotency/examples/payments"
	"github.com/archlab/idempotency/internal/pgtest"
)

// envProgram makes the test binary be the program, also when it starts itself as a worker.
const envProgram = "PAYMENTS_TEST_IS_PROGRAM"

func TestMain(m *testing.M) {
	if os.Getenv(envProgram) != "" {
		payments.Main()
	}
	pgtest.Main(m)
}

// program returns the program, not started yet, on the tests' server.
func program(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	return command(t, []string{pgtest.EnvURL + "=" + pgtest.DSN(t), pgtest.EnvRequire + "=url"}, args...)
}

func command(t *testing.T, env []string, args ...string) *exec.Cmd {
	t.Helper()
	self, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.CommandContext(t.Context(), self, args...) //nolint:gosec // ourselves
	cmd.Env = append(append(os.Environ(), envProgram+"=1"), env...)
	return cmd
}

// output is what a run of the program said.
type output struct {
	stdout, stderr string
	code           int
}

func execute(t *testing.T, cmd *exec.Cmd) output {
	t.Helper()
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		var exit *exec.ExitError
		require.ErrorAs(t, err, &exit)
	}
	t.Logf("%s%s", &stdout, &stderr)
	return output{stdout.String(), stderr.String(), cmd.ProcessState.ExitCode()}
}

// count reads a row of the table.
func (o output) count(t *testing.T, row string) int {
	t.Helper()
	found := regexp.MustCompile(`(?m)^  ` + row + ` +(\d+)  `).FindStringSubmatch(o.stdout)
	require.NotNil(t, found, "no row %q", row)
	n, err := strconv.Atoi(found[1])
	require.NoError(t, err)
	return n
}

var schemaLine = regexp.MustCompile(`Schema (payments_demo_\w+)`)

func (o output) schema(t *testing.T) string {
	t.Helper()
	found := schemaLine.FindStringSubmatch(o.stdout)
	require.NotNil(t, found)
	return found[1]
}

func file(t *testing.T, content string) string {
	t.Helper()
	name := filepath.Join(t.TempDir(), "requests.jsonl")
	require.NoError(t, os.WriteFile(name, []byte(content), 0o600))
	return name
}

func requireSchemaGone(t *testing.T, schema string) {
	t.Helper()
	var there bool
	require.NoError(t, pgtest.Pool(t).QueryRow(t.Context(),
		`SELECT EXISTS (SELECT FROM pg_namespace WHERE nspname = $1)`, schema).Scan(&there))
	require.False(t, there, "schema %s is still there", schema)
}

func dropAtEnd(t *testing.T, schema string) {
	t.Helper()
	pool := pgtest.Pool(t)
	ctx := context.WithoutCancel(t.Context())
	t.Cleanup(func() {
		_, err := pool.Exec(ctx, "DROP SCHEMA "+pgx.Identifier{schema}.Sanitize()+" CASCADE")
		require.NoError(t, err)
	})
}

// mixed is an input with some of everything.
func mixed(keys int) string {
	var b strings.Builder
	for n := range keys {
		key := fmt.Sprintf("k-%d", n)
		for range 1 + n%4 {
			fmt.Fprintln(&b, line("acct_a", key, 100+n))
		}
		fmt.Fprintln(&b, line("acct_b", key, 100+n))
		fmt.Fprintln(&b, line("acct_b", key, 101+n))
		fmt.Fprintln(&b, line("acct_b", "", 100+n))
	}
	return b.String()
}

func TestEachPaymentOnceThoughWorkersAreKilled(t *testing.T) {
	t.Parallel()
	for _, workers := range []int{1, 4} {
		t.Run(fmt.Sprintf("workers=%d", workers), func(t *testing.T) {
			t.Parallel()
			const keys = 32
			o := execute(t, program(t, "-file", file(t, mixed(keys)), "-workers", strconv.Itoa(workers),
				"-kills", strconv.Itoa(payments.Moments), "-lease", "500ms", "-work", "5ms", "-keep", "-v"))
			schema := o.schema(t)
			dropAtEnd(t, schema)
			require.Equal(t, 0, o.code)
			require.Empty(t, o.stderr)
			require.Equal(t, payments.Moments, o.count(t, "killed"))
			require.Equal(t, keys, o.count(t, "conflict"))
			require.Equal(t, keys, o.count(t, "rejected"))
			require.Equal(t, keys, strings.Count(o.stdout, ": idempotency: empty key component\n")/2, "once when it happens, once in the end")
			// Only the last of the moments is after the commit.
			require.GreaterOrEqual(t, o.count(t, "taken over"), payments.Moments-1)
			require.LessOrEqual(t, o.count(t, "executed")+o.count(t, "taken over"), 2*keys-1)
			require.Equal(t, 2*keys+keys*3/2, o.count(t, "executed")+o.count(t, "taken over")+
				o.count(t, "replayed")+o.count(t, "in progress, then replayed"), "every request got its response")
			require.Contains(t, o.stdout, "\nOK: each of 64 payments exactly once")

			var rows, distinct, sum int
			require.NoError(t, pgtest.Pool(t).QueryRow(t.Context(), `SELECT count(*), count(DISTINCT (tenant, payment_key)), sum(amount) FROM `+
				pgx.Identifier{schema, "ledger"}.Sanitize()).Scan(&rows, &distinct, &sum))
			require.Equal(t, 2*keys, rows)
			require.Equal(t, 2*keys, distinct)
			require.Equal(t, 2*(keys*100+keys*(keys-1)/2), sum)
		})
	}
}

func TestRepeatsMeetInTheDatabase(t *testing.T) {
	t.Parallel()
	o := execute(t, program(t, "-file", file(t, strings.Repeat(line("a", "k", 1)+"\n", 5)), "-workers", "4", "-kills", "0",
		"-lease", "4s", "-work", "2s")) // at least a second for the others to come while the first is at it
	require.Equal(t, 0, o.code)
	require.Equal(t, 1, o.count(t, "executed"))
	require.Positive(t, o.count(t, "in progress, then replayed"))
	require.Positive(t, o.count(t, "replayed"), "the last one comes late")
	require.Equal(t, 4, o.count(t, "in progress, then replayed")+o.count(t, "replayed"))
}

func TestAnyInputIsTakenAsItIs(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		input              string
		executed, rejected int
		says               string
	}{
		"empty":                     {input: "", says: "OK: each of 0 payments exactly once"},
		"blank":                     {input: "\n \n\r\n", says: "Blank lines: 3."},
		"no repeats":                {input: line("a", "1", 1) + "\n" + line("a", "2", 2) + "\n", executed: 2},
		"CRLF, and no last end":     {input: line("a", "1", 1) + "\r\n" + line("a", "2", 2), executed: 2},
		"huge lines":                {input: line("a", "1", 1) + "\n" + strings.Repeat("x", 3<<20) + "\n" + line("a", "2", 2), executed: 2, rejected: 1, says: "line 2: longer than 1048576 bytes"},
		"a line as long as can be":  {input: strings.Repeat(" ", payments.MaxLine-len(line("a", "1", 1))) + line("a", "1", 1), executed: 1},
		"nothing but rubbish":       {input: "\x00\n\xff\n{\n[]\n", rejected: 4, says: "line 2: not valid UTF-8"},
		"fewer payments than kills": {input: line("a", "1", 1), says: "of the 7 that were asked for: there are not as many payments"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			kills := "0"
			if strings.Contains(name, "kills") {
				kills = "7"
			}
			o := execute(t, program(t, "-file", file(t, c.input), "-workers", "1", "-kills", kills, "-work", "0", "-lease", "300ms"))
			require.Equal(t, 0, o.code)
			require.Empty(t, o.stderr)
			require.Equal(t, c.executed, o.count(t, "executed"))
			require.Equal(t, c.rejected, o.count(t, "rejected"))
			require.Contains(t, o.stdout, c.says)
			requireSchemaGone(t, o.schema(t))
		})
	}
}

func TestRejectedLinesAreReportedWithTheirNumbers(t *testing.T) {
	t.Parallel()
	o := execute(t, program(t, "-file", file(t, line("a", "1", 1)+"\n"+strings.Repeat("{\n", 6)), "-workers", "1", "-kills", "0"))
	require.Contains(t, o.stdout, "  line 2: not JSON: it ends in the middle\n")
	require.Contains(t, o.stdout, "  line 6: not JSON: it ends in the middle\n  and 1 more, which -v shows\n")
}

func TestWrongUseIsRefusedAtOnce(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		args []string
		says string
	}{
		"unknown flag":     {[]string{"-fast"}, "flag provided but not defined: -fast"},
		"argument":         {[]string{"requests.jsonl"}, `unexpected argument "requests.jsonl"`},
		"no workers":       {[]string{"-workers", "0"}, "-workers is 0: it must be between 1 and 50"},
		"negative kills":   {[]string{"-kills", "-1"}, "-kills is -1: it must be between 0 and 1000"},
		"no duration":      {[]string{"-lease", "2"}, `invalid value "2" for flag -lease`},
		"short lease":      {[]string{"-lease", "1ms"}, "-lease is 1ms: it must be between 100ms and 1m"},
		"work over lease":  {[]string{"-work", "3s"}, "-work is 3s: it must be between 0 and half the lease, 1s"},
		"keep":             {[]string{"-keep"}, "-keep needs a server that outlives the program: set TEST_DATABASE_URL"},
		"missing file":     {[]string{"-file", "none.jsonl"}, "open none.jsonl: no such file or directory"},
		"file is a folder": {[]string{"-file", os.TempDir()}, "is a directory"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o := execute(t, command(t, []string{pgtest.EnvURL + "="}, c.args...))
			require.Equal(t, 2, o.code)
			require.Contains(t, o.stderr, "payments: ")
			require.Contains(t, o.stderr, c.says)
			require.Empty(t, o.stdout)
		})
	}
}

func TestHelpExplainsTheFlags(t *testing.T) {
	t.Parallel()
	o := execute(t, command(t, nil, "-h"))
	require.Equal(t, 0, o.code)
	require.Contains(t, o.stdout, `{"tenant":"acct_1","idempotency_key":"order-7"`)
	require.Contains(t, o.stdout, "-workers number")
	require.Empty(t, o.stderr)
}

func TestAServerThatDoesNotAnswerIsAnErrorThatSaysSo(t *testing.T) {
	t.Parallel()
	o := execute(t, command(t, []string{pgtest.EnvURL + "=postgres://%zz", pgtest.EnvRequire + "="}))
	require.Equal(t, 1, o.code)
	require.Contains(t, o.stderr, "TEST_DATABASE_URL")
}

// running is the program at work.
type running struct {
	*exec.Cmd

	out    *bufio.Reader
	stderr bytes.Buffer
	schema string
}

// start starts the program and returns when it has its schema.
func start(t *testing.T, args ...string) *running {
	t.Helper()
	r := &running{Cmd: program(t, args...)}
	r.Stderr = &r.stderr
	stdout, err := r.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, r.Start())
	r.out = bufio.NewReader(stdout)
	for r.schema == "" {
		text, err := r.out.ReadString('\n')
		require.NoError(t, err, "%s", &r.stderr)
		if found := schemaLine.FindStringSubmatch(text); found != nil {
			r.schema = found[1]
		}
	}
	return r
}

// end waits for the program's end.
func (r *running) end(t *testing.T) output {
	t.Helper()
	rest := new(bytes.Buffer)
	_, err := r.out.WriteTo(rest)
	require.NoError(t, err)
	if err := r.Wait(); err != nil {
		var exit *exec.ExitError
		require.ErrorAs(t, err, &exit)
	}
	t.Logf("%s%s", rest, &r.stderr)
	return output{rest.String(), r.stderr.String(), r.ProcessState.ExitCode()}
}

// awaitWork returns when workers hold keys.
func (r *running) awaitWork(t *testing.T) {
	t.Helper()
	require.Eventually(t, func() bool {
		var held int
		err := pgtest.Pool(t).QueryRow(t.Context(), `SELECT count(*) FROM `+
			pgx.Identifier{r.schema, "idempotency_keys"}.Sanitize()).Scan(&held)
		return err == nil && held > 0
	}, 20*time.Second, 10*time.Millisecond)
}

// awaitNoWorkers returns when no worker is connected any more.
func (r *running) awaitNoWorkers(t *testing.T) {
	t.Helper()
	require.Eventually(t, func() bool {
		var connected int
		err := pgtest.Pool(t).QueryRow(t.Context(),
			`SELECT count(*) FROM pg_stat_activity WHERE starts_with(application_name, $1)`, r.schema).Scan(&connected)
		return err == nil && connected == 0
	}, 20*time.Second, 10*time.Millisecond)
}

// TestALedgerThatBooksTwiceIsFound has a trigger write each row once more: the program must see it, and say so.
func TestALedgerThatBooksTwiceIsFound(t *testing.T) {
	t.Parallel()
	r := start(t, "-file", file(t, mixed(1)), "-workers", "2", "-kills", "0",
		"-lease", "20s", "-work", "4s") // so that the first row is written two seconds from now, or later
	table := pgx.Identifier{r.schema, "ledger"}.Sanitize()
	function := pgx.Identifier{r.schema, "book_twice"}.Sanitize()
	_, err := pgtest.Pool(t).Exec(t.Context(), `
CREATE FUNCTION `+function+`() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
	INSERT INTO `+table+` (`+columns+`) VALUES
		(NEW.tenant, NEW.payment_key, NEW.amount, NEW.currency, NEW.customer, NEW.description, NEW.payment_id, NEW.attempt);
	RETURN NULL;
END $$;
CREATE TRIGGER book_twice AFTER INSERT ON `+table+` FOR EACH ROW WHEN (pg_trigger_depth() = 0) EXECUTE FUNCTION `+function+`()`)
	require.NoError(t, err)
	o := r.end(t)
	require.Equal(t, 1, o.code)
	require.Contains(t, o.stderr, "is in the ledger 2 times, not once")
	require.Contains(t, o.stdout, "\nWRONG: ")
	require.NotContains(t, o.stdout, "\nOK: ")
	requireSchemaGone(t, r.schema)
}

func TestAnInterruptedRunLeavesNothingBehind(t *testing.T) {
	t.Parallel()
	for name, signal := range map[string]os.Signal{"interrupt": os.Interrupt, "terminate": syscall.SIGTERM} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := start(t, "-file", file(t, mixed(10)), "-workers", "2", "-lease", "1m", "-work", "30s")
			r.awaitWork(t)
			require.NoError(t, r.Process.Signal(signal))
			o := r.end(t)
			require.Equal(t, 130, o.code)
			require.Contains(t, o.stderr, "payments: interrupted")
			r.awaitNoWorkers(t)
			requireSchemaGone(t, r.schema)
		})
	}
}

func TestWorkersEndWhenTheProgramIsKilled(t *testing.T) {
	t.Parallel()
	r := start(t, "-file", file(t, mixed(10)), "-workers", "2", "-lease", "1m", "-work", "30s")
	dropAtEnd(t, r.schema)
	r.awaitWork(t)
	require.NoError(t, r.Process.Kill())
	r.end(t)
	r.awaitNoWorkers(t)
}
