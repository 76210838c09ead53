package pgtest_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/archlab/idempotency/internal/pgtest"
)

func TestEveryTestFailsWithTheErrorOfTheStart(t *testing.T) {
	t.Parallel()
	out, err := command(t, []string{pgtest.EnvRequire + "=url"}, "-test.run=^(TestSchemaIsMigratedAndItsOwn|TestHeldReplyIsDoneButNotSeen)$").CombinedOutput()
	require.Error(t, err)
	require.Equal(t, 2, strings.Count(string(out), "pgtest: PGTEST_REQUIRE=url, but: TEST_DATABASE_URL is not set"), "%s", out)
	require.NotContains(t, string(out), "panic")
}

func TestWithoutATestThatWantsItNoServerIsStarted(t *testing.T) {
	t.Parallel()
	out, err := command(t, []string{pgtest.EnvRequire + "=nonsense"}, "-test.run=^TestAdvice").CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.NotContains(t, string(out), "pgtest:")
}

func TestTheServerIsNamedOnce(t *testing.T) {
	t.Parallel()
	out, err := command(t, []string{pgtest.EnvURL + "=" + pgtest.DSN(t)}, "-test.run=^(TestSchemaIsMigratedAndItsOwn|TestHeldReplyIsDoneButNotSeen)$").CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.Equal(t, 1, strings.Count(string(out), "pgtest: PostgreSQL "), "%s", out)
}

func TestGoroutineThatIsLeftBehindFailsTheRun(t *testing.T) {
	t.Parallel()
	out, err := command(t, []string{envChild + "=leak"}, "-test.run=^TestAdvice").CombinedOutput()
	require.Error(t, err)
	require.Contains(t, string(out), "goroutines were left behind")
}
