package pgstore_test

import (
	"bufio"
	"context"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/archlab/idempotency/internal/pgtest"
	"github.com/archlab/idempotency/migrations"
	"github.com/archlab/idempotency/pgstore"
)

// Moments of a call at which something can happen. The last two are those of DoTx, the others of Do.
const (
	beforeBegin    = "before Begin"
	afterBegin     = "after Begin"
	duringFn       = "during fn"
	afterFn        = "after fn"
	duringComplete = "during Complete"
	afterComplete  = "after Complete"
	beforeCommit   = "during COMMIT, not yet done"
	afterCommit    = "during COMMIT, done"
)

// Ways in which things end.
const (
	processKilled    = "process killed"
	connectionCut    = "connection cut"
	databaseStopped  = "database stopped"
	contextCancelled = "context cancelled"
	panics           = "panic"
	goexits          = "Goexit"
	leaseLost        = "lease lost"
)

var (
	guaranteeMoments = []string{beforeBegin, afterBegin, duringFn, afterFn, duringComplete, afterComplete, beforeCommit, afterCommit}
	guaranteeWays    = []string{processKilled, connectionCut, databaseStopped, contextCancelled, panics, goexits, leaseLost}
)

// guarantee is a cell of the table, in the words of docs/guarantees.md, each of which stands for what the test looks at.
type guarantee struct{ runs, key, caller, next string }

// The words.
const (
	notRun       = "not run"
	once         = "once"
	successorToo = "once, and once by its successor"
	rolledBack   = "once, rolled back"
	again        = "twice, the first time rolled back"

	free = "free"
	held = "held until its lease lapses"
	done = "done"

	response       = "the response"
	dead           = "nothing: it is dead"
	ownPanic       = "the panic"
	ended          = "nothing: its goroutine has ended"
	storeError     = "the driver's error"
	contextError   = "its context's error"
	leaseExpired   = "`ErrLeaseExpired`"
	staleAttempt   = "`ErrStaleAttempt`, and its context told it so"
	notRecorded    = "the response, `ErrNotRecorded` and `ErrStaleAttempt`"
	outcomeUnknown = "`ErrOutcomeUnknown`"

	runs            = "runs it"
	replays         = "gets the response"
	replaysAnothers = "gets the successor's response"
	told            = "gets `ErrInProgress`; from the lease's end it runs, and sees `Abandoned`"
)

var (
	nothingHappened = func(caller string) guarantee { return guarantee{notRun, free, caller, runs} }
	heldUnrun       = func(caller string) guarantee { return guarantee{notRun, held, caller, told} }
	heldAfterARun   = func(caller string) guarantee { return guarantee{once, held, caller, told} }
	recorded        = func(caller string) guarantee { return guarantee{once, done, caller, replays} }
	undone          = func(caller string) guarantee { return guarantee{rolledBack, free, caller, runs} }
)

// guarantees is the table: a row for each moment, a cell for each way.
var guarantees = map[string][]guarantee{
	//              killed                 cut                   stopped                   cancelled                      panic                    Goexit                lost
	beforeBegin:    {nothingHappened(dead), recorded(response), nothingHappened(storeError), nothingHappened(contextError), nothingHappened(ownPanic), nothingHappened(ended), recorded(response)},
	afterBegin:     {heldUnrun(dead), recorded(response), heldUnrun(storeError), heldUnrun(contextError), heldUnrun(ownPanic), heldUnrun(ended), nothingHappened(leaseExpired)},
	duringFn:       {heldAfterARun(dead), recorded(response), recorded(response), heldAfterARun(contextError), heldAfterARun(ownPanic), heldAfterARun(ended), {successorToo, done, staleAttempt, replaysAnothers}},
	afterFn:        {heldAfterARun(dead), recorded(response), recorded(response), recorded(response), heldAfterARun(ownPanic), heldAfterARun(ended), {successorToo, done, notRecorded, replaysAnothers}},
	duringComplete: {recorded(dead), recorded(response), recorded(response), recorded(response), recorded(ownPanic), recorded(ended), recorded(response)},
	afterComplete:  {recorded(dead), recorded(response), recorded(response), recorded(response), recorded(ownPanic), recorded(ended), recorded(response)},
	beforeCommit:   {undone(dead), {again, done, response, replays}, undone(outcomeUnknown), recorded(response), undone(ownPanic), undone(ended), recorded(response)},
	afterCommit:    {recorded(dead), recorded(response), recorded(outcomeUnknown), recorded(response), recorded(ownPanic), recorded(ended), recorded(response)},
}

