"""The self-test of `mpigrad doctor`, which takes about a second on its ranks.

python -m mpigrad.launch.selftest
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing
from mpi4py import MPI

import mpigrad
from mpigrad import sparse
from mpigrad.autodiff import self_check
from mpigrad.communicator import default_communicator
from mpigrad.operations import _jax_private
from mpigrad.runtime.native import library

SHARED, TRIED = 1, 2  # results of mpigrad_way_of_sum


def _world() -> str:
    level = {MPI.THREAD_MULTIPLE: "multiple", MPI.THREAD_SERIALIZED: "serialized"}
    return f"thread level {level.get(MPI.Query_thread(), 'too low')}"


def _allreduce() -> str:
    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    got = np.asarray(mpigrad.allreduce(jnp.arange(3.0) + rank))
    _same(got, size * np.arange(3.0) + size * (size - 1) / 2)
    return ""


def _long_sums() -> str:
    """Return which long sums go through shared memory. Two ranks first try both ways."""
    slot, way = default_communicator().slot, library().mpigrad_way_of_sum
    shared = []
    for kib in (32, 64, 128, 256, 512, 1024, 2048, 4096):
        bytes_ = kib << 10
        x = jnp.ones(bytes_ // 8)
        while True:
            _same(np.asarray(mpigrad.allreduce(x)), np.full(x.shape, MPI.COMM_WORLD.size))
            if way(slot, bytes_) != TRIED:
                break
        if way(slot, bytes_) == SHARED:
            shared.append(f"{kib} KiB" if kib < 1024 else f"{kib >> 10} MiB")
    return f"through shared memory: {', '.join(shared)}" if shared else "through MPI"


def _ring() -> str:
    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size

    def energy(x: jax.Array) -> jax.Array:
        left = mpigrad.sendrecv(x, (rank + 1) % size, (rank - 1) % size)
        return jnp.sum((left - (rank + 1.0)) ** 2)

    value, gradient = mpigrad.jit(mpigrad.value_and_grad(energy))(jnp.full(2, float(rank)))
    # The right neighbour subtracts its rank + 1 from what this rank sends.
    right = (rank + 1) % size
    ranks = np.arange(size)
    _same(np.asarray(value), 2 * np.sum(((ranks - 1) % size - ranks - 1.0) ** 2))
    _same(np.asarray(gradient), np.full(2, 2 * (rank - right - 1.0)))
    return ""


def _solve() -> str:
    """Solve -u'' = f on a few rows per rank, and differentiate with respect to f."""
    n_local, size = 8, MPI.COMM_WORLD.size
    n = n_local * size
    rows = np.arange(n_local) + n_local * MPI.COMM_WORLD.rank
    entries = [(i, j) for i in rows for j in (i - 1, i, i + 1) if 0 <= j < n]
    where = np.array(entries, np.int64)
    values = jnp.asarray(np.where(where[:, 0] == where[:, 1], 2.0, -1.0))
    pattern = sparse.Pattern.from_coo(where[:, 0], where[:, 1], n_local)
    matrix = sparse.Matrix(pattern, values)
    solver = sparse.default_solver(rtol=1e-10)

    def total(b: jax.Array) -> jax.Array:
        return jnp.sum(sparse.solve(matrix, b, solver).value)

    value, gradient = mpigrad.value_and_grad(total)(jnp.ones(n_local))
    exact = (rows + 1) * (n - rows) / 2
    _same(np.asarray(gradient), exact)
    everywhere = np.arange(n)
    _same(np.asarray(value), np.sum((everywhere + 1) * (n - everywhere) / 2))
    if sparse.hypre_available():
        return sparse.hypre_version()
    return f"own solver, {type(solver).__name__}: {sparse.why_no_hypre()}"


def _transformations() -> str:
    """Check derivatives of messages inside JAX's constructs with this version of JAX."""
    result = self_check.examine()
    refused = {**result.errors, **result.failed, **_jax_private.missing()}
    lines = [f"{feature} ({why})" for feature, why in refused.items()]
    return f"refused with this JAX: {'; '.join(lines)}" if lines else "nothing is refused"


def _same(got: np.ndarray, expected: np.typing.ArrayLike) -> None:
    if not np.allclose(got, expected, rtol=1e-6):
        raise ArithmeticError(
            f"mpigrad: the self-test expected {expected} on rank {MPI.COMM_WORLD.rank}, got {got}. "
            "Run the tests of mpigrad, and report this."
        )


CHECKS: dict[str, Callable[[], str]] = {
    "MPI": _world,
    "allreduce": _allreduce,
    "allreduce of 32 KiB to 4 MiB": _long_sums,
    "sendrecv ring, and its gradient": _ring,
    "linear solve, and its gradient": _solve,
    "derivatives inside JAX's constructs": _transformations,
}


def main() -> int:
    """Run the checks. Rank 0 prints a line for each. A failed check raises an error."""
    jax.config.update("jax_enable_x64", True)
    first = MPI.COMM_WORLD.rank == 0
    for name, check in CHECKS.items():
        if first:
            print(f"  {name:<36}", end="", flush=True)
        remark = check()
        if first:
            print(f"ok{f' ({remark})' if remark else ''}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
