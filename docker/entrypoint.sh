#!/bin/sh
# Makes a database cluster where there is none, and becomes the server. Understands what the public postgres image does, as far
# as tests and development need it:
#
#   POSTGRES_PASSWORD   the superuser's password; required
#   POSTGRES_USER       the superuser, "postgres" by default
#   POSTGRES_DB         a database to create, named like the user by default
#   PGDATA              where the cluster lives
#
# Arguments go to the server (`postgres -c fsync=off`, or just `-c fsync=off`); another command runs in its place.
set -eu

case ${1:-} in
'' | -*) set -- postgres "$@" ;;
esac
[ "$1" = postgres ] || exec "$@"

if [ "$(id -u)" = 0 ]; then
    install -d -o postgres -g postgres -m 0700 "$PGDATA"
    install -d -o postgres -g postgres -m 2775 /run/postgresql
    exec setpriv --reuid=postgres --regid=postgres --init-groups "$0" "$@"
fi

if [ ! -s "$PGDATA/PG_VERSION" ]; then
    user=${POSTGRES_USER:-postgres}
    database=${POSTGRES_DB:-$user}
    if [ -z "${POSTGRES_PASSWORD:-}" ]; then
        echo 'POSTGRES_PASSWORD is empty: give the superuser a password, as in -e POSTGRES_PASSWORD=secret' >&2
        exit 1
    fi

    # Through a file, so that the password stands in no process's arguments.
    password=$(mktemp)
    trap 'rm -f "$password"' EXIT
    # The first process of a container ignores a signal unless it says what to do.
    trap 'exit 130' INT TERM
    printf '%s\n' "$POSTGRES_PASSWORD" >"$password"
    initdb --username="$user" --pwfile="$password" --auth-local=trust --auth-host=scram-sha-256 \
        --encoding=UTF8 --locale=C.UTF-8 --no-sync
    rm -f "$password"

    echo 'host all all all scram-sha-256' >>"$PGDATA/pg_hba.conf"
    echo "listen_addresses = '*'" >>"$PGDATA/postgresql.conf"

    # A server for the set-up, on its socket only. It writes to the container's log, like its successor: who waits for a start
    # the second "ready to accept connections" there gets the one that stays.
    pg_ctl --wait --options="-c listen_addresses='' -c fsync=off" start
    if [ "$database" != postgres ]; then
        psql --quiet --no-psqlrc --username="$user" --dbname=postgres --set=ON_ERROR_STOP=1 --set=name="$database" <<'SQL'
CREATE DATABASE :"name";
SQL
    fi
    pg_ctl --wait --mode=fast stop
    trap - EXIT INT TERM
fi

unset POSTGRES_PASSWORD
exec "$@"
