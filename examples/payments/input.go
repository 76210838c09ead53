package main

import (
	"bufio"
	"bytes"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"os"
)

//go:generate go run ./generate requests.jsonl

//go:embed requests.jsonl
var builtIn []byte

// maxLine is the longest line in bytes, without its end. A longer one is rejected and never held in memory.
const maxLine = 1 << 20

// line is one line of the input that is not blank.
type line struct {
	number  int    // counted from 1, blank lines too
	body    []byte // without the line's end
	tooLong bool   // over maxLine, so that body is missing
}

// readInput reads the named file, or the one that comes with the program.
func readInput(name string) (lines []line, blank int, err error) {
	if name == "" {
		return readLines(bytes.NewReader(builtIn))
	}
	file, err := os.Open(name)
	if err != nil {
		return nil, 0, fmt.Errorf("open the requests: %w", err)
	}
	defer file.Close() //nolint:errcheck // only read
	return readLines(file)
}

// readLines splits the input. Lines end in LF or CRLF, the last one perhaps in nothing. A byte order mark is no part of the
// first. Blank lines are counted and left out.
func readLines(r io.Reader) (lines []line, blank int, err error) {
	reader := bufio.NewReaderSize(r, 64<<10)
	for number := 1; ; number++ {
		l, err := readLine(reader)
		ended := errors.Is(err, io.EOF)
		if err != nil && !ended {
			return nil, 0, fmt.Errorf("read line %d of the requests: %w", number, err)
		}
		if number == 1 {
			l.body = bytes.TrimPrefix(l.body, []byte("\ufeff"))
		}
		switch {
		case l.tooLong || len(bytes.TrimSpace(l.body)) > 0:
			l.number = number
			lines = append(lines, l)
		case !ended:
			blank++
		}
		if ended {
			return lines, blank, nil
		}
	}
}

func readLine(r *bufio.Reader) (l line, err error) {
	for {
		var part []byte
		part, err = r.ReadSlice('\n')
		if !l.tooLong {
			l.body = append(l.body, part...)
		}
		full := errors.Is(err, bufio.ErrBufferFull)
		if !full {
			l.body = bytes.TrimSuffix(bytes.TrimSuffix(l.body, []byte("\n")), []byte("\r"))
		}
		if len(l.body) > maxLine {
			l.body, l.tooLong = nil, true
		}
		if !full {
			return l, err //nolint:wrapcheck // the caller knows the line's number
		}
	}
}
