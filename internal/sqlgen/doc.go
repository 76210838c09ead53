// Package sqlgen renders the SQL that the store runs.
//
// It is pure: it reads nothing, keeps nothing and imports the standard library only, so that every statement can be
// looked at, held in a golden file, prepared on each supported server and mutated by a test without a store around it.
// A store renders its [Statements] once, in its constructor.
//
// # Rules that hold in every statement
//
//   - Tables and sequences are qualified by the schema, so an empty search_path changes nothing.
//   - Every parameter has an explicit cast, so all query execution modes of pgx and PgBouncer in transaction mode agree
//     on the types.
//   - Time is statement_timestamp() on the database: not the client's clock, and not now(), which stands still inside a
//     caller's transaction.
//   - Instants leave the database as microseconds since 1970 in a bigint, durations as microseconds. Neither DateStyle,
//     TimeZone nor IntervalStyle of a session can change what they say, and no nanosecond is rounded on the way.
//   - An ON CONFLICT clause holds columns, EXCLUDED and constants only.
//   - One condition stands on one line. The mutation test finds them in the text, changes them one at a time, and expects a
//     test to fail for each.
package sqlgen
