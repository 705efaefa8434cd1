"""Operations beside mpi4py and, where it is installed, mpi4jax: one table, one run.

    mpigrad launch -n 2 bench/operations.py [--json FILE]

Loops of each library take turns within one process, so that a drift of the machine meets all of
them alike; figures are medians over rounds, with the smallest and the largest ratio of the pairs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

import mpigrad as mg

jax.config.update("jax_enable_x64", True)

try:
    import mpi4jax
except ImportError:
    mpi4jax = None

SIZES = {"8 B": 1, "8 KiB": 1 << 10, "1 MiB": 1 << 17, "8 MiB": 1 << 20}
LOOP = {1: 2000, 1 << 10: 1000, 1 << 17: 60, 1 << 20: 12}
ROUNDS = 15
world = MPI.COMM_WORLD
right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size


def seconds(f: Callable[[], Any]) -> float:
    world.Barrier()
    start = time.perf_counter()
    f()
    return world.allreduce(time.perf_counter() - start, op=MPI.MAX)


def measure(loops: dict[str, tuple[Callable[[], Any], int]]) -> dict[str, list[float]]:
    """Microseconds per call of each loop in each round; the loops take turns."""
    for f, _ in loops.values():
        f()
    times: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(ROUNDS):
        for name, (f, count) in loops.items():
            times[name].append(seconds(f) / count * 1e6)
    return times


def in_loop(operation: Callable[[Any], Any], x: Any, count: int, jit: Any) -> Callable[[], Any]:
    program = jit(lambda x: jax.lax.fori_loop(0, count, lambda i, x: operation(x), x, unroll=2))
    return lambda: jax.block_until_ready(program(x))


def repeated(f: Callable[[], Any], count: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(count):
            f()

    return run


def loops(n: int) -> dict[str, dict[str, tuple[Callable[[], Any], int]]]:
    """For each operation the loops of all libraries."""
    a, b = np.zeros(n), np.zeros(n)
    x, count = jnp.zeros(n), LOOP[n]
    raw = {
        "allreduce": lambda: world.Allreduce(a, b),
        "sendrecv": lambda: world.Sendrecv(a, right, 0, b, left, 0),
        "bcast": lambda: world.Bcast(a, 0),
    }
    ours = {
        "allreduce": mg.allreduce,
        "sendrecv": lambda x: mg.sendrecv(x, right, left),
        "bcast": mg.bcast,
    }
    table = {
        op: {
            "mpi4py": (repeated(raw[op], count), count),
            "mpigrad": (in_loop(ours[op], x, count, mg.jit), count),
        }
        for op in raw
    }
    if mpi4jax is not None:
        theirs = {
            "allreduce": lambda x: mpi4jax.allreduce(x, op=MPI.SUM, comm=world),
            "sendrecv": lambda x: mpi4jax.sendrecv(x, x, left, right, comm=world),
            "bcast": lambda x: mpi4jax.bcast(x, 0, comm=world),
        }
        for op, f in theirs.items():
            table[op]["mpi4jax"] = (in_loop(f, x, count, jax.jit), count)
    return table


def dispatch() -> dict[str, tuple[Callable[[], Any], int]]:
    """One call of 8 bytes at a time: jitted, and eager."""
    x = jnp.zeros(1)
    a, b = np.zeros(1), np.zeros(1)
    jitted, plain = mg.jit(mg.allreduce), jax.jit(lambda x: x + 1)
    rows: dict[str, tuple[Callable[[], Any], int]] = {
        "mpi4py": (repeated(lambda: world.Allreduce(a, b), 1000), 1000),
        "jax.jit without messages": (repeated(lambda: plain(x).block_until_ready(), 500), 500),
        "mpigrad.jit": (repeated(lambda: jitted(x).block_until_ready(), 500), 500),
        "mpigrad eager": (repeated(lambda: mg.allreduce(x).block_until_ready(), 200), 200),
    }
    if mpi4jax is not None:
        f = lambda x: mpi4jax.allreduce(x, op=MPI.SUM, comm=world)
        g = jax.jit(f)
        rows["mpi4jax under jax.jit"] = (repeated(lambda: g(x).block_until_ready(), 200), 200)
        rows["mpi4jax eager"] = (repeated(lambda: f(x).block_until_ready(), 3), 3)
    return rows


def row(label: str, times: dict[str, list[float]], base: str = "mpigrad") -> dict[str, Any]:
    ours = times[base]
    record: dict[str, Any] = {"label": label, "microseconds": {}, "ratio": {}}
    text = f"{label:18s}"
    for name, values in times.items():
        record["microseconds"][name] = statistics.median(values)
        text += f"  {name} {statistics.median(values):10.2f}"
        if name != base:
            ratios = sorted(m / t for m, t in zip(ours, values, strict=True))
            record["ratio"][name] = [ratios[0], statistics.median(ratios), ratios[-1]]
            text += f" (x{statistics.median(ratios):.2f}, {ratios[0]:.2f} to {ratios[-1]:.2f})"
    if world.rank == 0:
        print(text, flush=True)
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--sizes", nargs="*", default=list(SIZES), choices=list(SIZES))
    arguments = parser.parse_args()
    if world.rank == 0:
        print(
            f"{world.size} ranks, {MPI.Get_library_version().splitlines()[0].split(',')[0]}, "
            f"JAX {jax.__version__}, mpi4jax "
            f"{getattr(mpi4jax, '__version__', 'not installed')}\n"
            "microseconds per operation, medians; in brackets mpigrad's time over the other's",
            flush=True,
        )
    records = []
    for label in arguments.sizes:
        for op, candidates in loops(SIZES[label]).items():
            records.append(row(f"{op} {label}", measure(candidates)))
    calls = measure(dispatch())
    records.append(
        row("dispatch 8 B", {k: v for k, v in calls.items() if "eager" not in k}, "mpigrad.jit")
    )
    records.append(
        row("eager 8 B", {k: v for k, v in calls.items() if "jit" not in k}, "mpigrad eager")
    )
    if arguments.json and world.rank == 0:
        with open(arguments.json, "w") as file:
            json.dump({"ranks": world.size, "python": sys.version, "rows": records}, file, indent=1)


if __name__ == "__main__":
    main()
