package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"time"
)

// dispatcher hands the requests to the workers, kills some of them, sees to it that what was lost with them is sent again,
// and collects the answers. It runs in one goroutine: what happens comes as an event.
//
// A payment's repeats go out together with it, each to another worker, so that they meet in the database; where there are
// several, the last one comes late, to find the work done. What conflicts with a payment goes out when the payment has been
// answered: while its key is held by a worker that gets killed, the key would come free for either body, and nobody could
// say beforehand which one is right.
type dispatcher struct {
	conf   setup // without the seat
	report *report
	stderr io.Writer

	seats   []*seat
	running int // processes that have not exited
	events  chan event

	queue    []volley // in the order of the input
	next     []volley // the head of the queue, and what has come up meanwhile: small enough to be searched for what fits
	inFlight int
	victim   *submission // the one that is executing towards the moment of its worker's death

	answers map[int]message // by line
	lost    map[int]bool    // lines that were being worked on when their worker was killed

	kills        []kill
	foreignKills int // by somebody else
}

// seat is the place of a worker. When its process dies, another one takes the seat.
type seat struct {
	number   int
	process  *process
	ready    bool
	inFlight map[int]*submission // by line
}

// submission is a line on its way through a worker, or waiting for one.
type submission struct {
	line    line
	task    *task
	halt    moment // at which to kill the worker
	reached bool   // the worker stands still at that moment
}

// task is a number of lines that are sent together. Others follow when all of them are answered.
type task struct {
	open   int
	held   []*submission // repeats that are sent when the worker of the first has been killed
	follow []line
}

// volley is what is to be sent at the same moment, to a worker each as far as there are as many.
type volley struct {
	submissions []*submission
	start       int // the seat to begin with
}

// kill is a worker's death.
type kill struct {
	seat, pid int
	line      int    // that it was working on
	moment    moment // empty: it was not us
	lost      int    // requests that were in its hands
}

// maxForeignKills is how many workers may be killed by somebody else: a reader with another terminal is welcome, but a machine
// that is out of memory would kill them for ever.
const maxForeignKills = 20

func newDispatcher(conf setup, workers int, in *intent, kills int, r *report, stderr io.Writer) *dispatcher {
	d := &dispatcher{
		conf: conf, report: r, stderr: stderr, events: make(chan event),
		answers: make(map[int]message, in.lines), lost: map[int]bool{},
	}
	for n := range workers {
		d.seats = append(d.seats, &seat{number: n + 1, inFlight: map[int]*submission{}})
	}
	d.enqueue(in, kills)
	return d
}

// enqueue makes a volley of each payment and of each line that will be rejected, in the order of the input.
func (d *dispatcher) enqueue(in *intent, kills int) {
	halts := victims(in.payments, kills)
	for _, p := range in.payments {
		together, follow := p.lines, p.conflicts
		if last := len(together) - 1; last > 1 {
			together, follow = together[:last], append([]line{together[last]}, follow...)
		}
		t := &task{open: len(together), follow: follow}
		all := make([]*submission, len(together))
		for i, l := range together {
			all[i] = &submission{line: l, task: t}
		}
		if halt := halts[p]; halt != "" {
			all[0].halt, t.held, all = halt, all[1:], all[:1]
		}
		d.queue = append(d.queue, volley{submissions: all})
	}
	for _, r := range in.rejected {
		if r.tooLong { // a service does not read such a body to its end
			d.answers[r.number] = message{Kind: answered, Line: r.number, Outcome: rejected, Reason: r.reason}
			continue
		}
		d.queue = append(d.queue, volley{submissions: []*submission{{line: r.line, task: &task{open: 1}}}})
	}
	slices.SortStableFunc(d.queue, func(a, b volley) int {
		return a.submissions[0].line.number - b.submissions[0].line.number
	})
	for i := range d.queue {
		d.queue[i].start = i
	}
}

// victims chooses the payments in whose middle a worker is killed: one in each of as many stretches of equal length, if there
// is one, a payment that others repeat.
func victims(payments []*intended, kills int) map[*intended]moment {
	chosen := make(map[*intended]moment, kills)
	kills = min(kills, len(payments))
	for n := range kills {
		stretch := payments[n*len(payments)/kills : (n+1)*len(payments)/kills]
		stretch = stretch[len(stretch)/2:]
		repeated := slices.IndexFunc(stretch, func(p *intended) bool { return len(p.lines) > 1 })
		chosen[stretch[max(repeated, 0)]] = moments[n%len(moments)]
	}
	return chosen
}

// run returns when every line has been answered, or something has gone wrong. No process outlives it.
func (d *dispatcher) run(ctx context.Context) (err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer func() {
		if err != nil {
			cancel() // kills the workers
		}
		for _, s := range d.seats {
			if s.process != nil {
				s.process.finish()
			}
		}
		for d.running > 0 {
			if e := <-d.events; e.exited {
				d.running--
				if err == nil && e.err != nil && !wasKilled(e.err) { // all is answered: no harm in that
					err = fmt.Errorf("worker %d did not end in peace: %w", e.seat.number, e.err)
				}
			}
		}
		cancel()
	}()
	for _, s := range d.seats {
		if err := d.start(ctx, s); err != nil {
			return err
		}
	}
	ticker := time.NewTicker(progressInterval)
	defer ticker.Stop()
	patience := 10*d.conf.Lease + 10*d.conf.Work + 30*time.Second // without any event: something is stuck
	quiet := time.NewTimer(patience)
	defer quiet.Stop()
	for {
		d.send()
		if len(d.queue)+len(d.next)+d.inFlight == 0 {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("stopped: %w", ctx.Err())
		case <-ticker.C:
			d.report.progress(len(d.answers), d.inFlight)
		case <-quiet.C:
			return fmt.Errorf("nothing has happened for %v, and %d requests are not answered", patience, d.inFlight)
		case e := <-d.events:
			quiet.Reset(patience)
			if err := d.handle(ctx, e); err != nil {
				return err
			}
		}
	}
}

