#!/bin/sh
# `make test-wheel ARCH=aarch64`: run the wheel for another processor on two ranks, under QEMU.
#
# The system is a Debian of that processor that is unpacked and never started, and JAX, mpi4py and MPICH
# are the wheels for it. mpiexec and the processes are this machine's.
set -eu
cd "$(dirname "$0")/.."
arch=$1
root=$PWD/build/$arch
fail() {
    echo "test-wheel: $*" >&2
    exit 1
}
case $arch in
    aarch64) debian=arm64 ;;
    *) fail "ARCH=$arch: expected aarch64" ;;
esac
for program in "qemu-$arch" debootstrap; do
    command -v "$program" > /dev/null || fail "there is no $program: apt-get install qemu-user debootstrap"
done
wheel=$(ls "$PWD"/dist/mpigrad-*_"$arch".whl 2> /dev/null) || fail "run: make wheel ARCH=$arch"
mkdir -p "$root"
log=$root/log.txt
: > "$log"
quietly() {
    timeout -k 5 900 "$@" >> "$log" 2>&1 || { tail -n 20 "$log" >&2; fail "failed: $* (all output: $log)"; }
}

if ! [ -e "$root/debian/ready" ]; then
    rm -rf "$root/debian"
    quietly debootstrap --arch=$debian --foreign --variant=minbase --include=python3,libgomp1 \
        bookworm "$root/debian"
    for package in "$root"/debian/var/cache/apt/archives/*.deb; do
        quietly dpkg-deb --extract "$package" "$root/debian"
    done
    touch "$root/debian/ready"
fi
python=$(ls "$root"/debian/usr/bin/python3.[0-9]*)
rm -rf "$root/site" "$root/launcher" "$root/mpich"
platforms="--platform manylinux_2_35_$arch --platform manylinux_2_28_$arch --platform manylinux_2_27_$arch
    --platform manylinux_2_17_$arch --platform manylinux2014_$arch"
quietly python3 -m venv "$root/launcher"
quietly "$root/launcher/bin/python" -m pip install mpich
pip="$root/launcher/bin/python -m pip"
# shellcheck disable=SC2086
quietly $pip install --target "$root/site" --only-binary :all: $platforms \
    --python-version "${python##*/python}" "$wheel"
# shellcheck disable=SC2086
quietly $pip download --dest "$root/mpich" --only-binary :all: $platforms \
    --python-version "${python##*/python}" mpich
quietly python3 -m zipfile --extract "$root"/mpich/mpich-*.whl "$root/mpich"
library=$(find "$root/mpich" -name libmpi.so.12) && [ "$library" ] || fail "the wheel of MPICH has no libmpi.so.12"

# try TEXT PROGRAM…: the program, on two ranks, must print this text.
try() {
    text=$1
    shift
    begin=$(date +%s)
    PYTHONPATH=$root/site MPI4PY_LIBMPI=$library MPIGRAD_TIMEOUT=400 JAX_DISABLE_MOST_OPTIMIZATIONS=1 \
        timeout -k 5 900 "$root/launcher/bin/mpiexec" -n 2 "qemu-$arch" -L "$root/debian" "$python" "$@" \
        > "$root/output.txt" 2>&1 || { cat "$root/output.txt" >&2; fail "$arch: $* failed"; }
    grep -qF -- "$text" "$root/output.txt" || { cat "$root/output.txt" >&2; fail "$arch: no '$text'"; }
    echo "test-wheel: $arch under QEMU, 2 ranks: $text ($(($(date +%s) - begin)) s)"
}
try "rank 1 of 2 on $arch: gradient [0. 2. 4.]" -c "
import platform
import jax.numpy as jnp
import mpigrad as mg
rank, size = mg.default_communicator().rank, mg.default_communicator().size
gradient = mg.grad(lambda x: mg.allreduce(jnp.sum(x**2)), loss='replicated')(jnp.arange(3.0))
print(f'rank {rank} of {size} on {platform.machine()}: gradient {gradient}')"
try "ok: BoomerAMG" tools/try_wheel/poisson.py BoomerAMG
try "ok: rate" tools/try_wheel/acoustic.py
