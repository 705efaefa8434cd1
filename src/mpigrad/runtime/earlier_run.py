"""The error for a directory or history of an earlier run. It imports neither JAX nor MPI."""

from __future__ import annotations

import contextlib
import json
import pathlib
import time
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["EarlierRun", "earlier_run_error", "last_record", "last_save"]


class EarlierRun(NamedTuple):
    """The last step of an earlier run, and when it was saved, in seconds since 1970."""

    step: int | None
    seconds: float


def last_save(saves: Sequence[pathlib.Path]) -> EarlierRun:
    """Return the newest of some saves (directories `save-000012`). There is at least one."""
    dates: list[tuple[float, str, pathlib.Path]] = []
    for save in saves:
        with contextlib.suppress(OSError):
            dates.append((save.stat().st_mtime, save.name, save))
    seconds, _, newest = max(dates, default=(0.0, "", saves[-1]))
    step = None
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        manifest = json.loads((newest / "manifest.json").read_text(encoding="utf-8"))
        step = int(manifest["manifest"]["step"])
    return EarlierRun(step, seconds)


def last_record(history: pathlib.Path) -> EarlierRun | None:
    """Return the last whole record of a history (a file of JSON lines), or None."""
    lines = history.read_text(encoding="utf-8", errors="replace").splitlines()
    for line in reversed(lines):
        try:
            record = json.loads(line)
            step = record.get("iteration", record.get("step"))
        except (ValueError, AttributeError):  # a job that is killed may leave half a line
            continue
        return EarlierRun(step, history.stat().st_mtime)
    return None


def earlier_run_error(
    name: str,
    directory: pathlib.Path,
    run: EarlierRun,
    *,
    resume: str = "resume=True",
    overwrite: str = "overwrite=True",
    other: str = "another directory",
) -> FileExistsError:
    """Return the error that names the last step of an earlier run, its date, and what to do.

    Parameters
    ----------
    name
        The option or function that the user typed.
    directory
        The directory or the history of the earlier run.
    run
        Its last step.
    resume, overwrite, other
        What the user must give to continue the run (empty: it has no saves), to replace it, or to
        keep it.
    """
    date = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.seconds))
    last = f"of {date}" if run.step is None else f"with the last step {run.step} of {date}"
    return FileExistsError(
        f"{name}: {directory} has an earlier run {last}. Use "
        + (f"{resume} to continue it, " if resume else "")
        + f"{overwrite} to replace it, or {other}."
    )
