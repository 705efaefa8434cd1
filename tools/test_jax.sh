#!/bin/sh
# What `make test-jax` does: tests with another JAX, in an environment of its own.
#   JAX      a release (0.11.2), a minor release (0.11, its newest patch), oldest or newest (the ends
#            of the range that is supported), nightly (JAX's own index must be reachable)
#   PYTHON   an interpreter that this JAX supports; without it one is looked for
#   MPI      system or wheel
#   EXTRA    more packages to install
# Arguments are for tests/run.py. All environments get the same wheel of mpigrad.
set -eu

table=src/mpigrad/_version.py
release() { sed -n "s/^$1 = (\([0-9]*\), *\([0-9]*\)).*/\1.\2/p" "$table"; }
case "$JAX" in
    oldest) JAX=$(release OLDEST) ;;
    newest) JAX=$(release NEWEST_TESTED) ;;
esac
case "$JAX" in
    nightly) wanted="--pre jax jaxlib --extra-index-url ${JAX_NIGHTLY_INDEX:?the index of JAX nightlies}" ;;
    *.*.*) wanted="jax==$JAX jaxlib==$JAX" ;;
    *) wanted="jax==$JAX.* jaxlib==$JAX.*" ;;
esac

# JAX 0.11 and later want Python 3.12 or newer.
case "$JAX" in
    0.8* | 0.9* | 0.10*) oldest=11 ;;
    *) oldest=12 ;;
esac
suits() { "$1" -c "import ensurepip, sys; sys.exit(not (3, $oldest) <= sys.version_info < (3, 15))" 2> /dev/null; }
if [ -z "${PYTHON:-}" ] || ! suits "$PYTHON"; then
    for candidate in python3 python3.13 python3.12 python3.14 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[2-4]*/bin/python; do
        if suits "$candidate"; then found=$candidate; fi
        [ -z "${found:-}" ] || break
    done
    if [ -z "${found:-}" ]; then
        echo "test-jax: NOT RUN: JAX $JAX wants Python 3.$oldest or newer, and there is none here; make test-jax JAX=$JAX PYTHON=…" >&2
        exit 3
    fi
    PYTHON=$found
fi

venv=build/jax-$JAX
wheels=build/jax-wheel
log=build/jax-$JAX.setup.log
mkdir -p build
: > "$log"
quietly() {
    "$@" >> "$log" 2>&1 || {
        tail -n 30 "$log" >&2
        echo "test-jax: failed: $1 … (all output: $log)" >&2
        exit 1
    }
}
pip() { quietly "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
[ -x "$venv/bin/python" ] || quietly "$PYTHON" -m venv "$venv"
[ "$MPI" = system ] || pip install mpich
rm -rf "$wheels"
echo "test-jax: JAX $JAX with $("$PYTHON" --version) into $venv"
quietly .venv/bin/python -m pip --disable-pip-version-check wheel --no-deps --no-build-isolation \
    --config-settings build-dir=build/jax-native --wheel-dir "$wheels" .
wheel=$(ls "$wheels"/mpigrad-*.whl)
# shellcheck disable=SC2086
pip install $wanted "$wheel[apps,fem]" \
    "beartype>=0.20" "hypothesis>=6.100" "optimistix>=0.1" "pytest>=8.3" "pytest-timeout>=2.3" ${EXTRA:-}
pip install --no-deps --force-reinstall "$wheel"
"$venv/bin/python" -c "import jax; print('test-jax: JAX', jax.__version__)"
MPIGRAD_TEST_BUILD="build/jax-$JAX-tests" exec "$venv/bin/python" tests/run.py "$@"
