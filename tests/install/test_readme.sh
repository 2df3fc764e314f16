#!/bin/sh
# The C in README.md compiles without a warning, links with the library, and computes attention.
# Usage: test_readme.sh SOURCE_DIR C_COMPILER LIBRARY_FILE
set -eu
work=$(mktemp -d "${TMPDIR:-/tmp}/flashattn readme.XXXXXX")
trap 'rm -rf "$work"' EXIT

awk '/^```c$/ { on = 1; next } /^```$/ { on = 0 } on' "$1/README.md" >"$work/readme.c"
cat >>"$work/readme.c" <<'EOF_C'
int main(void) /* two keys: the first query sees the first one alone */
{
    float q[2] = {0, 0}, k[2] = {1, 2}, v[2] = {3, 5}, out[2] = {0, 0};
    return !attend(q, k, v, out, 2, 1, 1) && out[0] == 3 && out[1] == 4 && attend(q, k, v, NULL, 2, 1, 1) ? 0 : 1;
}
EOF_C
"$2" -std=c11 -Wall -Wextra -Wpedantic -Werror "-I$1/include" "$work/readme.c" "$3" -o "$work/readme"
LD_LIBRARY_PATH=$(dirname "$3") "$work/readme"
