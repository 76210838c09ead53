package main_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	payments "github.com/archlab/idempotency/examples/payments"
)

// line writes a body with what matters here.
func line(tenant, key string, amount int) string {
	return fmt.Sprintf(`{"tenant":%q,"idempotency_key":%q,"amount":%d,"currency":"EUR","customer":"cus_1","description":"Tee"}`, tenant, key, amount)
}

func TestTheInputSaysWhatIsIntended(t *testing.T) {
	t.Parallel()
	in, err := payments.ReadIntent(strings.NewReader(strings.Join([]string{
		1:  line("a", "k", 0), // refused, so it does not own the key
		2:  line("a", "k", 1),
		3:  line("a", "k", 2),
		4:  line("b", "k", 1),
		5:  "",
		6:  line("a", "k", 1),
		7:  `{"amount":1,"currency":"EUR","customer":"cus_1","description":"Tee","tenant":"b","idempotency_key":"k"}`,
		8:  line("a", "K", 1),
		9:  line("a", strings.Repeat("k", 512), 1),
		10: line("a", strings.Repeat("k", 513), 1),
		11: line("", "k", 1),
		12: line("a", "", 1),
		13: strings.Replace(line("a", "k", 1), `"k"`, `"k\u0000"`, 1),
		14: line("a", strings.Repeat("é", 257), 1),
		15: "{",
		16: line("a", "k", 3),
		17: strings.Repeat(" ", payments.MaxLine) + line("a", "k", 1),
		18: line("a/k", "1", 1),
		19: line("a", "k/1", 1),
	}[1:], "\n")))
	require.NoError(t, err)
	require.Equal(t, [][]int{{2, 6}, {4, 7}, {8}, {9}, {18}, {19}}, in.Payments)
	require.Equal(t, []int{3, 16}, in.Conflicts)
	require.Equal(t, 1, in.Blank)
	require.Equal(t, map[int]string{
		1:  "amount is 0: it must be between 1 and 999999999999",
		10: "tenant or idempotency_key has more than 512 bytes",
		11: "tenant or idempotency_key is missing",
		12: "tenant or idempotency_key is missing",
		13: "tenant or idempotency_key holds a NUL",
		14: "tenant or idempotency_key has more than 512 bytes",
		15: "not JSON: it ends in the middle",
		17: "longer than 1048576 bytes",
	}, in.Rejected)
}
