// Package migrations creates and changes the store's table. It is the only package that links goose; a service that is
// migrated by somebody else need not import it.
//
// # In production
//
// Call [Up] once when you deploy, before the new version starts, as the owner of the schema. Calling it in every process at its
// start is safe too, and where nothing is pending it takes no lock and writes nothing. The role that runs the service needs no
// right to create anything: let another role migrate.
//
// [Status] tells what is there, and writes nothing. [SQL] prints the text for teams whose migrations run elsewhere; it records
// what it has applied, so that one may change over to Up later. [Down] drops the table and with it every key: it is for
// development and for leaving.
//
// Each file in this folder says in its first lines which locks it takes and for how long. Each runs in one transaction: one that
// fails, or whose process or connection dies, leaves nothing behind, and the next Up begins there again. A file that has
// been released never changes; what changes the table later is a new file. No statement of the store depends on there being
// no further column, so migrate first, then start the new version; the old one goes on working meanwhile.
//
// # Schemas
//
// [WithSchema] takes any name that PostgreSQL takes, quotes and spaces included. A schema that is missing is created; one that is
// there is used, and needs no right on the database. Several schemas of one database are migrated independently of each other. Neither
// the search path nor any other setting of the role decides in which schema anything lands.
//
// # Locks
//
// Migrators of one schema take turns by an advisory lock of the session, whose number is derived from the names of schema and version
// table: other users of goose, who share a number by default, are not waited for. A migrator asks for the lock every [LockPoll]
// until its context ends, or for [LockWait] at most; the error then names the session that holds it. It asks rather than queues, because
// a statement that waits for a lock holds a snapshot, which CREATE INDEX CONCURRENTLY in turn would wait for, and because a role's
// lock_timeout would end the wait.
//
// The lock ends with its session, so a migrator that was killed does not block the next one for longer than the server takes to
// notice.
//
// # PgBouncer and other poolers
//
// In transaction mode each transaction may run on another session of the server: the lock would protect nothing, and could stay
// behind on a session that lives on. Up and Down need a direct connection, or a pooler in session mode. They use one
// connection of the pool at a time, so a pool of one will do, return it as they found it, and do not close the pool. Status
// needs no session and works through any pooler.
//
// # The version table
//
// Versions are recorded in [VersionTable], in the same schema as the table. The application's own goose_db_version, which goose uses by
// default, is neither read nor written: two sets of files with one version table skip each other's numbers. The application may go
// on using goose's package-level functions, whose settings are not consulted.
//
// # With the goose program
//
// The files are plain goose migrations for the schema public, and the program and this package agree on the version table, so that
// one may use now the one, now the other:
//
//	goose -table public.idempotency_schema_migrations -dir migrations postgres "$DATABASE_URL" up
//
// Write the table's name with its schema, as here. The program takes no lock: do not run it twice at the same time.
package migrations
