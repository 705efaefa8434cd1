"""L-BFGS: time per iteration outside the objective, beside SciPy's L-BFGS-B and optax.

    python bench/optimize.py [--unknowns 1e4 1e6 1e7] [--ranks 1 2] [--pairs 5] [--output FILE]

The objective Σ cᵢ (√(1 + (xᵢ - 1)²) - 1) with cᵢ from 1 to 1000, in double precision, costs little.
All remember 10 pairs. On several ranks each evaluates its part of the sum. "replicated": every rank
holds all unknowns, and the gradient is summed over ranks; so run SciPy and optax, on every rank.
"sharded": each rank holds its part. A run is --iterations iterations after the memory is full; its
time less that of its evaluations is what is shown. The evaluations of mpigrad and optax are timed
by themselves (median), SciPy's while it runs, the conversion of its arrays included. The runs take
turns, --pairs times; medians, and the median of the ratios within the turns.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import time
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
MEMORY = 10
WARM = MEMORY + 2  # iterations after which the memory is full
NAMES = ("mpigrad, sharded", "mpigrad, replicated", "SciPy", "optax")


def measure(n: int, pairs: int, iterations: int) -> None:
    """Print a line of JSON with each one's seconds per iteration outside the objective."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    import scipy.optimize
    from mpi4py import MPI

    import mpigrad
    from mpigrad.optimize import LBFGS, Objective

    jax.config.update("jax_enable_x64", True)
    world = MPI.COMM_WORLD
    first, last = (n * r // world.size for r in (world.rank, world.rank + 1))
    c = jnp.asarray(np.geomspace(1, 1000, n)[first:last])

    def share(x: Any) -> Any:
        return jnp.sum(c * (jnp.sqrt(1 + (x - 1) ** 2) - 1))

    def share_of_all(x: Any) -> Any:
        return share(x[first:last])

    x0 = np.zeros(n)
    own = jnp.zeros(last - first)
    sharded = mpigrad.jit(mpigrad.value_and_grad(share))
    replicated = mpigrad.jit(mpigrad.value_and_grad(share_of_all, replicated=0))

    def seconds(f: Any) -> float:
        world.Barrier()
        start = time.perf_counter()
        jax.block_until_ready(f())
        return time.perf_counter() - start

    def evaluation(value_and_grad: Any, x: Any) -> float:
        value_and_grad(x)
        return statistics.median(seconds(lambda: value_and_grad(x)) for _ in range(15))

    def ours(objective: Any, x: Any, each: float) -> float:
        method = LBFGS(memory=MEMORY)
        state = method.start(objective, objective.unknowns.initial_vector(x))
        for _ in range(WARM):
            state = method.step(objective, state)
        objective.evaluations = 0

        def run() -> Any:
            nonlocal state
            for _ in range(iterations):
                state = method.step(objective, state)
            return state.x

        total = seconds(run)
        return (total - each * objective.evaluations) / iterations

    def scipys() -> float:
        inside = 0.0
        marks: list[tuple[float, float]] = []

        def value_and_gradient(x: Any) -> Any:
            nonlocal inside
            start = time.perf_counter()
            value, gradient = replicated(jnp.asarray(x))
            result = float(value), np.asarray(gradient)
            inside += time.perf_counter() - start
            return result

        def note(x: Any) -> None:
            marks.append((time.perf_counter(), inside))

        scipy.optimize.minimize(
            value_and_gradient, x0, jac=True, method="L-BFGS-B", callback=note,
            options={"maxcor": MEMORY, "maxiter": WARM + iterations, "gtol": 0, "ftol": 0},
        )  # fmt: skip
        assert len(marks) == WARM + iterations
        (start, before), (end, after) = marks[WARM - 1], marks[-1]
        return ((end - start) - (after - before)) / iterations

    search = optax.scale_by_zoom_linesearch(20, initial_guess_strategy="one")
    solver = optax.lbfgs(memory_size=MEMORY, linesearch=search)

    @jax.custom_vjp
    def loss(x: Any) -> Any:
        return replicated(x)[0]

    loss.defvjp(replicated, lambda gradient, seed: (seed * gradient,))

    @mpigrad.jit
    def optax_step(x: Any, state: Any) -> Any:
        value, gradient = optax.tree.get(state, "value"), optax.tree.get(state, "grad")
        updates, state = solver.update(
            gradient, state, x, value=value, grad=gradient, value_fn=loss
        )
        return x + updates, state

    def optaxs(each: float) -> float:
        x = jnp.asarray(x0)
        value, gradient = replicated(x)
        state = optax.tree.set(solver.init(x), value=value, grad=gradient)
        state = jax.tree.map(lambda leaf: jnp.asarray(leaf, leaf.dtype), state)
        evaluations = 0
        for _ in range(WARM):
            x, state = optax_step(x, state)

        def run() -> Any:
            nonlocal x, state, evaluations
            for _ in range(iterations):
                x, state = optax_step(x, state)
                evaluations += int(optax.tree.get(state, "num_linesearch_steps"))
            return x

        total = seconds(run)
        return (total - each * evaluations) / iterations

    spent: dict[str, list[float]] = {name: [] for name in NAMES}
    objectives = Objective(share, own, sharded=True), Objective(share_of_all, x0, replicated=True)
    for _ in range(pairs):
        alone = evaluation(sharded, own), evaluation(replicated, jnp.asarray(x0))
        runs = (
            lambda: ours(objectives[0], own, alone[0]),  # noqa: B023
            lambda: ours(objectives[1], x0, alone[1]),  # noqa: B023
            scipys,
            lambda: optaxs(alone[1]),  # noqa: B023
        )
        for name, run in zip(NAMES, runs, strict=True):
            spent[name].append(max(world.allgather(run())))
    if world.rank == 0:
        print("RESULT " + json.dumps({"unknowns": n, "ranks": world.size, "seconds": spent}))


def launch(n: int, ranks: int, pairs: int, iterations: int) -> dict[str, Any]:
    """The measurement on so many ranks, in processes of its own."""
    program = [__file__, "--serve", str(n), str(pairs), str(iterations)]
    command = [sys.executable, "-m", "mpigrad", "launch", "-n", str(ranks), *program]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return json.loads(line.partition(" ")[2])  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--unknowns", type=float, nargs="+", default=[1e4, 1e6, 1e7])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--output", type=pathlib.Path, default=HERE / "results/optimize.json")
    parser.add_argument("--serve", type=int, nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        measure(*arguments.serve)
        return
    print("unknowns  ranks  milliseconds per iteration outside the objective (of SciPy's, median)")
    results = []
    for n in map(int, arguments.unknowns):
        for ranks in arguments.ranks:
            result = launch(n, ranks, arguments.pairs, arguments.iterations)
            results.append(result)
            parts = []
            for name, times in result["seconds"].items():
                ratios = [a / b for a, b in zip(times, result["seconds"]["SciPy"], strict=True)]
                parts.append(
                    f"{name} {1e3 * statistics.median(times):.3g} ({statistics.median(ratios):.2f})"
                )
            print(f"{n:8d}  {ranks:5d}  " + "  ".join(parts), flush=True)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(results, indent=1) + "\n")
    print(f"written to {arguments.output}")


if __name__ == "__main__":
    main()
