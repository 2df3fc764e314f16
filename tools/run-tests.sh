#!/bin/sh
# Runs CTest in a build directory, then the Python package's tests if asked to, and ends with one line that
# counts both: "N passed, M failed", and how many were skipped.
# Usage: tools/run-tests.sh [--with-python] BUILD_DIR [JOBS [CTEST_OPTION...]]
set -u
python=no
if [ "$1" = --with-python ]; then
    python=yes
    shift
fi
build=$1
jobs=${2:-2}
[ $# -ge 2 ] && shift 2 || shift 1
log=$build/tests.log

ctest --test-dir "$build" --parallel "$jobs" --output-on-failure --no-tests=error \
      --output-log "$log" "$@"
status=$?

# CTest's last line: "87% tests passed, 2 tests failed out of 15".
counts=$(sed -n 's/.*tests passed, \([0-9]*\) tests failed out of \([0-9]*\).*/\1 \2/p' "$log")
failed=${counts% *}
total=${counts#* }
if [ -z "$counts" ]; then
    echo "0 passed, 1 failed (no test ran)"
    exit 1
fi
# CTest counts skipped tests among the passed ones.
skipped=$(grep -c '(Skipped)$' "$log")
passed=$((total - failed - skipped))
why=""
[ "$skipped" -eq 0 ] || why=", $skipped skipped (no CUDA device)"

# Its last line: "Python: N passed, M failed, K skipped", or why nothing could be tested (77).
if [ $python = yes ]; then
    tools/test-python.sh "$build" >"$build/python-tests.log" 2>&1
    case $? in
    0 | 77) tail -n 1 "$build/python-tests.log" ;;
    *)
        cat "$build/python-tests.log"
        status=1
        ;;
    esac
    count() { # WHAT
        tail -n 1 "$build/python-tests.log" | grep -o "[0-9][0-9]* $1" | grep -o '[0-9]*' || echo 0
    }
    passed=$((passed + $(count passed)))
    failed=$((failed + $(count failed)))
fi

echo "$passed passed, $failed failed$why"
[ "$failed" -eq 0 ] || status=1
exit $status
