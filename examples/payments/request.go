package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"unicode/utf8"
)

// payment is the body of one request: POST /v1/payments of a payment provider, whose tenants are its merchants.
type payment struct {
	Tenant         string `json:"tenant"`          // the merchant's account
	IdempotencyKey string `json:"idempotency_key"` // chosen by the merchant's client
	Amount         int64  `json:"amount"`          // in minor units: cents, or yen
	Currency       string `json:"currency"`        // three capital letters
	Customer       string `json:"customer"`
	Description    string `json:"description"` // any text, or none
}

// maxAmount is the largest amount in minor units. A million of them fit into the sum of a currency.
const maxAmount = 999_999_999_999

// parse reads and validates a body. It says nothing about tenant and key: that is the store's part, and its errors are
// ErrKeyEmpty and ErrKeyInvalid.
func parse(body []byte) (payment, error) {
	if !utf8.Valid(body) {
		// encoding/json would replace what it cannot read, and make two different requests the same.
		return payment{}, errors.New("not valid UTF-8")
	}
	var p payment
	decoder := json.NewDecoder(bytes.NewReader(body))
	// A member that we do not know is none of the fingerprint, so two requests that differ in it would be taken for one.
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&p); err != nil {
		return payment{}, explain(err)
	}
	if _, err := decoder.Token(); !errors.Is(err, io.EOF) {
		return payment{}, errors.New("more than one JSON object on the line")
	}
	return p, p.validate()
}

// explain says what is wrong with the JSON in the words of the API, not of Go's types.
func explain(err error) error {
	if typeErr, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
		switch typeErr.Field {
		case "":
			return fmt.Errorf("the body must be an object, not a JSON %s", typeErr.Value)
		case "amount":
			return fmt.Errorf("amount must be an integer of minor units, not a JSON %s", typeErr.Value)
		}
		return fmt.Errorf("%s must be a string, not a JSON %s", typeErr.Field, typeErr.Value)
	}
	if errors.Is(err, io.ErrUnexpectedEOF) {
		return errors.New("not JSON: it ends in the middle")
	}
	if _, ok := errors.AsType[*json.SyntaxError](err); ok {
		return fmt.Errorf("not JSON: %w", err)
	}
	return errors.New(strings.TrimPrefix(err.Error(), "json: ")) // an unknown member
}

func (p payment) validate() error {
	for _, member := range [...]struct{ name, text string }{
		{"tenant", p.Tenant}, {"idempotency_key", p.IdempotencyKey}, {"currency", p.Currency},
		{"customer", p.Customer}, {"description", p.Description},
	} {
		switch {
		case strings.ContainsRune(member.text, utf8.RuneError):
			// What encoding/json makes of half a surrogate pair, such as "\ud83d": see above.
			return fmt.Errorf("%s holds a character that is none: half a surrogate pair, or U+FFFD", member.name)
		case strings.Contains(member.text, "\x00") && member.name != "tenant" && member.name != "idempotency_key":
			return fmt.Errorf("%s holds a NUL, which PostgreSQL's text cannot", member.name)
		}
	}
	switch {
	case p.Amount < 1 || p.Amount > maxAmount:
		return fmt.Errorf("amount is %d: it must be between 1 and %d", p.Amount, int64(maxAmount))
	case len(p.Currency) != 3 || strings.Trim(p.Currency, "ABCDEFGHIJKLMNOPQRSTUVWXYZ") != "":
		return fmt.Errorf("currency is %.20q: it must be three capital letters", p.Currency)
	case p.Customer == "":
		return errors.New("customer is missing")
	}
	return nil
}

// fingerprint is a digest of all that makes the request what it is. Tenant and key are left out: they are what it is
// compared under. Each part is preceded by its length, so that no part can pass for the end of another.
//
// It is made from the members, not from the raw bytes, so that a client which writes the same members in another order when
// it repeats is not refused.
func (p payment) fingerprint() string {
	digest := sha256.New()
	for _, part := range [...]string{strconv.FormatInt(p.Amount, 10), p.Currency, p.Customer, p.Description} {
		digest.Write(binary.BigEndian.AppendUint64(nil, uint64(len(part))))
		digest.Write([]byte(part))
	}
	return string(digest.Sum(nil))
}
