package pgstore

import (
	"encoding/hex"
	"errors"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgtype"
)

// State is what a key's record says of its operation.
type State string

// The states of a live record.
const (
	StateInProgress State = "in_progress" // an attempt holds the key until its lease lapses
	StateDone       State = "done"        // completed: the response is replayed until the retention is over
	StateFailed     State = "failed"      // failed for good: repeats see the failure until the retention is over
	StateRetryable  State = "retryable"   // released: the next Begin with the same fingerprint gets a new attempt
)

// Record is what the database holds for a key at one moment.
type Record struct {
	State       State
	Fingerprint string // of the request that began it, byte for byte
	Response    string // what Complete stored, byte for byte; empty in every state but StateDone

	// ExpiresAt is when the lease lapses (StateInProgress) or the outcome is forgotten (any other state), on the
	// database's clock, in UTC and microseconds. Compare it with other instants of the database; to wait, use Remaining.
	ExpiresAt time.Time

	// Remaining is the time until ExpiresAt as the database measured it while it answered. A client whose clock is wrong
	// can count from it; count from the moment before the call, since the answer took time to arrive.
	Remaining time.Duration

	// Attempt is the fencing token of the execution that holds, or held, the key: unique and increasing over the whole
	// table. Pass it on to every system that can refuse an older one.
	Attempt uint64

	// Abandoned is the attempt whose lease lapsed and which this one replaced, or 0. Nobody knows how far that attempt
	// got: reconcile its effect before repeating it. It outlives a release by Fail.
	Abandoned uint64
}

// row receives the columns that statements return of a record.
type row struct {
	state       string
	fingerprint byteString
	response    byteString
	attempt     int64
	abandoned   *int64
	expiresAt   int64 // microseconds since 1970
	remaining   int64 // microseconds
}

// record converts what the database returned. It cannot fail: the table's constraints hold the values.
func (r *row) record() Record {
	record := Record{
		State:       State(r.state),
		Fingerprint: string(r.fingerprint),
		Response:    string(r.response),
		ExpiresAt:   time.UnixMicro(r.expiresAt).UTC(),
		Remaining:   time.Duration(r.remaining) * time.Microsecond,
		Attempt:     uint64(r.attempt), //nolint:gosec // CHECK (attempt > 0)
	}
	if r.abandoned != nil {
		record.Abandoned = uint64(*r.abandoned) //nolint:gosec // it was an attempt
	}
	return record
}

// byteString receives a bytea, or NULL as the empty string.
type byteString string

// ScanBytes implements pgtype.BytesScanner: what arrives in binary needs the one copy that an immutable string takes.
func (s *byteString) ScanBytes(v []byte) error {
	*s = byteString(v)
	return nil
}

// ScanText implements pgtype.TextScanner, for the query execution modes in which values arrive as text. pgx reads only one of
// the two formats that a session's bytea_output chooses from.
func (s *byteString) ScanText(v pgtype.Text) error {
	decode := unescape
	text, isHex := strings.CutPrefix(v.String, `\x`) // what is escaped has another backslash or a digit behind the first
	if isHex {
		decode = unhex
	}
	decoded, err := decode(text)
	*s = byteString(decoded)
	return err
}

// errNotBytea says that the server sent something else than it should, without repeating any of it.
var errNotBytea = errors.New("the server sent a bytea in neither of its formats")

// unhex reads two hexadecimal digits for each byte.
func unhex(digits string) (string, error) {
	var b strings.Builder
	b.Grow(len(digits) / 2)
	if _, err := io.Copy(&b, hex.NewDecoder(strings.NewReader(digits))); err != nil {
		return "", errNotBytea
	}
	return b.String(), nil
}

// unescape reads bytes that stand for themselves, two backslashes for one, and a backslash and three octal digits for any byte.
func unescape(text string) (string, error) {
	var b strings.Builder
	b.Grow(len(text))
	for {
		plain, rest, found := strings.Cut(text, `\`)
		b.WriteString(plain)
		if !found {
			return b.String(), nil
		}
		if strings.HasPrefix(rest, `\`) {
			b.WriteByte('\\')
			text = rest[1:]
			continue
		}
		const digits = 3
		if len(rest) < digits {
			return "", errNotBytea
		}
		octet, err := strconv.ParseUint(rest[:digits], 8, 8)
		if err != nil {
			return "", errNotBytea
		}
		b.WriteByte(byte(octet))
		text = rest[digits:]
	}
}
