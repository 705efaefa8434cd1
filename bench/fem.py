"""Finite elements: assembly beside scikit-fem, the benchmark Mosaic, and messages by rank.

    python bench/fem.py [--parts assembly heat structural partition] [--cells 1000000]
                        [--nx 512 1024] [--ranks 1 2] [--rounds 5] [--output FILE]

Seconds are given as wall time and as CPU time of the slowest rank. On a machine with other work the
CPU time is the better one. Loops of one program take turns, so a ratio is the median of pairs.

- assembly: the Jacobian of P1 tetrahedra with a new coefficient in each call, beside scikit-fem.
- heat: a slab of Mosaic, a value, and a value and its gradient, with a new density in each call.
- structural: a beam of Mosaic, iterations and seconds.
- partition: ghosts, neighbours and messages of a solve with 4,096 cells for each rank.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import mpi_monitor

HERE = pathlib.Path(__file__).resolve()
sys.path.insert(0, str(HERE.parent.parent / "examples" / "mosaic"))
PARTS = ("assembly", "heat", "structural", "partition")
Loops = dict[str, Callable[[int], Any]]


def interleaved(loops: Loops, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return wall and CPU seconds of each loop in each round, of the slowest rank."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    found: dict[str, dict[str, list[float]]] = {n: {"wall": [], "cpu": []} for n in loops}
    for turn in range(rounds + 1):
        for name in sorted(loops, reverse=turn % 2 == 1):
            world.Barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            loops[name](turn)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            if turn:  # the first round compiles
                found[name]["wall"].append(world.allreduce(wall, MPI.MAX))
                found[name]["cpu"].append(world.allreduce(cpu, MPI.MAX))
    return found


def assembly(cells: int, rounds: int) -> dict[str, Any]:
    """Assemble ∫ k ∇u · ∇v on tetrahedra."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import mpigrad as mg
    from mpigrad import fem

    n = round((cells / 6) ** (1 / 3))
    mesh = fem.box((n, n, n), (1.0, 1.0, 1.0), cell_type="tetrahedron")
    space = fem.Space(mesh)
    form = fem.Energy(space, lambda p, k: 0.5 * k * p.grad @ p.grad)
    make = mg.jit(lambda k: form(fem.PerCell(k)).jacobian().values)
    ks = [jnp.full(mesh.n_cells, 1.0 + 0.1 * i) for i in range(rounds + 1)]
    loops: Loops = {"mpigrad": lambda turn: jax.block_until_ready(make(ks[turn]))}
    if mg.default_communicator().size == 1:
        from skfem import Basis, BilinearForm, ElementTetP1, MeshTet

        line = np.linspace(0, 1, n + 1)
        basis = Basis(MeshTet.init_tensor(line, line, line), ElementTetP1())

        @BilinearForm
        def conduction(u: Any, v: Any, w: Any) -> Any:
            return w.k * (u.grad * v.grad).sum(axis=0)

        points = basis.X.shape[-1]

        def peer(turn: int) -> Any:
            k = np.full((basis.mesh.nelements, points), 1.0 + 0.1 * turn)
            return conduction.assemble(basis, k=k)

        loops["scikit-fem"] = peer
        trace = abs(make(ks[0])).sum() / abs(peer(0)).sum()
        assert abs(float(trace) - 1) < 1e-9, trace
    return {"cells": mesh.n_cells_global, "seconds": interleaved(loops, rounds)}


