"""What a gradient of waves keeps of the forward run."""

from __future__ import annotations

from typing import Literal

__all__ = ["Checkpoints", "check_checkpoints", "native_number"]

Checkpoints = int | Literal["all", "boundary"] | None

_NUMBERS = {None: 0, "all": -1, "boundary": -2}  # as in native/waves/tile.h


def check_checkpoints(checkpoints: object, name: str, *, native: bool) -> None:
    """Raise a ValueError of the model called `name` unless its kernels can keep that."""
    counted = isinstance(checkpoints, int) and not isinstance(checkpoints, bool) and checkpoints > 0
    if not (counted or checkpoints in (None, "all", "boundary")):
        raise ValueError(
            f'{name}: checkpoints must be a number of steps, "all", "boundary" or None, '
            f"not {checkpoints!r}"
        )
    if checkpoints == "boundary" and not native:
        raise ValueError(
            f'{name}: checkpoints="boundary" is of the native kernels; XLA programs (method="xla", '
            "and all that run on devices) take a number of steps"
        )


def native_number(checkpoints: Checkpoints) -> int:
    """The number that stands for it in the native library."""
    return checkpoints if isinstance(checkpoints, int) else _NUMBERS[checkpoints]
