#!/bin/sh
# The work of `make setup`: missing Debian packages, the virtual environment, the build.
#
#   tools/setup.sh [core]
#
#   core      what `make demo` needs: neither waves nor the packages of tests and finite elements
#
# PYTHON, VENV and MPI (system or wheel) come from the Makefile. Debian packages and Python packages are
# installed at the same time, and so are the build and the packages that it does not need.
set -eu

part=${1:-all}

log=build/setup.log
export PIP_NO_COMPILE=1  # modules are compiled when a program imports them
mkdir -p build
: > "$log"

step() { echo "setup: $*"; }

# Run a command quietly, and show its output if it fails.
quietly() {
    "$@" >> "$log" 2>&1 || {
        status=$?
        tail -n 30 "$log" >&2
        echo "setup: failed: $1 … (all output: $log)" >&2
        exit $status
    }
}

command -v "$PYTHON" > /dev/null || { echo "setup: $PYTHON was not found. Name another one: make setup PYTHON=…" >&2; exit 1; }
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "setup: expected Python 3.11 or newer, found $("$PYTHON" --version). Name another one: make setup PYTHON=…" >&2
    exit 1
}

# Debian packages, only the missing ones.
missing=""
command -v g++ > /dev/null || missing="$missing g++"
"$PYTHON" -c 'import ensurepip, venv' 2> /dev/null || missing="$missing python3-venv"
if [ "$MPI" = system ]; then
    command -v mpiexec > /dev/null || missing="$missing openmpi-bin"
    command -v mpicc > /dev/null || missing="$missing libopenmpi-dev"
    # Debian's hypre is built with Open MPI and does not run on another MPI.
    if ! command -v mpicc > /dev/null || mpicc --showme:version > /dev/null 2>&1; then
        [ -e /usr/include/hypre/HYPRE.h ] || [ -n "${HYPRE_DIR:-}${HYPRE_SOURCE:-}" ] ||
            missing="$missing libhypre-dev"
    fi
fi
installing=""
if [ -n "$missing" ]; then
    if [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
        step "Debian packages:$missing"
        install_debian() {
            quietly apt-get update
            # shellcheck disable=SC2086
            quietly env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends $missing
        }
        install_debian &
        installing=$!
        trap wait EXIT  # dpkg must not be left in the middle of its work
        case "$missing" in *venv*) wait "$installing" || exit 1 && installing="" ;; esac
    else
        echo "setup: Debian packages are missing. Install them as root:" >&2
        echo "    apt-get install --no-install-recommends$missing" >&2
        case "$missing" in
            *g++* | *venv*) ;;
            *) echo "or use an MPI in the environment, without hypre: make setup MPI=wheel" >&2 ;;
        esac
        exit 1
    fi
fi

if ! "$VENV/bin/python" -m pip --version > /dev/null 2>&1; then
    step "$VENV ($("$PYTHON" --version))"
    quietly "$PYTHON" -m venv --clear "$VENV"
fi
if [ "$part" = core ]; then
    step "packages, and the build of native/ without waves (a minute or two the first time)"
else
    step "packages, and the build of native/ (minutes the first time)"
fi
"$VENV/bin/python" - <<'PYTHON'
import tomllib

file = tomllib.load(open("pyproject.toml", "rb"))
project = file["project"]
extras = project["optional-dependencies"]
tools = [line for line in extras["dev"] if line.startswith(("cmake", "ninja"))]
lists = {
    "building": file["build-system"]["requires"] + project["dependencies"] + tools,
    "packages-core": extras["apps"],
    "packages-all": extras["apps"] + extras["fem"] + extras["dev"],
}
for name, lines in lists.items():
    open(f"build/{name}.txt", "w").write("\n".join(lines) + "\n")
PYTHON
mpi=""
[ "$MPI" = system ] || mpi=mpich
# shellcheck disable=SC2086
quietly "$VENV/bin/python" -m pip install -r build/building.txt $mpi
[ -z "$installing" ] || wait "$installing" || exit 1
# Not isolated, because the editable build goes on using the tools of this environment.
set -- --no-build-isolation --no-deps --editable .
if [ "$part" = core ]; then
    set -- "$@" --config-settings=build.targets=core --config-settings=install.components=core
fi
quietly "$VENV/bin/python" -m pip install "$@" &
building=$!
trap 'kill $building 2> /dev/null || true' EXIT
quietly "$VENV/bin/python" -m pip install -r "build/packages-$part.txt"
wait "$building" || exit 1
"$VENV/bin/python" - <<'PYTHON'
import pathlib, mpigrad
built = sorted(p.name for d in mpigrad.__path__ for p in pathlib.Path(d).glob("_native/*.so"))
print("setup: built", ", ".join(built) or "nothing")
if not any("waves" in name for name in built):
    print("setup: without waves; `make setup` builds them")
if "libmpigrad_hypre.so" not in built:
    print("setup: without hypre; `mpigrad doctor` says how to get it")
PYTHON
