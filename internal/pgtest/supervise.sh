# Runs a PostgreSQL server for the process at the other end of the standard input, and no longer than that.
#
#   start ARGUMENTS   starts the server
#   stop SIGNAL       ends it with the signal, and waits for it
#
# Each command is answered by a line. At the end of the input, because the other process is done, or dead: ends the server and
# removes the folder.
dir=$1
postgres=$2
server=

end() {
    if [ -n "$server" ]; then
        kill -s "$1" "$server" 2>/dev/null
        wait "$server"
        server=
    fi
}

while read -r command arguments; do
    case $command in
    start)
        # shellcheck disable=SC2086 # none of them holds a space
        "$postgres" $arguments >>"$dir/log" 2>&1 </dev/null &
        server=$!
        ;;
    stop)
        end "$arguments"
        ;;
    esac
    echo done
done

end QUIT
cd /
rm -rf "$dir"
