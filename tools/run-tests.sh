#!/bin/sh
# Runs CTest in a build directory and ends with one line that counts: "N passed, M failed", and how many
# were skipped for want of a CUDA device.
# Usage: tools/run-tests.sh BUILD_DIR [JOBS [CTEST_OPTION...]]
set -u
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
line="$((total - failed - skipped)) passed, $failed failed"
[ "$skipped" -eq 0 ] || line="$line, $skipped skipped (no CUDA device)"
echo "$line"
[ "$failed" -eq 0 ] || status=1
exit $status
