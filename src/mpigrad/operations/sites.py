"""The user's source line of every operation, as a number that compiled programs carry."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

from mpigrad.native import library

__all__ = ["call_site", "describe", "pass_over", "standing_at"]

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# The problems are programs that use the library: their lines are worth naming.
_PROGRAMS = os.path.join(_PACKAGE, "problems") + os.sep
_PACKAGE += os.sep
_JAX = os.path.join("site-packages", "jax") + os.sep

# But for those that are libraries themselves.
_passed_over: list[str] = []


def pass_over(directory: str) -> None:
    """Name the callers of the code in a directory of the problems, not its own lines."""
    _passed_over.append(directory + os.sep)


# Where a message stands that is traced later than it was written, in a backward pass perhaps.
_given: list[int] = []


@contextlib.contextmanager
def standing_at(site: int) -> Iterator[None]:
    """A context in which messages stand at the source line with this number."""
    _given.append(site)
    try:
        yield
    finally:
        _given.pop()


_numbers: dict[tuple[str, int], int] = {}
_with_trees: dict[tuple[int, str], int] = {}
_TREES = 1024  # of the board's 4096 numbers
_texts: list[str] = ["an unknown line"]


def call_site(tree: str = "") -> int:
    """The number of the innermost source line outside the library (1, 2, …).

    With `tree`, the arrays of a pytree that travels there, it is another number for each tree: the
    guard compares the trees of ranks. A tree that starts with "?" may be any.
    """
    number = _given[-1] if _given else _line()
    if not tree:
        return number
    if len(_with_trees) >= _TREES:  # trees of sizes that change for ever: the board has no room
        tree = "?"
    key = (number, tree)
    if key not in _with_trees:
        _with_trees[key] = _add(_texts[number], tree)
    return _with_trees[key]


def _line() -> int:
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        inside = (name.startswith(_PACKAGE) and not name.startswith(_PROGRAMS)) or _JAX in name
        inside = inside or name.startswith(tuple(_passed_over))
        # The library's own context managers are entered by contextlib.
        if not inside and not name.startswith("<frozen") and name != contextlib.__file__:
            break
        frame = frame.f_back
    if frame is None:
        return 0
    key = (frame.f_code.co_filename, frame.f_lineno)
    number = _numbers.get(key)
    if number is None:
        name = os.path.relpath(key[0]) if key[0].startswith(os.getcwd()) else key[0]
        number = _numbers[key] = _add(f"{name}:{key[1]}", "")
    return number


def _add(text: str, tree: str) -> int:
    _texts.append(text)
    library().mpigrad_set_call_site(len(_texts) - 1, text.encode(), tree.encode())
    return len(_texts) - 1


def describe(site: int) -> str:
    """The text of a number: prog.py:12, or the adjoint of prog.py:12 for a negative one."""
    text = _texts[abs(site)] if abs(site) < len(_texts) else _texts[0]
    return f"the adjoint of {text}" if site < 0 else text
