"""Find an earlier run of an application in a directory. It imports neither JAX nor MPI."""

from __future__ import annotations

import pathlib
from typing import Any

from mpigrad.runtime import EarlierRun, earlier_run_error, last_record, last_save

__all__ = ["OutputCheck"]

_SAVES = ("restart/save-*", "restart/*/save-*", "*/restart/save-*")
_HISTORIES = ("history.jsonl", "*/history.jsonl")


class OutputCheck:
    """A check of the settings `out`, `overwrite` and, if the application saves, `resume`."""

    def check_output(self) -> None:
        """Raise an error if `out` has an earlier run that is not to be continued or replaced.

        A run with a report and without saves, such as a simulation, cannot be continued.

        Raises
        ------
        FileExistsError
            It names the last step of the earlier run, its date, and the options to give.
        ValueError
            If both options are given.
        """
        settings: Any = self
        out, resumes = settings.out, getattr(settings, "resume", False)
        if resumes and settings.overwrite:
            raise ValueError("--overwrite: got --resume, too. Give one of them.")
        if settings.overwrite:
            return
        saves = [save for pattern in _SAVES for save in out.glob(pattern)]
        if resumes and not saves and (out / "report.html").exists():
            raise FileExistsError(
                f"--resume: {out} has the report of an earlier run, but no saves to continue from. "
                "Use --overwrite to replace it, or another --out."
            )
        if resumes:
            return
        run = last_save(saves) if saves else _results(out)
        if run is not None:
            resume = "--resume" if saves else ""
            raise earlier_run_error(
                "--out", out, run, resume=resume, overwrite="--overwrite", other="another --out"
            )


def _results(out: pathlib.Path) -> EarlierRun | None:
    """Return the last step in a history, or else the date of the report, or else None."""
    for history in (path for pattern in _HISTORIES for path in out.glob(pattern)):
        if (run := last_record(history)) is not None:
            return run
    report = out / "report.html"
    return EarlierRun(None, report.stat().st_mtime) if report.exists() else None
