"""The directory that a run writes into."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from typing import Any

from mpigrad.communicator import Communicator
from mpigrad.together import together

__all__ = ["prepare"]


def prepare(settings: Any, out: pathlib.Path, comm: Communicator) -> None:
    """The output directory, which must be writable before hours are spent, and its settings.json.

    Collective: rank 0 writes, and its error is raised by every rank.
    """
    with together(comm):
        if comm.rank == 0:
            out.mkdir(parents=True, exist_ok=True)
            if not os.access(out, os.W_OK):
                raise PermissionError(f"--out: {out} is not writable")
            text = json.dumps(dataclasses.asdict(settings), indent=2, default=str)
            (out / "settings.json").write_text(text + "\n", encoding="utf-8")
