"""A neural network inside a Poisson equation, built from the parts of the library.

`mpigrad run poisson` does all of this and more. This program fits on one page, so that you can
build your own problem from it. The equation is div(kappa grad u) = -1 on the unit square, with u =
0 on the boundary. The solution u is observed, and kappa is unknown. A small network represents
kappa. The grid is divided into tiles, one on each rank. The network is the same on all ranks.

    mpigrad launch -n 2 examples/poisson_by_hand.py kappa.png
"""

import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

import mpigrad as mg
from mpigrad_apps import report

jax.config.update("jax_enable_x64", True)

# The grid has 24 x 24 cells with the unknowns at their centres. Each rank has the cells of its
# tile, which are contiguous rows of the linear system.
n = 24
grid = mg.Grid((n, n), (1 / n, 1 / n))
x, y = (jnp.asarray(axis) for axis in grid.centers())

# The sparsity pattern of the five-point scheme is built once. It has a row for each cell of the
# tile, with an entry for the cell itself and one for each neighbour, which may lie in another tile.
# Entries that would leave the grid are not stored.
steps = ((-1, 0), (1, 0), (0, -1), (0, 1))
pattern = mg.sparse.Pattern.from_stencil(grid, ((0, 0), *steps))
shifted = {
    (i, j): (slice(1 + i, 1 + i + x.shape[0]), slice(1 + j, 1 + j + x.shape[1])) for i, j in steps
}
on_boundary = {step: grid.local_rows(width=1)[place] < 0 for step, place in shifted.items()}


def solve(kappa):
    """Solve for u. This sends the halo of kappa and the messages of the linear solver."""
    around = mg.halo_exchange(kappa, grid, width=1, boundary="edge")
    diagonal, others = jnp.zeros_like(kappa), []
    for step in steps:
        # The mean kappa of both cells. The boundary is half a cell away: twice the cell's own
        # kappa.
        coefficient = (kappa + around[shifted[step]]) / 2 * np.where(on_boundary[step], 2, 1)
        diagonal = diagonal + coefficient
        others.append(-coefficient)
    matrix = mg.sparse.Matrix.assemble(pattern, [diagonal, *others])
    right_hand_side = jnp.full(grid.n_local, 1 / n**2)
    return mg.sparse.solve(matrix, right_hand_side).value.reshape(grid.local_shape)


def network(theta):
    """Return kappa on this rank's tile. It is positive for all parameters."""
    w1, b1, w2, b2 = theta
    hidden = jnp.tanh(jnp.stack([x, y], -1) @ w1 + b1)
    return jnp.exp(hidden @ w2 + b2)


# The true kappa, and the observations: u in every cell. Every rank draws the same weights.
true_kappa = 1 + x**2 + y**2
observed = mg.jit(solve)(true_kappa)
generator = np.random.default_rng(0)
theta = tuple(
    jnp.asarray(a)
    for a in (generator.normal(size=(2, 10)), np.zeros(10), generator.normal(size=10) / 10, 0.0)
)


def share(theta):
    """Return this rank's share of the loss."""
    return 1e4 * jnp.sum((solve(network(theta)) - observed) ** 2) / grid.size


def show(record, theta):
    """Print the loss, after each iteration."""
    if record.iteration % 20 == 0 and grid.comm.rank == 0:
        print(f"iteration {record.iteration}: loss {record.loss:.2e}")


# The loss is the sum of the shares of all ranks. All ranks have the same parameters (replicated).
solution = mg.optimize.minimize(
    share, theta, mg.optimize.LBFGS(memory=50), replicated=True, max_steps=60, callback=show
)

difference = float(jnp.max(jnp.abs(network(solution.value) - true_kappa)))
error = max(grid.comm.mpi.allgather(difference))
true, learned = grid.gather(true_kappa), grid.gather(network(solution.value))  # on rank 0
if true is not None and learned is not None:
    print(f"largest error of kappa: {error:.2f}")
    if sys.argv[-1].endswith(".png"):
        panels = [
            report.Panel("true κ", true, (1.0, 3.0)),
            report.Panel("learned κ", learned, (1.0, 3.0)),
            report.Panel("learned − true κ", learned - true, diverging=True),
        ]
        pathlib.Path(sys.argv[-1]).write_bytes(report.maps("kappa", "", panels).png)
assert solution.stats["loss"] < 1e-3 * solution.stats["history"][0].loss
