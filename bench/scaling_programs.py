"""The programs of the seed paper's figures, one tile of a given size for each rank.

    mpigrad launch -n 4 bench/scaling_programs.py count|time --problem acoustic --side 100 ...

`count` prints what each rank has sent in one evaluation, as MPI has counted it (mpi_monitor.py);
`time` the processor seconds of evaluations, on one rank. One line of JSON each, which
bench/scaling.py reads.

    transposition  of the values of the Poisson matrix; its gradient is two of them
    poisson        kappa of a network, as in the paper, new in every evaluation: the set-up of the
                   multigrid method, a solve, the misfit; with gradient also the adjoint solve
    acoustic       a Ricker wavelet in the middle, a line of receivers, order 4, layers of 20 cells
    elastic        the same with a force, gradient in lambda, mu and rho
    acoustic3d     the same on three axes, layers of 10 cells
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI
from mpi_monitor import counted
from scaling_model import LAYERS, PROBLEMS, axes_of, tiles

import mpigrad
from mpigrad import sparse
from mpigrad.communicator import default_communicator
from mpigrad.grid import Grid

# Takes the number of an evaluation; gives the iterations of the linear solve, or 0.
Evaluate = Callable[[int], int]


def tiled(side: int, spacing: float, axes: int = 2) -> Grid:
    """A grid with `side` cells along each axis on each rank."""
    dims = tiles(default_communicator().size, axes)
    return Grid(tuple(side * n for n in dims), (spacing,) * axes, dims=dims)


def transposition(side: int, steps: int) -> dict[str, Evaluate]:
    """The transpose of a matrix's values, by the plan that is made once."""
    from mpigrad.sparse.matrix.products import transpose_values
    from mpigrad_apps.poisson.model import poisson

    grid = tiled(side, 1 / side)
    pattern = poisson(grid, np.zeros(grid.local_shape)).pattern
    values = jnp.asarray(np.random.default_rng(0).random(pattern.nnz))
    forward = mpigrad.jit(lambda v: transpose_values(pattern, v))
    share = lambda v: jnp.sum(transpose_values(pattern, v) ** 2)
    gradient = mpigrad.jit(mpigrad.grad(share))

    def evaluate(f: Callable[..., Any]) -> Evaluate:
        def run(k: int) -> int:
            jax.block_until_ready(f(values))
            return 0

        return run

    return {"forward": evaluate(forward), "gradient": evaluate(gradient)}


def poisson(side: int, steps: int) -> dict[str, Evaluate]:
    """The misfit of the Poisson problem as a function of the network's weights."""
    from mpigrad_apps.poisson.model import poisson as make
    from mpigrad_apps.poisson.parametrization import NetworkValues

    grid = tiled(side, 1 / (side * tiles(default_communicator().size)[0]))
    model = make(grid, np.full(grid.local_shape, -1.0))
    network = NetworkValues(grid)
    solver = sparse.PCG(rtol=1e-8, preconditioner=sparse.PFMG())  # the model counts hypre
    x, y = (jnp.asarray(axis) for axis in grid.centers())
    data = (x * (1 - x) * y * (1 - y)).ravel()

    def share(parameters: Any) -> Any:
        solution = model.solve(network.kappa(parameters), solver)
        return jnp.sum((solution.value - data) ** 2), solution.stats["num_steps"]

    def loss(parameters: Any) -> Any:
        value, iterations = share(parameters)
        return mpigrad.allreduce(value), iterations

    first = network.first(None, 0)
    forward = mpigrad.jit(loss)
    gradient = mpigrad.jit(mpigrad.value_and_grad(share, has_aux=True, replicated=0))

    def evaluate(f: Callable[..., Any], of: Callable[[Any], Any]) -> Evaluate:
        def run(k: int) -> int:
            moved = jax.tree.map(lambda w: w * (1 + 1e-3 * k), first)
            return int(of(jax.block_until_ready(f(moved))))

        return run

    return {
        "forward": evaluate(forward, lambda out: out[1]),
        "gradient": evaluate(gradient, lambda out: out[0][1]),
    }


