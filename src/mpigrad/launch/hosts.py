"""The hosts of a job: the hosts file, and scripts of batch jobs."""

from __future__ import annotations

import dataclasses
import math
import pathlib
import re
import shlex
import sys
from collections.abc import Mapping, Sequence

from mpigrad._version import __version__
from mpigrad.launch.mpi_installation import Family, common_environment, mpi_library
from mpigrad.runtime.world import MPIError

__all__ = [
    "Host",
    "place_ranks",
    "read_hosts",
    "slurm",
]

# ---- The hosts file, which lists the hosts for the ranks of a job ----
#
# Each line has the name or address of a host and its number of ranks (1 by default).
#
#     # two nodes
#     node1 slots=32
#     node2:32
#
# Ranks fill the hosts in this order, so that consecutive ranks share a host. Only the standard
# library is imported.


_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"
_LINE = re.compile(rf"({_NAME})(?:\s+slots\s*=\s*([0-9]{{1,9}})|:([0-9]{{1,9}}))?")


@dataclasses.dataclass(frozen=True)
class Host:
    """A machine and its number of ranks."""

    name: str
    slots: int = 1


def read_hosts(file: pathlib.Path) -> tuple[Host, ...]:
    """Read the hosts of a file. A host in two lines takes the ranks of both.

    Raises
    ------
    OSError
        If the file cannot be read.
    ValueError
        If the file is empty or a line is invalid. The message has the line number.
    """
    slots: dict[str, int] = {}
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not a text in UTF-8: {error}.") from None
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].strip()
        if not words:
            continue
        match = _LINE.fullmatch(words)
        if match is None:
            raise ValueError(
                f"{file}, line {number}: expected a host, got {words!r}. Write: name slots=RANKS"
            )
        name, count = match[1], int(match[2] or match[3] or 1)
        if count < 1:
            raise ValueError(
                f"{file}, line {number}: {name} must take at least 1 rank, got {count}."
            )
        slots[name] = slots.get(name, 0) + count
    if not slots:
        raise ValueError(f"{file}: expected at least one host, got none. Write: name slots=RANKS")
    return tuple(Host(name, count) for name, count in slots.items())


def place_ranks(hosts: Sequence[Host], ranks: int) -> list[int]:
    """Return how many of `ranks` ranks each host runs, filling the first hosts first.

    Without hosts, all ranks run on this host.

    Raises
    ------
    ValueError
        If the hosts take fewer ranks.
    """
    if not hosts:
        return [ranks]
    counts: list[int] = []
    for host in hosts:
        counts.append(min(host.slots, ranks - sum(counts)))
    if sum(counts) < ranks:
        raise ValueError(f"-n: got {ranks} ranks, but the hosts take {sum(counts)}.")
    return counts


# ---- Write a script that runs a command of mpigrad as a batch job ----


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
