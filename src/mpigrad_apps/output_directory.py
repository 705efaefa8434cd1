"""The directory that a run writes into."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
import uuid
from typing import Any

from mpigrad.collective_errors import raise_on_all_ranks
from mpigrad.communicator import Communicator
from mpigrad.runtime import write_atomically

__all__ = ["prepare_output", "remove_saves", "resume_settings"]

# A resumed run may change these settings.
_FREE = ("iterations", "frames", "restart", "resume", "overwrite", "draws", "vtk", "out")
# Results that describe an earlier run, and that its replacement may not write.
_RESULTS = (
    "report.html",
    "animation.gif",
    "heat.gif",
    *(
        f"{name}{ending}"
        for name in ("fields", "snapshots")
        for ending in (".pieces-[0-9]*", ".pvd", ".pvti", "-vtk")
    ),
    "snapshots.zarr",
    "snapshots.png",
)


def prepare_output(settings: Any, out: pathlib.Path, comm: Communicator) -> None:
    """Make the output directory and write settings.json into it (collective).

    Call it before the computation, so that a directory that is not writable is found early. Rank 0
    writes, and its error is raised on all ranks. An earlier run in the directory is an error,
    unless the settings say that it is continued or replaced. A continued run keeps the file of its
    first start.
    """
    with raise_on_all_ranks(comm):
        if comm.rank == 0:
            if hasattr(settings, "check_output"):
                settings.check_output()
            if any(path.is_file() for path in (out, *out.parents)):
                raise FileExistsError(f"--out: {out} is, or is in, a file. Choose a directory.")
            out.mkdir(parents=True, exist_ok=True)
            if not os.access(out, os.W_OK):
                raise PermissionError(f"--out: {out} is not writable. Choose another directory.")
            path = out / "settings.json"
            if getattr(settings, "resume", False) and path.exists():
                return  # the saves may be of another run, which is then found
            if getattr(settings, "overwrite", False):
                _remove_results(out)
            text = json.dumps(dataclasses.asdict(settings), indent=2, default=str)
            write_atomically(path, lambda file: file.write(f"{text}\n".encode()))


def _remove_results(out: pathlib.Path) -> None:
    """Remove the results of an earlier run, and no other files: `out` may have the user's."""
    for pattern in _RESULTS:
        for path in out.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def remove_saves(saves: pathlib.Path) -> None:
    """Remove the directory of an earlier run's saves, if there is one. Call it on one rank."""
    with contextlib.suppress(FileNotFoundError):
        # A run that is killed here must not find half of the saves.
        removed = saves.with_name(f".{saves.name}-{uuid.uuid4().hex}")
        saves.rename(removed)
        shutil.rmtree(removed)


def resume_settings(settings: Any) -> dict[str, Any]:
    """Return the settings that a resumed run must share with the run that wrote the saves."""
    whole = json.loads(json.dumps(dataclasses.asdict(settings), default=str))
    return {name: value for name, value in whole.items() if name not in _FREE}
