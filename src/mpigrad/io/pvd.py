"""Write an index of files by time, which ParaView opens as one animation."""

from __future__ import annotations

import math
import numbers
import os
import pathlib
from collections.abc import Mapping
from xml.sax.saxutils import quoteattr

from mpigrad.collective_errors import raise_on_all_ranks
from mpigrad.communicator import Communicator, resolve
from mpigrad.io.atomic_write import write_atomically
from mpigrad.io.paths import check_path

__all__ = ["write_pvd"]


def write_pvd(
    path: str | os.PathLike[str],
    files: Mapping[float, str | os.PathLike[str]],
    comm: Communicator | None = None,
) -> None:
    """Write a ParaView index of files that `write_vtk` has written at several times (collective).

    Call it after each file of a long run: the index is small, and it is replaced in one step.

    Parameters
    ----------
    path
        The index, with the suffix `.pvd`. Its directory must exist.
    files
        The `.pvti` file of each time. Rank 0 reads this argument. The index has the paths relative
        to its own directory.
    comm
        The communicator of the ranks that call it. Default: the communicator of the enclosing
        `with`, or all ranks.

    Raises
    ------
    TypeError, ValueError
        On all ranks: if `files` is not a dict, a time is not finite, or `path` is not valid.
    OSError
        On all ranks: if a file does not exist, or the index cannot be written.

    Examples
    --------
    >>> import mpigrad as mg
    >>> grid = mg.Grid((4, 2), spacing=(0.25, 0.5))
    >>> x, _ = grid.centers()
    >>> files = {}
    >>> for step in range(3):
    ...     time = 0.1 * step
    ...     files[time] = f"u_{step:04d}.pvti"
    ...     mg.io.write_vtk(files[time], grid, {"u": x + time})
    ...     mg.io.write_pvd("u.pvd", files)
    """
    comm = resolve(comm)
    path = check_path("write_pvd", path, comm, ".pvd")
    with raise_on_all_ranks(comm):
        if comm.rank == 0:
            index = _index(path, files).encode()
            write_atomically(path, lambda file: file.write(index))


def _index(path: pathlib.Path, files: Mapping[float, str | os.PathLike[str]]) -> str:
    lines = []
    if not isinstance(files, Mapping):
        raise TypeError(
            f"write_pvd: expected a dict of files by time, got {type(files).__name__}. Write "
            "{0.0: 'u_0000.pvti'}."
        )
    for time, file in files.items():
        if not isinstance(time, numbers.Real) or not math.isfinite(time):
            raise ValueError(
                f"write_pvd: expected finite numbers as times, got {time!r} for {file}."
            )
        if not pathlib.Path(file).is_file():
            raise FileNotFoundError(f"write_pvd: {file} does not exist. Write it first.")
        source = quoteattr(os.path.relpath(file, path.parent))
        lines.append(f'<DataSet timestep="{float(time)!r}" file={source}/>')
    return "\n".join(
        [
            '<?xml version="1.0"?>',
            '<VTKFile type="Collection" version="1.0" byte_order="LittleEndian">',
            "<Collection>", *lines, "</Collection>", "</VTKFile>", "",
        ]
    )  # fmt: skip
