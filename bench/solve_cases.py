"""Linear systems of three kinds by hypre: iterations and seconds, forward and adjoint.

    python bench/solve_cases.py [--scale 1] [--ranks 1 2] [--calls 5] [--output FILE]

Cases, by finite volumes with fixed values at the walls: the Poisson equation in three dimensions
(128³ cells), in two with conductivities 1 and 0.001 along the axes (1024²), and convection in an
eddy, upwind, with diffusion 1e-5 (512²). "value" is a set-up and a solve, "gradient" the value,
the adjoint solve (with PCG by the same hierarchy, else by the transpose's own) and the gradient
in every entry of the matrix. Each call has new values; medians over the calls. A solve that does
not converge is an error and ends the program; the largest relative residual |b - A x| / |b| of
both solves is computed by mpigrad's own product.
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
CELLS = {"poisson 3-D": (128, 3), "anisotropic": (1024, 2), "convection": (512, 2)}


def solvers(case: str) -> dict[str, Any]:
    """The settings that are compared, by name."""
    from mpigrad.sparse import GMRES, PCG, PFMG, BiCGStab, BoomerAMG, Multigrid

    if case == "poisson 3-D":
        return {
            "PCG, PFMG": PCG(preconditioner=PFMG()),
            "PCG, threshold 0.5": PCG(preconditioner=BoomerAMG(strong_threshold=0.5)),
            "PCG, aggressive": PCG(
                preconditioner=BoomerAMG(strong_threshold=0.5, aggressive_levels=1)
            ),
        }
    if case == "anisotropic":
        return {"PCG, PFMG": PCG(preconditioner=PFMG()), "PCG": PCG(), "Multigrid": Multigrid()}
    # No PFMG: with GMRES and 51² cells it stays at a residual of 0.97.
    return {"GMRES": GMRES(), "BiCGStab": BiCGStab(), "Multigrid": Multigrid()}


def assemble(case: str, n: int, dimensions: int) -> tuple[dict[bool, Any], dict[bool, Any]]:
    """Patterns and values of this rank's slab of n^dimensions cells: of rows, and of a stencil."""
    import numpy as np
    from mpi4py import MPI

    from mpigrad import sparse
    from mpigrad.grid import Grid
    from mpigrad.sparse import Pattern

    world = MPI.COMM_WORLD
    h = 1 / n
    grid = Grid((n,) * dimensions, (h,) * dimensions, dims=(world.size, *[1] * (dimensions - 1)))
    axes = [np.arange(part.start, part.stop) for part in grid.slices]
    cell = np.meshgrid(*axes, indexing="ij")
    strides = [n**k for k in reversed(range(dimensions))]
    row = sum(c * s for c, s in zip(cell, strides, strict=True))
    centre = [(c + 0.5) * h for c in cell]
    diagonal = np.zeros(row.shape)
    rows, columns, values, offsets, couplings = [], [], [], [], []
    for axis in range(dimensions):
        for side in (-1, 1):
            diffusion = {"poisson 3-D": 1.0, "anisotropic": (1.0, 1e-3)[axis % 2]}.get(case, 1e-5)
            outward: Any = 0.0
            if case == "convection":
                at = [x + 0.5 * h * side * (k == axis) for k, x in enumerate(centre)]
                # An eddy: divergence-free, and along the walls.
                x, y = np.pi * at[0], np.pi * at[1]
                outward = side * (np.sin(x) * np.cos(y) if axis == 0 else -np.cos(x) * np.sin(y))
            inside = (cell[axis] + side >= 0) & (cell[axis] + side < n)
            conductance = diffusion / h * np.where(inside, 1, 2)
            diagonal += conductance + np.maximum(outward, 0)
            coupling = np.broadcast_to(-conductance + np.minimum(outward, 0), row.shape)
            rows.append(row[inside])
            columns.append(row[inside] + side * strides[axis])
            values.append(coupling[inside])
            offsets.append(tuple(side * (k == axis) for k in range(dimensions)))
            couplings.append(coupling)
    rows, columns = (np.concatenate([*parts, row.ravel()]) for parts in (rows, columns))
    pattern = Pattern.from_coo(rows, columns, row.size)
    stencil = Pattern.from_stencil(grid, [*offsets, (0,) * dimensions])
    return (
        {False: pattern, True: stencil},
        {
            False: np.concatenate([*values, diagonal.ravel()]),
            True: np.asarray(sparse.Matrix.assemble(stencil, [*couplings, diagonal]).values),
        },
    )


