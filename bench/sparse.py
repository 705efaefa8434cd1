"""Transposes and matrix-vector products: mpigrad, SciPy (one rank) and hypre, side by side.

    python bench/sparse.py [--rows 100000 25000000] [--ranks 1 2] [--pairs 15] [--output FILE]

The matrix has the five-point stencil of a square grid in stripes of grid lines. All programs (this
one with --serve, this one with --serve-scipy, and sparse_hypre.c) run at the same time and are
asked in turn, so that a slow phase of the machine meets all; those that wait sleep. Each turn has
new values. A "transpose" is that of the values by mpigrad's plan, which is made once (`plan`, in
seconds), `A.T.tocsr()` by SciPy, `hypre_ParCSRMatrixTranspose` by hypre; a "product" is y = A x.
Printed and written: medians over the turns of the seconds, and of the ratio mpigrad / other with
its quartiles. Then, for weak growth, what one transposition sends: messages and bytes of the rank
that sends most.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pathlib
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from interleave import Program, commands

HERE = pathlib.Path(__file__).resolve().parent
LARGE = 10_000_000  # rows: 25 million take about 12 GB here, 5 GB in C and as much in SciPy


def stencil(n: int, all_lines: int, first_line: int, lines: int) -> tuple[Any, Any]:
    """Global rows and columns of the entries of these grid lines, in row order."""
    import numpy as np

    row = np.arange(first_line * n, (first_line + lines) * n)[:, None]
    columns = row + np.array([-n, -1, 0, 1, n])
    inside = np.ones(columns.shape, bool)
    inside[:, 1], inside[:, 3] = row[:, 0] % n > 0, row[:, 0] % n < n - 1
    inside &= (columns >= 0) & (columns < n * all_lines)
    return np.repeat(row[:, 0], inside.sum(1)), columns[inside]


def numbers_of(rows: Any, columns: Any) -> Any:
    """Return the integers that the values are made of, as `entry` in sparse_hypre.c does."""
    return ((7 * rows + 13 * columns) % 101).astype("uint8")


def answer(calls: dict[str, Callable[..., Any]], world: Any) -> None:
    """Answer commands: calls[what](K, R) gives seconds of a call and this rank's checksum."""
    if world.rank == 0:
        print("ready", flush=True)
    for line in commands(world.rank):
        command, *numbers = line.split()
        seconds, *results = calls[command](*(int(k) for k in numbers))
        results = [world.reduce(x) for x in results]
        if world.rank == 0:
            print(f"{seconds:.9f}", *(f"{x:.15e}" for x in results), flush=True)


