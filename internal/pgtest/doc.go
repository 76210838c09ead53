// Package pgtest finds or starts a real PostgreSQL for tests, benchmarks and the demo, keeps tests out of each other's way, and breaks
// connections where a test says.
package pgtest