func guaranteeTest(moment, way string) string {
	return "TestGuarantees/" + strings.ReplaceAll(moment+"/"+way, " ", "_")
}

// Each cell of docs/guarantees.md is made to happen: processes are killed, connections cut, a server is stopped and started.
func TestGuarantees(t *testing.T) {
	t.Parallel()
	for _, moment := range guaranteeMoments {
		t.Run(moment, func(t *testing.T) {
			t.Parallel()
			for i, way := range guaranteeWays {
				t.Run(way, func(t *testing.T) {
					t.Parallel()
					cell := newGuaranteeCell(t, moment, way, guarantees[moment][i])
					cell.happen(t)
					cell.check(t)
				})
			}
		})
	}
}

// guaranteeCell is one cell while it happens.
type guaranteeCell struct {
	guarantee

	moment, way string
	fixture     *fixture // whose own connections nothing happens to
	server      *pgtest.Server
	proxy       *pgtest.Proxy
	pool        *faultPool // through the proxy
	store       *pgstore.Store
	lease       time.Duration

	entered, leave chan struct{} // of fn, where the moment is during fn
	outcome        pgstore.Outcome
	err            error
	panicked       any
	returned       bool
}

func newGuaranteeCell(t *testing.T, moment, way string, want guarantee) *guaranteeCell {
	t.Helper()
	c := &guaranteeCell{guarantee: want, moment: moment, way: way, lease: lease, entered: make(chan struct{}), leave: make(chan struct{})}
	address := pgtest.DSN(t)
	if way == databaseStopped {
		c.server = pgtest.NewServer(t)
		address = c.server.URL()
		pool, err := pgxpool.New(t.Context(), address)
		require.NoError(t, err)
		t.Cleanup(pool.Close)
		_, err = migrations.Up(t.Context(), pool)
		require.NoError(t, err)
		c.fixture = &fixture{Pool: pool, Schema: pgstore.SchemaDefault}
		c.fixture.Store = c.fixture.NewStore(t, pool, lease, retention)
	} else {
		c.fixture = setup(t)
	}
	if way == leaseLost { // for leases that are to lapse by themselves
		c.lease = map[string]time.Duration{
			beforeBegin: time.Second, afterBegin: time.Second, duringFn: 3 * time.Second, beforeCommit: 100 * time.Millisecond, afterCommit: 100 * time.Millisecond,
		}[moment]
		if c.lease == 0 {
			c.lease = lease
		}
	}
	schema := pgx.Identifier{c.fixture.Schema}.Sanitize()
	_, err := c.fixture.Pool.Exec(t.Context(), fmt.Sprintf(`CREATE TABLE %[1]s.run (); CREATE TABLE %[1]s.effect ()`, schema))
	require.NoError(t, err)
	c.proxy = pgtest.NewProxy(t, address)
	c.pool = newFaultPool(t, c.proxy.URL(), func(config *pgxpool.Config) {
		if way == panics || way == goexits {
			config.ConnConfig.Tracer = &guaranteeTracer{c}
		}
	})
	c.store = c.fixture.NewStore(t, c.pool, c.lease, retention)
	return c
}

// isTx reports whether the moment is one of DoTx.
func (c *guaranteeCell) isTx() bool { return c.moment == beforeCommit || c.moment == afterCommit }

// gate makes the message wait at the proxy that the moment is about.
func (c *guaranteeCell) gate() *pgtest.Fault {
	begin, complete := pgtest.Executes(c.store.Statements().Begin), pgtest.Executes(c.store.Statements().Complete)
	switch c.moment {
	case beforeBegin:
		return c.proxy.HoldRequest(begin)
	case afterBegin:
		return c.proxy.HoldReply(begin)
	case afterFn:
		return c.proxy.HoldRequest(complete)
	case duringComplete:
		return c.proxy.HoldReply(complete)
	case beforeCommit:
		return c.proxy.HoldRequest(dotxCommit)
	case afterCommit:
		return c.proxy.HoldReply(dotxCommit)
	}
	return nil
}

// guaranteeWork is the function of Do and DoTx: it notes its run by a connection of its own, which nothing happens to, and its effect on tx,
// where there is one.
func guaranteeWork(ctx context.Context, direct *pgxpool.Pool, schema string, tx pgx.Tx) (string, error) {
	name := pgx.Identifier{schema}.Sanitize()
	if _, err := direct.Exec(context.WithoutCancel(ctx), `INSERT INTO `+name+`.run DEFAULT VALUES`); err != nil {
		return "", err
	}
	if tx != nil {
		if _, err := tx.Exec(ctx, `INSERT INTO `+name+`.effect DEFAULT VALUES`); err != nil {
			return "", err
		}
	}
	return recordResponse, nil
}