func (d *dispatcher) start(ctx context.Context, s *seat) (err error) {
	conf := d.conf
	conf.Seat = s.number
	if s.process, err = startProcess(ctx, s, conf, d.stderr, d.events); err != nil {
		return err
	}
	d.running++
	return nil
}

// maxNext is how far ahead send looks for a volley that fits, where the one in front has to wait.
const maxNext = 16

// send sends as much as the workers can take.
func (d *dispatcher) send() {
	if n := min(maxNext-len(d.next), len(d.queue)); n > 0 {
		d.next = append(d.next, d.queue[:n]...)
		d.queue = d.queue[n:]
	}
	waiting := d.next[:0]
	for _, v := range d.next {
		if v = d.sendVolley(v); len(v.submissions) > 0 {
			waiting = append(waiting, v)
		}
	}
	d.next = waiting
}

// sendVolley returns what is left of the volley.
func (d *dispatcher) sendVolley(v volley) volley {
	first := v.submissions[0]
	free := d.freeSeats(v.start)
	n := min(len(v.submissions), len(d.seats))
	if len(free) < n || first.halt != "" && d.victim != nil {
		return v // rather wait than send one after the other, or have two deaths at a time
	}
	if first.halt != "" {
		d.victim = first
	}
	for i, sub := range v.submissions[:n] {
		s := free[i]
		s.inFlight[sub.line.number] = sub
		d.inFlight++
		s.process.send(request{Line: sub.line.number, Body: sub.line.body, Halt: sub.halt})
	}
	v.submissions = v.submissions[n:]
	return v
}

// freeSeats returns the seats that can take a request, from start on.
func (d *dispatcher) freeSeats(start int) (free []*seat) {
	for i := range d.seats {
		if s := d.seats[(start+i)%len(d.seats)]; s.ready && len(s.inFlight) < slots {
			free = append(free, s)
		}
	}
	return free
}

// sendNext puts volleys in front of all others.
func (d *dispatcher) sendNext(volleys ...volley) { d.next = slices.Insert(d.next, 0, volleys...) }

func (d *dispatcher) handle(ctx context.Context, e event) error {
	switch {
	case e.exited:
		return d.exited(ctx, e)
	case e.Kind == ready:
		e.seat.ready = true
	case e.Kind == halted:
		if sub := e.seat.inFlight[e.Line]; sub != nil {
			sub.reached = true
		}
		e.seat.ready = false
		e.kill()
	case e.Kind == answered:
		return d.answered(e)
	default:
		return fmt.Errorf("worker %d, line %d: %s", e.seat.number, e.Line, e.Reason)
	}
	return nil
}

func (d *dispatcher) answered(e event) error {
	sub := e.seat.inFlight[e.Line]
	if sub == nil {
		return fmt.Errorf("worker %d answers line %d, which it was not asked", e.seat.number, e.Line)
	}
	delete(e.seat.inFlight, e.Line)
	d.inFlight--
	d.answers[e.Line] = e.message
	d.report.answer(e.seat.number, e.message)
	if d.victim == sub { // it was executed before, by a worker that somebody else killed
		d.victim = nil
		d.sendNext(volley{submissions: sub.task.held, start: e.seat.number})
		sub.task.held = nil
	}
	if sub.task.open--; sub.task.open > 0 || len(sub.task.follow) == 0 {
		return nil
	}
	next := &task{open: len(sub.task.follow)}
	v := volley{start: e.seat.number}
	for _, l := range sub.task.follow {
		v.submissions = append(v.submissions, &submission{line: l, task: next})
	}
	d.sendNext(v)
	return nil
}

// exited sees to it that the requests of a killed worker are sent again, to others, as clients would who got no answer, and
// fills the seat again.
func (d *dispatcher) exited(ctx context.Context, e event) error {
	d.running--
	s := e.seat
	s.process, s.ready = nil, false
	if ctx.Err() != nil {
		return fmt.Errorf("stopped: %w", ctx.Err())
	}
	switch {
	case e.err == nil:
		return fmt.Errorf("worker %d ended without being asked", s.number)
	case !wasKilled(e.err):
		return fmt.Errorf("worker %d ended without being asked: %w", s.number, e.err)
	}
	k := kill{seat: s.number, pid: e.pid(), lost: len(s.inFlight)}
	var again []volley
	for _, number := range slices.Sorted(maps.Keys(s.inFlight)) {
		sub := s.inFlight[number]
		d.lost[number] = true
		v := volley{submissions: []*submission{sub}, start: s.number + len(again)}
		if d.victim == sub {
			d.victim = nil
		}
		if sub.reached {
			k.line, k.moment = number, sub.halt
			sub.halt, sub.reached = "", false
			v.submissions = append(v.submissions, sub.task.held...)
			sub.task.held = nil
		}
		again = append(again, v)
	}
	d.inFlight -= len(s.inFlight)
	clear(s.inFlight)
	d.kills = append(d.kills, k)
	d.report.killed(k)
	if k.moment == "" {
		d.foreignKills++
	}
	if d.foreignKills > maxForeignKills {
		return errors.New("too many workers were killed by somebody else: is there not enough memory?")
	}
	d.sendNext(again...)
	return d.start(ctx, s)
}
