"""`python -m mpigrad.rank PROBLEM options`: what `mpigrad run` starts on every rank."""

from __future__ import annotations

import importlib
import sys
import time
import traceback

import tyro
from mpi4py import MPI

from mpigrad.cli import problem_options, settings_of
from mpigrad.guard import end_job

_TURN = 1.0  # seconds that the other ranks leave to rank 0 for saying what all have found


def main() -> int:
    """Solve the problem named in sys.argv; an error is said once, and ends all ranks."""
    problem, *arguments = sys.argv[1:]
    world = MPI.COMM_WORLD
    options = tyro.cli(
        problem_options(problem),
        prog=f"mpigrad run {problem}",
        args=arguments,
        console_outputs=world.rank == 0,
    )
    try:
        importlib.import_module(f"mpigrad.problems.{problem}").run(settings_of(problem, options))
    except Exception as error:
        # Most errors are raised on all ranks together. Rank 0 says it and ends the job; another
        # rank gets to say its own only where rank 0 has none.
        if world.rank > 0:
            time.sleep(_TURN)
        if isinstance(error, ValueError | OSError) or str(error).startswith("mpigrad"):
            where = "" if world.rank == 0 else f"rank {world.rank}: "
            text = f"{where}{_named(error)}"
        else:
            failed = f"mpigrad: rank {world.rank} of {world.size} failed"
            text = f"{traceback.format_exc()}{failed}"
        end_job(text)
    return 0


def _named(error: BaseException) -> str:
    text = str(error)
    return text if text.startswith("mpigrad") else f"mpigrad: {text}"


if __name__ == "__main__":
    sys.exit(main())
