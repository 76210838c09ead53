package pgtest_test

import (
	"context"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgconn/ctxwatch"
	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/stretchr/testify/require"

	"github.com/archlab/idempotency/internal/pgtest"
)

var modes = []pgx.QueryExecMode{
	pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec, pgx.QueryExecModeExec,
	pgx.QueryExecModeSimpleProtocol,
}

// connect opens a connection that is closed when the test ends.
func connect(t *testing.T, address string, mode pgx.QueryExecMode) *pgx.Conn {
	t.Helper()
	config, err := pgx.ParseConfig(address)
	require.NoError(t, err)
	config.DefaultQueryExecMode = mode
	conn, err := pgx.ConnectConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close(context.WithoutCancel(t.Context())) })
	return conn
}

// table is a table of numbers behind a proxy, and its statements.
type table struct {
	*pgtest.Proxy
	name, insert string
}

func newTable(t *testing.T) *table {
	t.Helper()
	name := pgx.Identifier{pgtest.EmptySchema(t), "numbers"}.Sanitize()
	_, err := pgtest.Pool(t).Exec(t.Context(), "CREATE TABLE "+name+" (n int PRIMARY KEY)")
	require.NoError(t, err)
	return &table{pgtest.NewProxy(t, pgtest.DSN(t)), name, "INSERT INTO " + name + " (n) VALUES ($1::int) RETURNING n"}
}

// numbers reads the table past the proxy.
func (tb *table) numbers(t *testing.T) []int {
	t.Helper()
	rows, err := pgtest.Pool(t).Query(t.Context(), "SELECT n FROM "+tb.name+" ORDER BY n")
	require.NoError(t, err)
	numbers, err := pgx.CollectRows(rows, pgx.RowTo[int])
	require.NoError(t, err)
	return numbers
}

func TestProxyIsTransparentAndCountsRoundTrips(t *testing.T) {
	t.Parallel()
	for _, mode := range modes {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			proxy := pgtest.NewProxy(t, pgtest.DSN(t))
			conn := connect(t, proxy.URL(), mode)
			require.Zero(t, proxy.RoundTrips(), "connecting")

			const large = 3 << 20
			var length int
			text := strings.Repeat("é", large/2)
			ask := func() error { return conn.QueryRow(t.Context(), "SELECT octet_length($1::text)", text).Scan(&length) }
			require.NoError(t, ask())
			require.Equal(t, large, length)
			first := proxy.RoundTrips()
			require.NoError(t, ask())
			require.Equal(t, map[pgx.QueryExecMode]int{
				pgx.QueryExecModeCacheStatement: 2, pgx.QueryExecModeCacheDescribe: 2, pgx.QueryExecModeDescribeExec: 2,
				pgx.QueryExecModeExec: 1, pgx.QueryExecModeSimpleProtocol: 1,
			}[mode], first, "describe, then execute")
			require.Equal(t, map[pgx.QueryExecMode]int{
				pgx.QueryExecModeCacheStatement: 1, pgx.QueryExecModeCacheDescribe: 1, pgx.QueryExecModeDescribeExec: 2,
				pgx.QueryExecModeExec: 1, pgx.QueryExecModeSimpleProtocol: 1,
			}[mode], proxy.RoundTrips()-first)

			var back string
			require.NoError(t, conn.QueryRow(t.Context(), "SELECT repeat('x', 3000000)").Scan(&back))
			require.Len(t, back, 3000000)

			before := proxy.RoundTrips()
			_, err := conn.Exec(t.Context(), "SELECT 1/0", pgx.QueryExecModeSimpleProtocol)
			pgErr := new(pgconn.PgError)
			require.ErrorAs(t, err, &pgErr)
			require.Equal(t, "22012", pgErr.Code)
			require.Equal(t, 1, proxy.RoundTrips()-before, "an error is an answer")

			_, err = conn.Exec(t.Context(), "CREATE TEMPORARY TABLE copied (n int)")
			require.NoError(t, err)
			copied, err := conn.CopyFrom(t.Context(), pgx.Identifier{"copied"}, []string{"n"}, pgx.CopyFromSlice(10000, func(i int) ([]any, error) {
				return []any{i}, nil
			}))
			require.NoError(t, err)
			require.Equal(t, int64(10000), copied)

			batch := new(pgx.Batch)
			for i := range 5 {
				batch.Queue("SELECT $1::int", i)
			}
			before = proxy.RoundTrips()
			require.NoError(t, conn.SendBatch(t.Context(), batch).Close())
			require.Positive(t, proxy.RoundTrips()-before)
		})
	}
}

