package main

// Main is main, for the tests, which are a package of their own.
var Main = main
