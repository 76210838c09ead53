package pgstore

import (
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"
)

// MaxKeyComponentBytes is the longest tenant, operation or value of a [Key]. Three of this length fit the unique index
// of PostgreSQL's default page size whatever they hold; one over it could fail there, deep inside a statement.
const MaxKeyComponentBytes = 512

// MaxFingerprintBytes is the longest fingerprint. Digests are far shorter: a fingerprint that needs more is a request
// that someone forgot to hash.
const MaxFingerprintBytes = 1024

// Key names an operation. Tenant and Operation scope a Value that a client chose: the same Value under another tenant,
// or for another operation, is another key.
//
// Each component is a non-empty UTF-8 string without NUL, of at most [MaxKeyComponentBytes] bytes, and is compared byte by
// byte: case, white space and Unicode normalisation all count. Components never join into one string, so
// {"a/b", "c", "d"} and {"a", "b/c", "d"} are different keys.
type Key struct {
	Tenant    string // who asks: the account or customer that the value belongs to
	Operation string // what is asked for, such as "payment.create"
	Value     string // the idempotency key that the client sent
}

// String returns the three components quoted and joined by slashes, for errors and logs. Control characters and invalid
// bytes are escaped, and a component that no valid key could have is cut short, so that a hostile key can neither forge
// a line of a log nor flood it.
func (k Key) String() string {
	var b strings.Builder
	for i, component := range [...]string{k.Tenant, k.Operation, k.Value} {
		if i > 0 {
			b.WriteByte('/')
		}
		if len(component) > MaxKeyComponentBytes {
			b.WriteString(strconv.Quote(component[:MaxKeyComponentBytes]))
			b.WriteString("...")
			continue
		}
		b.WriteString(strconv.Quote(component))
	}
	return b.String()
}

// validate returns ErrKeyEmpty or ErrKeyInvalid, with the reason, or nil.
func (k Key) validate() error {
	if k.Tenant == "" || k.Operation == "" || k.Value == "" {
		return ErrKeyEmpty
	}
	for _, component := range [...]struct{ name, text string }{
		{"tenant", k.Tenant}, {"operation", k.Operation}, {"value", k.Value},
	} {
		switch {
		case len(component.text) > MaxKeyComponentBytes:
			return fmt.Errorf("%w: the %s is %d bytes long, the limit is %d",
				ErrKeyInvalid, component.name, len(component.text), MaxKeyComponentBytes)
		case !utf8.ValidString(component.text):
			return fmt.Errorf("%w: the %s is not valid UTF-8", ErrKeyInvalid, component.name)
		case strings.IndexByte(component.text, 0) >= 0:
			return fmt.Errorf("%w: the %s holds a NUL byte", ErrKeyInvalid, component.name)
		}
	}
	return nil
}

// validateFingerprint returns ErrFingerprintInvalid, with the reason, or nil. The fingerprint itself never enters a
// message: it may be the request.
func validateFingerprint(fingerprint string) error {
	switch {
	case fingerprint == "":
		return fmt.Errorf("%w: it is empty", ErrFingerprintInvalid)
	case len(fingerprint) > MaxFingerprintBytes:
		return fmt.Errorf("%w: it is %d bytes long, the limit is %d: use a digest of the request",
			ErrFingerprintInvalid, len(fingerprint), MaxFingerprintBytes)
	}
	return nil
}
