"""The environment variables of the guard."""

from __future__ import annotations

import os

__all__ = ["guard_enabled", "timeout_seconds", "unreceived_is_error"]


def timeout_seconds() -> float:
    """Return MPIGRAD_TIMEOUT, the time limit of an operation in seconds (default 300, 0: none)."""
    text = os.environ.get("MPIGRAD_TIMEOUT", "300")
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:
        raise ImportError(
            f"mpigrad: MPIGRAD_TIMEOUT must be a number of seconds, 0 or more, got {text!r}. Set "
            "it to 300, for example, or to 0 for no limit."
        )
    return seconds


def guard_enabled() -> bool:
    """Return True if MPIGRAD_GUARD=1: operations are compared between ranks before they start."""
    text = os.environ.get("MPIGRAD_GUARD", "0")
    if text not in ("", "0", "1"):
        raise ImportError(
            f"mpigrad: MPIGRAD_GUARD must be 1 (on) or 0 (off), got {text!r}. Set it to 1 or 0."
        )
    return text == "1"


def unreceived_is_error() -> bool:
    """Return False if MPIGRAD_UNRECEIVED=warn: messages that nobody received only warn."""
    text = os.environ.get("MPIGRAD_UNRECEIVED", "error")
    if text not in ("", "error", "warn"):
        raise ImportError(
            f"mpigrad: MPIGRAD_UNRECEIVED must be error or warn, got {text!r}. Set it to warn if "
            "your program means to leave messages unreceived."
        )
    return text != "warn"
