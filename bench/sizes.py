"""Allreduce, bcast, sendrecv and halo exchange of 8 B to 64 MiB beside mpi4py, and the worst ratio.

    mpigrad launch -n 2 bench/sizes.py [--json FILE]

Loops take turns, as in bench/operations.py. Ratios are medians of pairs. An allreduce is also
compared with `Allreduce(MPI.IN_PLACE, ...)`. A sendrecv sends what the last one received. The halo
exchange is one step of a stencil on tiles of two rows: a row of this size goes to each neighbour,
and each row becomes the sum of the rows beside it. With mpi4py it is written by hand, with NumPy
and nonblocking messages into the rows around the tile.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from mpi4py import MPI
from processor import processor

import mpigrad as mg
from mpigrad.grid import Grid, halo_exchange
from operations import in_loop, left, measure, repeated, right, row, world

KIB, MIB = 1 << 10, 1 << 20
SIZES = (
    *(8, 64, 512, 2 * KIB, 8 * KIB, 32 * KIB, 64 * KIB, 128 * KIB, 256 * KIB, 512 * KIB),
    *(MIB, 2 * MIB, 4 * MIB, 8 * MIB, 16 * MIB, 64 * MIB),
)
ROWS = 2

Loop = tuple[Callable[[], Any], int]


def stencil(n: int) -> tuple[Callable[[Any], Any], Callable[[], None]]:
    """One step on mpigrad, and the same by hand. Rows around the grid are copies of its ends."""
    grid = Grid((ROWS * world.size,), spacing=(1.0,))

    def step(u: Any) -> Any:
        v = halo_exchange(u, grid)
        return v[:-2] + v[2:]

    u, v = np.full((ROWS + 2, n), 0.0), np.full((ROWS + 2, n), 0.0)
    buffers = [u, v]
    before, after = world.rank - 1, world.rank + 1

    def by_hand() -> None:
        u, v = buffers
        requests = []
        if before >= 0:
            requests += [world.Irecv(u[0], before, 0), world.Isend(u[1], before, 0)]
        else:
            u[0] = u[1]
        if after < world.size:
            requests += [world.Irecv(u[-1], after, 0), world.Isend(u[-2], after, 0)]
        else:
            u[-1] = u[-2]
        MPI.Request.Waitall(requests)
        np.add(u[:-2], u[2:], out=v[1:-1])
        buffers.reverse()

    return step, by_hand


def rows(size: int, milliseconds: float) -> Iterator[tuple[str, dict[str, Loop]]]:
    """Each operation, and the loops of both libraries, in one turn of about this length."""
    n = size // 8
    even = max(10, int(min(2000, milliseconds * 1e6 / (500 + size / 4)) / 2))
    count = 2 * even  # the loops on mpigrad are unrolled once
    a, b = np.full(n, 0.0), np.full(n, 0.0)
    x = jnp.zeros(n)
    buffers = [a, b]

    def exchanged() -> None:
        world.Sendrecv(buffers[0], right, 0, buffers[1], left, 0)
        buffers.reverse()

    def ours(operation: Callable[[Any], Any], x: Any) -> Loop:
        return in_loop(operation, x, count, mg.jit), count

    def theirs(f: Callable[[], Any]) -> Loop:
        return repeated(f, count), count

    yield (
        "allreduce",
        {
            "mpigrad": ours(mg.allreduce, x),
            "mpi4py": theirs(lambda: world.Allreduce(a, b)),
            "mpi4py in place": theirs(lambda: world.Allreduce(MPI.IN_PLACE, a)),
        },
    )
    yield "bcast", {"mpigrad": ours(mg.bcast, x), "mpi4py": theirs(lambda: world.Bcast(a, 0))}
    exchange = lambda x: mg.sendrecv(x, right, left)
    yield "sendrecv", {"mpigrad": ours(exchange, x), "mpi4py": theirs(exchanged)}
    step, by_hand = stencil(n)
    tiles = jnp.zeros((ROWS, n))
    yield "halo exchange", {"mpigrad": ours(step, tiles), "mpi4py": theirs(by_hand)}


def shown(size: int) -> str:
    """Return 8 B, 2 KiB, 64 MiB."""
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size} B"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--sizes", nargs="*", type=int, default=SIZES, help="in bytes")
    parser.add_argument("--operations", nargs="*", help="instead of all")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--milliseconds", type=float, default=20, help="of a loop, roughly")
    arguments = parser.parse_args()
    text = (
        f"{processor()}, {world.size} ranks on {os.cpu_count()} cores, "
        f"{MPI.Get_library_version().splitlines()[0].split(',')[0]}\n"
        "microseconds per operation, medians; in brackets mpigrad's time over the other's"
    )
    if world.rank == 0:
        print(text, flush=True)
    records = []
    for size in arguments.sizes:
        for operation, loops in rows(size, arguments.milliseconds):
            if not arguments.operations or operation in arguments.operations:
                times = measure(loops, arguments.rounds)
                records.append(row(f"{operation} {shown(size)}", times))
    ratios = [
        (ratio, record["label"], other)
        for record in records
        for other, (_, ratio, _) in record["ratio"].items()
    ]
    worst = sorted(ratios, reverse=True)[:5]
    if world.rank == 0:
        for ratio, label, other in worst:
            print(f"worst: {label} {ratio:.2f} of {other}", flush=True)
    if arguments.json and world.rank == 0:
        result = {"ranks": world.size, "processor": processor(), "rows": records}
        with open(arguments.json, "w") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