def heat(nx: int, rounds: int) -> dict[str, Any]:
    """Solve a slab of Mosaic with a density that is new in each call, and with an equal one."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from large import heated_box
    from mpi4py import MPI

    problem = heated_box(nx)
    mesh = problem.mesh
    nodes = mesh.vertices.n_local
    rest = (jnp.zeros(mesh.n_cells), jnp.zeros(nodes), np.ones(nodes, bool))
    weights, wave = jnp.array([1.0, 0.0]), jnp.cos(jnp.asarray(mesh.cell_ids, float))

    def density(turn: int) -> jax.Array:
        return jax.block_until_ready(0.5 + 1e-3 * turn * wave)

    densities = [density(i + 1) for i in range(2 * rounds + 2)]

    def value(turn: int) -> Any:
        return jax.block_until_ready(problem.outputs(densities[2 * turn], *rest))

    def gradient(turn: int) -> Any:
        return jax.block_until_ready(problem.pullback(weights, densities[2 * turn + 1], *rest))

    seconds = interleaved({"value": value, "value and gradient": gradient}, rounds)
    seconds |= interleaved({"value, equal density": lambda turn: value(0)}, rounds)
    peak = MPI.COMM_WORLD.allreduce(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    unknowns = mesh.vertices.n_global
    return {
        "nx": nx,
        "unknowns": unknowns,
        "peak bytes per unknown": round(peak / unknowns),
        "seconds": seconds,
    }


def structural(nx: int, rounds: int) -> dict[str, Any]:
    """Solve a beam of Mosaic with a density that is new in each call."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from problems import Elastic, Groups, stiffness_ratio

    import mpigrad as mg
    from mpigrad import fem

    mesh = fem.box((nx, 2, nx // 2), (2.0, 1.0, 1.0), cell_type="hexahedron")
    x = mesh.points[: mesh.vertices.n_local, 0]
    clamped = Groups((x < 1e-9).astype(int), np.zeros((1, 3)))
    load = Groups((x > 2 - 1e-9).astype(int), np.array([[0.0, 0.0, -1.0]]))
    problem = Elastic(mesh, clamped, load)

    @mg.jit
    def solve(rho: jax.Array) -> Any:
        E = problem.E_max * stiffness_ratio(rho, problem.p_exp)
        equation = problem.body(fem.PerCell(E)) - problem.loads[0]
        found = fem.solve(equation, problem.fixed, solver=problem.solver)
        return found.value, found.stats["num_steps"]

    steps = []

    def run(turn: int) -> None:
        _, taken = jax.block_until_ready(solve(jnp.full(mesh.n_cells, 0.5 + 1e-3 * turn)))
        steps.append(int(taken))

    seconds = interleaved({"value": run}, rounds)
    unknowns = 3 * mesh.vertices.n_global
    return {"nx": nx, "unknowns": unknowns, "iterations": max(steps), "seconds": seconds}


def partition() -> dict[str, Any]:
    """Count what each rank has, and what it sends in a value and its gradient."""
    import jax
    import jax.numpy as jnp
    from mpi4py import MPI

    import mpigrad as mg
    from mpigrad import fem

    world = MPI.COMM_WORLD
    shape = [16, 16, 16]
    for i in range(world.size.bit_length() - 1):  # 4096 cells for each rank
        shape[i % 3] *= 2
    mesh = fem.box(shape, [n / 16 for n in shape], cell_type="hexahedron")
    space = fem.Space(mesh)
    form = fem.Energy(space, lambda p, k: 0.5 * k * p.grad @ p.grad - p.u)
    fixed = space.fixed("xmin")

    def loss(k: jax.Array) -> jax.Array:
        return jnp.sum(fem.solve(form(fem.PerCell(k)), fixed).value)

    run = mg.jit(mg.value_and_grad(loss))
    solve = mg.jit(lambda k: fem.solve(form(fem.PerCell(k)), fixed).stats["num_steps"])
    steps = int(solve(jnp.ones(mesh.n_cells)))
    jax.block_until_ready(run(jnp.ones(mesh.n_cells)))
    before = mpi_monitor.counted()
    jax.block_until_ready(run(jnp.full(mesh.n_cells, 2.0)))
    sent = [b - a for a, b in zip(before, mpi_monitor.counted(), strict=True)]
    report = mesh.partition_report()
    return {
        "ranks": world.size,
        "cells": int(report.cells.max()),
        "ghosts": int(report.ghosts.max()),
        "neighbours": int(report.neighbors.max()),
        "imbalance": report.imbalance,
        "iterations": steps,
        "messages": world.allreduce(sent[0], MPI.MAX),
        "bytes": world.allreduce(sent[1], MPI.MAX),
        "collectives": world.allreduce(sent[2], MPI.MAX),
    }


def rank(given: argparse.Namespace) -> None:
    """Measure on these ranks, and write the results on rank 0."""
    import jax
    from mpi4py import MPI

    import mpigrad  # noqa: F401 (before other users of MPI)

    jax.config.update("jax_enable_x64", True)
    rows: list[dict[str, Any]] = []
    match given.parts[0]:
        case "assembly":
            rows = [assembly(given.cells, given.rounds)]
        case "heat":
            rows = [heat(nx, given.rounds) for nx in given.nx]
        case "structural":
            rows = [structural(given.beam, given.rounds)]
        case "partition":
            rows = [partition()]
    if MPI.COMM_WORLD.rank == 0:
        pathlib.Path(given.times).write_text(json.dumps(rows))


def launch(part: str, ranks: int, given: argparse.Namespace, folder: str) -> list[dict[str, Any]]:
    """Run a part on a number of ranks, and return its rows."""
    out = f"{folder}/{part}-{ranks}.json"
    words = ["--parts", part, "--cells", str(given.cells), "--rounds", str(given.rounds)]
    words += ["--beam", str(given.beam), "--nx", *map(str, given.nx), "--times", out]
    environment = dict(os.environ)
    if part == "partition":
        environment |= mpi_monitor.environment(pathlib.Path(folder))
    program = [sys.executable, "-m", "mpigrad", "launch", "-n", str(ranks), str(HERE), *words]
    subprocess.run(program, check=True, timeout=1800, env=environment)
    rows = json.loads(pathlib.Path(out).read_text())
    return [{"part": part, "ranks": ranks} | row for row in rows]


def pairs(a: dict[str, list[float]], b: dict[str, list[float]]) -> str:
    """Return the medians of the ratios of pairs, of wall and of CPU time."""
    ratios = [
        statistics.median(x / y for x, y in zip(a[k], b[k], strict=True)) for k in ("wall", "cpu")
    ]
    return f"{ratios[0]:.2f} (CPU {ratios[1]:.2f})"


def show(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        facts = ", ".join(f"{v} {k}" for k, v in row.items() if k not in ("part", "seconds"))
        print(f"{row['part']}: {facts}")
        times = row.get("seconds", {})
        for name, each in times.items():
            wall, cpu = (statistics.median(each[k]) for k in ("wall", "cpu"))
            print(f"  {name}: {wall:.3f} s, CPU {cpu:.3f} s")
        if "scikit-fem" in times:
            print(f"  mpigrad / scikit-fem: {pairs(times['mpigrad'], times['scikit-fem'])}")
        if "value and gradient" in times:
            print(f"  gradient / value: {pairs(times['value and gradient'], times['value'])}")
        same = ("part", "nx", "cells")
        for other in rows:
            if other["ranks"] != 1 or row["ranks"] == 1:
                continue
            if all(other.get(k) == row.get(k) for k in same):
                for name in times:
                    gain = pairs(other["seconds"][name], times[name])
                    print(f"  {name}, 1 rank / {row['ranks']} ranks: {gain}")


def main() -> None:
    """Run all parts, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--cells", type=int, default=1_000_000, help="tetrahedra")
    parser.add_argument("--nx", type=int, nargs="+", default=[512, 1024], help="of the slab")
    parser.add_argument("--beam", type=int, default=128, help="nx of the beam")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--counted", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=pathlib.Path)
    parser.add_argument("--times", help="measure on the ranks of this program, into this file")
    given = parser.parse_args()
    if given.times:
        return rank(given)
    from processor import processor

    cores = len(os.sched_getaffinity(0))
    print(f"{processor()}, {cores} cores, load {os.getloadavg()[0]:.1f}", flush=True)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for part in given.parts:
            for ranks in given.counted if part == "partition" else given.ranks:
                rows += launch(part, ranks, given, folder)
    show(rows)
    if given.output:
        given.output.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
