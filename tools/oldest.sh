#!/bin/sh
# What `make test-oldest` does: operations and transformations on the oldest JAX that pyproject.toml
# allows, in an environment of its own. PYTHON and MPI come from the Makefile; arguments, for tests/run.py,
# stand for those below.
set -eu

venv=build/oldest
oldest=$(sed -n 's/^dependencies.*jax>=\([0-9.]*\).*/\1/p' pyproject.toml)
[ -x "$venv/bin/python" ] || "$PYTHON" -m venv "$venv"
pip="$venv/bin/python -m pip --quiet --disable-pip-version-check"
[ "$MPI" = system ] || $pip install mpich
echo "test-oldest: JAX $oldest into $venv, and the build of native/"
$pip install "jax==$oldest" "jaxlib==$oldest" "mpi4py>=4.0,<5" "numpy>=2.0" "tyro>=1.0,<2" \
    scikit-build-core cmake ninja pytest pytest-timeout hypothesis jaxtyping beartype
# Not editable: it has a build folder of its own, and leaves that of `make setup` alone. Without MPI
# there is no hypre, which is not tested here.
$pip install --no-deps --no-build-isolation --config-settings build-dir=build/oldest-native \
    --config-settings cmake.define.CMAKE_DISABLE_FIND_PACKAGE_MPI=ON .
[ $# -gt 0 ] || set -- -n 1,2 tests/operations tests/test_transformations.py \
    tests/test_jacobian.py tests/test_communicator.py
MPIGRAD_TEST_BUILD=build/oldest-tests exec "$venv/bin/python" tests/run.py "$@"
