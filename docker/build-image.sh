#!/usr/bin/env bash
# Builds archlab-idempotency/postgres:N for each version N given (default: 17 15 18) from Debian's packages, where the image is
# missing or was built from another recipe. No image registry is needed, only the Debian mirror that this machine uses already.
#
#   docker/build-image.sh [VERSION ...]
#
#   DEBIAN_MIRROR   take the packages from here; default: what the machine's apt sources name
set -euo pipefail

here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
repository=archlab-idempotency/postgres

fail() {
    printf 'build-image: %s\n' "$@" >&2
    exit 1
}

# The Debian release that ships the version.
suite_of() {
    case $1 in
    15) echo bookworm ;;
    17) echo trixie ;;
    18) echo forky ;;
    *) fail "no Debian release is known for PostgreSQL $1; known are 15, 17 and 18" ;;
    esac
}

# What an image was built from. The tree comes out of this script, so it counts too.
recipe=$(cat "$here/Dockerfile" "$here/entrypoint.sh" "$here/build-image.sh" | sha256sum | cut -c1-16)

present() {
    [ "$(docker image inspect --format '{{ index .Config.Labels "recipe" }}' "$repository:$1" 2>/dev/null)" = "$recipe" ]
}

mirror() {
    local uri
    if [ -n "${DEBIAN_MIRROR:-}" ]; then
        echo "$DEBIAN_MIRROR"
        return
    fi
    # shellcheck disable=SC2016  # apt's own variables
    uri=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 2>/dev/null | grep -E '/debian/?$' | head -n 1) || true
    case $uri in
    mirror+file:*) uri=$(awk '/^[^#]/ { print $1; exit }' "${uri#mirror+file:}") ;;
    esac
    [ -n "$uri" ] || fail 'the apt sources of this machine name no Debian mirror; set DEBIAN_MIRROR to the URL of one'
    echo "$uri"
}

# Everything that only a machine with people on it needs. The package database stays.
strip_tree() {
    local tree=$1
    rm -rf "$tree"/var/cache/apt/* "$tree"/var/lib/apt/lists/* "$tree"/var/cache/debconf/*-old "$tree"/var/log/*.log \
        "$tree"/usr/share/doc/* "$tree"/usr/share/man/* "$tree"/usr/share/info/* "$tree"/usr/share/lintian/* \
        "$tree"/usr/share/locale/* "$tree"/usr/share/i18n "$tree"/usr/share/postgresql/*/man "$tree"/debootstrap
    # The cluster that the package made at its installation: the entry point makes one with the settings it is given.
    rm -rf "$tree"/var/lib/postgresql/* "$tree"/etc/postgresql/* "$tree"/tmp/*
}

build() {
    local version=$1 suite source script work tree previous started=$SECONDS
    suite=$(suite_of "$version")
    source=$(mirror)
    work=$(mktemp -d "${TMPDIR:-/tmp}/postgres-image.XXXXXX")
    tree=$work/tree
    # shellcheck disable=SC2064  # the folder of this run
    trap "rm -rf --one-file-system '$work'" EXIT

    script=/usr/share/debootstrap/scripts/$suite
    if [ ! -e "$script" ]; then
        # A release younger than this debootstrap is set up like the development branch; the name must be the suite's.
        script=$work/$suite
        ln -s /usr/share/debootstrap/scripts/sid "$script"
    fi

    printf 'build-image: PostgreSQL %s from Debian %s: one to two minutes\n' "$version" "$suite"
    # Nothing of the tree has to survive a crash of this machine, and nobody reads its manuals.
    mkdir -p "$tree/etc/dpkg/dpkg.cfg.d"
    printf '%s\n' force-unsafe-io 'path-exclude=/usr/share/man/*' 'path-exclude=/usr/share/doc/*' \
        'path-exclude=/usr/share/locale/*' >"$tree/etc/dpkg/dpkg.cfg.d/image"
    if ! debootstrap --variant=minbase --include="locales,postgresql-$version" "$suite" "$tree" "$source" "$script" \
        >"$work/log" 2>&1 </dev/null; then
        tail -n 20 "$work/log" >&2
        [ ! -e "$tree/debootstrap/debootstrap.log" ] || tail -n 20 "$tree/debootstrap/debootstrap.log" >&2
        fail "debootstrap failed for $suite; the end of its log is above"
    fi
    # One locale of the C library beside C, for databases whose collation is not byte order. ICU comes with the server.
    chroot "$tree" localedef -i en_US -f UTF-8 en_US.UTF-8
    strip_tree "$tree"

    mkdir "$work/context"
    cp "$here/Dockerfile" "$here/entrypoint.sh" "$work/context/"
    tar -C "$tree" --exclude='./dev/*' --exclude='./proc/*' --exclude='./sys/*' --numeric-owner -cf "$work/context/tree.tar" .
    previous=$(docker image inspect --format '{{ .Id }}' "$repository:$version" 2>/dev/null) || true
    docker build --quiet --tag "$repository:$version" --build-arg POSTGRES_VERSION="$version" --build-arg RECIPE="$recipe" \
        "$work/context" >"$work/log" 2>&1 || {
        cat "$work/log" >&2
        fail "docker could not build $repository:$version"
    }
    # Without a name the image that was replaced only takes up space; one that a container still runs on stays.
    [ -z "$previous" ] || docker image rm "$previous" >/dev/null 2>&1 || true
    rm -rf --one-file-system "$work"
    trap - EXIT
    printf 'build-image: %s:%s built in %d s, %d MB\n' "$repository" "$version" "$((SECONDS - started))" \
        "$(($(docker image inspect --format '{{ .Size }}' "$repository:$version") / 1000000))"
}

[ $# -gt 0 ] || set -- 17 15 18
docker version --format '{{ .Server.Version }}' >/dev/null 2>&1 ||
    fail 'no Docker engine answers; tests and demo also run on PostgreSQL binaries (apt-get install postgresql)'

missing=()
for version in "$@"; do
    suite_of "$version" >/dev/null
    if present "$version"; then
        printf 'build-image: %s:%s is there\n' "$repository" "$version"
    else
        missing+=("$version")
    fi
done
[ ${#missing[@]} -gt 0 ] || exit 0

if ! command -v debootstrap >/dev/null; then
    fail 'debootstrap is missing: install it (on Debian and its kin: apt-get install debootstrap),' \
        'or use the public image where a registry answers: docker pull postgres:17'
fi
[ "$(id -u)" = 0 ] || fail 'debootstrap needs root: sudo make image; or use the public image: docker pull postgres:17'

for version in "${missing[@]}"; do
    build "$version"
done
