#!/usr/bin/env python3
"""Counts the tests of a JUnit report, as `ctest --output-junit` and `pytest --junitxml` write it.

Usage: tools/count_tests.py REPORT
Prints three numbers: passed, failed, skipped. The exit code is 1, and nothing is printed but the reason on
standard error, where the report is missing, is no report, or holds no test.
"""

import sys
import xml.etree.ElementTree as ElementTree


def outcome(case):
    """Of one <testcase>: "passed", "failed" or "skipped"."""
    status = case.get("status", "run")  # CTest's; pytest has none
    if status not in ("run", "fail", "notrun", "disabled"):
        raise ValueError(f"test {case.get('name')!r} has status {status!r}")
    if status == "fail" or case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    skipped = case.find("skipped")
    # CTest also calls a test skipped that could not run: its program is missing, or what it needs failed.
    if status == "notrun" and not (skipped is not None and skipped.get("message", "").startswith("SKIP_")):
        return "failed"
    return "passed" if status == "run" and skipped is None else "skipped"


def main(arguments):
    if len(arguments) != 1:
        sys.exit(__doc__)
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    try:
        for case in ElementTree.parse(arguments[0]).iter("testcase"):
            counts[outcome(case)] += 1
    except (OSError, ValueError, ElementTree.ParseError) as error:
        sys.exit(f"{arguments[0]}: {error}")
    if not any(counts.values()):
        sys.exit(f"{arguments[0]}: holds no test")
    print(*counts.values())


if __name__ == "__main__":
    main(sys.argv[1:])
