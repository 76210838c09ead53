// Package migrations creates and changes the store's table. It is the only package that links goose; a service that is
// migrated by somebody else need not import it.
//
// # In production
//
// Call [Up] once when you deploy, before the new version starts, as the owner of the schema. The role that runs the service
// needs no right to create anything. [Status] tells what is there, [SQL] prints the text for teams whose migrations run elsewhere.
// Each file says in its first lines which locks it takes and for how long.
//
// # With the goose program
//
// The files are plain goose migrations for the schema public:
//
//	goose -table public.idempotency_schema_migrations -dir migrations postgres "$DATABASE_URL" up
//
// # Locks
//
// Migrators of one schema take turns by an advisory lock of the session, whose number is derived from the schema's name. Through
// PgBouncer in transaction mode a session is not one: migrate on a direct connection.
//
// # The version table
//
// Versions are recorded in idempotency_schema_migrations, beside the table. The application's own goose_db_version is neither
// read nor written.
package migrations