// call is the call that something happens to.
func (c *guaranteeCell) call(ctx context.Context) { //nolint:contextcheck // the caller's, inside a context of the test's own
	defer func() {
		if !c.returned {
			c.panicked = recover()
		}
	}()
	if c.moment == beforeBegin {
		ctx = guaranteeContext{ctx, c}
	}
	work := func(ctx context.Context, tx pgx.Tx) (string, error) {
		response, err := guaranteeWork(ctx, c.fixture.Pool, c.fixture.Schema, tx)
		if c.moment != duringFn || err != nil {
			return response, err
		}
		close(c.entered)
		select {
		case <-ctx.Done():
			return "", ctx.Err()
		case <-c.leave:
		}
		c.end()
		return response, nil
	}
	if c.isTx() {
		c.outcome, c.err = c.store.DoTx(ctx, key, fingerprint, func(ctx context.Context, tx pgx.Tx, _ pgstore.Record) (string, error) {
			return work(ctx, tx)
		}, pgstore.WithLockWait(faultWait))
	} else {
		c.outcome, c.err = c.store.Do(ctx, key, fingerprint, func(ctx context.Context, _ pgstore.Record) (string, error) {
			return work(ctx, nil)
		})
	}
	if c.moment == afterComplete {
		c.end()
	}
	c.returned = true
}

// end ends the goroutine in the way that is the caller's own doing.
func (c *guaranteeCell) end() {
	switch c.way {
	case panics:
		panic(errDo)
	case goexits:
		runtime.Goexit()
	}
}

// guaranteeContext is code of the user's that runs inside of a call before anything is sent.
type guaranteeContext struct {
	context.Context //nolint:containedctx // it is one

	cell *guaranteeCell
}

// Err implements context.Context.
func (c guaranteeContext) Err() error {
	c.cell.end()
	return c.Context.Err()
}

// guaranteeTracer is code of the user's that runs inside of a call at other moments in which nothing else of theirs does.
type guaranteeTracer struct{ cell *guaranteeCell }

type guaranteeTraced struct{}

func (tr *guaranteeTracer) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	tr.at(data.SQL, "", afterFn, beforeCommit)
	return context.WithValue(ctx, guaranteeTraced{}, data.SQL)
}

func (tr *guaranteeTracer) TraceQueryEnd(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryEndData) {
	sql, _ := ctx.Value(guaranteeTraced{}).(string)
	tr.at(sql, afterBegin, duringComplete, afterCommit)
}

// at ends the goroutine if the statement is the one that the cell's moment is about.
func (tr *guaranteeTracer) at(sql, begin, complete, commit string) {
	statements := tr.cell.store.Statements()
	if moment := map[string]string{statements.Begin: begin, statements.Complete: complete, "commit": commit}[sql]; moment == tr.cell.moment {
		tr.cell.end()
	}
}

