"""mpi4jax's published shallow-water program with mpi4jax, and with mpigrad's module of its names.

    python bench/shallow_water.py [--ranks 1 2] [--days 1] [--pairs 5] [--json FILE]

The program is that of the sdist, unchanged. Both are started in turn, as jobs of their own with one
compute thread for each rank. The time is that of its loop, without compiling. Printed are medians,
and the quartiles of the ratios within each pair. The last fields are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
import types
from typing import Any

HERE = pathlib.Path(__file__).resolve()
THREADS = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
FIELDS = ("h", "u", "v")


def solve(source: str, days: float, out: str) -> None:
    """Run the program on this rank, and write its last fields and the seconds of its loop."""
    import importlib

    import numpy as np

    sys.path.insert(0, str(pathlib.Path(source) / "examples"))
    program: Any = importlib.import_module("shallow_water")
    program.HAS_TQDM = False
    times: list[float] = []  # the program reads the clock before its loop and after it

    def read_clock() -> float:
        times.append(time.perf_counter())
        return times[-1]

    program.time = types.SimpleNamespace(perf_counter=read_clock)
    state = program.solve_shallow_water(days * program.DAY_IN_SECONDS, program.PLOT_EVERY)[-1]
    found: dict[str, Any] = {name: np.asarray(getattr(state, name)) for name in FIELDS}
    found |= {"seconds": times[1] - times[0], "module": program.mpi4jax.__name__}
    np.savez(pathlib.Path(out) / f"{program.mpi_rank}.npz", **found)


def job(words: list[str], source: pathlib.Path, days: float, ranks: int) -> dict[str, Any]:
    """Run one job, and return its seconds and the fields of all ranks."""
    import numpy as np

    with tempfile.TemporaryDirectory() as out:
        command = ["-m", "mpigrad", "launch", "-n", str(ranks), *words, str(HERE)]
        command += ["--solve", str(source), str(days), out]
        subprocess.run(
            [sys.executable, *command],
            check=True,
            env=os.environ | {"XLA_FLAGS": THREADS, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            timeout=1000,
        )
        found = [np.load(pathlib.Path(out) / f"{rank}.npz") for rank in range(ranks)]
        return {
            "seconds": max(float(one["seconds"]) for one in found),
            "module": str(found[0]["module"]),
            **{name: np.stack([one[name] for one in found]) for name in FIELDS},
        }


def compare(source: pathlib.Path, days: float, ranks: int, pairs: int) -> dict[str, Any]:
    """Run both in turn, and return their seconds and the difference of their fields."""
    import numpy as np

    seconds: dict[str, list[float]] = {"mpi4jax": [], "mpigrad": []}
    last: dict[str, Any] = {}
    for k in range(pairs):
        ways = {"mpi4jax": [], "mpigrad": ["--as", "mpi4jax"]}
        for name in sorted(ways, reverse=k % 2 == 1):
            last[name] = job(ways[name], source, days, ranks)
            seconds[name].append(last[name]["seconds"])
            print(f"{ranks} ranks, {name}: {seconds[name][-1]:.2f} s", file=sys.stderr, flush=True)
    modules = {name: one["module"] for name, one in last.items()}
    assert modules == {"mpi4jax": "mpi4jax", "mpigrad": "mpigrad.compat.mpi4jax"}, modules
    difference = max(
        float(np.abs(last["mpigrad"][name] - last["mpi4jax"][name]).max()) for name in FIELDS
    )
    assert all(np.isfinite(last["mpigrad"][name]).all() for name in FIELDS)
    ratios = [a / b for a, b in zip(seconds["mpigrad"], seconds["mpi4jax"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4) if pairs > 1 else ratios * 3
    return {
        "ranks": ranks,
        "days": days,
        "seconds": seconds,
        "ratio": middle,
        "quartiles": (low, high),
        "difference": difference,
    }


def main() -> None:
    """Run all numbers of ranks, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--solve", nargs=3, metavar=("SOURCE", "DAYS", "OUT"), help="one rank")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--days", type=float, default=1.0)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--json", type=pathlib.Path)
    given = parser.parse_args()
    if given.solve:
        source, days, out = given.solve
        return solve(source, float(days), out)
    peers = runpy.run_path(str(HERE.parents[1] / "tests" / "peers" / "run.py"))
    source = peers["source"](peers["BUILD"])
    rows = []
    for ranks in given.ranks:
        row = compare(source, given.days, ranks, given.pairs)
        rows.append(row)
        ours, theirs = (statistics.median(row["seconds"][n]) for n in ("mpigrad", "mpi4jax"))
        low, high = row["quartiles"]
        print(
            f"{ranks} ranks: mpi4jax {theirs:.2f} s, mpigrad {ours:.2f} s, ratio "
            f"{row['ratio']:.2f} ({low:.2f} to {high:.2f}), largest difference of the fields "
            f"{row['difference']:g}",
            flush=True,
        )
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
