package httpidem

import (
	"errors"
	"fmt"
	"net/http"
	"strings"

	"github.com/dunglas/httpsfv"

	"github.com/archlab/idempotency/pgstore"
)

// KeyHeader is the request header that carries the key.
const KeyHeader = "Idempotency-Key"

// keyValue returns the key that a request carries, and whether it carries one. Quoted and bare spelling of a value are one key.
func keyValue(header http.Header, strict bool) (value string, present bool, err error) {
	lines := header[KeyHeader]
	switch len(lines) {
	case 0:
		return "", false, nil
	case 1:
	default:
		return "", true, fmt.Errorf("the header comes %d times", len(lines))
	}
	value, err = parseKey(lines[0], strict)
	return value, true, err
}

var (
	errKeyBlank = errors.New("the key is blank")
	errKeyBytes = errors.New("the header holds a byte that is not printable ASCII")
	errKeyBare  = errors.New(`the key is neither in double quotes nor made of visible characters other than " , ; \`)
	errKeyQuote = errors.New(`the key is not in double quotes, "like this"`)
)

// parseKey reads a field value: the String of RFC 8941, section 3.3.3, parameters ignored, or, unless strict, the bare value that
// most clients send. What could be a list, a parameter or half of a String is not taken for a bare value.
func parseKey(field string, strict bool) (string, error) {
	if strings.ContainsFunc(field, func(r rune) bool { return r < ' ' || r > '~' }) {
		return "", errKeyBytes
	}
	field = strings.Trim(field, " ")
	value := field
	switch {
	case strings.HasPrefix(field, `"`):
		item, err := httpsfv.UnmarshalItem([]string{field})
		if err != nil {
			return "", fmt.Errorf("the key is not a String of RFC 8941: %w", err)
		}
		value = item.Value.(string) //nolint:forcetypeassert // an item that begins with a quote is a String
	case field == "":
		return "", errKeyBlank
	case strict:
		return "", errKeyQuote
	case strings.ContainsAny(field, ` ",;\`):
		return "", errKeyBare
	}
	switch {
	case strings.Trim(value, " ") == "":
		return "", errKeyBlank
	case len(value) > pgstore.MaxKeyComponentBytes:
		return "", fmt.Errorf("the key is %d bytes long, and at most %d are allowed", len(value), pgstore.MaxKeyComponentBytes)
	}
	return value, nil
}
