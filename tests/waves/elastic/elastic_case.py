"""A small elastic problem with everything in it, on any ranks, from the same global arrays."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpigrad.communicator import Communicator
from mpigrad.grid import Grid
from mpigrad.waves.elastic import Elastic, State, Survey

CELLS, SPACING, PML, STEPS = (14, 11), (10.0, 12.0), ((5, 4), (3, 6)), 12
SHOTS, SOURCES = 2, 2


def survey() -> Survey:
    """Points on cells, between them, and next to the model's edge; more of them than ranks."""
    return Survey(
        sources=np.array([[[55.0, 66.0], [31.7, 20.0]], [[102.3, 99.1], [5.0, 130.0]]]),
        receivers=np.array([[[45.0, 30.0], [77.7, 101.2], [139.0, 1.0]]]),
    )


def model(comm: Communicator, **settings: Any) -> Elastic:
    defaults = dict(dt=1.5e-3, steps=STEPS, frequency=15.0, pml=PML)
    return Elastic(Grid(CELLS, SPACING, comm), **{**defaults, **settings})  # type: ignore[arg-type]


def arrays() -> dict[str, Any]:
    """lam, mu, rho, wavelets and a state of random fields, whole; a part of the model is water."""
    random = np.random.default_rng(7)
    lam, mu = random.uniform(6e9, 9e9, CELLS), random.uniform(3e9, 4e9, CELLS)
    rho = random.uniform(1900, 2200, CELLS)
    mu[:6, :4] = 0
    whole = [n + sum(p) for n, p in zip(CELLS, PML, strict=True)]
    layers = [sum(p) for p in PML]
    shapes = [(SHOTS, *whole)] * 5
    shapes += [(SHOTS, 4, layers[0], whole[1]), (SHOTS, 4, whole[0], layers[1])]
    # Velocities and stresses of one wave: stresses are larger by the impedance.
    memory = np.array([5e5, 5e5, 0.1, 0.1])[:, None, None]
    sizes = (1, 1, 5e6, 5e6, 5e6, memory, memory)
    state = State(
        *(jnp.asarray(s * random.normal(size=n)) for s, n in zip(sizes, shapes, strict=True))
    )
    wavelets = 1e9 * random.normal(size=(SHOTS, SOURCES, STEPS))
    return {"lam": lam, "mu": mu, "rho": rho, "wavelets": wavelets, "state": state}


def mine(elastic: Elastic, whole: dict[str, Any]) -> dict[str, Any]:
    """This rank's part of the arrays."""
    part = {k: jnp.asarray(whole[k][elastic.grid.slices]) for k in ("lam", "mu", "rho")}
    return {
        **part,
        "wavelets": jnp.asarray(whole["wavelets"]),
        "state": _pieces(elastic, jax.tree.map(np.asarray, whole["state"])),
    }


def _pieces(elastic: Elastic, state: State) -> State:
    tile = elastic.tile
    cells, layers = [], []
    for axis, (before, after) in enumerate(PML):
        start = tile.origin[axis] + before
        cells.append(slice(start, start + tile.shape[axis]))
        has = tile.extension[axis]
        layers.append(np.repeat([bool(has[0]), bool(has[1])], [before, after]))
    fields = [jnp.asarray(field[:, cells[0], cells[1]]) for field in state[:5]]
    return State(
        *fields,
        memory_x=jnp.asarray(state.memory_x[:, :, layers[0], cells[1]]),
        memory_y=jnp.asarray(state.memory_y[:, :, cells[0]][..., layers[1]]),
    )


def compare(got: Any, expected: Any, tolerance: float = 1e-12) -> None:
    """Leaf by leaf, relative to the leaf's largest value."""
    for path, a in jax.tree_util.tree_leaves_with_path(got):
        b = dict(jax.tree_util.tree_leaves_with_path(expected))[path]
        if a.size:
            scale = max(float(np.max(np.abs(b))), 1e-300)
            difference = float(np.max(np.abs(np.asarray(a) - np.asarray(b)))) / scale
            assert difference < tolerance, (jax.tree_util.keystr(path), difference)
