"""Write a script that runs a command of mpigrad as a batch job."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Mapping, Sequence

from mpigrad._version import __version__
from mpigrad.launch.mpi_installation import Family, common_environment, mpi_library
from mpigrad.runtime.world import MPIError

__all__ = ["slurm"]

_SAVE_BEFORE = 300  # a job is asked to save this many seconds before its time limit
_HOUR = 3600.0


def slurm(words: Sequence[str], name: str, ranks: int, seconds: float, *, requeue: bool) -> str:
    """Return the text of a script for `sbatch`.

    Parameters
    ----------
    words
        The arguments of `mpigrad`, as started by srun.
    name
        Name of the job.
    ranks
        Number of tasks.
    seconds
        Time limit of the job. For infinity the script says one hour, to be changed by the user.
    requeue
        True if the command can continue from its last save. Then it is asked to save before the
        limit, and is queued again if it ends with exit code 0.
    """
    family = _family()
    lines = [
        "#!/bin/bash",
        f"# Written by mpigrad {__version__}. Complete it and submit it with sbatch.",
        f"#SBATCH --job-name={_word(name)}",
        f"#SBATCH --ntasks={ranks}",
        "#SBATCH --cpus-per-task=1",
        "#SBATCH --hint=nomultithread",
        f"#SBATCH --time={_limit(seconds if math.isfinite(seconds) else _HOUR)}",
        "#SBATCH --output=%x-%j.out",
        "##SBATCH --partition=",
        "##SBATCH --account=",
    ]
    if requeue:
        lines += [
            "# Five minutes before the limit the job is asked to save, and is queued again:",
            "#SBATCH --requeue",
            "#SBATCH --open-mode=append",
            f"#SBATCH --signal=B:USR1@{_SAVE_BEFORE}",
        ]
    lines += [
        "",
        "# Load the modules with which mpigrad was installed (Python, MPI):",
        "# module load ...",
        *(f"export {n}={shlex.quote(v)}" for n, v in _settings(family).items()),
        "",
    ]
    command = _srun(family, words)
    lines += [*_BEFORE, f"{command} &", *_AFTER] if requeue else [command]
    return "\n".join(lines) + "\n"


# A signal ends bash's `wait`, not the ranks. srun passes the signal to all ranks.
_BEFORE = ["asked=", "trap 'asked=yes; kill -USR1 \"$ranks\"' USR1"]
_AFTER = [
    "ranks=$!",
    'wait "$ranks"; status=$?',
    'while kill -0 "$ranks" 2> /dev/null; do wait "$ranks"; status=$?; done',
    'if [ "$asked" ] && [ "$status" = 0 ]; then exec scontrol requeue "$SLURM_JOB_ID"; fi',
    'exit "$status"',
]


def _family() -> Family | None:
    try:
        return mpi_library().family
    except MPIError:  # a login node without the module of MPI
        return None


def _settings(family: Family | None) -> Mapping[str, str]:
    """Return the variables that a rank started by srun does not set itself."""
    common = common_environment()
    every = family.environment if family else {}
    return {name: value for name, value in every.items() if name not in common}


def _srun(family: Family | None, words: Sequence[str]) -> str:
    options = [
        *(family.srun if family else ()),
        '--cpus-per-task="$SLURM_CPUS_PER_TASK"',
        "--cpu-bind=cores",
        "--kill-on-bad-exit=1",
    ]
    command = shlex.join([sys.executable, "-m", "mpigrad", *words])
    return f"srun {' '.join(options)} \\\n    {command}"


def _word(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in name)


def _limit(seconds: float) -> str:
    """Format a time as days-hours:minutes:seconds, rounded up to minutes."""
    minutes = max(1, math.ceil(seconds / 60))
    hours, days = minutes // 60 % 24, minutes // 1440
    return (f"{days}-" if days else "") + f"{hours:02d}:{minutes % 60:02d}:00"
