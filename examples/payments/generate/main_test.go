package main_test

import (
	"bytes"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	generate "github.com/archlab/idempotency/examples/payments/generate"
)

func TestTheCommittedRequestsAreTheGeneratedOnes(t *testing.T) {
	t.Parallel()
	committed, err := os.ReadFile("../requests.jsonl")
	require.NoError(t, err)
	if !bytes.Equal(committed, generate.Requests()) { // without a difference of a thousand lines
		require.Fail(t, "requests.jsonl is out of date, run: go generate ./examples/payments")
	}
}
