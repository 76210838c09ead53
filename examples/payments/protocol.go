package main

import "time"

// The program and its workers exchange JSON values over the workers' standard input and output: a setup first, then
// requests one way and messages the other. A worker ends when its input does, also when that is because the program died.

// workerCommand is the argument by which the program starts itself as a worker.
const workerCommand = "worker"

// slots is how many requests a worker works on at once.
const slots = 4

// setup is the first thing that a worker reads. The URL holds a password, so it is neither an argument nor in the environment,
// where other users of the machine could read it.
type setup struct {
	Seat   int           `json:"seat"`
	URL    string        `json:"url"`
	Schema string        `json:"schema"`
	Lease  time.Duration `json:"lease"`
	Work   time.Duration `json:"work"`
}

// request is a line of the input on its way to a worker.
type request struct {
	Line int    `json:"line"`
	Body []byte `json:"body"` // bytes, since a line need not be text
	Halt moment `json:"halt,omitempty"`
}

// moment is a point in the middle of an execution at which a worker can be told to stop, report, and wait for its death.
type moment string

const (
	afterBegin   moment = "right after Begin"
	afterInsert  moment = "after the ledger's row, before Complete"
	beforeCommit moment = "after Complete, before COMMIT"
	afterCommit  moment = "right after COMMIT, before the answer"
)

// moments are the points at which workers are killed, in turn.
var moments = [...]moment{afterBegin, afterInsert, beforeCommit, afterCommit}

// message is what a worker has to say.
type message struct {
	Kind      kind    `json:"kind"`
	Line      int     `json:"line,omitempty"`
	Outcome   outcome `json:"outcome,omitempty"`
	Response  []byte  `json:"response,omitempty"`
	Attempt   uint64  `json:"attempt,omitempty"`
	Abandoned uint64  `json:"abandoned,omitempty"` // the attempt that this one replaced
	Reason    string  `json:"reason,omitempty"`
}

type kind string

const (
	ready    kind = "ready"    // connected to the database
	answered kind = "answered" // Line has its Outcome
	halted   kind = "halted"   // Line has reached the moment at which it was told to stop
	failed   kind = "failed"   // something happened that the demo does not expect
)

// outcome is what a client gets.
type outcome string

const (
	executed       outcome = "executed"
	replayed       outcome = "replayed"
	waitedReplayed outcome = "in progress, then replayed"
	takenOver      outcome = "taken over"
	conflict       outcome = "conflict"
	rejected       outcome = "rejected"
)
