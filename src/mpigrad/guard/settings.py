"""The environment variables of the guard."""

from __future__ import annotations

import os

__all__ = ["guarded", "timeout_seconds"]


def timeout_seconds() -> float:
    """MPIGRAD_TIMEOUT: how long one operation may wait (seconds, default 300, 0 for ever)."""
    text = os.environ.get("MPIGRAD_TIMEOUT", "300")
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:
        raise ImportError(
            f"mpigrad: MPIGRAD_TIMEOUT={text!r} is not a number of seconds (0: no limit)"
        )
    return seconds


def guarded() -> bool:
    """MPIGRAD_GUARD=1: whether operations are compared between ranks before they start."""
    text = os.environ.get("MPIGRAD_GUARD", "0")
    if text not in ("", "0", "1"):
        raise ImportError(f"mpigrad: MPIGRAD_GUARD={text!r} is not 1 (on) or 0 (off)")
    return text == "1"
