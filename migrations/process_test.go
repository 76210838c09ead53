package migrations_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	_ "github.com/jackc/pgx/v5/stdlib" // the driver that the goose program uses
	"github.com/pressly/goose/v3"
	"github.com/stretchr/testify/require"

	"github.com/archlab/idempotency/migrations"
)

// envProcess makes the test binary another process that does what a test asks of it.
const envProcess = "IDEMPOTENCY_MIGRATIONS_TEST_PROCESS"

// job is what a process is asked to do, when it is told to go.
type job struct {
	URL    string
	Schema string
	Goose  []string // a command of the goose program; else Up
}

// answer is what it says: ready first, and then what came of it.
type answer struct {
	Ready   bool
	Applied int
	Err     string
}

// beProcess does jobs until there are no more.
func beProcess() int {
	in, out := json.NewDecoder(os.Stdin), json.NewEncoder(os.Stdout)
	for {
		err := beAsked(in, out)
		if errors.Is(err, io.EOF) {
			return 0
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
	}
}

func beAsked(in *json.Decoder, out *json.Encoder) error {
	ctx, cancel := context.WithTimeout(context.Background(), 2*awaitTimeout)
	defer cancel()
	var j job
	if err := in.Decode(&j); err != nil {
		return err
	}
	pool, err := pgxpool.New(ctx, j.URL)
	if err != nil {
		return err
	}
	defer pool.Close()
	if err := pool.Ping(ctx); err != nil {
		return err
	}
	if err := out.Encode(answer{Ready: true}); err != nil {
		return err
	}
	var start bool
	if err := in.Decode(&start); err != nil {
		return err
	}
	var a answer
	if j.Goose != nil {
		err = gooseProgram(ctx, j.URL, j.Goose)
	} else {
		var done []migrations.Migration
		done, err = migrations.Up(ctx, pool, migrations.WithSchema(j.Schema))
		a.Applied = len(done)
	}
	if err != nil {
		a.Err = err.Error()
	}
	return out.Encode(a)
}

// gooseProgram does what `goose -table public.idempotency_schema_migrations -dir . postgres URL COMMAND` does, in the same words as
// the program's main function.
func gooseProgram(ctx context.Context, url string, command []string) (err error) {
	goose.SetTableName("public." + migrations.VersionTable)
	goose.SetLogger(goose.NopLogger())
	db, err := goose.OpenDBWithDriver("postgres", url)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	return goose.RunWithOptionsContext(ctx, command[0], db, ".", command[1:])
}

// process is another process of this binary.
type process struct {
	cmd *exec.Cmd
	in  *json.Encoder
	out *json.Decoder
}

// startProcess starts one that ends with the test, and must end well unless the test killed it.
func startProcess(tb testing.TB) *process {
	tb.Helper()
	executable, err := os.Executable()
	require.NoError(tb, err)
	ctx, cancel := context.WithTimeout(contextAfter(tb), 5*time.Minute)
	cmd := exec.CommandContext(ctx, executable) //nolint:gosec // this very binary
	cmd.Env = append(os.Environ(), envProcess+"=1")
	cmd.Stderr = os.Stderr
	stdin, err := cmd.StdinPipe()
	require.NoError(tb, err)
	stdout, err := cmd.StdoutPipe()
	require.NoError(tb, err)
	require.NoError(tb, cmd.Start())
	tb.Cleanup(func() {
		defer cancel()
		if cmd.ProcessState != nil {
			return // killed
		}
		require.NoError(tb, stdin.Close())
		require.NoError(tb, cmd.Wait())
	})
	return &process{cmd, json.NewEncoder(stdin), json.NewDecoder(stdout)}
}

// prepare gives the process a job and waits until it is connected.
func (p *process) prepare(tb testing.TB, j job) {
	tb.Helper()
	require.NoError(tb, p.in.Encode(j))
	require.True(tb, p.answer(tb).Ready)
}

// start lets it go.
func (p *process) start(tb testing.TB) {
	tb.Helper()
	require.NoError(tb, p.in.Encode(true))
}

func (p *process) answer(tb testing.TB) answer {
	tb.Helper()
	var a answer
	require.NoError(tb, p.out.Decode(&a))
	return a
}

// kill ends it as a power cut would.
func (p *process) kill(tb testing.TB) {
	tb.Helper()
	require.NoError(tb, p.cmd.Process.Kill())
	require.Error(tb, p.cmd.Wait())
}
