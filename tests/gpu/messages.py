"""Time of a message on a GPU, by its size: mpigrad, and mpi4py on the same device memory.

    mpigrad launch -n 2 tests/gpu/messages.py [--small]
        [--by mpigrad halo numpy copies cupy xla]

Rank 0 prints a line of JSON for each operation and size: microseconds for one message in a loop of
a compiled program, and GB/s of the bytes that a rank sends. Controls without mpigrad: mpi4py sends
arrays of NumPy (`numpy`), blocks of CuPy, for which MPI must be GPU-aware (`cupy`), and the memory
of JAX's arrays, which UCX may reject (`xla`). `copies` moves an array to pinned memory of the host,
and back.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

import mpigrad as mg
from mpigrad.grid import Grid, halo_exchange

ROUNDS = 3
SIZES = (8, 1 << 10, 1 << 16, 1 << 20, 1 << 24, 1 << 27)
SMALL = (8, 1 << 16, 1 << 20)


def messages(size: int, limit: float = 1e9) -> int:
    """Return how many messages of this size a round has."""
    return max(2, min(200, int(limit / size)))


def seconds(call: Callable[[], Any]) -> float:
    """Return the median time of a call. All ranks begin together."""
    call()
    times = []
    for _ in range(ROUNDS):
        MPI.COMM_WORLD.barrier()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def report(by: str, operation: str, size: int, each: float, **more: Any) -> None:
    """Print a line from rank 0."""
    if MPI.COMM_WORLD.rank == 0:
        row = {"by": by, "case": operation, "bytes": size, "us": 1e6 * each}
        row |= {"GB_s": size / each / 1e9, "platform": jax.default_backend(), **more}
        print(json.dumps(row), flush=True)


def by_mpigrad(sizes: tuple[int, ...]) -> None:
    """Time messages in a loop of a compiled program, less the time of the loop without them."""
    comm = mg.default_communicator()
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    operations: dict[str, Callable[[Any], Any]] = {
        "nothing": lambda x: x,
        "allreduce": mg.allreduce,
        "sendrecv": lambda x: mg.sendrecv(x, after, before),
    }
    for size in sizes:
        n, x = messages(size), jnp.ones(max(1, size // 4), jnp.float32)
        empty = 0.0
        for name, operation in operations.items():

            @mg.jit
            def program(x: Any, operation: Any = operation, n: int = n) -> Any:
                return jax.lax.fori_loop(0, n, lambda _, x: operation(x) * 0.5 + 1.0, x)

            each = seconds(lambda x=x, f=program: jax.block_until_ready(f(x))) / n
            if name == "nothing":
                empty = each
                continue
            report("mpigrad", name, x.nbytes, each - empty, loop_us=1e6 * empty)


def by_halo(sizes: tuple[int, ...]) -> None:
    """Time halo exchanges of a plane between steps."""
    comm = mg.default_communicator()
    for size in sizes[-2:]:
        cells = max(64, min(int((size / 8) ** 0.5) * 8, 16384))
        grid = Grid((cells, cells), (1.0, 1.0), dims=(comm.size, 1))
        u, n = jnp.ones(grid.local_shape, jnp.float32), 20

        @mg.jit
        def steps(u: Any, grid: Any = grid, n: int = n) -> Any:
            inner = lambda p: p[1:-1, 1:-1]
            step = lambda _, u: 0.5 * inner(halo_exchange(u, grid, width=1))
            return jax.lax.fori_loop(0, n, step, u)

        each = seconds(lambda u=u, f=steps: jax.block_until_ready(f(u))) / n
        report("halo", f"halo of {cells}^2", 4 * cells, each)


def by_numpy(sizes: tuple[int, ...]) -> None:
    """Time mpi4py's Sendrecv and Allreduce of arrays on the host."""
    world = MPI.COMM_WORLD
    after, before = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    for size in sizes:
        n, sent = messages(size), np.ones(max(1, size // 4), np.float32)
        received = np.empty_like(sent)

        def exchange(n: int = n, sent: Any = sent, received: Any = received) -> None:
            for _ in range(n):
                world.Sendrecv(sent, after, 0, received, before, 0)

        def add(n: int = n, sent: Any = sent, received: Any = received) -> None:
            for _ in range(n):
                world.Allreduce(sent, received)

        report("numpy", "sendrecv", sent.nbytes, seconds(exchange) / n)
        report("numpy", "allreduce", sent.nbytes, seconds(add) / n)


def by_copies(sizes: tuple[int, ...]) -> None:
    """Time copies to pinned memory of the host and back, with a wait for each."""
    import cupy

    for size in sizes:
        n, x = messages(size), cupy.ones(max(1, size // 4), cupy.float32)
        stream = cupy.cuda.Stream(non_blocking=True)
        pinned = cupy.cuda.alloc_pinned_memory(x.nbytes)

        def copy(to: int, of: int, n: int, x: Any = x, stream: Any = stream) -> None:
            for _ in range(n):
                cupy.cuda.runtime.memcpyAsync(to, of, x.nbytes, 4, stream.ptr)
                stream.synchronize()

        pairs = {"to the host": (pinned.ptr, x.data.ptr), "to the device": (x.data.ptr, pinned.ptr)}
        for name, (to, of) in pairs.items():
            each = seconds(lambda to=to, of=of, n=n, f=copy: f(to, of, n)) / n
            report("copies", name, x.nbytes, each)


def by_cupy(sizes: tuple[int, ...], of_xla: bool) -> None:
    """Time mpi4py's Sendrecv of device memory: CuPy's, or that of JAX's arrays."""
    import cupy

    cupy.cuda.set_allocator(None)  # plain cudaMalloc, which every UCX can share
    world = MPI.COMM_WORLD
    other = (world.rank + 1) % world.size
    for size in sizes:
        n, count = messages(size), max(1, size // 4)
        if of_xla:
            kept = [jnp.full(count, float(world.rank), jnp.float32), jnp.zeros(count, jnp.float32)]
            jax.block_until_ready(kept)
            sent, received = (cupy.from_dlpack(a) for a in kept)
        else:
            sent = cupy.full(count, float(world.rank), cupy.float32)
            received = cupy.zeros(count, cupy.float32)
        cupy.cuda.get_current_stream().synchronize()

        def program(n: int = n, sent: Any = sent, received: Any = received) -> None:
            for _ in range(n):
                world.Sendrecv(sent, other, 0, received, (world.rank - 1) % world.size, 0)

        each = seconds(program) / n
        right = bool((received == (world.rank - 1) % world.size).all())
        report("xla" if of_xla else "cupy", "sendrecv", 4 * count, each, ok=right)


WAYS: dict[str, Callable[[tuple[int, ...]], None]] = {
    "mpigrad": by_mpigrad,
    "halo": by_halo,
    "numpy": by_numpy,
    "copies": by_copies,
    "cupy": lambda sizes: by_cupy(sizes, of_xla=False),
    "xla": lambda sizes: by_cupy(sizes, of_xla=True),
}


def main() -> None:
    """Time what `--by` names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--by", nargs="+", default=["mpigrad"], choices=list(WAYS))
    o = parser.parse_args()
    sizes = SMALL if o.small else SIZES
    for by in o.by:
        WAYS[by](sizes)
    assert np.isfinite(float(mg.allreduce(jnp.ones(()))))


if __name__ == "__main__":
    main()
