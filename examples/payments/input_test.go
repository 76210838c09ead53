package main_test

import (
	"errors"
	"io"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/stretchr/testify/require"

	payments "github.com/archlab/idempotency/examples/payments"
)

func TestLinesAreSplitAndCountedAsAnEditorDoes(t *testing.T) {
	t.Parallel()
	longest := strings.Repeat("x", payments.MaxLine)
	for name, c := range map[string]struct {
		input string
		lines []payments.Line
		blank int
	}{
		"empty":                         {input: ""},
		"one end of line":               {input: "\n", blank: 1},
		"last line without an end":      {input: "a\nb", lines: []payments.Line{{Number: 1, Body: "a"}, {Number: 2, Body: "b"}}},
		"last line with an end":         {input: "a\nb\n", lines: []payments.Line{{Number: 1, Body: "a"}, {Number: 2, Body: "b"}}},
		"CRLF":                          {input: "a\r\nb\r\n", lines: []payments.Line{{Number: 1, Body: "a"}, {Number: 2, Body: "b"}}},
		"only the end's CR is removed":  {input: "a\r\r\nb", lines: []payments.Line{{Number: 1, Body: "a\r"}, {Number: 2, Body: "b"}}},
		"blank lines keep the numbers":  {input: "\n \t\r\na\n\nb", lines: []payments.Line{{Number: 3, Body: "a"}, {Number: 5, Body: "b"}}, blank: 3},
		"byte order mark":               {input: "\ufeffa\n\ufeffb", lines: []payments.Line{{Number: 1, Body: "a"}, {Number: 2, Body: "\ufeffb"}}},
		"nothing but a byte order mark": {input: "\ufeff"},
		"not UTF-8":                     {input: "\xff\n", lines: []payments.Line{{Number: 1, Body: "\xff"}}},
		"a NUL":                         {input: "a\x00\n", lines: []payments.Line{{Number: 1, Body: "a\x00"}}},
		"as long as can be":             {input: longest + "\r\nb", lines: []payments.Line{{Number: 1, Body: longest}, {Number: 2, Body: "b"}}},
		"one byte longer":               {input: longest + "x\nb", lines: []payments.Line{{Number: 1, TooLong: true}, {Number: 2, Body: "b"}}},
		"much longer, and the last":     {input: "a\n" + strings.Repeat(longest, 5), lines: []payments.Line{{Number: 1, Body: "a"}, {Number: 2, TooLong: true}}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for _, r := range []io.Reader{strings.NewReader(c.input), iotest.DataErrReader(strings.NewReader(c.input))} {
				lines, blank, err := payments.ReadLines(r)
				require.NoError(t, err)
				require.Equal(t, c.lines, lines)
				require.Equal(t, c.blank, blank)
			}
		})
	}
}

func TestAnErrorOfReadingNamesTheLine(t *testing.T) {
	t.Parallel()
	broken := errors.New("disk on fire")
	_, _, err := payments.ReadLines(io.MultiReader(strings.NewReader("a\nb"), iotest.ErrReader(broken)))
	require.ErrorIs(t, err, broken)
	require.ErrorContains(t, err, "read line 2 of the requests")
}
