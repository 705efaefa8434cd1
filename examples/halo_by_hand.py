"""A halo exchange written with mpi4py, as an operation that JAX differentiates.

`mg.custom_operation` takes code that you already have: two functions on NumPy arrays that call
mpi4py, here with non-blocking sends and receives. One function is the operation, the other is its
transpose. The result is an operation like those of the library, and works with jit, grad, jvp,
vmap, scan and checkpoint. Run the program on any number of ranks:

    mpigrad launch -n 4 examples/halo_by_hand.py
"""

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

import mpigrad as mg

jax.config.update("jax_enable_x64", True)

# A grid of 7 x 9 cells, divided into tiles. `tiles` holds the ranks of the neighbouring tiles:
# tiles[-1, 0] comes before this tile along the first axis, tiles[0, 1] after it along the second.
grid = mg.Grid((7, 9), (1.0, 1.0))
tiles = {neighbor.step: neighbor.rank for neighbor in grid.neighbors}
edge = {-1: slice(0, 1), 1: slice(-1, None)}  # the first and the last layer along an axis


def neighbor_rank(axis, step):
    """Return the rank of the tile before (-1) or after (1) this tile along an axis, or None."""
    return tiles.get((step, 0) if axis == 0 else (0, step))


def exchange_layers(comm, axis, outgoing):
    """Send a layer to each neighbouring tile along an axis, and receive its layer."""
    incoming = {step: np.empty_like(layer) for step, layer in outgoing.items()}
    requests = []
    for step in outgoing:  # a message to the next tile has tag 2, a message to the previous one 0
        requests.append(comm.Irecv(incoming[step], neighbor_rank(axis, step), tag=1 - step))
    for step, layer in outgoing.items():
        requests.append(comm.Isend(layer, neighbor_rank(axis, step), tag=1 + step))
    MPI.Request.Waitall(requests)
    return incoming


# The operation adds one layer of cells on each side of the tile. It exchanges the rows first. The
# columns are then two cells longer and bring the corners with them. Outside of the grid, each cell
# is a copy of the nearest cell inside.


def exchange(u, comm):
    """(lx, ly) -> (lx + 2, ly + 2)"""
    for axis in (0, 1):
        u = np.moveaxis(u, axis, 0)
        layers = {step: np.ascontiguousarray(u[edge[step]]) for step in (-1, 1)}
        inside = {step: x for step, x in layers.items() if neighbor_rank(axis, step) is not None}
        layers |= exchange_layers(comm, axis, inside)
        u = np.moveaxis(np.concatenate([layers[-1], u, layers[1]]), 0, axis)
    return u


# The transpose undoes these steps in reverse order. It sends each layer back to the tile that it
# came from, and adds it there to the cells that were copied.


def accumulate(ct, comm):
    """(lx + 2, ly + 2) -> (lx, ly)"""
    for axis in (1, 0):
        ct = np.moveaxis(ct, axis, 0)
        layers = {step: np.ascontiguousarray(ct[edge[step]]) for step in (-1, 1)}
        inside = {step: x for step, x in layers.items() if neighbor_rank(axis, step) is not None}
        layers |= exchange_layers(comm, axis, inside)
        ct = ct[1:-1].copy()
        for step in (-1, 1):
            ct[edge[step]] += layers[step]
        ct = np.moveaxis(ct, 0, axis)
    return ct


def padded(u):
    """Return the shape and dtype of the result."""
    return jax.ShapeDtypeStruct((u.shape[0] + 2, u.shape[1] + 2), u.dtype)


halo = mg.custom_operation(exchange, accumulate, padded)

# The result and its derivatives are equal to those of the built-in exchange.
u = jnp.asarray(np.random.default_rng(grid.comm.rank).standard_normal(grid.local_shape))


def built_in(u):
    return mg.halo_exchange(u, grid, width=1, boundary="edge")


assert jnp.array_equal(halo(u), built_in(u))
mg.dot_test(halo, u)  # <F u', y'> = <u', F^T y'>, over all ranks


def energy_after(steps, halo):
    """Return a function, the energy after some steps of diffusion with one exchange each."""

    def step(u, _):
        p = halo(u)
        flow = p[2:, 1:-1] + p[:-2, 1:-1] + p[1:-1, 2:] + p[1:-1, :-2] - 4 * u
        return u + 0.1 * flow * jnp.cos(u), None

    return lambda u: jnp.sum(jax.lax.scan(step, u, None, length=steps)[0] ** 2)


by_hand, expected = (
    mg.jit(mg.value_and_grad(energy_after(5, exchange)))(u) for exchange in (halo, built_in)
)
np.testing.assert_allclose(by_hand[0], expected[0])
np.testing.assert_allclose(by_hand[1], expected[1], rtol=1e-12, atol=1e-14)
mg.dot_test(mg.grad(energy_after(2, halo)), u)  # second derivatives

if grid.comm.rank == 0:
    ranks = grid.comm.size
    print(f"on {ranks} rank{'s' * (ranks > 1)}: energy {by_hand[0]:.6f}, as the built-in exchange")