// happen makes the call, and lets the thing happen at the moment.
func (c *guaranteeCell) happen(t *testing.T) {
	t.Helper()
	if c.way == processKilled {
		c.kill(t)
		return
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	finished := make(chan struct{})
	start := func() {
		go func() {
			defer close(finished)
			c.call(ctx)
		}()
	}
	wait := func() {
		t.Helper()
		select {
		case <-finished:
		case <-time.After(faultWait):
			require.FailNow(t, "the call never came to its end")
		}
	}
	if c.way == leaseLost && c.moment == beforeBegin {
		c.outwait(t, start)
		wait()
		return
	}
	gate := (*pgtest.Fault)(nil)
	if c.way != panics && c.way != goexits {
		gate = c.gate()
	}
	start()
	switch {
	case gate != nil:
		gate.Wait(t)
	case c.moment == duringFn:
		<-c.entered
	case c.moment == afterComplete, c.way == panics, c.way == goexits:
		wait()
	}
	let := func() {
		if gate != nil {
			gate.Release()
		}
		if c.moment == duringFn {
			close(c.leave)
		}
	}
	switch c.way {
	case connectionCut:
		c.proxy.Down()
		c.proxy.Up()
		let()
	case databaseStopped:
		require.NoError(t, c.server.Stop(t.Context()))
		c.proxy.Down()
		c.proxy.Up()
		let()
		if slices.Contains([]string{beforeBegin, afterBegin, beforeCommit, afterCommit}, c.moment) {
			wait() // what is recorded is tried until it is there; all else has an end before
		}
		require.NoError(t, c.server.Start(t.Context()))
		c.fixture.Pool.Reset() // its connections are those of the server that was stopped
	case contextCancelled:
		cancel()
		switch c.moment {
		case beforeBegin: // what the server has not got yet, it never gets
			wait()
			c.proxy.Down()
			c.proxy.Up()
		case afterBegin:
			wait()
		case duringFn: // it hears of it by its context
			wait()
			return
		}
		let()
	case leaseLost:
		c.lose(t)
		if c.moment == duringFn {
			wait() // it hears of it by its context
			return
		}
		let()
	default:
		let()
	}
	wait()
}

// outwait begins while somebody else's transaction holds the key for longer than a lease.
func (c *guaranteeCell) outwait(t *testing.T, start func()) {
	t.Helper()
	tx := directedTx(t, c.fixture.Pool)
	_, _, err := c.fixture.WithTx(tx).Begin(t.Context(), key, fingerprint)
	require.NoError(t, err)
	start()
	faultEventually(t, "waiting", func() bool { return c.pool.sessions(t, c.fixture.Pool, faultWaiting) == 1 })
	require.NoError(t, beatPasses(t.Context(), c.fixture, c.lease))
	require.NoError(t, tx.Rollback(t.Context()))
}

// lose lets the lease lapse, by itself or by moving it back in time, and, where that can be, another attempt take over.
func (c *guaranteeCell) lose(t *testing.T) {
	t.Helper()
	switch c.moment {
	case afterBegin:
		require.NoError(t, beatPasses(t.Context(), c.fixture, c.lease))
	case beforeCommit, afterCommit:
		require.NoError(t, beatPasses(t.Context(), c.fixture, 2*c.lease))
	case duringFn, afterFn:
		recordAge(t, c.fixture, key, c.lease)
		_, err := c.fixture.Do(t.Context(), key, fingerprint, func(ctx context.Context, r pgstore.Record) (string, error) {
			require.EqualValues(t, 1, r.Abandoned)
			_, err := guaranteeWork(ctx, c.fixture.Pool, c.fixture.Schema, nil)
			return "the successor's", err
		})
		require.NoError(t, err)
	default:
		recordAge(t, c.fixture, key, c.lease)
	}
}

// guaranteeChild is the environment of the process that is killed: the proxy's address, the database's, the schema and the moment.
const guaranteeChild = "IDEMPOTENCY_GUARANTEE_CHILD"

// kill runs the call in a process of its own, and kills that at the moment.
func (c *guaranteeCell) kill(t *testing.T) {
	t.Helper()
	gate := c.gate()
	command := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestGuaranteeChild$") //nolint:gosec // this very program
	command.Env = append(os.Environ(), guaranteeChild+"="+strings.Join([]string{c.proxy.URL(), pgtest.DSN(t), c.fixture.Schema, c.moment}, "\n"),
		pgtest.EnvURL+"="+pgtest.DSN(t), pgtest.EnvRequire+"=url")
	command.Stderr = os.Stderr
	output, err := command.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, command.Start())
	if gate != nil {
		gate.Wait(t)
	} else {
		said, lines := "", bufio.NewScanner(output)
		for said != "child: "+c.moment && lines.Scan() {
			said = lines.Text()
		}
		require.NoError(t, lines.Err())
	}
	require.NoError(t, command.Process.Kill())
	require.ErrorContains(t, command.Wait(), "signal: killed")
	if gate != nil {
		if c.moment == beforeBegin || c.moment == afterFn || c.moment == beforeCommit { // what the server has not got yet, it never gets
			c.proxy.Down()
			c.proxy.Up()
		}
		gate.Release()
	}
}

