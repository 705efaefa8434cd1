"""Acoustic waves on a GPU: cell-steps a second, forward and with gradient, ranks on one device.

    python bench/gpu.py [--ranks 1 2] [--cells 2000] [--steps 200] [--rounds 5] [--output FILE]

The case is that of bench/wave_programs.py, with method="xla": stencils on the device, layers of
neighbours through the host. Without a GPU there is nothing to measure; --cpu runs the same program
there, to see that it works. Numbers are medians over the rounds, with the smallest and largest.
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
from typing import Any

COMMANDS = ("forward", "gradient")
ADCME = {"forward": 894e6, "gradient": 217e6}  # as published, on 3,200 cores


def measure(o: argparse.Namespace) -> None:
    """Measure, on this rank among others; rank 0 prints the seconds of each round."""
    import jax
    from mpi4py import MPI
    from wave_programs import mpigrad_calls

    import mpigrad  # noqa: F401  before JAX starts

    if not o.cpu and jax.default_backend() == "cpu":
        if MPI.COMM_WORLD.rank == 0:
            print(json.dumps({"missing": "JAX sees no GPU here"}))
        return
    settings = argparse.Namespace(
        cells=(o.cells, o.cells), steps=o.steps, physics="acoustic", threads=1, apart=False,
        method="xla",
    )  # fmt: skip
    calls, _ = mpigrad_calls(settings)
    seconds: dict[str, list[float]] = {}
    for command in COMMANDS:
        calls[command]()  # compiles
        seconds[command] = []
        for _ in range(o.rounds):
            start = time.perf_counter()
            calls[command]()  # returns a number, so it has ended
            seconds[command].append(time.perf_counter() - start)
    if MPI.COMM_WORLD.rank == 0:
        print(json.dumps({"device": jax.devices()[0].device_kind, "seconds": seconds}))


def job(o: argparse.Namespace, ranks: int) -> dict[str, Any]:
    """Run a job, and return the measurements of rank 0."""
    words = [sys.executable, "-m", "mpigrad", "launch", "-n", str(ranks), __file__, "--rank"]
    words += [f"--{name}={getattr(o, name)}" for name in ("cells", "steps", "rounds")]
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    if o.cpu:
        words.append("--cpu")
        environment["JAX_PLATFORMS"] = "cpu"
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False, env=environment)
    if done.returncode:
        sys.exit(done.returncode)
    found = json.loads(done.stdout.splitlines()[-1])
    if "missing" in found:
        sys.exit(
            f"bench/gpu.py: {found['missing']}: install jax[cuda12] on a machine that has one; "
            "--cpu tries the program on the CPU, which measures nothing of interest."
        )
    return found


def main() -> None:
    """Print a table, a line for each command and number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--cells", type=int, default=2000, help="along each side")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cpu", action="store_true", help="try the program without a GPU")
    parser.add_argument("--output", type=pathlib.Path, help="JSON")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    o = parser.parse_args()
    if o.rank:
        measure(o)
        return
    results = {ranks: job(o, ranks) for ranks in o.ranks}
    work = o.cells**2 * o.steps
    for ranks, found in results.items():
        for command in COMMANDS:
            rates = sorted(work / s / 1e6 for s in found["seconds"][command])
            middle = statistics.median(rates)
            print(
                f"{found['device']}, {ranks} rank{'s' * (ranks > 1)}, {command}: {middle:.0f} "
                f"({rates[0]:.0f} to {rates[-1]:.0f}) million cell-steps/s, "
                f"{middle * 1e6 / ADCME[command]:.2g} of ADCME on 3,200 cores"
            )
    if o.output:
        o.output.write_text(json.dumps({"settings": vars(o), "results": results}, default=str))


if __name__ == "__main__":
    main()
