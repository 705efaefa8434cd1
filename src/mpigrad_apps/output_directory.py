"""The directory that a run writes into."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from typing import Any

from mpigrad.collective_errors import raise_on_all_ranks
from mpigrad.communicator import Communicator
from mpigrad_apps.atomic_write import write_atomically

__all__ = ["prepare_output", "resume_settings"]

# A resumed run may change these settings.
_FREE = ("iterations", "frames", "restart", "resume", "out")


def prepare_output(settings: Any, out: pathlib.Path, comm: Communicator) -> None:
    """Make the output directory and write settings.json into it (collective).

    Call it before the computation, so that a directory that is not writable is found early. Rank 0
    writes, and its error is raised on all ranks.
    """
    with raise_on_all_ranks(comm):
        if comm.rank == 0:
            out.mkdir(parents=True, exist_ok=True)
            if not os.access(out, os.W_OK):
                raise PermissionError(f"--out: {out} is not writable. Choose another directory.")
            text = json.dumps(dataclasses.asdict(settings), indent=2, default=str)
            write_atomically(out / "settings.json", lambda file: file.write(f"{text}\n".encode()))


def resume_settings(settings: Any) -> dict[str, Any]:
    """Return the settings that a resumed run must share with the run that wrote the saves."""
    whole = json.loads(json.dumps(dataclasses.asdict(settings), default=str))
    return {name: value for name, value in whole.items() if name not in _FREE}
