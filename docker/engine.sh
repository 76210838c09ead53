# shellcheck shell=sh
# To be sourced, not run: tells testcontainers-go what it cannot find out about a Docker engine on this machine. What is set
# already stays.

case ${DOCKER_HOST:-$(docker context inspect --format '{{ .Endpoints.docker.Host }}' 2>/dev/null || true)} in
unix://*)
    # On a machine that looks like a container itself (/.dockerenv) it would dial the default gateway.
    export TESTCONTAINERS_HOST_OVERRIDE="${TESTCONTAINERS_HOST_OVERRIDE:-127.0.0.1}"
    # The reaper comes from a registry. The tests remove their own containers; it is a second net.
    if [ -z "${TESTCONTAINERS_RYUK_DISABLED:-}" ] && [ -z "$(docker image ls --quiet testcontainers/ryuk 2>/dev/null)" ]; then
        export TESTCONTAINERS_RYUK_DISABLED=true
    fi
    ;;
esac
