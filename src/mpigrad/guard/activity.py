"""The activity of a rank outside of operations, for the reports of the guard."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

__all__ = ["activity", "current_activity"]


# The activities of the main thread, the outer ones first: functions that return a text.
_activities: list[Callable[[], str]] = []


def current_activity() -> str:
    """Return the text of the main thread's activity, or ""."""
    activities = _activities[-1:]
    return activities[0]() if activities else ""


@contextlib.contextmanager
def activity(text: str | Callable[[], str]) -> Iterator[None]:
    """Show a text in reports while this block runs in the main thread.

    `text` may be a function that returns the text. The watchdog calls it in a thread of its own.

    Examples
    --------
    >>> from mpigrad.guard.activity import activity, current_activity
    >>> with activity("compiling jit_step"):
    ...     current_activity()
    'compiling jit_step'
    >>> current_activity()
    ''
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _activities.append(text if callable(text) else lambda: text)
    try:
        yield
    finally:
        _activities.pop()
