"""Measure the first call of programs with many messages: tracing, lowering, XLA and the first run.

    mpigrad launch -n 2 bench/tracing.py [--messages 20 100] [--rounds 7] [--json FILE]

A chain of messages is compiled and run once by `mpigrad.jit(f)` and by
`mpigrad.jit(mpigrad.grad(f))`, with empty caches of JAX. In each round the chains take turns with
the same chain without messages. The times are medians of the slowest rank in milliseconds. "CPU" is
the time of all threads of the process, which depends less on other work of the machine. The last
two columns are what each message adds to the chain, in microseconds of total time and of CPU time.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import mpigrad
from mpigrad.grid import Grid, halo_exchange

# The names of JAX's own timers, https://docs.jax.dev/en/latest/jax.monitoring.html
PHASES = {
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
    "/jax/core/compile/backend_compile_duration": "XLA",
}
COLUMNS = (*PHASES.values(), "run", "total", "CPU")
CELLS = 64
# The chain without messages that a chain is compared with. Default: "no message".
WITHOUT = {"no halo": "no halo", "halo exchange": "no halo"}


def operations() -> dict[str, Callable[[Any], Any]]:
    """Return the links of the chains by name."""
    comm = mpigrad.default_communicator()
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    grid = Grid((CELLS * comm.size,), spacing=(1.0,))
    return {
        "no message": lambda x: x,
        "no halo": lambda x: mean(jnp.pad(x, 1, mode="edge")),
        "allreduce": mpigrad.allreduce,
        "sendrecv": lambda x: mpigrad.sendrecv(x, right, left),
        "bcast": mpigrad.bcast,
        "halo exchange": lambda x: mean(halo_exchange(x, grid)),
    }


def mean(u: Any) -> Any:
    """Return the mean of the two neighbours of each cell."""
    return (u[2:] + u[:-2]) * 0.5


def chain(link: Callable[[Any], Any], messages: int) -> Callable[[Any], Any]:
    """Return a function of an array with this number of links."""

    def f(x: Any) -> Any:
        for _ in range(messages):
            x = jax.lax.sin(link(x)) * 0.9
        return jnp.sum(x)

    return f


def compiled(link: Callable[[Any], Any], messages: int, of: str) -> Callable[[Any], Any]:
    """Return a new compiled function: the chain, or its gradient."""
    f = chain(link, messages)
    return mpigrad.jit(mpigrad.grad(f) if of == "grad" else f)


longest: dict[str, float] = {}


def note(event: str, duration_secs: float, **_: Any) -> None:
    """Keep the longest time of each phase: shorter times are those of parts of the program."""
    if event in PHASES:
        longest[PHASES[event]] = max(longest.get(PHASES[event], 0.0), duration_secs)


def first_call(program: Callable[[Any], Any], x: Any) -> list[float]:
    """Return the milliseconds of the first call in each phase, on the slowest rank."""
    comm = mpigrad.default_communicator()
    jax.clear_caches()
    gc.collect()
    longest.clear()
    comm.mpi.Barrier()
    start, start_cpu = time.perf_counter(), time.process_time()
    jax.block_until_ready(program(x))
    total, cpu = time.perf_counter() - start, time.process_time() - start_cpu
    phases = [longest.get(name, 0.0) for name in PHASES.values()]
    times = [*phases, total - sum(phases), total, cpu]
    return [1e3 * max(ranks) for ranks in zip(*comm.mpi.allgather(times), strict=True)]


def main() -> None:
    """Measure, and print a table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, nargs="+", default=[20, 100])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=pathlib.Path, help="also write all times to this file")
    options = parser.parse_args()
    jax.monitoring.register_event_duration_secs_listener(note)
    x = jnp.ones(CELLS, jnp.float32)
    cases = {
        (transformation, count, name): (functools.partial(compiled, link, count, transformation))
        for transformation in ("value", "grad")
        for count in options.messages
        for name, link in operations().items()
    }
    times: dict[tuple[str, int, str], list[list[float]]] = {case: [] for case in cases}
    for turn in range(options.rounds + 1):
        for case, make in cases.items():
            measured = first_call(make(), x)
            if turn:  # the first round imports parts of JAX
                times[case].append(measured)
    comm = mpigrad.default_communicator()
    if comm.rank:
        return
    if options.json:
        options.json.write_text(json.dumps([[*case, rows] for case, rows in times.items()]))
    print(f"{comm.size} ranks, JAX {jax.__version__}, medians of {options.rounds} rounds")
    print(
        "| of | links | link | "
        + " | ".join(f"{c}, ms" for c in COLUMNS)
        + " | added, µs | added CPU, µs |"
    )
    print("|---" * (len(COLUMNS) + 5) + "|")
    for (transformation, count, name), rows in times.items():
        medians = [statistics.median(column) for column in zip(*rows, strict=True)]
        same = WITHOUT.get(name, "no message")
        alone = times[transformation, count, same]
        added = [
            statistics.median(a[i] - b[i] for a, b in zip(rows, alone, strict=True)) * 1e3 / count
            for i in (-2, -1)
        ]
        cells = " | ".join(f"{m:.1f}" for m in medians)
        last = " | " if name == same else f"{added[0]:.0f} | {added[1]:.0f}"
        print(f"| {transformation} | {count} | {name} | {cells} | {last} |")


if __name__ == "__main__":
    main()