// TestGuaranteeChild is the process that another test kills.
func TestGuaranteeChild(t *testing.T) {
	t.Parallel()
	if os.Getenv(guaranteeChild) == "" {
		return
	}
	told := strings.Split(os.Getenv(guaranteeChild), "\n")
	proxied, err := pgxpool.New(t.Context(), told[0])
	require.NoError(t, err)
	direct, err := pgxpool.New(t.Context(), told[1])
	require.NoError(t, err)
	schema, moment := told[2], told[3]
	store, err := pgstore.New(proxied, lease, retention, pgstore.WithSchema(schema))
	require.NoError(t, err)
	reach := func(here string) {
		if here == moment {
			fmt.Fprintln(os.Stdout, "child: "+here) //nolint:errcheck // the parent will miss it
			select {}                               // until the end
		}
	}
	if moment == beforeCommit || moment == afterCommit {
		_, err = store.DoTx(t.Context(), key, fingerprint, func(ctx context.Context, tx pgx.Tx, _ pgstore.Record) (string, error) {
			return guaranteeWork(ctx, direct, schema, tx)
		})
	} else {
		_, err = store.Do(t.Context(), key, fingerprint, func(ctx context.Context, _ pgstore.Record) (string, error) {
			response, err := guaranteeWork(ctx, direct, schema, nil)
			reach(duringFn)
			return response, err
		})
	}
	require.NoError(t, err)
	reach(afterComplete)
	require.Fail(t, "it should have been killed")
}

// check holds what has happened against the words.
func (c *guaranteeCell) check(t *testing.T) {
	t.Helper()
	c.checkRuns(t)
	c.checkKey(t)
	c.checkCaller(t)
	c.checkNext(t)
}

func (c *guaranteeCell) count(t *testing.T, table string) int {
	t.Helper()
	return faultCount(t, c.fixture, pgx.Identifier{c.fixture.Schema, table}.Sanitize())
}

func (c *guaranteeCell) checkRuns(t *testing.T) {
	t.Helper()
	require.Equal(t, map[string]int{notRun: 0, once: 1, successorToo: 2, rolledBack: 1, again: 2}[c.runs], c.count(t, "run"))
	effects := 0
	if c.isTx() && c.key == done {
		effects = 1
	}
	faultEventually(t, "effects as committed", func() bool { return c.count(t, "effect") == effects })
}

func (c *guaranteeCell) checkKey(t *testing.T) {
	t.Helper()
	rows := faultRows(t, c.fixture, key)
	switch c.key {
	case free:
		require.True(t, len(rows) == 0 || rows[0].State == pgstore.StateRetryable, rows)
	case held:
		require.Equal(t, pgstore.StateInProgress, faultTheRow(t, c.fixture, key).State)
	case done:
		require.Equal(t, pgstore.StateDone, faultTheRow(t, c.fixture, key).State)
	default:
		require.Fail(t, "no such word", c.key)
	}
}

func (c *guaranteeCell) checkCaller(t *testing.T) {
	t.Helper()
	require.Equal(t, c.caller == ownPanic, c.panicked != nil, c.panicked)
	require.Equal(t, c.caller != ownPanic && c.caller != ended && c.caller != dead, c.returned)
	switch c.caller {
	case dead, ended:
	case ownPanic:
		require.Equal(t, errDo, c.panicked)
	case response:
		require.NoError(t, c.err)
		require.Equal(t, recordResponse, c.outcome.Response)
		require.False(t, c.outcome.Replayed)
	case storeError:
		faultIsNoSentinel(t, c.err)
	case contextError:
		require.ErrorIs(t, c.err, context.Canceled)
	case leaseExpired:
		require.ErrorIs(t, c.err, pgstore.ErrLeaseExpired)
	case staleAttempt:
		require.ErrorIs(t, c.err, pgstore.ErrStaleAttempt)
	case notRecorded:
		require.ErrorIs(t, c.err, pgstore.ErrNotRecorded)
		require.ErrorIs(t, c.err, pgstore.ErrStaleAttempt)
		require.Equal(t, recordResponse, c.outcome.Response)
	case outcomeUnknown:
		require.ErrorIs(t, c.err, pgstore.ErrOutcomeUnknown)
	default:
		require.Fail(t, "no such word", c.caller)
	}
}

func (c *guaranteeCell) checkNext(t *testing.T) {
	t.Helper()
	const second = "the next caller's"
	var abandoned uint64
	next := func() (pgstore.Outcome, error) {
		return c.fixture.Do(t.Context(), key, fingerprint, func(_ context.Context, r pgstore.Record) (string, error) {
			abandoned = r.Abandoned
			return second, nil
		})
	}
	if c.next == told {
		_, err := next()
		require.ErrorIs(t, err, pgstore.ErrInProgress)
		recordAge(t, c.fixture, key, c.lease)
	}
	outcome, err := next()
	require.NoError(t, err)
	switch c.next {
	case told:
		require.Equal(t, second, outcome.Response)
		require.EqualValues(t, 1, abandoned)
	case runs:
		require.Equal(t, second, outcome.Response)
		require.Zero(t, abandoned)
	case replays:
		require.Equal(t, recordResponse, outcome.Response)
		require.True(t, outcome.Replayed)
	case replaysAnothers:
		require.Equal(t, "the successor's", outcome.Response)
		require.True(t, outcome.Replayed)
	default:
		require.Fail(t, "no such word", c.next)
	}
}

