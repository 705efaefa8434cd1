"""Count the messages of a rank by Open MPI's monitoring (mpi_monitor.c).

This includes the messages of operations, of hypre and of the native time loops, without a change to
any of them.
"""

from __future__ import annotations

import ctypes
import pathlib
import shutil
import subprocess

__all__ = ["counted", "environment"]

SOURCE = pathlib.Path(__file__).with_suffix(".c")


def environment(directory: pathlib.Path) -> dict[str, str]:
    """Build the library in `directory`, and return the environment that `counted` needs on ranks.

    Raises
    ------
    RuntimeError
        If there is no C compiler.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise RuntimeError(
            "mpi_monitor: there is no C compiler to build mpi_monitor.c. Install one."
        )
    library = directory / "libmpi_monitor.so"
    flags = ["-O2", "-shared", "-fPIC", "-Wall", "-Wextra"]
    subprocess.run([compiler, *flags, str(SOURCE), "-o", str(library)], check=True)
    # Sums in the memory of one host would be no messages.
    return {
        "LD_PRELOAD": str(library),
        "OMPI_MCA_pml_monitoring_enable": "2",
        "MPIGRAD_SHARED_MEMORY": "0",
    }


def counted() -> tuple[int, int, int, int]:
    """(messages from point to point, bytes, collectives, bytes of their operands) until now.

    A collective counts on every rank, but bcast, reduce, gather and scatter on the root alone. On
    one rank all are 0: nothing is sent.

    Raises
    ------
    RuntimeError
        If the ranks were not started with `environment`, or MPI is not Open MPI.
    """
    from mpi4py import MPI

    if "Open MPI" not in MPI.Get_library_version():
        raise RuntimeError("only Open MPI counts messages in this way")
    if not hasattr(ctypes.CDLL(None), "mpi_monitor_read"):
        raise RuntimeError(
            "mpi_monitor: the environment of the ranks lacks the monitoring library. Start them "
            "with the result of mpi_monitor.environment."
        )
    numbers = (ctypes.c_long * 4)()
    ctypes.CDLL(None).mpi_monitor_read(numbers)
    messages, size, collectives, operands = numbers
    others = MPI.COMM_WORLD.size - 1
    return (messages, size, collectives, operands // others) if others else (0, 0, 0, 0)
