package pgstore_test

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/archlab/idempotency/pgstore"
)

type typedPayment struct {
	ID     string
	Amount int64
	secret int // which JSON does not carry
}

// typedCall is DoValue or DoTxValue with a function that needs no transaction.
type typedCall func(
	s *pgstore.Store, fn func(r pgstore.Record) (*typedPayment, error), opts ...pgstore.DoOption,
) (*typedPayment, pgstore.Outcome, error)

func typedCalls(t *testing.T) map[string]typedCall {
	t.Helper()
	return map[string]typedCall{
		"DoValue": func(
			s *pgstore.Store, fn func(r pgstore.Record) (*typedPayment, error), opts ...pgstore.DoOption,
		) (*typedPayment, pgstore.Outcome, error) {
			return pgstore.DoValue(t.Context(), s, key, fingerprint,
				func(_ context.Context, r pgstore.Record) (*typedPayment, error) { return fn(r) }, opts...)
		},
		"DoTxValue": func(
			s *pgstore.Store, fn func(r pgstore.Record) (*typedPayment, error), opts ...pgstore.DoOption,
		) (*typedPayment, pgstore.Outcome, error) {
			return pgstore.DoTxValue(t.Context(), s, key, fingerprint,
				func(_ context.Context, _ pgx.Tx, r pgstore.Record) (*typedPayment, error) { return fn(r) }, opts...)
		},
	}
}

// typedEach runs a test for DoValue and for DoTxValue.
func typedEach(t *testing.T, test func(t *testing.T, f *fixture, tx bool, call typedCall)) {
	t.Helper()
	for name := range typedCalls(t) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, setup(t), name == "DoTxValue", typedCalls(t)[name])
		})
	}
}

func typedReturns(payment *typedPayment, err error) func(pgstore.Record) (*typedPayment, error) {
	return func(pgstore.Record) (*typedPayment, error) { return payment, err }
}

func typedNever(t *testing.T) func(pgstore.Record) (*typedPayment, error) {
	t.Helper()
	return func(pgstore.Record) (*typedPayment, error) {
		t.Error("the function ran")
		return nil, errDo
	}
}

func TestValueIsTheFunctionsAndThenTheStoredOne(t *testing.T) {
	t.Parallel()
	typedEach(t, func(t *testing.T, f *fixture, _ bool, call typedCall) {
		t.Helper()
		payment := &typedPayment{"pay_1", 9007199254740993, 42}
		value, outcome, err := call(f.Store, typedReturns(payment, nil))
		require.NoError(t, err)
		require.Same(t, payment, value)
		require.Equal(t, pgstore.Outcome{Response: `{"ID":"pay_1","Amount":9007199254740993}`, Attempt: 1}, outcome)
		value, outcome, err = call(f.Store, typedNever(t))
		require.NoError(t, err)
		require.Equal(t, &typedPayment{ID: "pay_1", Amount: 9007199254740993}, value)
		require.True(t, outcome.Replayed)
	})
}

func TestErrorsOfValueFunctionsEndAsThoseOfOthers(t *testing.T) {
	t.Parallel()
	typedEach(t, func(t *testing.T, f *fixture, _ bool, call typedCall) {
		t.Helper()
		value, outcome, err := call(f.Store, typedReturns(&typedPayment{ID: "not to be seen"}, pgstore.Retryable(errDo)))
		require.ErrorIs(t, err, errDo)
		require.Nil(t, value)
		require.Zero(t, outcome)
		_, _, err = call(f.Store, typedReturns(nil, pgstore.Permanent(errDo)))
		require.ErrorIs(t, err, pgstore.ErrFailed)
		value, outcome, err = call(f.Store, typedNever(t))
		require.ErrorIs(t, err, pgstore.ErrFailed)
		require.Nil(t, value)
		require.True(t, outcome.Replayed)
	})
}

// typedCodec writes JSON in base64, and fails where a test says.
type typedCodec struct{ marshal, unmarshal error }

func (c typedCodec) Marshal(v any) ([]byte, error) {
	if c.marshal != nil {
		return nil, c.marshal
	}
	text, err := json.Marshal(v)
	return []byte(base64.StdEncoding.EncodeToString(text)), err
}

func (c typedCodec) Unmarshal(data []byte, v any) error {
	if c.unmarshal != nil {
		return c.unmarshal
	}
	text, err := base64.StdEncoding.DecodeString(string(data))
	if err != nil {
		return err
	}
	return json.Unmarshal(text, v)
}

