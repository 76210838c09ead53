package pgstore

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
)

// Codec writes a value as a response and reads it back; see [WithCodec].
type Codec interface {
	Marshal(v any) ([]byte, error)
	// Unmarshal gets a pointer to the value.
	Unmarshal(data []byte, v any) error
}

type jsonCodec struct{}

func (jsonCodec) Marshal(v any) ([]byte, error) {
	return json.Marshal(v) //nolint:wrapcheck // the caller says where it comes from
}

func (jsonCodec) Unmarshal(data []byte, v any) error {
	return json.Unmarshal(data, v) //nolint:wrapcheck // the caller says where it comes from
}

// DoValue is [Store.Do] for a function that returns a value: the response is the value as the codec writes it, JSON unless
// [WithCodec] says otherwise. A call that runs fn returns the very value of fn; a repeat returns what the codec reads from the response.
//
// If fn's value cannot be written, its effect has happened all the same: the key is held until the lease lapses, and the value is
// returned beside an error that is ErrNotRecorded. If a stored response cannot be read, because the type has changed since, say, the
// error is the codec's, and Outcome.Response has the bytes.
func DoValue[T any](
	ctx context.Context, s *Store, k Key, fingerprint string, fn func(ctx context.Context, r Record) (T, error), opts ...DoOption,
) (T, Outcome, error) {
	v := newTyped[T](opts)
	var write func(ctx context.Context, r Record) (string, error)
	if fn != nil {
		write = func(ctx context.Context, r Record) (string, error) { return v.write(fn(ctx, r)) }
	}
	outcome, err := s.Do(ctx, k, fingerprint, write, opts...)
	return v.read(k, outcome, err)
}

// DoTxValue is [Store.DoTx] for a function that returns a value, as [DoValue] is Do. If fn's value cannot be written, the
// transaction is rolled back.
func DoTxValue[T any](
	ctx context.Context, s *Store, k Key, fingerprint string,
	fn func(ctx context.Context, tx pgx.Tx, r Record) (T, error), opts ...DoOption,
) (T, Outcome, error) {
	v := newTyped[T](opts)
	var write func(ctx context.Context, tx pgx.Tx, r Record) (string, error)
	if fn != nil {
		write = func(ctx context.Context, tx pgx.Tx, r Record) (string, error) { return v.write(fn(ctx, tx, r)) }
	}
	outcome, err := s.DoTx(ctx, k, fingerprint, write, opts...)
	return v.read(k, outcome, err)
}

// typed is the value of one call on its way between the function and the response.
type typed[T any] struct {
	codec Codec
	value T
	ran   bool // value is what the function returned
}

// newTyped takes the codec from the options. Do and DoTx say what is wrong with those.
func newTyped[T any](opts []DoOption) *typed[T] {
	o, _ := newDoOptions(opts)
	return &typed[T]{codec: o.codec}
}

// write turns what the function returned into a response.
func (v *typed[T]) write(value T, err error) (string, error) {
	if err != nil {
		return "", err
	}
	v.value, v.ran = value, true
	response, err := v.codec.Marshal(value)
	if err != nil { // whose marks, if it has any, do not speak of the function's effect
		return "", notRecorded(fmt.Errorf("write the value as a response: %w", &settledError{err}))
	}
	return string(response), nil
}

// read turns what Do or DoTx returned into a value.
func (v *typed[T]) read(k Key, outcome Outcome, err error) (value T, _ Outcome, _ error) {
	switch {
	case v.ran && !outcome.Replayed && (err == nil || errors.Is(err, ErrNotRecorded)):
		return v.value, outcome, err
	case err != nil:
		return value, outcome, err
	}
	if err := v.codec.Unmarshal([]byte(outcome.Response), &value); err != nil {
		return *new(T), outcome, wrap("read the stored response of", k, err)
	}
	return value, outcome, nil
}
