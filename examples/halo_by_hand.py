"""A halo exchange written with mpi4py, as an operation that JAX differentiates.

`mpigrad.custom_operation` takes code that you have already: two functions on NumPy arrays which
call mpi4py as they please, here with non-blocking sends and receives. One is the operation, the
other its transpose. What comes out is an operation like those of the library, for jit, grad, jvp,
vmap, scan and checkpoint. Run it on any number of ranks:

    mpigrad launch -n 4 examples/halo_by_hand.py
"""

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

import mpigrad
from mpigrad.grid import Grid, halo_exchange

jax.config.update("jax_enable_x64", True)

# A grid of 7 x 9 cells, divided into tiles. `tiles` has the ranks of the tiles around this one:
# tiles[-1, 0] lies before it along the first axis, tiles[0, 1] behind it along the second.
grid = Grid((7, 9), (1.0, 1.0))
tiles = {neighbor.step: neighbor.rank for neighbor in grid.neighbors}
edge = {-1: slice(0, 1), 1: slice(-1, None)}  # the first and the last layer along an axis


def beside(axis, step):
    """The rank of the tile before (-1) or behind (1) this one along an axis, or None."""
    return tiles.get((step, 0) if axis == 0 else (0, step))


def swap(comm, axis, outgoing):
    """Send a layer to each tile beside this one, and receive the layers that they send."""
    incoming = {step: np.empty_like(layer) for step, layer in outgoing.items()}
    requests = []
    for step in outgoing:  # a message that goes forward has the tag 2, one that goes back 0
        requests.append(comm.Irecv(incoming[step], beside(axis, step), tag=1 - step))
    for step, layer in outgoing.items():
        requests.append(comm.Isend(layer, beside(axis, step), tag=1 + step))
    MPI.Request.Waitall(requests)
    return incoming


# The operation: one layer of cells on each side of the tile. The rows come first; the columns,
# which are then two cells longer, bring the corners with them. Beyond the grid lies a copy of the
# nearest cell.


def exchange(u, comm):
    """(lx, ly) -> (lx + 2, ly + 2)"""
    for axis in (0, 1):
        u = np.moveaxis(u, axis, 0)
        layers = {step: np.ascontiguousarray(u[edge[step]]) for step in (-1, 1)}
        inside = {step: x for step, x in layers.items() if beside(axis, step) is not None}
        layers |= swap(comm, axis, inside)
        u = np.moveaxis(np.concatenate([layers[-1], u, layers[1]]), 0, axis)
    return u


# Its transpose undoes the steps in reverse: what came from a tile goes back there, and is added
# to the cells that it was a copy of.


def accumulate(ct, comm):
    """(lx + 2, ly + 2) -> (lx, ly)"""
    for axis in (1, 0):
        ct = np.moveaxis(ct, axis, 0)
        layers = {step: np.ascontiguousarray(ct[edge[step]]) for step in (-1, 1)}
        inside = {step: x for step, x in layers.items() if beside(axis, step) is not None}
        layers |= swap(comm, axis, inside)
        ct = ct[1:-1].copy()
        for step in (-1, 1):
            ct[edge[step]] += layers[step]
        ct = np.moveaxis(ct, 0, axis)
    return ct


def padded(u):
    """Shape and dtype of the result."""
    return jax.ShapeDtypeStruct((u.shape[0] + 2, u.shape[1] + 2), u.dtype)


halo = mpigrad.custom_operation(exchange, accumulate, padded)

# It gives what the built-in exchange gives, and so do its derivatives.
u = jnp.asarray(np.random.default_rng(grid.comm.rank).standard_normal(grid.local_shape))


def built_in(u):
    return halo_exchange(u, grid, width=1, boundary="edge")


assert jnp.array_equal(halo(u), built_in(u))
mpigrad.dot_test(halo, u)  # <F u', y'> = <u', F^T y'>, over all ranks


def energy_after(steps, halo):
    """The energy of a field after some steps of diffusion; an exchange in each."""

    def step(u, _):
        p = halo(u)
        flow = p[2:, 1:-1] + p[:-2, 1:-1] + p[1:-1, 2:] + p[1:-1, :-2] - 4 * u
        return u + 0.1 * flow * jnp.cos(u), None

    return lambda u: jnp.sum(jax.lax.scan(step, u, None, length=steps)[0] ** 2)


by_hand, expected = (
    mpigrad.jit(mpigrad.value_and_grad(energy_after(5, exchange)))(u)
    for exchange in (halo, built_in)
)
np.testing.assert_allclose(by_hand[0], expected[0])
np.testing.assert_allclose(by_hand[1], expected[1], rtol=1e-12, atol=1e-14)
mpigrad.dot_test(mpigrad.grad(energy_after(2, halo)), u)  # second derivatives

if grid.comm.rank == 0:
    ranks = grid.comm.size
    print(f"on {ranks} rank{'s' * (ranks > 1)}: energy {by_hand[0]:.6f}, as the built-in exchange")