func TestCodecIsReplaceable(t *testing.T) {
	t.Parallel()
	typedEach(t, func(t *testing.T, f *fixture, _ bool, call typedCall) {
		t.Helper()
		codec := pgstore.WithCodec(typedCodec{})
		_, outcome, err := call(f.Store, typedReturns(&typedPayment{ID: "pay_1"}, nil), codec)
		require.NoError(t, err)
		require.Equal(t, base64.StdEncoding.EncodeToString([]byte(`{"ID":"pay_1","Amount":0}`)), outcome.Response)
		value, _, err := call(f.Store, typedNever(t), codec)
		require.NoError(t, err)
		require.Equal(t, &typedPayment{ID: "pay_1"}, value)
	})
}

func TestResponseThatCannotBeReadIsReturnedAsItIs(t *testing.T) {
	t.Parallel()
	typedEach(t, func(t *testing.T, f *fixture, _ bool, call typedCall) {
		t.Helper()
		_, _, err := call(f.Store, typedReturns(&typedPayment{ID: "pay_1"}, nil))
		require.NoError(t, err)
		value, outcome, err := call(f.Store, typedNever(t), pgstore.WithCodec(typedCodec{unmarshal: errDo}))
		require.ErrorIs(t, err, errDo)
		require.ErrorContains(t, err, "read the stored response of")
		require.Nil(t, value)
		require.Equal(t, pgstore.Outcome{Response: `{"ID":"pay_1","Amount":0}`, Replayed: true, Attempt: 1}, outcome)
	})
}

// The effect has happened, but its value cannot be written; not even where the codec's error bears a mark.
func TestValueThatCannotBeWrittenFreesNothing(t *testing.T) {
	t.Parallel()
	for name, marshal := range map[string]error{"no mark": errDo, "retryable": pgstore.Retryable(errDo), "permanent": pgstore.Permanent(errDo)} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			typedEach(t, func(t *testing.T, f *fixture, tx bool, call typedCall) {
				t.Helper()
				payment := &typedPayment{ID: "pay_1"}
				value, outcome, err := call(f.Store, typedReturns(payment, nil), pgstore.WithCodec(typedCodec{marshal: marshal}))
				require.ErrorIs(t, err, errDo)
				require.ErrorIs(t, err, pgstore.ErrNotRecorded)
				require.NotErrorIs(t, err, pgstore.ErrFailed)
				require.Same(t, payment, value)
				require.Zero(t, outcome)
				if tx {
					require.Empty(t, faultRows(t, f, key), "it is rolled back")
					return
				}
				_, _, err = call(f.Store, typedNever(t))
				require.ErrorIs(t, err, pgstore.ErrInProgress)
				recordAge(t, f, key, lease)
				_, _, err = call(f.Store, func(r pgstore.Record) (*typedPayment, error) {
					if r.Abandoned != 1 {
						return nil, fmt.Errorf("abandoned: %d", r.Abandoned)
					}
					return payment, nil
				})
				require.NoError(t, err)
			})
		})
	}
}

func TestValueCallsRefuseWhatIsMissing(t *testing.T) {
	t.Parallel()
	f := setup(t)
	_, _, err := pgstore.DoValue[int](t.Context(), f.Store, key, fingerprint, nil)
	require.ErrorContains(t, err, "the function is nil")
	_, _, err = pgstore.DoTxValue[int](t.Context(), f.Store, key, fingerprint, nil)
	require.ErrorContains(t, err, "the function is nil")
	_, _, err = pgstore.DoValue(t.Context(), f.Store, key, fingerprint, func(context.Context, pgstore.Record) (int, error) {
		return 0, errors.New("it should not have run")
	}, pgstore.WithCodec(nil), nil)
	require.ErrorContains(t, err, "the codec is nil")
	require.ErrorContains(t, err, "an option is nil")
	require.Empty(t, faultRows(t, f, key))
}

// The COMMIT's answer is lost: the value is the function's all the same.
func TestValueOfALostCommitIsTheFunctions(t *testing.T) {
	t.Parallel()
	f := setup(t)
	store, proxy, _ := doProxied(t, f, lease)
	proxy.CutAfterReply(dotxCommit)
	payment := &typedPayment{"pay_1", 1, 42}
	value, outcome, err := typedCalls(t)["DoTxValue"](store, typedReturns(payment, nil))
	require.NoError(t, err)
	require.Same(t, payment, value)
	require.False(t, outcome.Replayed)
}
