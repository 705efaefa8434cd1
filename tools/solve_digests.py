"""Print a digest of the bits of solutions and gradients by hypre's solvers, one line for each.

    mpiexec -n 2 .venv/bin/python tools/solve_digests.py

Two installations with the same release of hypre print the same lines on the same number of ranks,
whatever MPI they run on. Compare the wheel's hypre with the system's in this way.
"""

from __future__ import annotations

import hashlib

import jax
import jax.numpy as jnp
import numpy as np

import mpigrad as mg
from mpigrad.grid import Grid
from mpigrad.sparse import (
    GMRES,
    PCG,
    PFMG,
    BiCGStab,
    BoomerAMG,
    Matrix,
    Multigrid,
    Pattern,
    hypre_version,
    solve,
)

jax.config.update("jax_enable_x64", True)
SOLVERS = {
    "PCG, PFMG": PCG(preconditioner=PFMG()),
    "PCG, BoomerAMG": PCG(preconditioner=BoomerAMG()),
    "GMRES, BoomerAMG": GMRES(preconditioner=BoomerAMG()),
    "BiCGStab, PFMG": BiCGStab(preconditioner=PFMG()),
    "BoomerAMG alone": Multigrid(BoomerAMG()),
}


def main() -> None:
    comm = mg.default_communicator()
    lines = [hypre_version() or "no hypre"]
    for cells in ((120, 100), (24, 20, 22)):
        axes = len(cells)
        grid = Grid(cells, tuple(1 / n for n in cells))
        offsets = [(0,) * axes]
        for axis in range(axes):
            offsets += [tuple(step * (a == axis) for a in range(axes)) for step in (-1, 1)]
        pattern = Pattern.from_stencil(grid, offsets)
        ones = jnp.ones(grid.local_shape)
        rhs = jnp.asarray(np.random.default_rng(comm.rank).standard_normal(grid.n_local))
        for name, solver in SOLVERS.items():

            def loss(diagonal, rhs, pattern=pattern, ones=ones, axes=axes, solver=solver):
                neighbours = [-ones] * (2 * axes)
                A = Matrix.assemble(pattern, [(2 * axes + diagonal) * ones, *neighbours])
                x = solve(A, rhs, solver).value
                return mg.allreduce(jnp.vdot(x, x)), x

            (_, x), gradient = mg.value_and_grad(loss, has_aux=True)(0.1, rhs)
            lines.append(f"{axes} axes, {name}: {_bits(comm, x, gradient)}")
    if comm.rank == 0:
        print("\n".join(lines))


def _bits(comm: mg.Communicator, *arrays: jax.Array) -> str:
    own = hashlib.sha256(b"".join(np.asarray(a).tobytes() for a in arrays)).digest()
    return hashlib.sha256(b"".join(comm.mpi.allgather(own))).hexdigest()[:16]


if __name__ == "__main__":
    main()
