#!/bin/sh
# Far more threads than there is address space for: the command works, or says so itself.
# Usage: test_limits.sh COMMAND
set -u
output=$(
    ulimit -v 2000000 || exit 77
    "$1" bench --threads 1000 --heads 16 --seq 1024 --dim 64 2>&1
)
status=$?
[ $status -ne 77 ] || exit 77
case $status,$output in
0,*GFLOP*) exit 0 ;;
*,*memory*) exit 0 ;;
esac
echo "test_limits: exit code $status:" >&2
echo "$output" >&2
exit 1
