#!/bin/sh
# The shared library exports the functions that the header declares, and nothing else.
# Usage: test_symbols.sh NM LIBRARY HEADER
set -eu
nm=$1
library=$2
header=$3
work=$(mktemp -d "${TMPDIR:-/tmp}/flashattn symbols.XXXXXX")
trap 'rm -rf "$work"' EXIT

sed -n 's/^FA_API [^(]*[ *]\(fa_[a-z0-9_]*\)(.*/\1/p' "$header" | sort >"$work/declared"
[ -s "$work/declared" ] || { echo "test_symbols: no FA_API function found in $header" >&2; exit 1; }

case $library in
*.a)
    # A static library keeps its inner names; all must at least carry our prefix.
    "$nm" -g --defined-only "$library" | awk 'NF == 3 {print $3}' | sort -u >"$work/defined"
    grep -v '^fa_' "$work/defined" && { echo "test_symbols: names without fa_ above" >&2; exit 1; }
    comm -23 "$work/declared" "$work/defined" >"$work/missing"
    ;;
*)
    "$nm" -D --defined-only "$library" | awk '{print $3}' | sort -u >"$work/exported"
    comm -23 "$work/declared" "$work/exported" >"$work/missing"
    comm -13 "$work/declared" "$work/exported" >"$work/extra"
    [ ! -s "$work/extra" ] ||
        { echo "test_symbols: exported, but not in the header: $(xargs <"$work/extra")" >&2; exit 1; }
    ;;
esac
[ ! -s "$work/missing" ] ||
    { echo "test_symbols: declared, but not exported: $(xargs <"$work/missing")" >&2; exit 1; }
echo "$(wc -l <"$work/declared") functions declared and exported"