func TestProxyPassesOnARequestToCancel(t *testing.T) {
	t.Parallel()
	proxy := pgtest.NewProxy(t, pgtest.DSN(t))
	config, err := pgx.ParseConfig(proxy.URL())
	require.NoError(t, err)
	config.BuildContextWatcherHandler = func(conn *pgconn.PgConn) ctxwatch.Handler {
		return &pgconn.CancelRequestContextWatcherHandler{Conn: conn, DeadlineDelay: time.Minute}
	}
	conn, err := pgx.ConnectConfig(t.Context(), config)
	require.NoError(t, err)
	defer conn.Close(t.Context())

	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		_, err := conn.Exec(ctx, "SELECT pg_sleep(600)", pgx.QueryExecModeSimpleProtocol)
		ended <- err
	}()
	require.Eventually(t, func() bool {
		var n int
		require.NoError(t, pgtest.Pool(t).QueryRow(t.Context(), "SELECT count(*) FROM pg_stat_activity WHERE pid = $1 AND wait_event = 'PgSleep'",
			conn.PgConn().PID()).Scan(&n))
		return n == 1
	}, 10*time.Second, 5*time.Millisecond)
	cancel()
	err = <-ended
	pgErr := new(pgconn.PgError)
	require.ErrorAs(t, err, &pgErr, "an answer of the server's, not a broken connection")
	require.Equal(t, "57014", pgErr.Code)
}

func TestServerDoesNotGetWhatIsCutBefore(t *testing.T) {
	t.Parallel()
	for _, mode := range modes {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			table := newTable(t)
			var types []byte
			for n := 1; ; n++ {
				conn := connect(t, table.URL(), mode)
				var struck pgtest.FrontendMessage
				nth := pgtest.Nth(n, pgtest.Sends("PBDEQS", ""))
				fault := table.CutBeforeSend(func(m pgtest.FrontendMessage) bool {
					if nth(m) {
						struck = m
						return true
					}
					return false
				})
				_, err := conn.Exec(t.Context(), table.insert, n)
				if !fault.Struck() {
					require.NoError(t, err)
					require.Equal(t, []int{n}, table.numbers(t), "nothing but what was not cut")
					break
				}
				require.Error(t, err)
				fault.Wait(t)
				require.Empty(t, table.numbers(t), "cut before %c", struck.Type)
				types = append(types, struck.Type)
			}
			require.Equal(t, map[pgx.QueryExecMode]string{
				pgx.QueryExecModeCacheStatement: "PDSBES", pgx.QueryExecModeCacheDescribe: "PDSPBDES",
				pgx.QueryExecModeDescribeExec: "PDSBES", pgx.QueryExecModeExec: "PBDES", pgx.QueryExecModeSimpleProtocol: "Q",
			}[mode], string(types))
		})
	}
}

