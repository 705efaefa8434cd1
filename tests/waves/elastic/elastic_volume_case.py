"""A small elastic problem on three axes, on any ranks, from the same global arrays."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import mpigrad
from mpigrad.communicator import Communicator
from mpigrad.grid import Grid
from mpigrad.waves.elastic import Elastic, ElasticMedium, Survey, VolumeState

SHAPE, SPACING, LAYERS, STEPS = (8, 7, 9), (10.0, 12.0, 9.0), ((2, 1), (3, 0), (1, 2)), 6
COMPONENTS = ("vx", "vy", "vz", "pressure")
SURVEY = Survey(
    np.array([[[31.0, 47.0, 40.5]], [[12.3, 59.0, 60.0]]]),
    np.array([[[15.0, 18.0, 11.0], [64.2, 61.5, 60.0]]]),
)
SHOTS = 2
# Other problems by name: layers of one side, thick, or none.
PMLS = {
    "one side": ((0, 0), (0, 4), (0, 0)),
    "none": ((0, 0),) * 3,
    "thick": ((9, 8), (6, 7), (5, 9)),
}


def model(comm: Communicator, dims: Any = None, **settings: Any) -> Elastic:
    defaults: dict[str, Any] = dict(
        dt=1e-3, steps=STEPS, frequency=15.0, pml=LAYERS, components=COMPONENTS, source="force_z"
    )
    return Elastic(Grid(SHAPE, SPACING, comm, dims=dims), **{**defaults, **settings})


def arrays(pml: Any = LAYERS) -> dict[str, Any]:
    """lam, mu, rho, wavelets and a state of random fields, whole; a part of the model is water."""
    draw = np.random.default_rng(7)
    lam, mu = draw.uniform(6e9, 9e9, SHAPE), draw.uniform(3e9, 4e9, SHAPE)
    mu[:4, :3] = 0
    rho = draw.uniform(1900, 2200, SHAPE)
    whole = [n + sum(p) for n, p in zip(SHAPE, pml, strict=True)]
    fields = [size * draw.normal(size=(SHOTS, *whole)) for size in [1.0] * 3 + [5e6] * 6]
    memories = []
    for axis, pair in enumerate(pml):
        shape = [sum(pair) if a == axis else n for a, n in enumerate(whole)]
        size = np.array([5e5] * 3 + [0.1] * 3)[:, None, None, None]
        memories.append(size * draw.normal(size=(SHOTS, 6, *shape)))
    wavelets = 1e10 * draw.normal(size=(SHOTS, 1, STEPS))
    state = VolumeState(*fields, *memories)
    return {"lam": lam, "mu": mu, "rho": rho, "wavelets": wavelets, "state": state}


def cut(elastic: Elastic, state: Any) -> VolumeState:
    """This rank's part of a state."""
    tile, cells, layers = elastic.tile, [], []
    for axis, (before, after) in enumerate(elastic.pml):
        start = tile.origin[axis] + before
        cells.append(slice(start, start + tile.shape[axis]))
        layers.append(np.repeat([bool(width) for width in tile.extension[axis]], [before, after]))
    arrays = [np.asarray(x) for x in state]
    fields = [x[:, *cells] for x in arrays[:9]]
    memories = [
        np.compress(layers[axis], arrays[9 + axis], axis=2 + axis)[
            :, :, *(slice(None) if a == axis else cells[a] for a in range(3))
        ]
        for axis in range(3)
    ]
    return VolumeState(*(jnp.asarray(x) for x in (*fields, *memories)))


def part(elastic: Elastic) -> dict[str, Any]:
    """This rank's part of the arrays."""
    whole = arrays(elastic.pml)
    tiles = {k: jnp.asarray(whole[k][elastic.grid.slices]) for k in ("lam", "mu", "rho")}
    return {
        **tiles,
        "wavelets": jnp.asarray(whole["wavelets"]),
        "state": cut(elastic, whole["state"]),
    }


def value_and_gradient(elastic: Elastic) -> tuple[Any, Any, Any]:
    """Gathers, last state, and the gradient of a functional of both."""
    comm = elastic.grid.comm
    draw = np.random.default_rng(3)
    sizes = np.array([1e-7 if name == "pressure" else 1 for name in elastic.components])
    weights = draw.normal(size=(SHOTS, len(sizes), 2, STEPS)) * sizes[:, None, None]

    def objective(x: dict[str, Any]) -> Any:
        wavelets = mpigrad.bcast(x["wavelets"], comm=comm)
        model = (x[name] for name in ("lam", "mu", "rho"))
        gathers, state = elastic.propagate(ElasticMedium(*model), wavelets, SURVEY, x["state"])
        last = sum(jnp.sum(f**2) for f in state[:3])
        last += 1e-14 * sum(jnp.sum(f**2) for f in state[3:9])
        for memory in state[9:12]:
            last += 1e-12 * jnp.sum(memory[:, :3] ** 2) + jnp.sum(memory[:, 3:] ** 2)
        return jnp.sum(gathers * weights) / comm.size + last, (gathers, state)

    run = mpigrad.jit(mpigrad.value_and_grad(objective, has_aux=True, comm=comm))
    (_, (gathers, state)), gradient = run(part(elastic))
    return gathers, state, gradient


def relative(elastic: Elastic) -> tuple[Any, Any]:
    """The run as a function of numbers of order one, which all may change."""
    at = part(elastic)

    def run(x: dict[str, Any]) -> Any:
        wavelets = mpigrad.bcast(x["wavelets"], comm=elastic.grid.comm)
        changed = jax.tree.map(lambda a, b: a * (1 + b), at, {**x, "wavelets": wavelets})
        gathers, state = elastic.propagate(
            ElasticMedium(changed["lam"], changed["mu"], changed["rho"]), changed["wavelets"],
            SURVEY, changed["state"],
        )  # fmt: skip
        sizes = [1.0 if name != "pressure" else 5e6 for name in elastic.components]
        memory = np.array([5e5] * 3 + [0.1] * 3)[:, None, None, None]
        fields = [*(x for x in state[:3]), *(x / 5e6 for x in state[3:9])]
        fields += [x / memory for x in state[9:12]]
        return gathers / np.array(sizes)[:, None, None], fields

    return run, jax.tree.map(jnp.zeros_like, at)
