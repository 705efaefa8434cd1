"""The Poisson problem: mpigrad against a plain C program that calls hypre with the same settings.

    python bench/poisson.py [--multigrid pfmg] [--cells 512 1024 1800] [--ranks 1 2] [--pairs 15]
        [--output FILE]

Both programs (this one with --serve, and poisson_hypre.c) run at the same time and are asked in
turn, so that a slow phase of the machine meets both; the one that waits sleeps (interleave.py). A
"value" fills the matrix from the cells' coefficients, sets hypre up, solves once and sums the loss;
a "gradient" is the value, the adjoint solve (no second set-up) and the gradient in every cell's
coefficient. Each call has new coefficients. Printed and written: medians over the pairs of the
seconds, and of the ratio mpigrad / C with its quartiles. --multigrid: the preconditioner of both,
PFMG on the grid's stencil (the default) or BoomerAMG on the assembled matrix.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from interleave import Program, commands

HERE = pathlib.Path(__file__).resolve().parent


def serve(n: int, multigrid: str) -> None:
    """Answer commands: mpigrad's Poisson problem on n x n cells, in stripes."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from mpi4py import MPI

    import mpigrad
    from mpigrad import sparse
    from mpigrad_apps.poisson.model import poisson, unit_square

    jax.config.update("jax_enable_x64", True)
    world = MPI.COMM_WORLD
    rank, size = world.rank, world.size
    grid = unit_square((n, n), dims=(size, 1))
    model = poisson(grid, np.full(grid.local_shape, -1.0))
    lines = grid.slices[0]
    x = ((np.arange(lines.start, lines.stop) + 0.5) / n)[:, None]
    y = (np.arange(n) + 0.5) / n
    data = jnp.asarray((x * (1 - x) * y * (1 - y)).ravel())
    preconditioner = {"boomeramg": sparse.BoomerAMG(), "pfmg": sparse.PFMG()}[multigrid]
    solver = sparse.PCG(rtol=1e-8, preconditioner=preconditioner)

    def loss(kappa: Any) -> Any:
        solution = model.solve(kappa, solver)
        return jnp.sum((solution.value - data) ** 2), solution.stats["num_steps"]

    def total(kappa: Any) -> Any:
        share, steps = loss(kappa)
        return mpigrad.allreduce(share), steps

    calls = {
        "value": mpigrad.jit(lambda kappa: (total(kappa), None)),
        "gradient": mpigrad.jit(mpigrad.value_and_grad(loss, has_aux=True)),
    }
    if rank == 0:
        print("ready", flush=True)
    for line in commands(rank):
        command, number = line.split()
        kappa = jnp.asarray(1 + x * x + y * y + 0.1 * np.sin(float(number)) * x * y)
        kappa.block_until_ready()
        world.Barrier()
        start = time.perf_counter()
        (value, steps), gradient = jax.block_until_ready(calls[command](kappa))
        world.Barrier()
        seconds = time.perf_counter() - start
        weighted = 0.0 if gradient is None else float(jnp.sum(gradient * y))
        weighted = world.reduce(weighted)
        if rank == 0:
            print(f"{seconds:.6f} {float(value):.15e} {weighted:.15e} {int(steps)}", flush=True)


def compile_program(directory: str, multigrid: str) -> str:
    """Build the C program against the hypre that mpicc finds."""
    if not shutil.which("mpicc") or not shutil.which("mpiexec"):
        raise SystemExit("mpicc or mpiexec is missing (Debian: apt-get install libopenmpi-dev)")
    program = str(pathlib.Path(directory) / "poisson_hypre")
    source = str(HERE / "poisson_hypre.c")
    flags = ["-O3", "-I/usr/include/hypre", *shlex.split(os.environ.get("HYPRE_FLAGS", ""))]
    if multigrid == "pfmg":
        flags.append("-DPFMG")
    subprocess.run(["mpicc", *flags, source, "-lHYPRE", "-lm", "-o", program], check=True)
    return program


def compare(
    c_program: str, multigrid: str, n: int, ranks: int, pairs: int, measured: list[str]
) -> list[dict[str, Any]]:
    """Measure one grid on one number of ranks."""
    this = [sys.executable, str(HERE / "poisson.py"), "--multigrid", multigrid]
    programs = [
        Program([*this, "--serve", str(n)], ranks),
        Program([c_program, str(n)], ranks),
    ]
    results = []
    number = 0
    try:
        for program in programs:
            program.answer()  # it is ready
        for what in measured:
            seconds: list[list[float]] = [[], []]
            answers: list[tuple[float, ...]] = []
            for k in range(pairs + 1):  # the first pair compiles and warms up
                number += 1
                answers = [(), ()]
                # Always in this order: each follows the other, and finds the caches as that one
                # has left them. (With turns one of them would follow itself, 5 % faster at 512².)
                for side in (0, 1):
                    said = programs[side].ask(f"{what} {number}")
                    answers[side] = tuple(float(word) for word in said.split())
                    if k > 0:
                        seconds[side].append(answers[side][0])
                for ours, theirs in zip(answers[0][1:3], answers[1][1:3], strict=True):
                    if abs(ours - theirs) > 1e-5 * max(abs(theirs), 1e-300):
                        raise SystemExit(f"different answers: mpigrad {ours}, C {theirs}")
            ratios = [ours / theirs for ours, theirs in zip(*seconds, strict=True)]
            quartiles = (
                statistics.quantiles(ratios, n=4, method="inclusive") if pairs > 1 else ratios * 3
            )
            results.append(
                {
                    "what": what,
                    "multigrid": multigrid,
                    "cells": [n, n],
                    "ranks": ranks,
                    "pairs": pairs,
                    "mpigrad_seconds": statistics.median(seconds[0]),
                    "c_seconds": statistics.median(seconds[1]),
                    "ratio": statistics.median(ratios),
                    "ratio_quartiles": [quartiles[0], quartiles[2]],
                    "iterations": [int(answer[3]) for answer in answers],
                    "all_mpigrad_seconds": seconds[0],
                    "all_c_seconds": seconds[1],
                }
            )
            r = results[-1]
            print(
                f"{n:5d}²  {ranks:2d} ranks  {what:9s} {r['mpigrad_seconds']:9.3f} s "
                f"{r['c_seconds']:9.3f} s   {r['ratio']:6.3f}  "
                f"({quartiles[0]:.3f} to {quartiles[2]:.3f})",
                flush=True,
            )
    finally:
        for program in programs:
            program.end()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--cells", type=int, nargs="+", default=[512, 1024, 1800], help="per side")
    parser.add_argument("--multigrid", choices=["boomeramg", "pfmg"], default="pfmg")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--what", nargs="+", default=["value", "gradient"])
    parser.add_argument("--output", type=pathlib.Path, help="default: results/poisson-pfmg.json")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve, arguments.multigrid)
        return
    print("  grid    ranks            mpigrad           C    mpigrad / C (quartiles)")
    results = []
    with tempfile.TemporaryDirectory() as directory:
        c_program = compile_program(directory, arguments.multigrid)
        for n in arguments.cells:
            for ranks in arguments.ranks:
                results += compare(
                    c_program, arguments.multigrid, n, ranks, arguments.pairs, arguments.what
                )
    output = arguments.output or HERE / "results" / f"poisson-{arguments.multigrid}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(results, indent=1) + "\n")
    print(f"written to {output}")


if __name__ == "__main__":
    main()
