package main_test

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"

	provider "github.com/archlab/idempotency/examples/provider"
	"github.com/archlab/idempotency/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// execute runs the program.
func execute(t *testing.T, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	var out, errs bytes.Buffer
	code = provider.Run(t.Context(), args, &out, &errs)
	t.Logf("%s%s", &out, &errs)
	return out.String(), errs.String(), code
}

func TestEveryPaymentIsChargedOnceWhateverTheProviderDoes(t *testing.T) {
	t.Parallel()
	stdout, _, code := execute(t, "-payments", "40")
	require.Zero(t, code)
	require.Contains(t, stdout, "OK: each of 36 accepted payments charged exactly once, 4 declined ones never")
	require.Contains(t, stdout, "found            8")
	require.Contains(t, stdout, "charged late     4")
	require.Contains(t, stdout, "released         4")
	require.Contains(t, stdout, "lost            12")
	require.Contains(t, stdout, "The provider was called 1 time.")
}

// The check finds what goes wrong without the derived key and the question.
func TestBlindRepeatsAreChargedTwice(t *testing.T) {
	t.Parallel()
	stdout, stderr, code := execute(t, "-payments", "20", "-blind")
	require.Equal(t, 1, code)
	require.Contains(t, stdout, "order-001 was charged 2 times instead of once")
	require.Contains(t, stderr, "provider: the provider's books are wrong: ")
}

func TestWrongFlagsAreRefused(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{{"-payments", "0"}, {"-clients", "0"}, {"extra"}, {"-unknown"}} {
		_, stderr, code := execute(t, args...)
		require.Equal(t, 2, code, args)
		require.NotEmpty(t, stderr)
	}
}