// The document's tables are those of the test.
func TestGuaranteesAreWrittenAsTheyAreTested(t *testing.T) {
	t.Parallel()
	const file, from, to = "../docs/guarantees.md", "<!-- The tables are written by TestGuaranteesAreWrittenAsTheyAreTested -update. -->\n", "<!-- end of the tables -->"
	document, err := os.ReadFile(file)
	require.NoError(t, err)
	before, rest, found := strings.Cut(string(document), from)
	require.True(t, found)
	tables, after, found := strings.Cut(rest, to)
	require.True(t, found)
	want := guaranteeTables()
	if *updateGuarantees {
		require.NoError(t, os.WriteFile(file, []byte(before+from+want+to+after), 0o600)) //nolint:gosec // the document
		return
	}
	require.Equal(t, want, tables, "go test ./pgstore -run TestGuaranteesAreWritten -update")
}

// updateGuarantees is the flag that has the document's tables written anew.
var updateGuarantees = flag.Bool("update", false, "write the tables of docs/guarantees.md anew")

func guaranteeTables() string {
	var b strings.Builder
	b.WriteString("\n|  | " + strings.Join(guaranteeWays, " | ") + " |\n|---" + strings.Repeat("|---", len(guaranteeWays)) + "|\n")
	for _, moment := range guaranteeMoments {
		b.WriteString("| **" + moment + "** |")
		for _, cell := range guarantees[moment] {
			b.WriteString(" " + cell.brief() + " |")
		}
		b.WriteString("\n")
	}
	for _, moment := range guaranteeMoments {
		fmt.Fprintf(&b, "\n### %s\n\n%s\n\n| | fn ran | the key | the caller gets | the next caller | test |\n|---|---|---|---|---|---|\n",
			strings.ToUpper(moment[:1])+moment[1:], guaranteeNotes[moment])
		for i, way := range guaranteeWays {
			c := guarantees[moment][i]
			fmt.Fprintf(&b, "| %s | %s | %s | %s | %s | `%s` |\n", way, c.runs, c.key, c.caller, c.next, guaranteeTest(moment, way))
		}
	}
	return b.String() + "\n"
}

// brief is a cell of the first table.
func (g guarantee) brief() string {
	switch {
	case g.runs == successorToo:
		return "successor's stands"
	case g.key == done && g.caller == outcomeUnknown:
		return "done, unknown"
	case g.key == done:
		return "done"
	case g.key == held:
		return "held"
	case g.caller == outcomeUnknown:
		return "rolled back, unknown"
	case g.runs == rolledBack:
		return "rolled back"
	}
	return "nothing"
}

// guaranteeNotes say what the moments are.
var guaranteeNotes = map[string]string{
	beforeBegin: "`Do` has been called, and the server has not got its first statement. A statement that is on its way may still arrive when its sender has gone; " +
		"then it is as after Begin. Where a lease can be lost so early, the Begin has waited for somebody else's transaction for all of it, and draws a fresh one.",
	afterBegin:     "The server has reserved the key; the answer is under way. After a cut the call asks again, and recognises its own record. An answer that takes as long as the lease is not believed.",
	duringFn:       "The function is at work, and has had its effect. Only its context can tell it to stop. While the database is away the lease is not extended, but nobody else can begin either.",
	afterFn:        "The function has returned its response, and the server has not got the Complete. It is sent again until the lease ends.",
	duringComplete: "The server has stored the response; the answer is under way. A Complete that is sent again finds what it wants.",
	afterComplete:  "The call has returned. Nothing can change what is stored.",
	beforeCommit: "`DoTx`: the function has returned, the key is completed in the transaction, and COMMIT is under way. After a cut the call begins again, finds that the transaction is gone, and runs the function again. " +
		"All that happens to a `DoTx` before this moment leaves nothing: the server rolls back (`TestDoTxTellsTheTruthWhereverItIsCut`, `TestDoTxRollsBackWhenItsFunctionLeaves`, `TestDoTxOfACallerWhoLeaves`, `TestDoTxWhoseSessionIsTerminated`).",
	afterCommit: "`DoTx`: everything is committed; the answer is under way. After a cut the call begins again, and finds its own record. With the database stopped there is nobody to ask: the next call tells.",
}
