"""Particles that move between ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from mpi4py import MPI

from mpigrad.communicator import Communicator, check_rank, resolve
from mpigrad.extend import as_array, exchange_with_neighbors
from mpigrad.grid.grid import Grid
from mpigrad.operations import allreduce, require

__all__ = ["exchange_particles", "rank_at_position"]


def rank_at_position(x: Any, grid: Grid) -> jax.Array:
    """Return the rank whose tile contains each position.

    Parameters
    ----------
    x
        Positions of shape (..., axes), in the unit of length of `grid.spacing`. Outside the grid
        periodic axes go on, and along other axes the nearest tile has them.
    grid
        The grid.

    Returns
    -------
    jax.Array
        Integers of shape (...), and -1 for a position that is NaN or infinite.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from mpigrad.grid import Grid, rank_at_position
    >>> rank_at_position(jnp.array([[0.1, 0.2], [0.9, 0.4]]), Grid((4, 4), (0.25, 0.25)))
    Array([0, 0], dtype=int32)
    """
    x = jax.lax.stop_gradient(as_array(x))
    if x.shape[-1:] != (grid.ndim,):
        raise ValueError(
            f"rank_at_position: x must have the shape (..., {grid.ndim}), the grid's axes last, "
            f"got {x.shape} on rank {grid.comm.rank}. Give the coordinates of each position."
        )
    rank = jnp.zeros(x.shape[:-1], int)
    for axis, (n, h) in enumerate(zip(grid.shape, grid.spacing, strict=True)):
        cell = jnp.floor(x[..., axis] / h)
        cell = cell % n if grid.periodic[axis] else cell
        tile = sum((cell >= start for start in grid.starts(axis)[1:-1]), jnp.zeros_like(rank))
        rank = rank * grid.dims[axis] + tile
    return jnp.where(jnp.isfinite(x).all(axis=-1), rank, -1)


def exchange_particles(
    particles: Any,
    owner: Any,
    alive: Any,
    most: int,
    partners: Sequence[int] | None = None,
    comm: Communicator | None = None,
) -> tuple[Any, jax.Array]:
    """Send particles to the ranks that own them from now on.

    Each rank has room for n particles, some of which are alive. A particle that stays keeps its
    place. Those that arrive take free places. One packed message for each dtype goes to each
    partner. The exchange moves values, and its adjoint moves cotangents back.

    Parameters
    ----------
    particles
        Array or pytree of arrays of shape (n, ...): positions, velocities, weights.
    owner
        Integers of shape (n,): the rank that each particle belongs to.
    alive
        Booleans of shape (n,): which places have a particle. Values elsewhere are not used.
    most
        The largest number of particles that go to one rank in one call. Messages have this length.
    partners
        The ranks with which this rank exchanges particles. Rank r names s if and only if s names r.
        Default: all others. The ranks of `grid.neighbors` do if no particle skips a tile.
    comm
        The communicator. Default: the communicator of the enclosing `with`, or all ranks.

    Returns
    -------
    particles, alive
        The particles of this rank, with zeros in empty places, and which places have one.

    Raises
    ------
    ValueError, TypeError
        On its own rank: if shapes do not fit, or `most` is not a positive Python integer.
    jax.errors.JaxRuntimeError
        On all ranks, when the program runs: if more than `most` particles go to one rank, a
        particle goes to a rank that is no partner, or more arrive than there are free places.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from mpigrad.grid import exchange_particles
    >>> x, alive = jnp.array([0.5, 0.0]), jnp.array([True, False])
    >>> exchange_particles(x, jnp.zeros(2, int), alive, most=1)
    (Array([0.5, 0. ], dtype=float32), Array([ True, False], dtype=bool))
    """
    comm = resolve(comm)
    ranks = _partners(partners, comm)
    leaves, structure = jax.tree.flatten(particles)
    leaves, owner, alive = [as_array(x) for x in leaves], as_array(owner), as_array(alive)
    n = _checked(leaves, owner, alive, most, comm)

    stays = alive & (owner == comm.rank)
    goes = alive & ~stays
    # Where each particle lies in the messages: partner after partner, `most` places each.
    places = max(len(ranks), 1) * most
    place = jnp.full(n, places)
    largest = jnp.zeros((), int)
    known = stays
    for i, rank in enumerate(ranks):
        these = goes & (owner == rank)
        number = jnp.cumsum(these) - 1
        place = jnp.where(these & (number < most), i * most + number, place)
        largest = jnp.maximum(largest, jnp.sum(these))
        known = known | these
    outgoing = [
        jnp.zeros((places, *x.shape[1:]), x.dtype).at[place].set(x, mode="drop") for x in leaves
    ]
    full = jnp.zeros(places, bool).at[place].set(goes, mode="drop")
    incoming, arrives = outgoing, full  # both empty, if there are no partners
    if ranks:
        *incoming, arrives = exchange_with_neighbors(
            "exchange_particles",
            (*outgoing, full),
            ranks,
            [most] * len(ranks),
            [most] * len(ranks),
            comm,
        )
    # One small sum, so that all ranks end together.
    lost, largest, lacking = allreduce(
        jnp.stack(
            [
                jnp.sum(alive & ~known),
                largest,
                jnp.sum(arrives) - (n - jnp.sum(stays)),
            ]
        ),
        MPI.MAX,
        comm,
    )
    require(
        lost == 0,
        "exchange_particles: every particle must stay or go to a partner, got {} on one rank that "
        "go to others, or to rank -1 because a position is NaN or infinite. Check the positions, "
        "name all partners, or take a smaller time step.",
        lost,
        comm=comm,
    )
    require(
        largest <= most,
        f"exchange_particles: at most {most} particles may go to one rank, got {{}}. Raise most.",
        largest,
        comm=comm,
    )
    require(
        lacking <= 0,
        f"exchange_particles: a rank has room for {n} particles, got {{}} more. Make the arrays "
        "longer.",
        lacking,
        comm=comm,
    )
    free = jnp.argsort(stays)  # stable: the free places come first
    target = jnp.where(arrives, free[jnp.minimum(jnp.cumsum(arrives) - 1, n - 1)], n)
    moved = []
    for x, y in zip(leaves, incoming, strict=True):
        kept = jnp.where(stays.reshape(-1, *(1,) * (x.ndim - 1)), x, jnp.zeros((), x.dtype))
        moved.append(kept.at[target].set(y, mode="drop"))
    occupied = stays.at[target].set(arrives, mode="drop")
    return jax.tree.unflatten(structure, moved), occupied


def _partners(partners: Sequence[int] | None, comm: Communicator) -> tuple[int, ...]:
    if partners is None:
        partners = range(comm.size)
    ranks = (check_rank(r, comm, "exchange_particles: partners") for r in partners)
    return tuple(sorted({r for r in ranks if r != comm.rank}))


def _checked(leaves: list[Any], owner: Any, alive: Any, most: Any, comm: Communicator) -> int:
    where = f"on rank {comm.rank}"
    if not isinstance(most, int) or isinstance(most, bool) or most < 1:
        raise TypeError(
            f"exchange_particles: most must be a positive Python integer, got {most!r} {where}. "
            "Give the largest number of particles that go to one rank."
        )
    if owner.ndim != 1 or not jnp.issubdtype(owner.dtype, jnp.integer):
        raise TypeError(
            f"exchange_particles: owner must be integers of shape (n,), got {owner.dtype} of shape "
            f"{owner.shape} {where}. Give the rank of each particle."
        )
    n = owner.shape[0]
    if alive.shape != (n,) or alive.dtype != bool:
        raise TypeError(
            f"exchange_particles: alive must be booleans of shape ({n},), as owner, got "
            f"{alive.dtype} of shape {alive.shape} {where}. Give a mask of the places."
        )
    wrong = [x.shape for x in leaves if x.shape[:1] != (n,)]
    if wrong:
        raise ValueError(
            f"exchange_particles: particles must have the shape ({n}, ...), as owner, got "
            f"{wrong[0]} {where}. Give one row for each place."
        )
    return n
