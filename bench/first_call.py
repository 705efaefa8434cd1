"""Measure the processor time of first calls on 1, 2 and 4 ranks, with and without sharing.

    python bench/first_call.py [--ranks 1 2 4] [--rounds 3] [--output FILE]

Each program is called once by each rank of a new job. In one job each rank compiles it
(MPIGRAD_PROGRAMS=off), and in another job the ranks share compiled programs. The figures are
processor seconds of all threads of all ranks, and medians of the rounds: of the call, from the
first line of tracing to the result, and of the job from its start to the result. An earlier small
program of the same kind has imported all parts of JAX. The last column has how many of the ranks
have compiled the program.

training    a loss of a network on replicated weights, with its gradient
shot        one source of a wave on each rank, with the gradient for the replicated model
halo        a wave on a grid that all ranks divide, with its gradient
poisson     the gradient of a sparse solve on a grid that all ranks divide

The ranks have one text of `training` and `shot`. The tiles of `halo` and `poisson` have different
neighbours, so their programs differ.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

PROGRAMS = ("training", "shot", "halo", "poisson")
STEPS = 20
LAPLACIAN = {-2: -1 / 12, -1: 4 / 3, 1: 4 / 3, 2: -1 / 12}


def wave(layers: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return the recorded energy of some steps of a wave, by the padded field."""
    import jax
    import jax.numpy as jnp

    def energy(c: Any) -> Any:
        def step(state: Any, t: Any) -> Any:
            u, before = state
            p = layers(u)
            n, m = u.shape
            around = [
                weight * (p[2 + i : 2 + i + n, 2:-2] + p[2:-2, 2 + i : 2 + i + m])
                for i, weight in LAPLACIAN.items()
            ]
            change = 0.1 * c * c * (sum(around) - 5 * u)
            return (2 * u - before + change + 0.01 * jnp.sin(t), u), jnp.sum(u[3] ** 2)

        times = jnp.arange(STEPS, dtype=c.dtype)
        _, records = jax.lax.scan(step, (jnp.zeros_like(c), jnp.zeros_like(c)), times)
        return jnp.sum(records)

    return energy


def program_of(name: str, cells: int) -> tuple[Callable[..., Any], Any]:
    """Return a compiled function that was not called yet, and its argument."""
    import jax.numpy as jnp

    import mpigrad as mg
    from mpigrad import sparse

    comm = mg.default_communicator()
    if name == "training":
        weights = [jnp.full((cells, cells), 0.01 * (layer + 1)) for layer in range(6)]
        x = jnp.full((32, cells), 1.0 + comm.rank)

        def loss(weights: Any, x: Any) -> Any:
            for w in weights:
                x = jnp.tanh(x @ w)
            return mg.allreduce(jnp.sum(x**2))

        run = mg.jit(mg.value_and_grad(loss, loss="replicated", replicated=0))
        return lambda weights: run(weights, x), weights
    if name == "shot":
        energy = wave(lambda u: jnp.pad(u, 2))

        def misfit(c: Any) -> Any:
            return mg.allreduce(energy(c))

        run = mg.jit(mg.value_and_grad(misfit, loss="replicated", replicated=0))
        return run, jnp.ones((cells, cells))
    grid = mg.Grid((cells * comm.size, cells), (1.0, 1.0))
    if name == "halo":
        energy = wave(lambda u: mg.halo_exchange(u, grid, width=2, boundary="edge"))
        return mg.jit(mg.value_and_grad(energy)), jnp.ones(grid.local_shape)
    pattern = sparse.Pattern.from_stencil(grid, [(0, 0), (1, 0), (-1, 0), (0, 1), (0, -1)])
    solver = sparse.PCG(rtol=1e-4, preconditioner=None)

    def share(k: Any) -> Any:
        a = sparse.Matrix.assemble(pattern, [4 * k + 0.1, -k, -k, -k, -k])
        return jnp.sum(sparse.solve(a, jnp.ones(k.size), solver).value ** 2)

    return mg.jit(mg.value_and_grad(share)), jnp.ones(grid.local_shape)


def measure(name: str) -> None:
    """Print sums over ranks: seconds of the call, of the job until then, and who compiled."""
    import jax

    import mpigrad

    for small in (8, 64):  # the first one imports
        run, x = program_of(name, small)
        jax.block_until_ready(x)
        compiled: list[str] = []
        jax.monitoring.register_event_listener(
            lambda event, _found=compiled, **_: _found.append(event.rpartition("/programs/")[2])
        )
        mpigrad.default_communicator().mpi.Barrier()
        start = time.process_time()
        jax.block_until_ready(run(x))
        seconds = time.process_time() - start
    comm = mpigrad.default_communicator()
    own = "compiled" in compiled
    found = comm.mpi.gather((seconds, time.process_time(), own))
    if found is not None:
        print(json.dumps([sum(column) for column in zip(*found, strict=True)]))


def job(name: str, ranks: int, choice: str) -> list[float]:
    """Run one job, and return the seconds of the call and of the job, and who compiled."""
    words = [sys.executable, "-m", "mpigrad", "launch", "-n", str(ranks), __file__, "--job", name]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_COMPILATION")}
    environment["MPIGRAD_PROGRAMS"] = choice
    done = subprocess.run(words, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--programs", nargs="+", default=PROGRAMS, choices=PROGRAMS)
    parser.add_argument("--output", type=pathlib.Path, help="also write all times to this file")
    parser.add_argument("--job", choices=PROGRAMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        measure(options.job)
        return
    cases = [
        (name, ranks, choice)
        for name in options.programs
        for ranks in options.ranks
        for choice in ("off", "job")
    ]
    times: dict[tuple[str, int, str], list[list[float]]] = {case: [] for case in cases}
    for _ in range(options.rounds):
        for case in cases:
            times[case].append(job(*case))
    if options.output:
        options.output.write_text(json.dumps([[*case, rows] for case, rows in times.items()]))
    print("| program | ranks | call, s | shared, s | job, s | shared, s | ranks that compile |")
    print("|---" * 7 + "|")
    for name in options.programs:
        for ranks in options.ranks:
            alone, shared = (
                [statistics.median(column) for column in zip(*times[name, ranks, c], strict=True)]
                for c in ("off", "job")
            )
            pairs = zip(alone[:2], shared[:2], strict=True)
            cells = [f"{seconds:.2f}" for pair in pairs for seconds in pair]
            print(f"| {name} | {ranks} | {' | '.join(cells)} | {shared[2]:.0f} |")


if __name__ == "__main__":
    main()
