#!/bin/sh
# Runs CTest in a build directory, then the Python package's tests if asked to, and ends with one line that
# counts both: "N passed, M failed", and how many were skipped. The counts come from the JUnit reports of both,
# never from what they print for people, which changes from version to version.
# Usage: tools/run-tests.sh [--with-python] BUILD_DIR [JOBS [CTEST_OPTION...]]
set -u
tools=$(cd "$(dirname "$0")" && pwd)
python=no
if [ "$1" = --with-python ]; then
    python=yes
    shift
fi
build=$1
jobs=${2:-2}
[ $# -ge 2 ] && shift 2 || shift 1
# A relative path would be taken from the build directory.
report=$(cd "$build" && pwd)/tests.xml

# The same as count_tests.py on machines without Python, for CTest's reports alone: a bare "<" is only ever the
# beginning of a tag, for within text and attributes it is written "&lt;".
count_by_awk() { # REPORT
    awk 'BEGIN { RS = "<"; disabled = failed = skipped = passed = 0 }
        function close_test() {
            if (status == "run") passed++
            else if (status == "disabled" || (status == "notrun" && skip)) skipped++
            else if (status != "") failed++
            status = ""
        }
        $1 == "testcase" {
            close_test()
            skip = 0
            status = $0
            sub(/.* status="/, "", status)
            sub(/".*/, "", status)
        }
        $1 == "skipped" && $2 ~ /^message="SKIP_/ { skip = 1 }
        END { close_test(); if (passed + failed + skipped) print passed, failed, skipped }' "$1"
}

# Prints "PASSED FAILED SKIPPED"; nothing if the report is missing or broken.
count() { # REPORT
    [ -s "$1" ] || return
    if command -v python3 >/dev/null 2>&1; then python3 "$tools/count_tests.py" "$1"; else count_by_awk "$1"; fi
}

# Beside avx512_bf16 the engine of avx512 is the same code but for conversions: here its tests are left
# to CI, as is that each header compiles alone.
if [ $python = yes ] && [ -z "${FA_ALL_TESTS:-}" ]; then
    left_out='^test_headers$'
    if "$build/flashattn" info 2>/dev/null | grep -q avx512_bf16; then
        echo "Left out: tests of the avx512 engine, beside avx512_bf16 (FA_ALL_TESTS=1: all)"
        left_out="$left_out|\\.avx512\$"
    fi
    set -- -E "$left_out" "$@"
    echo "Left out: most random problems of kernels on the CPU and of cli_verify, emulated AMX, test_headers (FA_ALL_TESTS=1: all)"
fi

rm -f "$report"
ctest --test-dir "$build" --parallel "$jobs" --output-on-failure --no-tests=error \
      --output-junit "$report" "$@"
status=$?
# shellcheck disable=SC2046
set -- $(count "$report")
if [ $# -ne 3 ]; then
    echo "0 passed, 1 failed (CTest ended with code $status and left no report of tests)"
    exit 1
fi
passed=$1 failed=$2 skipped=$3
why=""
[ "$skipped" -eq 0 ] || why=", $skipped skipped (this machine lacks what they need)"

# Its last line says the same for people, or why nothing could be tested (77).
if [ $python = yes ]; then
    "$tools/test-python.sh" "$build" >"$build/python-tests.log" 2>&1
    code=$?
    case $code in
    0 | 77) tail -n 1 "$build/python-tests.log" ;;
    *)
        cat "$build/python-tests.log"
        status=1
        ;;
    esac
    if [ $code -ne 77 ]; then
        # shellcheck disable=SC2046
        set -- $(count "$build/python-tests.xml")
        [ $# -eq 3 ] || set -- 0 1 0 # not even built
        passed=$((passed + $1))
        failed=$((failed + $2))
        [ $code -eq 0 ] || [ "$2" -ne 0 ] || failed=$((failed + 1)) # pytest itself failed
    fi
fi

echo "$passed passed, $failed failed$why"
[ "$failed" -eq 0 ] || status=1
exit $status
