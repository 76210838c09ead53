// Package pgtest finds or starts a real PostgreSQL for tests, benchmarks and the demo, keeps tests out of each other's way, and breaks
// connections where a test says. There is no mock of PostgreSQL anywhere.
//
//	func TestMain(m *testing.M) { pgtest.Main(m) }
//
//	func TestSomething(t *testing.T) {
//		t.Parallel()
//		pool, schema := pgtest.Pool(t), pgtest.Schema(t)
//		...
//	}
//
// # Which server
//
// [Start] takes the first of these that works, and [Server.Description] says in one line which it was and why those before it were
// passed over:
//
//  1. url: the server that TEST_DATABASE_URL names. Its role must be able to create schemas and databases.
//  2. container: where a Docker engine of this machine answers within 5 seconds, and an image is there: the one that
//     TEST_POSTGRES_IMAGE names, or archlab-idempotency/postgres:17, or postgres:17. Only where neither is there, and a registry
//     answers within 10 seconds, is the last one pulled, for at most 90 seconds.
//  3. binaries: the newest on the machine, 15 or later, in a temporary folder, as another user than root.
//  4. package: the server package of Debian and its kin, unpacked in the cache folder; nothing is installed.
//  5. An error that says what to install on this system.
//
// PGTEST_REQUIRE=container, say, makes every other rung an error; an image that TEST_POSTGRES_IMAGE names and that cannot be run is
// one too; so are demands that contradict each other. What a test run has shown should not depend on what somebody overlooked.
//
// A server that is started listens on 127.0.0.1 only, on a port that it keeps when it is stopped and started. It forgets what it
// has written if the machine crashes (fsync, synchronous_commit and full_page_writes are off), unless PGTEST_DURABLE=1 or
// [Durable] says otherwise, and has pg_stat_statements where that is to be had.
//
// # Isolation
//
// A test binary has one server and one pool of 15 connections, started for the first test that wants them; if that fails, every
// such test fails with the same error. Each test has a schema of its own with the real migrations, whose name needs quotes, so tests
// run in parallel and see nothing of each other; a statement that forgets to qualify or to quote a name finds nothing. Only what
// belongs to the whole database (roles, a collation, a default of its own) needs a [Database], and only who stops or kills a server
// needs a [NewServer].
//
// Measured on two cores that were shared with other work; the least of 200, and the median:
//
//	                          binaries, 15     container, 17
//	an empty schema           0.06, 0.1 ms     0.08, 0.1 ms
//	a migrated schema         9, 16 ms         12, 25 ms
//	a database                30, 92 ms        30, 194 ms
//	a server that answers     1.0–1.4 s        1.9–2.3 s
//	stop and start again      0.2 s            0.5–0.8 s
//
// # Nothing is left behind
//
// What was started ends with the process that started it, also after a panic, a time-out or a kill. A server from binaries runs
// under a shell that reads a pipe, the other end of which the process holds; at its end, however that comes, the shell stops the
// server and removes its folder. A container has a second process of the same program that waits in the same way. If that is
// killed too, the container's label tells the next process that comes this way whom it belonged to, and that it has gone. On a server
// that TEST_DATABASE_URL names, a killed process does leave its schemas and databases.
//
// [Main] fails a run that leaves goroutines behind.
//
// # Faults
//
// A [Proxy] reads the messages between a client and a server. It cuts before a message, after or within the reply to it, or holds
// either, at the message that a test names, and says when it has: no test sleeps, and none needs luck. It also counts round trips.
// To cut each message of an operation in turn:
//
//	for n := 1; ; n++ {
//		fault := proxy.CutBeforeSend(pgtest.Nth(n, pgtest.Sends("PBDEQS", "")))
//		... // the operation, on a connection to proxy.URL()
//		if !fault.Struck() {
//			break // it has fewer messages
//		}
//		fault.Wait(t) // the session has ended, its locks are gone
//		...
//	}
package pgtest
