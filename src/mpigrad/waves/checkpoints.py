"""The part of a forward run that is stored for its gradient."""

from __future__ import annotations

from typing import Literal

__all__ = ["Checkpoints", "check_checkpoints", "checkpoint_code"]

Checkpoints = int | Literal["all", "boundary"] | None

_CODES = {None: 0, "all": -1, "boundary": -2}  # as in native/waves/tile.h


def check_checkpoints(checkpoints: object, name: str) -> None:
    """Raise a ValueError of the model `name` if these are not checkpoints."""
    counted = isinstance(checkpoints, int) and not isinstance(checkpoints, bool) and checkpoints > 0
    if not (counted or checkpoints in (None, "all", "boundary")):
        raise ValueError(
            f'{name}: checkpoints must be a positive number of steps, "all", "boundary" or None, '
            f"got {checkpoints!r}."
        )


def checkpoint_code(checkpoints: Checkpoints) -> int:
    """Return the code of the native library for these checkpoints."""
    return checkpoints if isinstance(checkpoints, int) else _CODES[checkpoints]
