"""Measure the overhead of a call with the installed JAX, compared with plain `jax.jit`.

    python bench/dispatch.py [--rounds 31]

The call sends a message of 8 bytes on one rank, so that nothing waits. The programs take turns, and
each figure is the median of the rounds, in microseconds. `tools/test_jax.sh` makes environments
with other versions of JAX.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import mpigrad

CALLS = 400


def microseconds(program: Callable[[Any], Any], x: Any) -> float:
    """Measure the microseconds of one call until its result is ready."""
    start = time.perf_counter()
    for _ in range(CALLS):
        x = program(x)
    jax.block_until_ready(x)
    return (time.perf_counter() - start) / CALLS * 1e6


def main() -> None:
    """Measure, and print one line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=31)
    rounds = parser.parse_args().rounds
    programs: dict[str, Callable[[Any], Any]] = {
        "jax.jit": jax.jit(lambda x: x + 1),
        "mpigrad.jit": mpigrad.jit(mpigrad.allreduce),
        "eager": mpigrad.allreduce,
    }
    x = jnp.ones(2, jnp.float32)
    for program in programs.values():
        microseconds(program, x)
    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, program in programs.items():
            times[name].append(microseconds(program, x))
    text = ", ".join(f"{name} {statistics.median(t):.1f}" for name, t in times.items())
    print(f"JAX {jax.__version__}, Python {platform.python_version()}: {text} µs")


if __name__ == "__main__":
    main()
