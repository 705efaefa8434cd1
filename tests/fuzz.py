"""Thousands of random programs: `make fuzz`, or

    mpigrad launch -n 3 tests/fuzz.py --examples 1000 --seed 7

The program that runs is always in build/fuzz, as a text that runs it again: it is there, too, when
the job hangs or crashes. The first program that fails is made smaller, and printed.
With `--seed` and the same number of ranks a run can be repeated; `--single` is single precision.
"""

from __future__ import annotations

import os

from xla_flags import QUICK_TO_COMPILE

# Programs are tiny and run once: compiling fast matters more than running fast (tests/conftest.py).
os.environ["XLA_FLAGS"] = QUICK_TO_COMPILE + os.environ.get("XLA_FLAGS", "")
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"

import argparse
import pathlib
import sys
import time

import jax

from mpigrad.communicator import default_communicator
from random_programs import Program, search, text


def main() -> int:
    """Search; 1 when a program fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=1000, help="number of programs")
    parser.add_argument("--seed", type=int, default=0, help="another seed, other programs")
    parser.add_argument("--single", action="store_true", help="float32 instead of float64")
    arguments = parser.parse_args()
    jax.config.update("jax_enable_x64", not arguments.single)
    comm = default_communicator()
    file = pathlib.Path(__file__).parent.parent / "build" / "fuzz" / f"{comm.size}-ranks.py"
    file.parent.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()

    def shown(program: Program, number: int) -> None:
        file.write_text(text(program))
        if number % 50 == 0:
            print(f"{number} programs, {time.monotonic() - start:.0f} s", flush=True)

    if comm.rank == 0:
        print(f"fuzz: {arguments.examples} programs, {comm.size} ranks, seed {arguments.seed}")
    failing = comm.mpi.bcast(search(comm, arguments.examples, arguments.seed, shown, smaller=True))
    if comm.rank == 0:
        if failing:
            failed = file.with_suffix(".failing.py")
            failed.write_text(failing)
            print(f"this program fails, and is in {failed}:\n{failing}")
        else:
            print("no program failed", flush=True)
    return 1 if failing else 0


if __name__ == "__main__":
    sys.exit(main())
