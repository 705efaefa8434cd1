"""The seed paper's figures: counts, times on one rank, and what follows for up to 4096 ranks.

    python bench/scaling.py count [--ranks 1 2 4 16 64]   what ranks send, beside the formula
    python bench/scaling.py time                          seconds on one rank; on a quiet machine
    python bench/scaling.py draw                          pictures and tables, from both
    python bench/scaling.py all                           the three

With --problems, the results of the other problems stay as they are.

Results are kept in bench/record (--output changes that); docs/scaling.md says what they mean.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from typing import Any

import mpi_monitor
import scaling_figures
from scaling_model import PROBLEMS, axes_of, busiest

HERE = pathlib.Path(__file__).resolve().parent
PROGRAM = str(HERE / "scaling_programs.py")
# Tiles that are counted: what the formula says of them it says of larger ones, too.
SIDES = {"transposition": 60, "poisson": 60, "acoustic": 30, "elastic": 30, "acoustic3d": 12}
# (problem, sides of tiles, steps) that are timed: the paper's weak tiles, with fewer layers where
# other tiles lie around them, and tiles down to 4096 ranks' share of the strong problems.
TIMED = (
    ("transposition", (78, 300, 1000), 1),
    ("poisson", (28, 75, 150, 300, 600, 900), 1),
    ("acoustic", (60, 80, 100), 2000),
    ("elastic", (60, 80, 100), 2000),
    ("acoustic", (16, 64, 256, 1000), 100),
    ("elastic", (16, 64, 256, 1000), 100),
    ("acoustic3d", (20, 40, 100), 100),
)


def launch(ranks: int, arguments: list[str], environment: dict[str, str]) -> list[dict[str, Any]]:
    """Run the programs; what they have found."""
    command = [sys.executable, "-m", "mpigrad", "launch", "-n", str(ranks), PROGRAM, *arguments]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=False, env=os.environ | environment
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed\n{done.stdout}")
    lines = done.stdout.splitlines()
    return [json.loads(line.partition(" ")[2]) for line in lines if line.startswith("RESULT ")]


def count(
    problems: list[str], ranks: list[int], steps: int, monitoring: dict[str, str]
) -> list[dict[str, Any]]:
    """Count on so many ranks, and print it beside the formula."""
    results = []
    print("                            busiest rank: counted / by the formula")
    for n, problem in itertools.product(ranks, problems):  # one at a time: ranks share the memory
        words = ["count", "--problems", problem, "--side", str(SIDES[problem])]
        for row in launch(n, [*words, "--steps", str(steps)], monitoring):
            results.append(row)
            for what in ("forward", "gradient"):
                found = row[what]
                most = [max(rank) for rank in zip(*found["sent"], strict=True)]
                said = busiest(
                    row["problem"], n, row["side"], what == "gradient",
                    steps=row["steps"], iterations=found["iterations"],
                )  # fmt: skip
                pairs = zip(
                    ("messages", "bytes", "collectives", "their bytes"),
                    most,
                    (said.messages, said.bytes, said.collectives, said.collective_bytes),
                    strict=True,
                )
                text = "  ".join(f"{name} {a:,} / {b:,}" for name, a, b in pairs)
                print(f"{n:5d} {row['problem']:13s} {what:8s} {text}", flush=True)
    return results


def measure(problems: list[str], quick: bool) -> list[dict[str, Any]]:
    """Time on one rank."""
    results = []
    for problem, sides, steps in TIMED:
        if problem not in problems:
            continue
        some = sides[:2] if quick else sides
        words = ["--problems", *[problem] * len(some), "--side", *map(str, some)]
        words += ["--steps", str(steps), "--repeats", "3" if quick else "5"]
        for row in launch(1, ["time", *words], {}):
            results.append(row)
            medians = {w: statistics.median(row[w]["seconds"]) for w in ("forward", "gradient")}
            text = "  ".join(f"{what} {t:.4g} s" for what, t in medians.items())
            power = "²³"[axes_of(problem) - 2]
            print(f"{problem:13s} {row['side']:5d}{power}  {text}", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", choices=["count", "time", "draw", "all"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 16, 64])
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=list(PROBLEMS))
    parser.add_argument("--steps", type=int, default=20, help="of waves that are counted")
    parser.add_argument("--quick", action="store_true", help="time small tiles, few times")
    parser.add_argument("--output", type=pathlib.Path, default=HERE / "record" / "scaling.json")
    o = parser.parse_args()
    kept: dict[str, Any] = json.loads(o.output.read_text()) if o.output.exists() else {}
    others = {
        name: [row for row in kept.get(name, []) if row["problem"] not in o.problems]
        for name in ("counts", "times")
    }
    if o.what in ("count", "all"):
        with tempfile.TemporaryDirectory() as directory:
            monitoring = mpi_monitor.environment(pathlib.Path(directory))
            kept["counts"] = others["counts"] + count(o.problems, o.ranks, o.steps, monitoring)
    if o.what in ("time", "all"):
        kept["times"] = others["times"] + measure(o.problems, o.quick)
    o.output.parent.mkdir(parents=True, exist_ok=True)
    o.output.write_text(json.dumps(kept) + "\n")
    if o.what in ("draw", "all"):
        scaling_figures.draw(kept, o.output.with_suffix(".png"))
    print(f"written to {o.output}")


if __name__ == "__main__":
    main()
