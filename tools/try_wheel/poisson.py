"""The gradient of a Poisson solve with respect to the conductivity, checked by Taylor remainders.

python poisson.py BoomerAMG|PFMG|Jacobi
"""

import sys

import jax
import jax.numpy as jnp
from mpi4py import MPI

import mpigrad as mg
from mpigrad import sparse
from mpigrad.grid import Grid

jax.config.update("jax_enable_x64", True)

name = sys.argv[1]
solver = sparse.PCG(rtol=1e-12, max_steps=2000, preconditioner=getattr(sparse, name)())
grid = Grid((40, 30), (1.0, 1.0))
pattern = sparse.Pattern.from_stencil(grid, ((0, 0), (-1, 0), (1, 0), (0, -1), (0, 1)))
x, y = grid.centers()


def loss(kappa):
    """Return this rank's share of |u|², for -kappa Δu + u = 1 with u = 0 outside of the grid."""
    sides = [-jnp.ones_like(kappa)] * 4
    matrix = sparse.Matrix(pattern, pattern.assemble(jnp.stack([4 + 1 / kappa, *sides])))
    u = sparse.solve(matrix, jnp.ravel(1 / kappa), solver).value
    return jnp.sum(u**2)


kappa = 1 + 0.3 * jnp.sin(x / 9) * jnp.cos(y / 7)
result = mg.taylor_test(loss, kappa)
if MPI.COMM_WORLD.rank == 0:
    print(
        f"ok: {name}, {sparse.hypre_version() or 'without hypre'}, rate {result.rates_with[-1]:.3f}"
    )