func TestServerHasDoneWhatIsCutAfterTheReply(t *testing.T) {
	t.Parallel()
	for _, mode := range modes {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			table := newTable(t)
			conn := connect(t, table.URL(), mode)
			before := table.RoundTrips()
			fault := table.CutAfterReply(pgtest.Executes("INSERT INTO"))
			var n int
			require.Error(t, conn.QueryRow(t.Context(), table.insert, 7).Scan(&n))
			require.Zero(t, n)
			require.Equal(t, []int{7}, table.numbers(t), "committed when the client sees the cut, without waiting")
			fault.Wait(t)
			require.True(t, conn.IsClosed())
			require.LessOrEqual(t, table.RoundTrips()-before, 1, "the lost one is not counted, one that describes is")
			_, err := connect(t, table.URL(), mode).Exec(t.Context(), table.insert, 8)
			require.NoError(t, err, "a fault strikes once")
		})
	}
}

func TestClientGetsTheReplyUpToTheCutWithin(t *testing.T) {
	t.Parallel()
	for _, mode := range modes {
		for last, rows := range map[byte]int{'D': 1, 'C': 3, 'G': 3} {
			t.Run(fmt.Sprintf("%v after %c", mode, last), func(t *testing.T) {
				t.Parallel()
				table := newTable(t)
				conn := connect(t, table.URL(), mode)
				fault := table.CutWithinReply(pgtest.Executes("INSERT INTO"), last)
				got, err := conn.Query(t.Context(), "INSERT INTO "+table.name+" (n) SELECT i FROM generate_series(1, 3) AS i RETURNING n")
				require.NoError(t, err)
				seen := 0
				for got.Next() {
					seen++
				}
				require.Error(t, got.Err())
				require.Equal(t, rows, seen)
				fault.Wait(t)
				require.Equal(t, []int{1, 2, 3}, table.numbers(t))
			})
		}
	}
}

func TestHeldRequestArrivesLateAlsoAfterTheClientHasGone(t *testing.T) {
	t.Parallel()
	table := newTable(t)
	// Not pgx to the end: it would ask the server to cancel, which might come before the message or after.
	raw, err := connect(t, table.URL(), pgx.QueryExecModeExec).PgConn().Hijack()
	require.NoError(t, err)
	fault := table.HoldRequest(pgtest.Executes("INSERT INTO"))
	raw.Frontend.SendParse(&pgproto3.Parse{Query: "INSERT INTO " + table.name + " (n) VALUES (1)"})
	raw.Frontend.SendBind(&pgproto3.Bind{})
	raw.Frontend.SendExecute(&pgproto3.Execute{})
	raw.Frontend.SendSync(&pgproto3.Sync{})
	require.NoError(t, raw.Frontend.Flush())
	fault.Wait(t)
	require.NoError(t, raw.Conn.Close())
	require.Empty(t, table.numbers(t))
	fault.Release()
	require.Eventually(t, func() bool { return slices.Equal(table.numbers(t), []int{1}) }, 10*time.Second, 5*time.Millisecond)
}

func TestHeldReplyIsDoneButNotSeen(t *testing.T) {
	t.Parallel()
	table := newTable(t)
	conn := connect(t, table.URL(), pgx.QueryExecModeExec)
	fault := table.HoldReply(pgtest.Executes("INSERT INTO"))
	answered := make(chan error, 1)
	go func() {
		_, err := conn.Exec(t.Context(), table.insert, 1)
		answered <- err
	}()
	fault.Wait(t)
	require.Equal(t, []int{1}, table.numbers(t))
	require.Empty(t, answered)
	before := table.RoundTrips()
	fault.Release()
	require.NoError(t, <-answered)
	require.GreaterOrEqual(t, table.RoundTrips(), before)
}

func TestLocksAreGoneWhenACutIsComplete(t *testing.T) {
	t.Parallel()
	table := newTable(t)
	_, err := pgtest.Pool(t).Exec(t.Context(), "INSERT INTO "+table.name+" VALUES (1)")
	require.NoError(t, err)
	for range 20 {
		conn := connect(t, table.URL(), pgx.QueryExecModeExec)
		tx, err := conn.Begin(t.Context())
		require.NoError(t, err)
		lock := "SELECT n FROM " + table.name + " FOR UPDATE NOWAIT"
		_, err = tx.Exec(t.Context(), lock)
		require.NoError(t, err)
		fault := table.CutBeforeSend(pgtest.Executes("commit"))
		require.Error(t, tx.Commit(t.Context()))
		fault.Wait(t)
		_, err = pgtest.Pool(t).Exec(t.Context(), lock)
		require.NoError(t, err)
	}
}

