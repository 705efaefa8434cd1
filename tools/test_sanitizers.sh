#!/bin/sh
# What `make test-sanitizers` does: native/ compiled with sanitizers and with the assertions of
# libstdc++, in an environment of its own, and the tests of messages, guard, sparse systems and waves.
#   SANITIZE  the sanitizers (default: address,undefined)
# Arguments are for tests/run.py, instead of the chosen tests.
set -eu

sanitizers=${SANITIZE:-address,undefined}
here=$(pwd)
build=build/sanitized
site=$build/site
log=$build/build.log
mkdir -p "$build"

echo "test-sanitizers: the build with $sanitizers (minutes the first time; log: $log)"
{
    "$VENV/bin/cmake" -S . -B "$build/native" -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo \
        -DMPIGRAD_SANITIZE="$sanitizers" -DMPIGRAD_VARIANTS=x86-64 \
        -DPython_EXECUTABLE="$here/$VENV/bin/python" -DCMAKE_MAKE_PROGRAM="$here/$VENV/bin/ninja" \
        -DCMAKE_INSTALL_PREFIX="$here/$site"
    "$VENV/bin/cmake" --build "$build/native" --parallel "${JOBS:-2}"
} > "$log" 2>&1 || { tail -n 30 "$log" >&2; exit 1; }

# The package as it would be installed, and the other packages of .venv, but not its own mpigrad.
rm -rf "$site"
mkdir -p "$site"
cp -r src/mpigrad src/mpigrad_apps "$site"
"$VENV/bin/cmake" --install "$build/native" >> "$log"
[ -x "$build/venv/bin/python" ] || "$VENV/bin/python" -m venv --without-pip "$build/venv"
packages=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
own=$("$build/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
printf '%s\n' "$here/$site" "$packages" > "$own/sanitized.pth"

# The runtime of the sanitizers comes first in the process. Python keeps memory until its end: no
# leaks are reported.
preload=""
case "$sanitizers" in *address*) preload=$(cc -print-file-name=libasan.so) ;; esac
case "$sanitizers" in *undefined*) preload="$preload $(cc -print-file-name=libubsan.so)" ;; esac
export ASAN_OPTIONS="detect_leaks=0:abort_on_error=1:allocator_may_return_null=1:${ASAN_OPTIONS:-}"
export UBSAN_OPTIONS="print_stacktrace=1:${UBSAN_OPTIONS:-}"
export MPIGRAD_TEST_BUILD="$build/tests"

if [ $# -eq 0 ]; then
    # AddressSanitizer keeps freed memory for a while, so one test of memory is left out.
    set -- -n 2,3 tests/operations tests/guard tests/native tests/sparse tests/waves \
        --deselect tests/sparse/solvers/test_pfmg.py::test_memory_stays_flat
fi
LD_PRELOAD="$preload" "$build/venv/bin/python" tests/run.py --limit 3000 "$@"
