package main

// Requests is the file that the program writes.
var Requests = requests
