package main

// Run is run, for the tests, which are a package of their own.
var Run = run
