"""Energy and dissipation of the Taylor–Green vortex in time, by examples/taylor_green.py.

    mpigrad launch -n 2 bench/vortex.py [--cells 64] [--reynolds 1600] [--step 0.025] [--until 10]

Prints the energy E, the dissipation 2 Ω / Re (Ω: the mean of half the vorticity squared), and the
energy that is lost, -dE/dt, which is the same if the cells resolve the flow. The unit of length is
the inverse wave number of the vortex, and that of velocity its amplitude.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import time
from typing import Any

import jax
import numpy as np
from processor import processor

import mpigrad as mg
from mpigrad import fft

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "examples"))
from taylor_green import Flow


def advance(flow: Any, u: Any) -> Any:
    """Return the spectrum after one step of the classical Runge-Kutta method.

    Viscosity is exact. Heun's method of the example takes fewer transforms, and lets the highest
    modes grow if a step is as long as that of this method.
    """
    half, dt = np.sqrt(flow.decay), flow.dt
    first = flow.force(u)
    second = flow.force(half * (u + dt / 2 * first))
    third = flow.force(half * u + dt / 2 * second)
    fourth = flow.force(flow.decay * u + dt * half * third)
    change = flow.decay * first + 2 * half * (second + third) + fourth
    return flow.decay * u + dt / 6 * change


def series(flow: Any, steps: int, every: int) -> tuple[np.ndarray, np.ndarray]:
    """Return energy and enstrophy before each block of `every` steps, and at the end."""

    def block(u: Any, _: Any) -> Any:
        both = (flow.energy(u), flow.enstrophy(u))
        return jax.lax.scan(lambda u, _: (advance(flow, u), None), u, None, length=every)[0], both

    def run(velocity: Any) -> Any:
        u = fft.forward(velocity, flow.layout)
        u, (energy, enstrophy) = jax.lax.scan(block, u, None, length=steps // every)
        return mg.allreduce((energy, enstrophy, flow.energy(u), flow.enstrophy(u)))

    energy, enstrophy, *last = map(np.asarray, mg.jit(run)(flow.start()))
    return np.append(energy, last[0]), np.append(enstrophy, last[1])


def main() -> None:
    """Run, and print a row for each half unit of time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", type=int, default=64)
    parser.add_argument("--reynolds", type=float, default=1600.0)
    parser.add_argument("--step", type=float, default=0.025)
    parser.add_argument("--until", type=float, default=10.0)
    parser.add_argument("--rows", type=float, default=0.5, help="time between two rows")
    given = parser.parse_args()
    flow = Flow(given.cells, given.reynolds, given.step)
    every = 4  # steps
    steps = round(given.until / given.step / every) * every
    start = time.perf_counter()
    energy, enstrophy = series(flow, steps, every)
    seconds = time.perf_counter() - start
    if flow.grid.comm.rank:
        return
    t = given.step * every * np.arange(len(energy))
    dissipation, lost = 2 * enstrophy / given.reynolds, -np.gradient(energy, t)
    print(
        f"{processor()}, {flow.grid.comm.size} ranks, {given.cells}³ cells, Re "
        f"{given.reynolds:g}, steps of {given.step}: {seconds:.0f} s"
    )
    print("   t    energy   2 Ω / Re    -dE/dt")
    for k in range(0, len(t), round(given.rows / given.step / every)):
        print(f"{t[k]:5.2f}  {energy[k]:.6f}  {dissipation[k]:.6f}  {lost[k]:.6f}")
    for name, values in (("2 Ω / Re", dissipation), ("-dE/dt", lost)):
        k = int(np.argmax(values[1:-1])) + 1
        print(f"largest {name}: {values[k]:.6f} at t = {t[k]:.2f}")


if __name__ == "__main__":
    main()
