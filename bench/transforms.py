"""Fourier transforms of real fields beside mpi4py-fft (FFTW, measured plan) and jax.numpy.fft.

    python bench/transforms.py [--cells 256] [--ranks 1 2] [--rounds 9] [--output FILE]

On each number of ranks one program has all the loops, which take turns, so a ratio is the median of
pairs. A loop is `rfftn` and `irfftn` of a field in slabs. FFTW has as many threads as XLA on each
rank. mpi4py-fft transforms axis after axis, or several axes in one call of FFTW (collapse): the
faster one is its time. The gradient is that of the sum of squares of a filtered field.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

HERE = pathlib.Path(__file__).resolve()
NO_PEER = "mpi4py-fft is not installed, so its columns are missing (`python bench` installs it)"


def threads(ranks: int) -> int:
    """Return how many threads a rank has."""
    return max(1, len(os.sched_getaffinity(0)) // ranks)


def peer(shape: tuple[int, ...], dtype: str, whole: Any) -> dict[str, Callable[[], Any]]:
    """Return the loops on mpi4py-fft by name. The field is copied into its arrays once."""
    import numpy as np
    from mpi4py import MPI
    from mpi4py_fft import PFFT, newDistArray

    loops = {}
    for name, collapse in (("mpi4py-fft", False), ("mpi4py-fft, collapse", True)):
        plan = PFFT(
            MPI.COMM_WORLD,
            shape,
            dtype=np.dtype(dtype),
            slab=True,
            collapse=collapse,
            planner_effort="FFTW_MEASURE",
            threads=threads(MPI.COMM_WORLD.size),
        )
        field, spectrum = newDistArray(plan, False), newDistArray(plan, True)
        field[:] = whole[field.local_slice()]

        def both(plan: Any = plan, field: Any = field, spectrum: Any = spectrum) -> Any:
            plan.forward(field, spectrum)
            return plan.backward(spectrum, field)

        both()
        assert np.allclose(field, whole[field.local_slice()], atol=1e-4)
        loops[name] = both
    return loops


def loops(cells: int, dtype: str) -> dict[str, Callable[[], Any]]:
    """Return all loops of this number of ranks by name."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import mpigrad as mg
    from mpigrad import fft

    jax.config.update("jax_enable_x64", True)
    shape = (cells,) * 3
    size = mg.default_communicator().size
    grid = mg.Grid(shape, (2 * np.pi / cells,) * 3, dims=(size, 1, 1), periodic=True)
    whole = np.random.default_rng(0).normal(size=shape).astype(dtype)
    u = jnp.asarray(whole[grid.slices])
    k2 = sum(k**2 for k in fft.Layout(grid, real=True).wavenumbers())
    damping = jnp.asarray(np.exp(-1e-4 * k2), dtype)

    def both(u: Any, damping: Any) -> Any:
        return fft.irfftn(fft.rfftn(u, grid), grid)

    def energy(u: Any, damping: Any) -> Any:
        return jnp.sum(fft.irfftn(damping * fft.rfftn(u, grid), grid) ** 2) / 2

    programs = {
        "mpigrad": mg.jit(both),
        "value": mg.jit(energy),
        "value and gradient": mg.jit(mg.value_and_grad(energy)),
    }
    if size == 1:
        programs["jax.numpy.fft"] = jax.jit(lambda u, damping: jnp.fft.irfftn(jnp.fft.rfftn(u)))
    found: dict[str, Callable[[], Any]] = {
        name: lambda f=f: jax.block_until_ready(f(u, damping)) for name, f in programs.items()
    }
    assert np.allclose(found["mpigrad"](), u, atol=1e-4)
    with contextlib.suppress(ImportError):
        found |= peer(shape, dtype, whole)
    return found


def measure(cells: int, dtype: str, rounds: int) -> dict[str, list[float]]:
    """Return the milliseconds of each loop in each round, on the slowest rank."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    programs = loops(cells, dtype)
    times: dict[str, list[float]] = {name: [] for name in programs}
    for turn in range(rounds + 1):
        for name in sorted(programs, reverse=turn % 2 == 1):
            world.Barrier()
            start = time.perf_counter()
            programs[name]()
            seconds = world.allreduce(time.perf_counter() - start, MPI.MAX)
            if turn:  # the first round warms up
                times[name].append(1e3 * seconds)
    return times


def rank(cells: int, rounds: int, out: str) -> None:
    """Measure on these ranks, and write the times on rank 0."""
    from mpi4py import MPI

    found = {dtype: measure(cells, dtype, rounds) for dtype in ("float64", "float32")}
    if MPI.COMM_WORLD.rank == 0:
        pathlib.Path(out).write_text(json.dumps(found))


def row(ranks: int, cells: int, dtype: str, times: dict[str, list[float]]) -> dict[str, Any]:
    """Return the medians, and the ratios of pairs with their quartiles."""
    theirs = [name for name in times if name.startswith("mpi4py-fft")]
    pairs = {"value and gradient / value": ("value and gradient", "value")}
    if theirs:
        best = min(theirs, key=lambda name: statistics.median(times[name]))
        pairs["mpigrad / mpi4py-fft"] = ("mpigrad", best)
    if "jax.numpy.fft" in times:
        pairs["mpigrad / jax.numpy.fft"] = ("mpigrad", "jax.numpy.fft")
    ratios = {}
    for name, (a, b) in pairs.items():
        quotients = [x / y for x, y in zip(times[a], times[b], strict=True)]
        ratios[name] = statistics.quantiles(quotients, n=4)
    return {
        "ranks": ranks,
        "cells": cells,
        "dtype": dtype,
        "milliseconds": {name: statistics.median(t) for name, t in times.items()},
        "ratios": ratios,
    }


def main() -> None:
    """Run all numbers of ranks, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", type=int, default=256)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=9, help="at least two")
    parser.add_argument("--output", type=pathlib.Path)
    parser.add_argument("--times", help="measure on the ranks of this program, into this file")
    given = parser.parse_args()
    if given.times:
        return rank(given.cells, given.rounds, given.times)
    from processor import processor

    head = f"{given.cells}³ cells, milliseconds, medians of {given.rounds} rounds"
    print(f"{processor()}, {len(os.sched_getaffinity(0))} cores, {head}", flush=True)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for ranks in given.ranks:
            out = f"{folder}/{ranks}.json"
            size = ["--cells", str(given.cells), "--rounds", str(given.rounds), "--times", out]
            launch = [sys.executable, "-m", "mpigrad", "launch", "-n", str(ranks), str(HERE)]
            subprocess.run([*launch, *size], check=True, timeout=1800)
            found = json.loads(pathlib.Path(out).read_text())
            rows += [row(ranks, given.cells, dtype, times) for dtype, times in found.items()]
    for one in rows:
        number = f"{one['ranks']} rank{'s' * (one['ranks'] > 1)}, {one['dtype']}"
        print(f"{number}: " + ", ".join(f"{n} {t:.3g}" for n, t in one["milliseconds"].items()))
        for name, (low, middle, high) in one["ratios"].items():
            print(f"  {name}: {middle:.2f} ({low:.2f} to {high:.2f})")
    if not any("mpi4py-fft" in one["milliseconds"] for one in rows):
        print(NO_PEER)
    if given.output:
        given.output.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
