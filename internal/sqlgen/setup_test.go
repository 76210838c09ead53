package sqlgen_test

import (
	"testing"

	"github.com/archlab/idempotency/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }
