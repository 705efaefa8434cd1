"""The ranks that a launcher has started with this process, and the start of MPI."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import multiprocessing
import os
import pathlib
import signal
import socket
import stat
import sys
from collections.abc import Iterator, Mapping

from mpigrad.runtime.processor import native_path

__all__ = [
    "MPIError",
    "World",
    "check_system",
    "check_world",
    "forbid_child_import",
    "hide_launcher",
    "is_command",
    "is_served",
    "limit_mpi_init",
    "world_around",
]

# ---- The MPI world: the ranks that a launcher has started together with this process ----


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


def check_system() -> None:
    """Raise an MPIError on another system than Linux."""
    if sys.platform != "linux":
        raise MPIError(
            f"mpigrad: expected Linux, got {sys.platform}. Use a container or a virtual machine "
            "with Linux (docs/installing.md says what is missing on macOS)."
        )


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


# ---- Whether a launcher serves this process ----
#
# MPI_Init asks the launcher's server for the other ranks. A shell, a container or a notebook may
# have the variables of a launcher, and no server: then some MPIs end the process. The servers are
# found by what PMI and PMIx say about them: an open file, or an address that takes connections.


# Variables that are set in ranks only, by Open MPI, MPICH, Intel MPI, Flux, PALS and IBM's jsrun.
_RANKS = (
    *("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMI_FD", "PMI_PORT", "PMIX_RANK", "PMIX_NAMESPACE"),
    *("PALS_RANKID", "FLUX_TASK_RANK", "JSM_NAMESPACE_RANK", "MPIGRAD_EXPECTED_SIZE"),
)
_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "FLUX_JOB_SIZE", "JSM_NAMESPACE_SIZE")
# All by which an MPI could take a process without a server for a rank.
_HIDDEN = (
    *("OMPI_COMM_WORLD_", "OMPI_MCA_ess_", "OMPI_MCA_orte_", "PMI_", "PMIX_", "PRTE_"),
    *("SLURM_", "PALS_", "FLUX_", "JSM_", "HYDRA_", "I_MPI_PMI_LIBRARY"),
)
_ANSWER = 1.0  # seconds in which a server on this host takes a connection


def is_served() -> bool:
    """Return whether this process is a rank of a launcher, which MPI_Init will ask for the others.

    Several ranks have a launcher, or MPI says what is wrong. A single one may have a launcher's
    variables only: of an interactive shell, or of a container.
    """
    around, env = world_around(), os.environ
    if (around is not None and around.size > 1) or "MPIGRAD_EXPECTED_SIZE" in env:
        return True
    if any(env.get(name, "1") != "1" for name in _SIZES):
        return True
    if "PMI_FD" in env:
        return _is_open(env["PMI_FD"])
    if "PMI_PORT" in env:
        return _answers(env["PMI_PORT"])
    servers = [v for name, v in env.items() if name.startswith("PMIX_SERVER_URI")]
    if servers:
        return any(_answers(server.rpartition("//")[2]) for server in servers)
    if "PALS_SPOOL_DIR" in env:
        return pathlib.Path(env["PALS_SPOOL_DIR"]).is_dir()
    return any(name in env for name in _RANKS)


def _is_open(descriptor: str) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(int(descriptor)).st_mode)
    except (OSError, ValueError):
        return False


def _answers(address: str) -> bool:
    """Return whether a server takes connections. One without a port is taken for a server."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        return True
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER):
            return True
    except OSError:
        return False


@contextlib.contextmanager
def hide_launcher() -> Iterator[None]:
    """Hide the variables of launchers from MPI_Init, which then starts one rank."""
    hidden = {name: value for name, value in os.environ.items() if name.startswith(_HIDDEN)}
    for name in hidden:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(hidden)


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


# ---- The start of MPI: a time limit for MPI_Init, and an error in child processes of a rank ----


_RANK = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
# Variables by which a launcher identifies a rank. (Not SLURM_PROCID: a batch script also has it.)
_IDENTITY = ("PMIX_NAMESPACE", "PMIX_RANK", "PMI_JOBID", "PMI_RANK", "PMI_FD", "PMI_PORT")
# The process id and identity of a rank, for its children.
_PARENT = "MPIGRAD_PROCESS"
_GRACE = 3.0  # seconds added to the limit: a busy machine starts ranks one after the other
_STAGGER = 1.0  # seconds between the limits of two ranks, so that one rank reports


def forbid_child_import() -> None:
    """Raise an error if a child process of a rank imports mpigrad.

    The child inherits the rank's environment, so MPI would treat it as that rank, and the job would
    never end or be aborted. (A separate job that a launcher starts within a rank has another
    identity.)
    """
    if not is_served():
        return  # it is a rank of its own, whatever its variables say
    identity = " ".join(f"{name}={os.environ[name]}" for name in _IDENTITY if name in os.environ)
    rank, _, its_identity = os.environ.get(_PARENT, "").partition(" ")
    taken = identity and identity == its_identity and rank != str(os.getpid())
    # Only a PMIx namespace is unique to one job.
    started = "PMIX_NAMESPACE" in os.environ or rank == str(os.getppid())
    if not (taken and started) or "mpi4py.MPI" in sys.modules:
        os.environ[_PARENT] = f"{os.getpid()} {identity}"
        return
    # multiprocessing sets this while a spawned child imports the program.
    spawned = getattr(multiprocessing.current_process(), "_inheriting", False)
    if not spawned:
        raise ImportError(
            f"mpigrad: imported in a child of MPI process {rank}. The child inherits the "
            "launcher's variables (PMIX_*, OMPI_*, PMI_*), so MPI would treat it as the same rank. "
            "Start it from a file that imports neither mpigrad nor mpi4py, or without these "
            "variables: then it is a program of one rank."
        )
    text = (
        f"mpigrad: imported in a process that multiprocessing spawned from MPI process {rank}; "
        "ending the job. MPI would treat the child as the same rank. Import mpigrad and mpi4py "
        "under `if __name__ == '__main__':`, or start workers with subprocess from a file that "
        "imports neither."
    )
    print(text, file=sys.stderr, flush=True)
    os.kill(int(rank), signal.SIGTERM)  # a pool would start new processes without end
    raise ImportError(text)


@contextlib.contextmanager
def limit_mpi_init() -> Iterator[None]:
    """Limit the time of the import that starts MPI to MPIGRAD_TIMEOUT."""
    library = native_path("mpigrad_communication")
    rank = next((os.environ[name] for name in _RANK if name in os.environ), "")
    try:
        seconds = float(os.environ.get("MPIGRAD_TIMEOUT", "300"))
    except ValueError:
        seconds = 0.0  # reported later
    if "mpi4py.MPI" in sys.modules or not seconds > 0 or not rank.isdigit() or library is None:
        yield
        return
    native = ctypes.CDLL(str(library), mode=ctypes.RTLD_LOCAL)
    native.mpigrad_start_time_limit.argtypes = [ctypes.c_double, ctypes.c_char_p]
    limit = seconds + _GRACE + _STAGGER * min(int(rank), 15)
    text = (
        f"mpigrad: rank {rank} has waited {limit:g} s in MPI_Init, in `import mpigrad`: another "
        "rank ended before it started MPI, or has not started MPI yet. Import mpigrad on every "
        "rank, at the top of the program. If that takes longer, set MPIGRAD_TIMEOUT (seconds, 0: "
        "no limit).\n"
    )
    native.mpigrad_start_time_limit(limit, text.encode())
    try:
        yield
    finally:
        native.mpigrad_stop_time_limit()
