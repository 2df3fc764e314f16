#!/bin/sh
# tools/run-tests.sh counts right with every CMake that is found: the one that configured this build, that of
# PATH, that of the Python tests, and those named in FA_CMAKES ("dir/cmake:other/cmake"); with Python and without.
# Usage: test_run_tests.sh SOURCE_DIR BUILD_DIR CMAKE GENERATOR MAKE_PROGRAM
set -u
source=$1 build=$2 own_cmake=$3 generator=$4 make_program=$5
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failures=0

# A copy of the tools, in which the Python tests are what fake_python says.
mkdir "$work/tools" "$work/bin"
cp "$source/tools/run-tests.sh" "$source/tools/count_tests.py" "$work/tools/"
fake_python() { # CODE LAST_LINE REPORT: "" for none
    cat >"$work/tools/test-python.sh" <<END
#!/bin/sh
rm -f "\$1/python-tests.xml"
[ -z '$3' ] || echo '$3' >"\$1/python-tests.xml"
echo '$2'
exit $1
END
    chmod +x "$work/tools/test-python.sh"
}

# The tools that run-tests.sh and the tests need, without Python.
for tool in sh awk cat chmod dirname env grep mkdir rm sed tail; do
    ln -s "$(command -v $tool)" "$work/bin/$tool"
done

expect() { # CODE LAST_LINE PATH ARGUMENTS...: that run-tests.sh ends so
    code=$1 line=$2 path=$3
    shift 3
    PATH=$path sh "$work/tools/run-tests.sh" "$@" >"$work/log" 2>&1
    got=$?
    last=$(tail -n 1 "$work/log")
    if [ $got -ne "$code" ] || [ "$last" != "$line" ]; then
        echo "$cmake, run-tests.sh $*: exit code $got and \"$last\", expected $code and \"$line\""
        failures=$((failures + 1))
    fi
}

skipped="skipped (this machine lacks what they need)"
check_counts() { # PATH
    expect 1 "2 passed, 5 failed, 3 $skipped" "$1" "$work/tiny" 2
    expect 0 "1 passed, 0 failed" "$1" "$work/tiny" 2 -R '^passes$'
    expect 0 "1 passed, 0 failed, 2 $skipped" "$1" "$work/tiny" 2 -R '^passes$|^skips'
    expect 0 "0 passed, 0 failed, 1 $skipped" "$1" "$work/tiny" 2 -R '^skips_by_text$'
    expect 1 "0 passed, 1 failed" "$1" "$work/tiny" 2 -R '^lacks_program$'
    # No test ran; and no report of an earlier run is counted.
    expect 1 "0 passed, 1 failed (CTest ended with code 8 and left no report of tests)" "$1" "$work/tiny" 2 -R '^none$'
}

two='<testsuites><testsuite><testcase name="a"/><testcase name="b"/></testsuite></testsuites>'
one_fails='<testsuites><testsuite><testcase name="a"/><testcase name="b"><failure/><error/></testcase><testcase name="c"><skipped/></testcase></testsuite></testsuites>'
check_python() { # PATH
    fake_python 0 "Python: 2 passed, 0 failed, 0 skipped" "$two"
    expect 0 "3 passed, 0 failed" "$1" --with-python "$work/tiny" 2 -R '^passes$'
    fake_python 1 "Python: 9 passed, 9 failed" "$one_fails"
    expect 1 "2 passed, 1 failed" "$1" --with-python "$work/tiny" 2 -R '^passes$'
    fake_python 1 "Python: 0 passed, 1 failed (pip could not build the package)" ""
    expect 1 "1 passed, 1 failed" "$1" --with-python "$work/tiny" 2 -R '^passes$'
    fake_python 77 "Python: not tested: there is no network" ""
    expect 0 "1 passed, 0 failed" "$1" --with-python "$work/tiny" 2 -R '^passes$'
}

seen=:
IFS=:
for cmake in $own_cmake "$(command -v cmake)" "$build/venv/bin/cmake" ${FA_CMAKES:-}; do
    unset IFS
    ctest=$(dirname "$cmake")/ctest
    case $seen in *":$cmake:"*) continue ;; esac
    [ -x "$cmake" ] && [ -x "$ctest" ] || continue
    seen=$seen$cmake:
    "$cmake" --version | head -n 1
    rm -rf "$work/tiny"
    "$cmake" -G "$generator" "-DCMAKE_MAKE_PROGRAM=$make_program" -S "$source/tests/tools/tiny" -B "$work/tiny" \
        >"$work/log" 2>&1 || { cat "$work/log"; failures=$((failures + 1)); }
    if command -v python3 >/dev/null 2>&1; then
        check_counts "$(dirname "$cmake"):$PATH"
        check_python "$(dirname "$cmake"):$PATH"
    fi
    # For pip's ctest, a script whose first line names its Python by its path.
    ln -sf "$ctest" "$work/bin/ctest"
    check_counts "$work/bin"
done
echo "$failures failed"
[ $failures -eq 0 ] && [ "$seen" != : ]