def waves(side: int, steps: int, problem: str) -> dict[str, Evaluate]:
    """One shot; the loss is the sum of squares of what the receivers record."""
    from mpigrad.waves import ElasticMedium, Survey
    from mpigrad.waves.acoustic import Acoustic
    from mpigrad.waves.elastic import Elastic, lame

    elastic, axes = problem == "elastic", axes_of(problem)
    h, dt, frequency = 10.0, 1e-3, 10.0
    grid = tiled(side, h, axes)
    speed = np.full(grid.local_shape, 2000.0) + 500 * np.random.default_rng(0).random()
    common: dict[str, Any] = {"dt": dt, "steps": steps, "pml": LAYERS[axes]}
    if elastic:
        model: Any = Elastic(
            grid, frequency=frequency, source="force_x", components=("vx",), **common
        )
        density = np.full(grid.local_shape, 2000.0)
        arrays = (*lame(speed, speed / 1.7, density), density)
    else:
        model = Acoustic(grid, **common)
        arrays = (speed,)
    arrays = tuple(jnp.asarray(a, jnp.float32) for a in arrays)
    centre = (np.array(grid.shape) // 2 + 0.5) * h
    # Each receiver lies at the position of one value, so that it reads a single cell.
    beside = (3.5 * h,) * (axes - 1)
    line = [((i + (1 if elastic else 0.5)) * h, *beside) for i in range(grid.shape[0] - 1)]
    survey = Survey(centre[None, None], np.array(line)[None])
    squared = (np.pi * frequency * (np.arange(steps) * dt - 0.1)) ** 2
    height = 1e9 * h**2 if elastic else 1.0
    wavelet = jnp.asarray(height * (1 - 2 * squared) * np.exp(-squared), jnp.float32)[None, None]

    def share(arrays: Any) -> Any:
        medium = ElasticMedium(*arrays) if elastic else arrays[0]
        return jnp.sum(model.propagate(medium, wavelet, survey, gathers="share").gathers ** 2)

    forward = mpigrad.jit(lambda arrays: mpigrad.allreduce(share(arrays)))
    gradient = mpigrad.jit(mpigrad.value_and_grad(share))

    def evaluate(f: Callable[..., Any]) -> Evaluate:
        def run(k: int) -> int:
            jax.block_until_ready(f(arrays))
            return 0

        return run

    return {"forward": evaluate(forward), "gradient": evaluate(gradient)}


MAKE: dict[str, Callable[[int, int], dict[str, Evaluate]]] = {
    "transposition": transposition,
    "poisson": poisson,
    "acoustic": lambda side, steps: waves(side, steps, "acoustic"),
    "elastic": lambda side, steps: waves(side, steps, "elastic"),
    "acoustic3d": lambda side, steps: waves(side, steps, "acoustic3d"),
}


def count(problem: str, side: int, steps: int) -> dict[str, Any]:
    """Count the messages of each rank in an evaluation, in the order of the ranks."""
    world = MPI.COMM_WORLD
    found: dict[str, Any] = {}
    for what, evaluate in MAKE[problem](side, steps).items():
        evaluate(0)  # compiles, and does what is done once
        world.Barrier()
        before = counted()
        iterations = evaluate(1)
        sent = world.gather(np.subtract(counted(), before).tolist())
        found[what] = {"iterations": iterations, "sent": sent}
    return found


def seconds(problem: str, side: int, steps: int, repeats: int) -> dict[str, Any]:
    """Processor seconds of `repeats` evaluations on one rank; other programs' don't count."""
    assert MPI.COMM_WORLD.size == 1, "waiting for others would count"
    found: dict[str, Any] = {}
    for what, evaluate in MAKE[problem](side, steps).items():
        evaluate(0)
        taken, iterations, before = [], 0, sparse.solver_seconds()["solve"]
        wall = time.perf_counter()
        for k in range(repeats):
            start = time.process_time()
            iterations = evaluate(1 + k)
            taken.append(time.process_time() - start)
        # hypre's own share is in seconds on the clock.
        share = (sparse.solver_seconds()["solve"] - before) / (time.perf_counter() - wall)
        solving = share * sum(taken) / repeats
        found[what] = {"iterations": iterations, "seconds": taken, "solving": solving}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", choices=["count", "time"])
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=PROBLEMS)
    parser.add_argument("--side", type=int, nargs="+", required=True, help="cells, of each problem")
    parser.add_argument("--steps", type=int, default=20, help="of waves")
    parser.add_argument("--repeats", type=int, default=5)
    o = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    for problem, side in zip(o.problems, o.side, strict=True):
        if o.what == "count":
            found = count(problem, side, o.steps)
        else:
            found = seconds(problem, side, o.steps, o.repeats)
        if MPI.COMM_WORLD.rank == 0:
            about = {"problem": problem, "side": side, "steps": o.steps}
            about |= {"ranks": MPI.COMM_WORLD.size, "load": os.getloadavg()[0]}
            print("RESULT", json.dumps(about | found), flush=True)


if __name__ == "__main__":
    main()
