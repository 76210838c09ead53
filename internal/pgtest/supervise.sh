# Runs a PostgreSQL server for the process at the other end of the standard input, and no longer than that.
#
#   init          makes the cluster; the superuser's password lies in $dir/password
#   start         starts the server, and waits until it takes connections
#   stop MODE     ends it (fast, immediate), and waits until it has ended
#
# Each command is answered by a line, "done" or "failed"; $dir/log says more. At the end of the input, because the other process is
# done or dead, ends the server and removes the folder.
dir=$1
bin=$2
user=$3

answer() {
    if "$@" >>"$dir/log" 2>&1 </dev/null; then echo done; else echo failed; fi
}

while read -r command mode; do
    case $command in
    init)
        answer "$bin/initdb" --pgdata="$dir/data" --username="$user" --pwfile="$dir/password" --auth=scram-sha-256 \
            --encoding=UTF8 --locale=C.UTF-8 --no-sync
        ;;
    start)
        answer "$bin/pg_ctl" --pgdata="$dir/data" --log="$dir/log" --wait --timeout=60 start
        ;;
    stop)
        answer "$bin/pg_ctl" --pgdata="$dir/data" --mode="$mode" --wait --timeout=60 stop
        ;;
    esac
done

if [ -e "$dir/data/postmaster.pid" ]; then
    "$bin/pg_ctl" --pgdata="$dir/data" --mode=immediate --wait stop >>"$dir/log" 2>&1 </dev/null
fi
cd /
rm -rf "$dir"
