#!/bin/sh
# make lint: formatting, static analysis, the order of layers, generated documents, links.
# All checks run; the exit code is 1 if one failed.
set -u
cd "$(dirname "$0")/.."
status=0

for tool in clang-format clang-tidy cppcheck python3; do
    command -v "$tool" >/dev/null 2>&1 || {
        echo "lint: $tool is not installed (Debian: apt-get install $tool)" >&2
        exit 1
    }
done

check() { # NAME COMMAND...: runs one check and says how it went
    name=$1
    shift
    if "$@"; then echo "lint: $name: ok"; else echo "lint: $name: FAILED"; status=1; fi
}

formatting() {
    tools/sources.sh | xargs clang-format --dry-run -Werror
}

# The engine is read as its portable build: the same source, without the intrinsics.
defines="-DFA_ISA_PORTABLE=1 -DFA_ISA=portable -DFA_HAVE_PORTABLE=1 -DFA_HAVE_CUDA=1 -D_GNU_SOURCE=1"
includes="-Iinclude -Isrc -Ireference -Iladder -Icli"

# shellcheck disable=SC2086
tidy() {
    find src ladder cli reference -name '*.c' | LC_ALL=C sort |
        xargs -n 1 -P "$(nproc)" sh -c 'clang-tidy --quiet "$@" -- -std=c11 '"$includes $defines"' 2>/dev/null' sh
}

# cppcheck takes the vectors of simd_portable.h, filled element by element, for uninitialized.
# shellcheck disable=SC2086
static_analysis() {
    cppcheck --quiet --std=c11 --error-exitcode=1 --inline-suppr --enable=warning,performance,portability \
             --suppress=missingIncludeSystem \
             --suppress=uninitvar:src/cpu/simd_portable.h -j "$(nproc)" $includes $defines src ladder cli reference
}

# ruff and mypy come from PyPI: from PATH, or from the environment of the Python tests.
find_tool() {
    command -v "$1" || { [ -x "build/venv/bin/$1" ] && echo "build/venv/bin/$1"; }
}

from_pypi() { # TOOL ARGUMENT...
    if ! tool=$(find_tool "$1"); then
        echo "lint: $1 is not installed: not checked (pip install $1)"
        return
    fi
    shift
    "$tool" "$@"
}

# The scripts of the figures need packages that are not here; that they can be read is checked.
python_syntax() {
    for script in bench/*.py docs/*.py tools/*.py; do
        python3 -c 'import ast, sys; ast.parse(open(sys.argv[1]).read(), sys.argv[1])' "$script" ||
            return 1
    done
}

check formatting formatting
check clang-tidy tidy
check cppcheck static_analysis
check "Python syntax" python_syntax
check ruff from_pypi ruff check --quiet python tests/python bench docs tools
check mypy from_pypi mypy --no-error-summary
check "layer order" python3 tools/check_layers.py
check "C API document" python3 docs/make_c_api.py --check
check "links and paths in documents" python3 tools/check_links.py
check "measured tables" python3 bench/tables.py --check
exit $status
