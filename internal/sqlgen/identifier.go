package sqlgen

import (
	"errors"
	"fmt"
	"strings"
	"unicode/utf8"
)

// MaxIdentifierBytes is the longest identifier that PostgreSQL keeps: NAMEDATALEN - 1. It truncates a longer one with no
// more than a notice, so that two long names could silently mean the same schema.
const MaxIdentifierBytes = 63

// ValidateSchema reports why name cannot be the name of a schema, or nil. Any other name that PostgreSQL takes is fine:
// capitals, spaces, quotes, dots and letters of any script are quoted, not refused.
func ValidateSchema(name string) error {
	switch {
	case name == "":
		return errors.New("schema name is empty: leave it out to use the default schema")
	case len(name) > MaxIdentifierBytes:
		return fmt.Errorf("schema name is %d bytes long: PostgreSQL keeps %d at most", len(name), MaxIdentifierBytes)
	case !utf8.ValidString(name):
		return fmt.Errorf("schema name %q is not valid UTF-8", name)
	case strings.ContainsRune(name, 0):
		return fmt.Errorf("schema name %q holds a NUL byte", name)
	case strings.HasPrefix(name, "pg_"):
		return fmt.Errorf("schema name %q starts with pg_, which PostgreSQL reserves for itself", name)
	}
	return nil
}

// QuoteIdentifier quotes name as an SQL identifier: in double quotes, each double quote in it doubled. The result is one
// identifier whatever name holds, except for a NUL byte, which [ValidateSchema] refuses.
func QuoteIdentifier(name string) string {
	return `"` + strings.ReplaceAll(name, `"`, `""`) + `"`
}

// quoteLiteral quotes text as an SQL string constant. The E form is used where text holds a backslash, so that the
// constant means the same whatever standard_conforming_strings is.
func quoteLiteral(text string) string {
	quoted := `'` + strings.ReplaceAll(text, `'`, `''`) + `'`
	if strings.Contains(text, `\`) {
		return `E` + strings.ReplaceAll(quoted, `\`, `\\`)
	}
	return quoted
}