def serve(n: int, all_lines: int) -> None:
    """mpigrad."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from mpi4py import MPI

    import mpigrad
    from mpigrad.sparse import Matrix, Pattern
    from mpigrad.sparse.matrix.products import transpose_values, transposed

    jax.config.update("jax_enable_x64", True)
    world = MPI.COMM_WORLD
    first = all_lines * world.rank // world.size
    lines = all_lines * (world.rank + 1) // world.size - first
    rows, columns = stencil(n, all_lines, first, lines)
    kind = numbers_of(rows, columns)
    pattern = Pattern.from_coo(rows, columns, lines * n)
    del rows, columns
    start = time.perf_counter()
    back = transposed(pattern)
    plan_seconds = time.perf_counter() - start
    plan = pattern.derived["transpose"]
    own = np.arange(first * n, (first + lines) * n)
    x, weights = jnp.asarray(5 * own % 17 / 17), np.asarray(3 * own % 19, float)
    transpose = mpigrad.jit(lambda v: transpose_values(pattern, v))
    product = mpigrad.jit(lambda v, x: Matrix(pattern, v) @ x)
    check = mpigrad.jit(lambda v, x: Matrix(back, v) @ x)

    def timed(f: Callable[..., Any], operands: tuple[Any, ...], calls: int) -> tuple[float, Any]:
        result = f(*operands).block_until_ready()
        world.Barrier()
        start = time.perf_counter()
        for _ in range(calls):
            result = f(*operands).block_until_ready()
        world.Barrier()
        return (time.perf_counter() - start) / calls, result

    def values(k: int) -> Any:
        return jnp.asarray(((np.arange(101) + k) % 101 / 101)[kind])

    def run_transpose(k: int, calls: int) -> tuple[float, float]:
        seconds, result = timed(transpose, (values(k),), calls)
        return seconds, float(weights @ np.asarray(check(result, x)))

    def run_product(k: int, calls: int) -> tuple[float, float]:
        seconds, result = timed(product, (values(k), x), calls)
        return seconds, float(weights @ np.asarray(result))

    def cost() -> tuple[float, float, float]:
        """Seconds of the plan; messages and bytes, of the rank that sends most."""
        sent = (sum(count > 0 for count in plan.sendcounts), 8 * sum(plan.sendcounts))
        most = [max(part) / world.size for part in zip(*world.allgather(sent), strict=True)]
        return plan_seconds, most[0], most[1]

    answer({"transpose": run_transpose, "product": run_product, "cost": cost}, world)


def serve_scipy(n: int, all_lines: int) -> None:
    """SciPy, on one rank."""
    import numpy as np
    import scipy.sparse
    from mpi4py import MPI

    rows, columns = stencil(n, all_lines, 0, all_lines)
    kind = numbers_of(rows, columns)
    starts = np.concatenate([[0], np.cumsum(np.bincount(rows))]).astype(np.int32)
    columns = columns.astype(np.int32)
    own = np.arange(n * all_lines)
    x, weights = 5 * own % 17 / 17, np.asarray(3 * own % 19, float)
    del rows, own

    def timed(f: Callable[[], Any], calls: int) -> tuple[float, Any]:
        result = f()
        start = time.perf_counter()
        for _ in range(calls):
            result = f()
        return (time.perf_counter() - start) / calls, result

    def matrix(k: int) -> Any:
        values = ((np.arange(101) + k) % 101 / 101)[kind]
        return scipy.sparse.csr_array((values, columns, starts), shape=(len(x), len(x)))

    def run_transpose(k: int, calls: int) -> tuple[float, float]:
        A = matrix(k)
        seconds, result = timed(A.T.tocsr, calls)
        return seconds, float(weights @ (result @ x))

    def run_product(k: int, calls: int) -> tuple[float, float]:
        A = matrix(k)
        seconds, result = timed(lambda: A @ x, calls)
        return seconds, float(weights @ result)

    answer({"transpose": run_transpose, "product": run_product}, MPI.COMM_WORLD)


def compile_program(directory: str) -> str:
    """Build the C program against the hypre that mpicc finds."""
    program = str(pathlib.Path(directory) / "sparse_hypre")
    flags = ["-O3", "-I/usr/include/hypre", *shlex.split(os.environ.get("HYPRE_FLAGS", ""))]
    source = str(HERE / "sparse_hypre.c")
    subprocess.run(["mpicc", *flags, source, "-lHYPRE", "-lm", "-o", program], check=True)
    return program


def numbers(answer: str) -> tuple[float, ...]:
    return tuple(float(word) for word in answer.split())


def ours(n: int, all_lines: int, option: str = "--serve") -> list[str]:
    return [sys.executable, str(HERE / "sparse.py"), option, str(n), str(all_lines)]


def compare(c_program: str, n: int, ranks: int, turns: int) -> list[dict[str, Any]]:
    """Measure one grid on one number of ranks."""
    entrants = {"mpigrad": ours(n, n)}
    if ranks == 1:
        entrants["scipy"] = ours(n, n, "--serve-scipy")
    entrants["hypre"] = [c_program, str(n), str(n)]
    operations = ("transpose", "product")
    answers: dict[tuple[str, str], list[tuple[float, ...]]] = {}
    plan = 0.0
    # Programs that don't fit into memory together are measured one after the other.
    groups = [list(entrants)] if n * n <= LARGE else [[name] for name in entrants]
    for group in groups:
        programs = {name: Program(entrants[name], ranks) for name in group}
        try:
            for program in programs.values():
                program.answer()  # it is ready
            if "mpigrad" in group:
                plan = numbers(programs["mpigrad"].ask("cost"))[0] / ranks
            for k, what in enumerate(operations):
                calls = max(1, (200_000 if what == "transpose" else 2_000_000) // n**2)
                for turn in range(turns + 1):  # the first compiles and warms up
                    first = turn % len(group)
                    for name in group[first:] + group[:first]:
                        said = numbers(programs[name].ask(f"{what} {turn + k} {calls}"))
                        answers.setdefault((what, name), []).append(said)
        finally:
            for program in programs.values():
                program.end()
    results = []
    for what in operations:
        said = {name: answers[what, name] for name in entrants}
        for sums in zip(*([a[1] for a in part] for part in said.values()), strict=True):
            if max(sums) - min(sums) > 1e-9 * abs(sums[0]):
                raise SystemExit(f"different answers: {dict(zip(entrants, sums, strict=True))}")
        seconds = {name: [a[0] for a in part[1:]] for name, part in said.items()}
        result: dict[str, Any] = {"what": what, "rows": n * n, "ranks": ranks, "turns": turns}
        result |= {"plan_seconds": plan} if what == "transpose" else {}
        result["seconds"] = {name: statistics.median(part) for name, part in seconds.items()}
        line = f"{n * n:9d} {ranks:3d}  {what:10s}" + "".join(
            f" {name} {1e3 * median:9.3f} ms " for name, median in result["seconds"].items()
        )
        for name in list(entrants)[1:]:
            ratios = [a / b for a, b in zip(seconds["mpigrad"], seconds[name], strict=True)]
            inner = statistics.quantiles(ratios, n=4, method="inclusive") if turns > 1 else []
            low, middle, high = inner or ratios * 3
            result[f"ratio_{name}"], result[f"quartiles_{name}"] = middle, [low, high]
            line += f"  / {name} {middle:.3f} ({low:.3f} to {high:.3f})"
        results.append(result | {"all_seconds": seconds})
        print(line + (f"  plan {plan:.2f} s" if what == "transpose" else ""), flush=True)
    return results


def weak_growth(n: int, ranks: list[int]) -> list[dict[str, Any]]:
    """Count the messages of one transposition with n x n cells on each rank."""
    results = []
    for count in ranks:
        program = Program(ours(n, n * count), count)
        program.answer()
        _, messages, size = numbers(program.ask("cost"))
        program.end()
        results.append(
            {"what": "weak growth", "rows": n * n * count, "ranks": count}
            | {"messages": int(messages), "bytes": int(size)}
        )
        print(
            f"{n * n * count:9d} {count:3d}  each rank sends at most {int(messages)} messages and "
            f"{int(size)} bytes"
        )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[100_000, 1_000_000, 5_000_000, 25_000_000]
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--pairs", type=int, default=15, help="turns of each measurement")
    parser.add_argument("--weak", type=int, nargs="+", default=[1, 2, 3, 4], help="ranks")
    parser.add_argument("--output", type=pathlib.Path, default=HERE / "results" / "sparse.json")
    parser.add_argument("--serve", type=int, nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--serve-scipy", type=int, nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        return serve(*arguments.serve)
    if arguments.serve_scipy:
        return serve_scipy(*arguments.serve_scipy)
    print("     rows ranks               medians, mpigrad / other (quartiles)")
    results = []
    with tempfile.TemporaryDirectory() as directory:
        c_program = compile_program(directory)
        for rows in arguments.rows:
            for ranks in arguments.ranks:
                results += compare(c_program, math.isqrt(rows), ranks, arguments.pairs)
    results += weak_growth(math.isqrt(min(arguments.rows)), arguments.weak)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(results, indent=1) + "\n")
    print(f"written to {arguments.output}")


if __name__ == "__main__":
    main()
