package main_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	payments "github.com/archlab/idempotency/examples/payments"
)

const body = `{"tenant":"acct_1","idempotency_key":"k-1","amount":1999,"currency":"EUR","customer":"cus_1","description":"Café ☕"}`

var parsed = payments.Payment{
	Tenant: "acct_1", IdempotencyKey: "k-1", Amount: 1999, Currency: "EUR", Customer: "cus_1", Description: "Café ☕",
}

func TestAValidBodyIsParsed(t *testing.T) {
	t.Parallel()
	for name, text := range map[string]string{
		"as it is":             body,
		"members rearranged":   `{"description":"Café ☕","customer":"cus_1","currency":"EUR","amount":1999,"idempotency_key":"k-1","tenant":"acct_1"}`,
		"with white space":     " " + strings.ReplaceAll(body, ",", " , ") + "\t",
		"with escapes":         strings.ReplaceAll(body, "é", `\u00e9`),
		"a surrogate pair too": strings.ReplaceAll(body, "☕", `\u2615`),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p, err := payments.Parse([]byte(text))
			require.NoError(t, err)
			require.Equal(t, parsed, p)
		})
	}
}

func TestTenantAndKeyAreLeftToTheStore(t *testing.T) {
	t.Parallel()
	for _, text := range []string{
		strings.Replace(body, `"tenant":"acct_1",`, "", 1),
		strings.Replace(body, `"idempotency_key":"k-1",`, "", 1),
		strings.Replace(body, "k-1", strings.Repeat("k", 1000), 1),
		strings.Replace(body, "k-1", `k\u0000`, 1),
	} {
		_, err := payments.Parse([]byte(text))
		require.NoError(t, err)
	}
}

func TestAnInvalidBodyIsRefusedWithTheReason(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ text, reason string }{
		"cut off":                  {body[:50], "not JSON: it ends in the middle"},
		"not JSON":                 {"GET / HTTP/1.1", "not JSON: invalid character 'G'"},
		"an array":                 {"[1]", "the body must be an object, not a JSON array"},
		"a string":                 {`"payment"`, "the body must be an object, not a JSON string"},
		"null":                     {"null", "amount is 0"},
		"two objects":              {body + body, "more than one JSON object"},
		"garbage behind":           {body + "}", "more than one JSON object"},
		"not UTF-8":                {strings.Replace(body, "é", "\xe9", 1), "not valid UTF-8"},
		"half a surrogate pair":    {strings.Replace(body, "é", `\ud83d`, 1), "description holds a character that is none"},
		"half a pair in the key":   {strings.Replace(body, "k-1", `k-\udc00`, 1), "idempotency_key holds a character that is none"},
		"NUL":                      {strings.Replace(body, "é", `\u0000`, 1), "description holds a NUL"},
		"an unknown member":        {strings.Replace(body, "{", `{"metadata":{},`, 1), `unknown field "metadata"`},
		"amount as text":           {strings.Replace(body, "1999", `"19.99"`, 1), "amount must be an integer of minor units, not a JSON string"},
		"a fraction":               {strings.Replace(body, "1999", "19.99", 1), "amount must be an integer of minor units, not a JSON number 19.99"},
		"over int64":               {strings.Replace(body, "1999", "9223372036854775808", 1), "amount must be an integer of minor units"},
		"too much":                 {strings.Replace(body, "1999", "1000000000000", 1), "amount is 1000000000000: it must be between 1 and 999999999999"},
		"nothing":                  {strings.Replace(body, "1999", "0", 1), "amount is 0: it must be between 1 and"},
		"less than nothing":        {strings.Replace(body, "1999", "-5", 1), "amount is -5: it must be between 1 and"},
		"no amount":                {strings.Replace(body, `"amount":1999,`, "", 1), "amount is 0"},
		"customer as number":       {strings.Replace(body, `"cus_1"`, "7", 1), "customer must be a string, not a JSON number"},
		"no customer":              {strings.Replace(body, `"cus_1"`, `""`, 1), "customer is missing"},
		"currency in small":        {strings.Replace(body, "EUR", "eur", 1), `currency is "eur": it must be three capital letters`},
		"currency by its sign":     {strings.Replace(body, "EUR", "€", 1), `currency is "€"`},
		"a currency of any length": {strings.Replace(body, "EUR", strings.Repeat("EUR", 100), 1), `currency is "EUREUREUREUREUREUREU": it must`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := payments.Parse([]byte(c.text))
			require.ErrorContains(t, err, c.reason)
		})
	}
}

func TestTheFingerprintDependsOnEveryMemberAndWhereItEnds(t *testing.T) {
	t.Parallel()
	seen := map[string]payments.Payment{}
	for _, p := range []payments.Payment{
		{Amount: 1, Currency: "EUR", Customer: "cus_1", Description: "2"},
		{Amount: 2, Currency: "EUR", Customer: "cus_1", Description: "2"},
		{Amount: 1, Currency: "USD", Customer: "cus_1", Description: "2"},
		{Amount: 1, Currency: "EUR", Customer: "cus_12", Description: "2"},
		{Amount: 1, Currency: "EUR", Customer: "cus_12", Description: ""},
		{Amount: 1, Currency: "EUR", Customer: "cus_", Description: "12"},
		{Amount: 1, Currency: "EUR", Customer: "", Description: "cus_12"},
		{Amount: 1, Currency: "EUR", Customer: "caf\u00e9"},
		{Amount: 1, Currency: "EUR", Customer: "cafe\u0301"},
	} {
		fingerprint := p.Fingerprint()
		require.NotContains(t, seen, fingerprint, "%v and %v", p, seen[fingerprint])
		seen[fingerprint] = p
	}
	require.Equal(t, parsed.Fingerprint(), payments.Payment{
		Tenant: "another", IdempotencyKey: "key", Amount: 1999, Currency: "EUR", Customer: "cus_1", Description: "Café ☕",
	}.Fingerprint(), "tenant and key are not what is compared")
}