func TestProxyThatIsDownCutsOldAndNewConnections(t *testing.T) {
	t.Parallel()
	proxy := pgtest.NewProxy(t, pgtest.DSN(t))
	conn := connect(t, proxy.URL(), pgx.QueryExecModeExec)
	held := proxy.HoldReply(pgtest.Executes("SELECT 1"))
	proxy.Down()
	require.Error(t, conn.Ping(t.Context()))
	_, err := pgx.Connect(t.Context(), proxy.URL())
	require.Error(t, err)
	require.False(t, held.Struck())
	held.Release() // not struck: withdrawn
	proxy.Up()
	var one int
	require.NoError(t, connect(t, proxy.URL(), pgx.QueryExecModeExec).QueryRow(t.Context(), "SELECT 1").Scan(&one))
}

func TestFaultsStrikeInTheirOrderOnEveryConnection(t *testing.T) {
	t.Parallel()
	table := newTable(t)
	for range 2 {
		table.CutAfterReply(pgtest.Executes("INSERT INTO"))
	}
	last := table.CutBeforeSend(pgtest.Executes("INSERT INTO"))
	for n := range 3 {
		_, err := connect(t, table.URL(), pgx.QueryExecModeExec).Exec(t.Context(), table.insert, n)
		require.Error(t, err)
	}
	last.Wait(t)
	require.Equal(t, []int{0, 1}, table.numbers(t))
}

func TestStartupCanBeCut(t *testing.T) {
	t.Parallel()
	proxy := pgtest.NewProxy(t, pgtest.DSN(t))
	startup := func(m pgtest.FrontendMessage) bool { return m.Type == 0 }
	before, after := proxy.CutBeforeSend(startup), proxy.CutAfterReply(startup)
	for _, fault := range []*pgtest.Fault{before, after} {
		_, err := pgx.Connect(t.Context(), proxy.URL())
		require.Error(t, err)
		fault.Wait(t)
	}
	require.NoError(t, connect(t, proxy.URL(), pgx.QueryExecModeExec).Ping(t.Context()))
}

func TestMessagesSayWhatStatementTheyAreAbout(t *testing.T) {
	t.Parallel()
	proxy := pgtest.NewProxy(t, pgtest.DSN(t))
	seen := map[string]string{}
	proxy.HoldRequest(func(m pgtest.FrontendMessage) bool {
		seen[m.SQL] += string(m.Type)
		return false
	})
	conn := connect(t, proxy.URL(), pgx.QueryExecModeCacheStatement)
	for range 2 {
		for _, sql := range []string{"SELECT 'a', $1::int", "SELECT 'b', $1::int"} {
			_, err := conn.Exec(t.Context(), sql, 1)
			require.NoError(t, err)
		}
	}
	proxy.Down() // nothing is seen any more
	require.Equal(t, "PDBESBES", seen["SELECT 'a', $1::int"])
	require.Equal(t, "PDBESBES", seen["SELECT 'b', $1::int"])
}

func TestProxyKeepsWhatTheURLSays(t *testing.T) {
	t.Parallel()
	target := pgtest.DSN(t)
	if strings.Contains(target, "?") {
		target += "&"
	} else {
		target += "?"
	}
	address, err := url.Parse(pgtest.NewProxy(t, target+"application_name=through%20the%20proxy").URL())
	require.NoError(t, err)
	require.Equal(t, "127.0.0.1", address.Hostname())
	var name string
	require.NoError(t, connect(t, address.String(), pgx.QueryExecModeExec).
		QueryRow(t.Context(), "SELECT current_setting('application_name')").Scan(&name))
	require.Equal(t, "through the proxy", name)
}
