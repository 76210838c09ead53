package main_test

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"testing"

	"github.com/stretchr/testify/require"

	queue "github.com/archlab/idempotency/examples/queue"
	"github.com/archlab/idempotency/internal/pgtest"
)

// envProgram makes the test binary be the program, also when it starts itself as a consumer.
const envProgram = "QUEUE_TEST_IS_PROGRAM"

func TestMain(m *testing.M) {
	if os.Getenv(envProgram) != "" {
		queue.Main()
		os.Exit(0)
	}
	pgtest.Main(m)
}

// execute runs the program on the tests' server.
func execute(t *testing.T, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	self, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.CommandContext(t.Context(), self, args...) //nolint:gosec // ourselves
	cmd.Env = append(os.Environ(), envProgram+"=1", pgtest.EnvURL+"="+pgtest.DSN(t), pgtest.EnvRequire+"=url")
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); err != nil {
		_, ok := errors.AsType[*exec.ExitError](err)
		require.True(t, ok, err)
	}
	t.Logf("%s%s", &out, &errs)
	return out.String(), errs.String(), cmd.ProcessState.ExitCode()
}

func TestEveryMessageIsBookedOnceWhateverCrashes(t *testing.T) {
	t.Parallel()
	stdout, _, code := execute(t, "-messages", "120", "-crashes", "4")
	require.Zero(t, code)
	require.Contains(t, stdout, "OK: each of 117 messages booked exactly once, 3 refused")
	require.Contains(t, stdout, "crashed      4")
	require.Contains(t, stdout, "died before COMMIT")
	require.Contains(t, stdout, "died between COMMIT and the acknowledgement")
}

// The check finds what goes wrong without the store: every second delivery is a second booking.
func TestWithoutTheStoreTheBooksAreWrong(t *testing.T) {
	t.Parallel()
	stdout, stderr, code := execute(t, "-messages", "60", "-crashes", "2", "-unprotected")
	require.Equal(t, 1, code)
	require.Contains(t, stdout, "is booked 2 times instead of 1")
	require.Contains(t, stdout, "the balance of acct_")
	require.Contains(t, stderr, "queue: the books are wrong: ")
}

func TestWrongFlagsAreRefused(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{{"-messages", "0"}, {"-consumers", "0"}, {"-crashes", "-1"}, {"extra"}, {"-unknown"}} {
		_, stderr, code := execute(t, args...)
		require.Equal(t, 2, code, args)
		require.NotEmpty(t, stderr)
	}
}
