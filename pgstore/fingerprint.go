package pgstore

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"hash"
	"io"

	"github.com/go-json-experiment/json/jsontext"
)

// Fingerprint returns the SHA-256 of the parts, 32 bytes, each framed by its length: bytes that move from one part to its
// neighbour change it, and so does an empty part more or less.
//
// Give it everything that makes the request what it is, and nothing that an honest repeat changes (a time stamp, a signature, a
// trace). It compares bytes: two JSON documents that differ in the order of their members or in white space are two requests. Where
// clients do repeat a request in another spelling, pass it through [CanonicalJSON] first.
func Fingerprint(parts ...string) string {
	digest := sha256.New()
	for _, part := range parts {
		frame(digest, part)
	}
	return string(digest.Sum(nil))
}

// frame writes the part's length and the part. A hash never returns an error.
func frame(digest hash.Hash, part string) {
	var length [8]byte
	binary.BigEndian.PutUint64(length[:], uint64(len(part)))
	digest.Write(length[:])
	_, _ = io.WriteString(digest, part)
}

// CanonicalJSON returns the document in the canonical form of RFC 8785 (JCS): no white space, members sorted by the UTF-16 code
// units of their names, strings escaped in one way. It is for documents whose spelling means nothing, and a choice to be made for
// each of them; nothing in this package makes it by itself.
//
// Numbers are the one exception. RFC 8785 writes each as the nearest IEEE 754 double, which makes 9007199254740993 equal to
// 9007199254740992; here every number keeps the spelling that it came in, so that no two amounts ever become one, and 1.0 and 1 are
// different requests.
//
// Documents that RFC 8785 does not allow are refused: what is not JSON, repeated names in an object, strings that are not Unicode
// (lone surrogates, invalid UTF-8).
func CanonicalJSON(document string) (string, error) {
	value := jsontext.Value(document)
	err := value.Canonicalize(jsontext.CanonicalizeRawInts(false), jsontext.CanonicalizeRawFloats(false))
	if err != nil {
		return "", fmt.Errorf("idempotency: canonical JSON: %w", err)
	}
	return string(value), nil
}
