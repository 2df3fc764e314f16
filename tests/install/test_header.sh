#!/bin/sh
# The header, its *_INIT macros included, compiles without a warning in every standard of C and C++ that
# it promises, with every compiler that is here.
# Usage: test_header.sh INCLUDE_DIR C_COMPILER
set -eu
include=$1
work=$(mktemp -d "${TMPDIR:-/tmp}/flashattn header.XXXXXX")
trap 'rm -rf "$work"' EXIT

cat >"$work/user.c" <<'EOF'
#include "flashattn.h"

static fa_options shared_options = FA_OPTIONS_INIT;

int main(void)
{
    fa_options options = FA_OPTIONS_INIT;
    fa_gradients gradients = FA_GRADIENTS_INIT;
    const unsigned char *bytes = (const unsigned char *)&options;
    size_t i, set = 0;
    for (i = sizeof options.size; i < sizeof options; i++) set += bytes[i] != 0;
    for (i = 0; i < 4; i++) set += gradients.dbias.stride[i] != 0;
    options.flags = FA_CAUSAL;
    return set == 0 && options.size == sizeof options && gradients.size == sizeof gradients &&
                   shared_options.size == sizeof options && !gradients.dq.data
               ? 0
               : 1;
}
EOF
# In C++ the cast of C would be one of the warnings that some projects ask for.
sed 's/(const unsigned char \*)&options/reinterpret_cast<const unsigned char *>(\&options)/' \
    "$work/user.c" >"$work/user.cpp"

compiled=0
failed=0
try() { # COMPILER STANDARD FILE FLAG...
    compiler=$1 standard=$2 file=$3
    shift 3
    # An old compiler may not know a new standard: that is no fault of the header's.
    echo 'int main(void) { return 0; }' >"$work/empty.${file##*.}"
    "$compiler" "-std=$standard" -fsyntax-only "$work/empty.${file##*.}" 2>/dev/null || return 0
    compiled=$((compiled + 1))
    if "$compiler" "-std=$standard" -Wall -Wextra -Wpedantic -Werror "$@" "-I$include" "$work/$file" \
        -o "$work/user" 2>"$work/log" && "$work/user"; then
        return 0
    fi
    echo "test_header: $compiler -std=$standard:" >&2
    cat "$work/log" >&2
    failed=1
}

for compiler in "$2" gcc clang; do
    command -v "$compiler" >/dev/null || continue
    for standard in c99 c11 c17 c2x gnu11; do try "$compiler" $standard user.c; done
done
for compiler in g++ clang++ c++; do
    command -v "$compiler" >/dev/null || continue
    for standard in c++11 c++14 c++17 c++20 c++2b; do
        try "$compiler" $standard user.cpp -Wold-style-cast -Wzero-as-null-pointer-constant
    done
done
[ $compiled -gt 0 ] || { echo "test_header: no compiler was found" >&2; exit 1; }
[ $failed -eq 0 ] || exit 1
echo "compiled and ran in $compiled ways"
