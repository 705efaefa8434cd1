"""Pictures of the loss and its gradient over the iterations."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from mpigrad.runtime import write_atomically
from mpigrad_apps.report import Picture, curve

__all__ = ["draw_history"]


def draw_history(
    history: Sequence[Any] | str | os.PathLike[str],
    path: str | os.PathLike[str] | None = None,
    by: str = "iteration",
) -> Picture:
    """Draw the loss and the gradient norm on a logarithmic axis. Call it on one rank.

    Parameters
    ----------
    history
        The records of a `Solution`, or the file that `minimize(..., history=file)` writes. The file
        may still be growing.
    path
        PNG file to write.
    by
        Quantity on the horizontal axis: "iteration", "evaluations" or "seconds".

    Returns
    -------
    Picture
        The picture, for `report.write_report`.

    Raises
    ------
    ValueError
        If there are no records, or `by` is another name.
    """
    if by not in ("iteration", "evaluations", "seconds"):
        raise ValueError(
            f'draw_history: by must be "iteration", "evaluations" or "seconds", got {by!r}.'
        )
    if isinstance(history, str | os.PathLike):
        records = _read(pathlib.Path(history))
    else:
        records = [{n: getattr(r, n) for n in (by, "loss", "gradient_norm")} for r in history]
    if not records:
        raise ValueError(
            "draw_history: the history is empty. Call it after the first iteration of minimize."
        )
    x = [float(record[by]) for record in records]
    losses = [float(record["loss"]) for record in records]
    lowest = min(losses)
    label, place = "loss", losses
    if lowest <= 0:  # a logarithmic axis shows the distance from the lowest loss
        label, place = f"loss - ({lowest:.6g})", [loss - lowest for loss in losses]
    lines = {label: (x, place), "gradient norm": (x, [float(r["gradient_norm"]) for r in records])}
    picture = curve("history", "The loss and its gradient.", lines, by)
    if path is not None:
        write_atomically(path, lambda file: file.write(picture.png))
    return picture


def _read(path: pathlib.Path) -> list[dict[str, Any]]:
    """Read the records of a JSON-lines file, whose last line may be incomplete."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]
