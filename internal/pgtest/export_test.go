package pgtest

// LabelOwner is on every container that this package starts.
const LabelOwner = labelOwner

// What tests look into.
var (
	Install     = install
	ThisProcess = thisProcess
	HasGone     = hasGone
)

// SetInstalled makes this process look for binaries elsewhere.
func SetInstalled(pattern string) { installed = pattern }

// SetStatistics makes this process preload another library.
func SetStatistics(library string) { statistics = library }
