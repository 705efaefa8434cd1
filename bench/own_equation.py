"""Waves in three dimensions that a user writes with `apply_stencil`, beside the native kernels.

    mpigrad launch -n 1 bench/own_equation.py [--cells 100] [--steps 50] [--rounds 5]

Acoustic waves of fourth order without layers, in float32, one shot: the steps of examples/born.py
in `mg.loops.scan`, and `waves.Acoustic` with native kernels. "gradient" is the value and its
gradient in the velocity, with the default checkpoints of both. "Born" are two waves, the second
scattered, beside the tangent of the native run. The programs take turns. Printed are medians in ns
a point and step, and the median ratio of the pairs with its quartiles. Each rank has a cube of
cells.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import mpigrad as mg
from mpigrad.waves import Acoustic, Survey, ricker

WEIGHTS = (-1 / 12, 4 / 3, -5 / 2, 4 / 3, -1 / 12)
SPACING, DT = 10.0, 1e-3


def laplacian(p: Any) -> Any:
    """Return the Laplacian of a tile with two layers of cells on all sides."""
    inner, total = slice(2, -2), jnp.zeros((), p.dtype)
    for axis in range(3):
        for k, w in enumerate(WEIGHTS):
            shift = slice(k, p.shape[axis] - 4 + k)
            total += w / SPACING**2 * p[*(shift if a == axis else inner for a in range(3))]
    return total


def programs(cells: int, steps: int) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """Return the programs of a user, and those of native kernels, by what they compute."""
    comm = mg.default_communicator()
    grid = mg.Grid((cells * comm.size, cells, cells), (SPACING,) * 3, dims=(comm.size, 1, 1))
    speed = jnp.full(grid.local_shape, 2000.0, jnp.float32)
    change = jnp.full(grid.local_shape, 20.0, jnp.float32)
    wavelet = jnp.asarray(ricker(15.0, DT, steps), jnp.float32)
    start = jnp.zeros(grid.local_shape, jnp.float32)
    middle = np.array(grid.shape) // 2
    inside = [int(m - s.start) for m, s in zip(middle, grid.slices, strict=True)]
    mine = all(0 <= i < n for i, n in zip(inside, grid.local_shape, strict=True))
    source = start.at[*(i if mine else 0 for i in inside)].set(DT**2 * mine)
    spread = lambda u: mg.apply_stencil(laplacian, u, grid, width=2, boundary=0.0)

    def own(c: Any) -> Any:
        def step(state: Any, s: Any) -> Any:
            before, u = state
            return (u, 2 * u - before + DT**2 * (c**2 * spread(u)) + s * source), None

        return mg.loops.scan(step, (start, start), steps, wavelet)[0][1]

    def born(m: Any) -> Any:
        def step(state: Any, s: Any) -> Any:
            before, now = state
            curvature = spread(now)
            first = speed**2 * curvature[..., 0]
            second = speed**2 * curvature[..., 1] + 2 * speed * m * curvature[..., 0]
            after = 2 * now - before + DT**2 * jnp.stack([first, second], axis=-1)
            return (now, after.at[..., 0].add(s * source)), None

        rest = jnp.stack([start, start], axis=-1)
        return mg.loops.scan(step, (rest, rest), steps, wavelet)[0][1]

    model = Acoustic(grid, DT, steps, pml=0, backend="native")
    place = ((middle + 0.5) * SPACING)[None, None]
    survey = Survey(place, place)
    native = lambda c: model.propagate(c, wavelet[None, None], survey).state.field
    energy = lambda run: mg.jit(mg.value_and_grad(lambda c: jnp.sum(run(c) ** 2)))
    scattered, tangent = mg.jit(born), mg.jit(lambda m: mg.jvp(native, (speed,), (m,))[1])
    pairs = {
        "forward": (mg.jit(own), mg.jit(native), speed),
        "gradient": (energy(own), energy(native), speed),
        "Born": (scattered, tangent, change),
    }
    return {k: (lambda f=f, x=x: f(x), lambda g=g, x=x: g(x)) for k, (f, g, x) in pairs.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--cells", type=int, default=100, help="of each rank along each axis")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=5)
    o = parser.parse_args()
    comm = mg.default_communicator()

    def seconds(run: Callable[[], Any]) -> float:
        comm.mpi.Barrier()
        begin = time.perf_counter()
        jax.block_until_ready(run())
        comm.mpi.Barrier()
        return time.perf_counter() - begin

    for what, pair in programs(o.cells, o.steps).items():
        for run in pair:
            jax.block_until_ready(run())
        rounds = [tuple(seconds(run) for run in pair) for _ in range(o.rounds)]
        ratios = sorted(a / b for a, b in rounds)
        low, middle, high = (ratios[len(ratios) * k // 4] for k in (1, 2, 3))
        if comm.rank == 0:
            work = o.cells**3 * o.steps
            ns = [1e9 * statistics.median(t) / work for t in zip(*rounds, strict=True)]
            print(
                f"{what:9s} own {ns[0]:8.2f} ns   native {ns[1]:7.2f} ns   "
                f"ratio {middle:5.1f} ({low:.1f} to {high:.1f})",
                flush=True,
            )


if __name__ == "__main__":
    main()
