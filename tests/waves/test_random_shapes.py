"""Native waves on grids of random shapes, with random options.

`make nightly` runs them under AddressSanitizer. There every field of the kernels is an allocation
of its own, whose values are NaN at first.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpigrad
from mpigrad.communicator import Communicator
from mpigrad.grid import Grid
from mpigrad.waves import (
    Acoustic,
    AcousticMedium,
    Elastic,
    ElasticMedium,
    Storage,
    Survey,
    fit_relaxation,
)

RELAXATION = {n: fit_relaxation(20.0, (3.0, 30.0), n) for n in (1, 2, 3)}


def drawn(rng: np.random.Generator, comm: Communicator) -> Any:
    """Return a random model, or raise a ValueError if it is not one."""
    axes, elastic = int(rng.integers(2, 4)), bool(rng.integers(2))
    cells = tuple(int(n) for n in rng.integers(1, (41, 25)[axes - 2], axes))
    grid = Grid(cells, tuple(rng.uniform(8, 14, axes)), comm)
    pml = tuple(tuple(int(w) for w in rng.integers(0, 10, 2)) for _ in range(axes))
    surface = None
    if rng.integers(3) == 0:
        axis, end = int(rng.integers(axes)), int(rng.integers(2))
        surface = "xyz"[axis] + "01"[end]
        pml = tuple(
            tuple(0 if (a, e) == (axis, end) else pml[a][e] for e in range(2)) for a in range(axes)
        )
    keep = [None, 3, "all", "boundary"][rng.integers(4)]
    common: dict[str, Any] = {
        "pml": pml,
        "free_surface": surface,
        "storage": Storage(keep),
        "threads": int(rng.integers(1, 4)),
        "backend": "native",
    }
    steps = int(rng.integers(2, 12))
    if not elastic:
        return Acoustic(grid, 1e-3, steps, order=int(rng.choice([4, 8])), **common)
    if rng.integers(2):
        common["relaxation"] = RELAXATION[int(rng.integers(1, 4))]
    names = ("vx", "vy", "vz")[:axes]
    source = ("explosive", *(f"force_{name[1]}" for name in names))[rng.integers(axes + 1)]
    return Elastic(
        grid, 1e-3, steps, 15.0, source=source, components=(*names, "pressure"),
        order=int(rng.choice([4, 8])), **common,
    )  # fmt: skip


def medium_of(model: Any, rng: np.random.Generator, dtype: Any) -> Any:
    """Return this rank's tiles of a random medium, with water in some cells."""

    def tile(low: float, high: float) -> jax.Array:
        return jnp.asarray(rng.uniform(low, high, model.grid.shape)[model.grid.slices], dtype)

    if isinstance(model, Acoustic):
        velocity = tile(1500, 2500)
        return AcousticMedium(velocity, tile(1000, 3000) if rng.integers(2) else None)
    vs = tile(600, 1300)
    medium = ElasticMedium.from_velocities(
        tile(1900, 2600), jnp.where(vs < 800, 0, vs), tile(1800, 2300)
    )
    factors = [tile(20, 60), tile(15, 40)] if model.relaxation else []
    return ElasticMedium(*medium[:3], *factors)


@pytest.mark.full("make nightly runs it under AddressSanitizer")
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("seed", range(40))
def test_the_adjoint_is_the_transpose(comm: Communicator, seed: int) -> None:
    rng = np.random.default_rng([seed, comm.size])
    while True:
        try:
            model = drawn(rng, comm)
        except ValueError:
            continue
        break
    dtype = np.dtype(("float64", "float32")[seed % 4 == 3])
    extent = np.array(model.grid.shape) * np.array(model.grid.spacing)
    points = rng.uniform(0, 1, (2, 2, 3, len(extent))) * extent
    survey = Survey(points[0, :, :2], points[1])
    medium = medium_of(model, rng, dtype)
    wavelets = jnp.asarray(1e9 * rng.normal(size=(2, 2, model.steps)), dtype)

    def run(x: Any) -> Any:
        parts, w, state = x
        moved = jax.tree.map(lambda m, p: m * (1 + p), medium, parts)
        amplitudes = wavelets * (1 + mpigrad.bcast(w, comm=comm))
        start = jax.tree.map(lambda s, p: s + 1e-3 * p, first, state)
        recording = model.propagate(moved, amplitudes, survey, start)
        size = 1e-3 if isinstance(model, Acoustic) else 1e3
        return recording.gathers * size, jax.tree.leaves(recording.state)

    start = jax.jit(lambda: model.propagate(medium, wavelets, survey).state)()
    first = jax.tree.map(lambda s: jnp.asarray(s, dtype), start)
    zeros = jax.tree.map(jnp.zeros_like, (medium, wavelets, first))
    tolerance = 1e-9 if dtype == "float64" else 1e-2
    found = mpigrad.dot_test(mpigrad.jit(run), zeros, comm=comm, rtol=tolerance)
    assert found.error < tolerance
