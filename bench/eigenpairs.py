"""Ten eigenpairs of a Laplacian beside SLEPc's LOBPCG (slepc4py), or SciPy's on one rank.

    python -m mpigrad launch -n 2 bench/eigenpairs.py [--cells 1000 1000] [--rounds 3]

Each loop computes the ten smallest pairs to a relative residual of 1e-8: by `eigh` with its default
preconditioner and with BoomerAMG, and by SLEPc with BoomerAMG and as many vectors. Loops take
turns. The processor's seconds of rank 0 are printed too, because other programs may share it. The
exact values are known: all are compared with them.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
import scipy.sparse.linalg

import mpigrad as mg
from mpigrad.grid import Grid
from mpigrad.sparse import BoomerAMG, Matrix, Pattern, eigh, hypre_available

K, BLOCK, RTOL = 10, 13, 1e-8


def exact(shape: tuple[int, ...]) -> np.ndarray:
    """Return the smallest eigenvalues of the Laplacian."""
    axes = [4 * np.sin(np.arange(1, K + 1) * np.pi / (2 * n + 2)) ** 2 for n in shape]
    return np.sort([sum(parts) for parts in itertools.product(*axes)])[:K]


def ours(shape: tuple[int, ...]) -> dict[str, Callable[[], Any]]:
    grid, d = Grid(shape, (1.0,) * len(shape)), len(shape)
    steps = [tuple(s * (a == b) for b in range(d)) for a in range(d) for s in (-1, 1)]
    pattern = Pattern.from_stencil(grid, [(0,) * d, *steps])
    ones = jnp.ones(grid.local_shape)
    A = Matrix.assemble(pattern, [2.0 * d * ones, *[-ones] * (2 * d)])

    def solve(values: Any, preconditioner: Any) -> Any:
        return eigh(Matrix(pattern, values), k=K, rtol=RTOL, preconditioner=preconditioner)

    found = {"eigh": mg.jit(functools.partial(solve, preconditioner="auto"))}
    if hypre_available():
        found["eigh, BoomerAMG"] = mg.jit(functools.partial(solve, preconditioner=BoomerAMG()))
    return {
        name: lambda f=f: np.asarray(jax.block_until_ready(f(A.values)).value.values)
        for name, f in found.items()
    }


def rows(shape: tuple[int, ...], first: int, last: int) -> Any:
    """Return these planes of the first axis of the matrix, as SciPy has it."""
    total: Any = 0
    for axis in range(len(shape)):
        product: Any = scipy.sparse.identity(1)
        for other, n in enumerate(shape):
            line = [-np.ones(n - 1), 2 * np.ones(n), -np.ones(n - 1)]
            factor = (
                scipy.sparse.identity(n) if other != axis else scipy.sparse.diags(line, [-1, 0, 1])
            )
            factor = factor.tocsr()[first:last] if other == 0 else factor
            product = scipy.sparse.kron(product, factor, format="csr")
        total = product + total
    return total.tocsr()


def peer(shape: tuple[int, ...], comm: Any) -> dict[str, Callable[[], Any]]:
    planes = [shape[0] * r // comm.size for r in (comm.rank, comm.rank + 1)]
    local = rows(shape, *planes)
    try:
        import slepc4py

        slepc4py.init([])
        from petsc4py import PETSc
        from slepc4py import SLEPc
    except ImportError:
        if comm.size > 1:
            return {}
        start = np.random.default_rng(0).standard_normal((local.shape[0], BLOCK))
        diagonal = scipy.sparse.diags(1 / local.diagonal())

        def by_scipy() -> Any:
            tol = RTOL * exact(shape)[0]
            found = scipy.sparse.linalg.lobpcg(
                local, start, M=diagonal, largest=False, tol=tol, maxiter=400
            )
            return np.sort(found[0])[:K]

        return {"SciPy, Jacobi": by_scipy}
    size = (local.shape[0], local.shape[1])
    arrays = (local.indptr.astype(np.int32), local.indices.astype(np.int32), local.data)
    matrix = PETSc.Mat().createAIJ((size, (size[0], size[1])), csr=arrays)
    matrix.setOption(PETSc.Mat.Option.SYMMETRIC, True)

    def by_slepc() -> Any:
        solver = SLEPc.EPS().create()
        solver.setOperators(matrix)
        solver.setProblemType(SLEPc.EPS.ProblemType.HEP)
        solver.setType("lobpcg")
        solver.setLOBPCGBlockSize(BLOCK)
        solver.setDimensions(K)
        solver.setTolerances(RTOL, 400)
        solver.setWhichEigenpairs(SLEPc.EPS.Which.SMALLEST_REAL)
        solver.getST().setType("precond")
        ksp = solver.getST().getKSP()
        ksp.setType("preonly")
        ksp.getPC().setType("hypre")
        ksp.getPC().setHYPREType("boomeramg")
        solver.solve()
        return np.sort([solver.getEigenvalue(i).real for i in range(K)])

    return {"SLEPc, BoomerAMG": by_slepc}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cells", type=int, nargs="+", default=[1000, 1000])
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    comm, shape = mg.default_communicator(), tuple(given.cells)
    loops = ours(shape) | peer(shape, comm.mpi)
    expected, seconds = exact(shape), {name: [] for name in loops}
    for _ in range(given.rounds + 1):  # the first round compiles
        for name, loop in loops.items():
            comm.mpi.barrier()
            start, cpu = time.perf_counter(), time.process_time()
            values = loop()
            seconds[name].append((time.perf_counter() - start, time.process_time() - cpu))
            worst = float(np.abs(values / expected - 1).max())
            assert worst < 1e-8, f"{name}: the values differ by {worst}"
    if comm.rank == 0:
        for name, pairs in seconds.items():
            wall, cpu = np.median(pairs[1:], axis=0)
            print(f"{name:18} {comm.size} ranks: {wall:7.2f} s, processor {cpu:7.2f} s")


if __name__ == "__main__":
    main()
