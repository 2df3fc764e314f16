#!/bin/sh
# Installs into a directory with a space in its name, moves it (an installation must be relocatable),
# then builds the example by find_package and by pkg-config and compares what it prints.
# Usage: test_install.sh SOURCE_DIR BUILD_DIR C_COMPILER VERSION
set -eu
source_dir=$1
build_dir=$2
cc=$3
version=$4

work=$(mktemp -d "${TMPDIR:-/tmp}/flashattn install.XXXXXX")
trap 'rm -rf "$work"' EXIT
fail() {
    echo "test_install: $*" >&2
    exit 1
}

# The numbers that the example's own comment promises.
sed -n 's/^ \*     \(query .*\)$/\1/p' "$source_dir/examples/attention.c" >"$work/expected"
[ "$(wc -l <"$work/expected")" -eq 3 ] || fail "examples/attention.c: 3 expected lines not found"

DESTDIR='' cmake --install "$build_dir" --prefix "$work/first" >"$work/log" || fail "$(cat "$work/log")"
mv "$work/first" "$work/moved prefix"
prefix="$work/moved prefix"

compare() { # WAY: what the example printed, in $work/actual, against what it promises
    diff "$work/expected" "$work/actual" || fail "example built by $1: wrong output"
    echo "built by $1: ok"
}

cmake -S "$source_dir/examples" -B "$work/example build" -DCMAKE_C_COMPILER="$cc" \
      -DCMAKE_PREFIX_PATH="$prefix" >"$work/log" 2>&1 || fail "$(cat "$work/log")"
cmake --build "$work/example build" >"$work/log" 2>&1 || fail "$(cat "$work/log")"
"$work/example build/attention" >"$work/actual"
compare find_package

pc=$(find "$prefix" -name flashattn.pc)
[ -n "$pc" ] || fail "flashattn.pc was not installed"
libdir=$(dirname "$(dirname "$pc")")
if command -v pkg-config >/dev/null 2>&1; then
    PKG_CONFIG_PATH=$(dirname "$pc")
    export PKG_CONFIG_PATH
    [ "$(pkg-config --modversion flashattn)" = "$version" ] ||
        fail "pkg-config --modversion: $(pkg-config --modversion flashattn), expected $version"
    # pkg-config escapes the spaces; eval takes the escapes away again.
    eval "set -- $(pkg-config --cflags --libs flashattn)"
    "$cc" "$source_dir/examples/attention.c" "$@" -o "$work/by-pkg-config" ||
        fail "the line that pkg-config gave does not build the example: $*"
else
    echo "no pkg-config on this machine: building by hand with the flags of $pc"
    # shellcheck disable=SC2046
    set -- -I"$prefix/include" -L"$libdir" $(sed -n 's/^Libs: -L${libdir} //p' "$pc")
    "$cc" "$source_dir/examples/attention.c" "$@" -o "$work/by-pkg-config"
fi
LD_LIBRARY_PATH="$libdir" "$work/by-pkg-config" >"$work/actual"
compare pkg-config

if [ -x "$prefix/bin/flashattn" ]; then
    "$prefix/bin/flashattn" --version | grep -F -q "$version" ||
        fail "flashattn --version: expected $version"
    echo "installed command: ok"
fi
