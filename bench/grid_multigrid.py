"""Diffusion on grids by BoxMG and by hypre's PFMG, in turn: iterations and seconds.

    python bench/grid_multigrid.py [--cells 1024] [--axes 2] [--ranks 1 2] [--calls 3] [--cases ...]

Finite volumes with conductivities from both cells of a face, and zeros around the grid. "value" is
a set-up and a solve to 1e-8, "gradient" the value, the adjoint solve and the gradient in every
entry of the matrix. Each call has new values, and the solvers take turns. Medians over the calls.
The residual is computed by mpigrad's own product.
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
CASES = ("smooth", "lognormal", "noise", "boxes", "blocks", "anisotropic")


def conductivity(case: str, shape: tuple[int, ...]) -> Any:
    """One value for each cell of the whole grid."""
    import numpy as np

    generator = np.random.default_rng(3)
    axes = np.meshgrid(*[(np.arange(n) + 0.5) / n for n in shape], indexing="ij")
    if case == "smooth":
        return 1 + sum(x * x for x in axes)
    if case == "noise":
        return np.exp(2 * generator.standard_normal(shape))
    if case == "lognormal":
        waves = np.meshgrid(*[np.fft.fftfreq(n, 1 / n) for n in shape], indexing="ij")
        spectrum = (1 + sum(w * w for w in waves) / 64) ** (-(1 + len(shape)) / 2)
        white = np.fft.fftn(generator.standard_normal(shape))
        field = np.fft.ifftn(white * spectrum).real
        return np.exp(1.5 * field / field.std())
    if case == "boxes":  # that overlap, each 1 or 1000
        kappa = np.ones(shape)
        for _ in range(60):
            first = [generator.integers(0, n) for n in shape]
            size = [generator.integers(n // 20, n // 4) for n in shape]
            where = tuple(slice(a, a + b) for a, b in zip(first, size, strict=True))
            kappa[where] = 10.0 ** generator.choice([0, 3])
        return kappa
    if case == "blocks":  # eight along each axis, each 1 or 1000
        values = 10.0 ** (3 * generator.integers(0, 2, size=(8,) * len(shape)))
        return values[tuple((x * 8).astype(int) for x in axes)]
    return np.ones(shape)


def assemble(case: str, n: int, axes: int) -> tuple[Any, Any]:
    """The pattern and the values of this rank's slab."""
    import numpy as np
    from mpi4py import MPI

    from mpigrad.grid import Grid
    from mpigrad.sparse import Matrix, Pattern

    shape = (n,) * axes
    grid = Grid(shape, (1 / n,) * axes, dims=(MPI.COMM_WORLD.size, *[1] * (axes - 1)))
    kappa = np.pad(conductivity(case, shape), 1, mode="edge")

    def tile(padded: Any, step: tuple[int, ...]) -> Any:
        return padded[
            tuple(
                slice(1 + part.start + s, 1 + part.stop + s)
                for part, s in zip(grid.slices, step, strict=True)
            )
        ]

    here = tile(kappa, (0,) * axes)
    offsets, links, diagonal = [(0,) * axes], [], np.zeros(here.shape)
    for axis in range(axes):
        for side in (-1, 1):
            step = tuple(side * (k == axis) for k in range(axes))
            weight = 1e-3 if case == "anisotropic" and axis == 0 else 1.0
            link = weight * (here + tile(kappa, step)) / 2
            offsets.append(step)
            links.append(-link)
            diagonal += link
    pattern = Pattern.from_stencil(grid, offsets)
    return pattern, Matrix.assemble(pattern, [diagonal, *links]).values


def measure(case: str, n: int, axes: int, calls: int) -> None:
    """Print one line of JSON for each solver."""
    import jax
    import jax.numpy as jnp
    from mpi4py import MPI

    import mpigrad
    from mpigrad.sparse import PCG, PFMG, BoxMG, Matrix, solve

    jax.config.update("jax_enable_x64", True)
    world = MPI.COMM_WORLD
    pattern, entries = assemble(case, n, axes)
    ones = jnp.ones(pattern.n_local)
    programs: dict[str, Any] = {}
    for name, cycle in (("PFMG", PFMG()), ("BoxMG", BoxMG())):
        solver = PCG(preconditioner=cycle)

        def loss(values: Any, solver: Any = solver) -> Any:
            solution = solve(Matrix(pattern, values), ones, solver)
            return jnp.sum(solution.value), solution

        programs[name] = (
            mpigrad.jit(loss),
            mpigrad.jit(mpigrad.value_and_grad(loss, has_aux=True)),
        )
    spent: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in programs}
    steps, residual = {}, {}
    for call in range(calls + 1):  # the first compiles
        for name, pair in programs.items():
            solution: Any = None
            values = entries
            for gradient, program in enumerate(pair):
                values = (1 + 1e-3 * (call + 1) + 5e-4 * gradient) * entries
                values.block_until_ready()
                world.Barrier()
                start = time.perf_counter()
                out = jax.block_until_ready(program(values))
                world.Barrier()
                if call:
                    spent[name][gradient].append(time.perf_counter() - start)
                solution = out[0][1] if gradient else out[1]
            steps[name] = int(solution.stats["num_steps"])
            rest = Matrix(pattern, values) @ solution.value - ones
            squares = world.allreduce(float(rest @ rest)) / world.allreduce(float(ones @ ones))
            residual[name] = squares**0.5
    for name in programs:
        if world.rank == 0:
            line = {
                "case": case,
                "cells": n,
                "axes": axes,
                "ranks": world.size,
                "solver": name,
                "iterations": steps[name],
                "residual": residual[name],
                "value_seconds": statistics.median(spent[name][0]),
                "gradient_seconds": statistics.median(spent[name][1]),
            }
            print("RESULT " + json.dumps(line), flush=True)


def launch(case: str, n: int, axes: int, ranks: int, calls: int) -> list[dict[str, Any]]:
    """The case on so many ranks, in processes of its own."""
    program = [__file__, "--serve", case, str(n), str(axes), str(calls)]
    command = [sys.executable, "-m", "mpigrad", "launch", "-n", str(ranks), *program]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return [
        json.loads(line.partition(" ")[2])
        for line in done.stdout.splitlines()
        if line.startswith("RESULT ")
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--cells", type=int, nargs="+", default=[1024], help="per side")
    parser.add_argument("--axes", type=int, choices=(1, 2, 3), default=2)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--calls", type=int, default=3)
    parser.add_argument("--output", type=pathlib.Path, default=HERE / "results/grid_multigrid.json")
    parser.add_argument("--serve", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        case, n, axes, calls = arguments.serve
        measure(case, int(n), int(axes), int(calls))
        return
    print("case         cells    ranks  iterations   value: PFMG  BoxMG  ratio  gradient: PFMG  BoxMG  ratio")  # fmt: skip # noqa: E501
    results = []
    for n in arguments.cells:
        for case in arguments.cases:
            for ranks in arguments.ranks:
                both = launch(case, n, arguments.axes, ranks, arguments.calls)
                results += both
                old, new = both
                line = f"{case:12s} {n:4d}^{arguments.axes}   {ranks:5d}  "
                line += f"{old['iterations']:4d} {new['iterations']:4d}  "
                for what in ("value_seconds", "gradient_seconds"):
                    ratio = old[what] / new[what]
                    line += f"       {old[what]:8.3f} {new[what]:7.3f} {ratio:6.2f}"
                print(line, flush=True)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(results, indent=1) + "\n")
    print(f"written to {arguments.output}")


if __name__ == "__main__":
    main()