def measure(case: str, n: int, dimensions: int, calls: int) -> None:
    """Print one line of JSON for each of the case's solvers."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from mpi4py import MPI

    import mpigrad
    from mpigrad.sparse import Matrix, solve, solver_seconds
    from mpigrad.sparse.matrix.products import transpose_values, transposed

    jax.config.update("jax_enable_x64", True)
    world = MPI.COMM_WORLD
    patterns, all_entries = assemble(case, n, dimensions)
    ones = jnp.ones(patterns[False].n_local)

    def norm(v: Any) -> float:
        return float(world.allreduce(np.vdot(v, v)) ** 0.5)

    def seconds(f: Any, *arguments: Any) -> tuple[Any, float]:
        world.Barrier()
        start = time.perf_counter()
        result = jax.block_until_ready(f(*arguments))
        world.Barrier()
        return result, time.perf_counter() - start

    for name, solver in solvers(case).items():
        pattern = patterns["PFMG" in name]
        entries = jnp.asarray(all_entries["PFMG" in name])

        def loss(values: Any, solver: Any = solver, pattern: Any = pattern) -> Any:
            solution = solve(Matrix(pattern, values), ones, solver)
            return jnp.sum(solution.value), solution

        value = mpigrad.jit(loss)
        gradient = mpigrad.jit(mpigrad.value_and_grad(loss, has_aux=True))

        def adjoint(values: Any, solver: Any = solver, pattern: Any = pattern) -> Any:
            if solver.symmetric:
                return solve(Matrix(pattern, values), ones, solver)
            matrix = Matrix(transposed(pattern), transpose_values(pattern, values))
            return solve(matrix, ones, solver.transposed)

        adjoint = mpigrad.jit(adjoint)
        value(entries), gradient(entries)  # compiled
        spent: dict[str, list[float]] = {"value": [], "gradient": [], "setup": []}
        worst, solution, back = 0.0, None, None
        for k in range(calls):
            values = (1 + 1e-3 * (k + 1)) * entries
            before = solver_seconds()["setup"]
            (_, solution), taken = seconds(value, values)
            spent["value"].append(taken)
            spent["setup"].append(solver_seconds()["setup"] - before)
            _, taken = seconds(gradient, (1 - 1e-3 * (k + 1)) * entries)
            spent["gradient"].append(taken)
            back = adjoint(values)
            A = Matrix(pattern, values)
            worst = max(worst, norm(A @ solution.value - ones) / norm(ones))
            if solver.symmetric:
                transpose = A
            else:
                transpose = Matrix(transposed(pattern), transpose_values(pattern, values))
            worst = max(worst, norm(transpose @ back.value - ones) / norm(ones))
        assert solution is not None
        assert back is not None
        if world.rank == 0:
            line = {
                "case": case,
                "cells": n**dimensions,
                "ranks": world.size,
                "solver": name,
                "iterations": int(solution.stats["num_steps"]),
                "adjoint_iterations": int(back.stats["num_steps"]),
                "residual": worst,
                **{f"{what}_seconds": statistics.median(times) for what, times in spent.items()},
            }
            print("RESULT " + json.dumps(line), flush=True)


def launch(case: str, n: int, ranks: int, calls: int) -> list[dict[str, Any]]:
    """The case on so many ranks, in processes of its own."""
    program = [__file__, "--serve", case, str(n), str(calls)]
    command = [sys.executable, "-m", "mpigrad", "launch", "-n", str(ranks), *program]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return [
        json.loads(line.partition(" ")[2])
        for line in done.stdout.splitlines()
        if line.startswith("RESULT ")
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--cases", nargs="+", choices=CELLS, default=list(CELLS))
    parser.add_argument("--scale", type=float, default=1.0, help="of the cells per side")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--calls", type=int, default=5)
    parser.add_argument("--output", type=pathlib.Path, default=HERE / "results/solve_cases.json")
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        case, n, calls = arguments.serve
        measure(case, int(n), CELLS[case][1], int(calls))
        return
    print("case          cells    ranks  solver               iterations  residual   seconds:")
    print("                                                   (adjoint)           set-up   value gradient")  # fmt: skip # noqa: E501
    results = []
    for case in arguments.cases:
        n, dimensions = CELLS[case]
        n = max(4, round(arguments.scale * n))
        for ranks in arguments.ranks:
            for r in launch(case, n, ranks, arguments.calls):
                results.append(r)
                steps = f"{r['iterations']} ({r['adjoint_iterations']})"
                print(
                    f"{case:12s} {n:5d}^{dimensions}  {ranks:5d}  {r['solver']:20s} {steps:>10s}  "
                    f"{r['residual']:.1e}  {r['setup_seconds']:7.3f} {r['value_seconds']:7.3f} "
                    f"{r['gradient_seconds']:8.3f}",
                    flush=True,
                )
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(results, indent=1) + "\n")
    print(f"written to {arguments.output}")


if __name__ == "__main__":
    main()
