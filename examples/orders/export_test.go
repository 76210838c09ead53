package main

// For the tests, which are a package of their own.
var (
	Run        = run
	NewService = newService
)
