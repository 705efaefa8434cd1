"""The MPI world: the ranks that a launcher has started together with this process."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import sys
from collections.abc import Mapping

__all__ = ["MPIError", "World", "check_world", "is_command", "world_around"]

_MAIN = ("mpigrad", "__main__.py")
_SLURM_STEPS = 4_000_000_000  # Slurm numbers its special steps (batch, interactive) from here


class MPIError(RuntimeError):
    """Raised if MPI or its launcher is missing or does not fit. The message says what to do."""


def is_command() -> bool:
    """Return True in the process of the `mpigrad` command, which starts ranks but is not a rank."""
    program = pathlib.Path(sys.argv[0])
    if "-m" in sys.orig_argv and (program.name == "-m" or program.parts[-2:] == _MAIN):
        return sys.orig_argv[sys.orig_argv.index("-m") + 1] == "mpigrad"  # python -m mpigrad
    return program.name == "mpigrad"


@dataclasses.dataclass(frozen=True)
class World:
    """The launcher that started this process, and its rank and size."""

    launcher: str
    rank: int
    size: int


def world_around(environment: Mapping[str, str] | None = None) -> World | None:
    """Return the world in which mpiexec or srun started this process, or None."""
    env = os.environ if environment is None else environment
    if "OMPI_COMM_WORLD_SIZE" in env:
        rank = env.get("OMPI_COMM_WORLD_RANK", "0")
        return World("Open MPI's mpiexec", int(rank), int(env["OMPI_COMM_WORLD_SIZE"]))
    if "PMI_SIZE" in env:
        return World("MPICH's mpiexec", int(env.get("PMI_RANK", "0")), int(env["PMI_SIZE"]))
    step = env.get("SLURM_STEP_ID", "")
    if step.isdigit() and int(step) < _SLURM_STEPS:
        size = int(env.get("SLURM_STEP_NUM_TASKS", env.get("SLURM_NTASKS", "1")))
        # `srun --pty bash` also has one task: a shell from which to start ranks.
        if size > 1:
            return World("srun", int(env.get("SLURM_PROCID", "0")), size)
    return None


def check_world(size: int) -> None:
    """Check that MPI and the launcher agree on the number of ranks.

    Parameters
    ----------
    size
        The size of MPI_COMM_WORLD.

    Raises
    ------
    MPIError
        If they differ, because the launcher belongs to another MPI than mpi4py loads.
    """
    around = world_around()
    expected = around.size if around else int(os.environ.get("MPIGRAD_EXPECTED_SIZE", size))
    if size == expected:
        return
    who = around.launcher if around else "mpigrad"
    worlds = f"{expected} worlds of size 1" if size == 1 else f"a world of size {size}"
    raise MPIError(
        f"mpigrad: {who} has started {expected} ranks, but MPI sees {worlds}: this launcher "
        "belongs to another MPI than the library that mpi4py loads (`mpigrad doctor` shows both). "
        f"Start the program with `mpigrad launch -n {expected} program.py`."
    )
