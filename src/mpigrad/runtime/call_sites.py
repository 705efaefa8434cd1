"""The user's source line of every operation, as a number that compiled programs carry."""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from types import FrameType

from mpigrad.runtime.native import library

__all__ = ["at_call_site", "call_site", "describe", "pass_over", "program_line"]

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_JAX = os.path.join("site-packages", "jax") + os.sep
_INSTALLED = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "purelib"))

# Other libraries whose lines are not the user's.
_passed_over: list[str] = []


def pass_over(directory: str) -> None:
    """Name the callers of the code in a directory, not its own lines."""
    _passed_over.append(directory + os.sep)


# Where a message stands that is traced later than it was written, in a backward pass perhaps.
_given: list[int] = []


@contextlib.contextmanager
def at_call_site(site: int) -> Iterator[None]:
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


def _is_outside(name: str) -> bool:
    inside = name.startswith((_PACKAGE, *_passed_over)) or _JAX in name
    # The library's own context managers are entered by contextlib.
    return not inside and not name.startswith("<frozen") and name != contextlib.__file__


def _outside(frame: FrameType | None) -> FrameType | None:
    """The innermost frame outside the library, from this one on."""
    while frame is not None and not _is_outside(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


_LONGEST = 100  # of a path: the board has room for a line of text


def _text(file: str, line: int | None) -> str:
    path = os.path.relpath(file) if file.startswith(os.getcwd()) else file
    return f"{path if len(path) <= _LONGEST else f'...{path[-_LONGEST:]}'}:{line}"


def _line() -> int:
    frame = _outside(sys._getframe(1))
    if frame is None:
        return 0
    key = (frame.f_code.co_filename, frame.f_lineno)
    number = _numbers.get(key)
    if number is None:
        number = _numbers[key] = _add(_text(*key), "")
    return number


def program_line(places: Iterable[tuple[str, int]]) -> str:
    """The line of the user's program among files and lines, the innermost first: prog.py:12.

    That of the program's own files, where there is one, rather than of what it calls; "" of none.
    """
    outside = [place for place in places if _is_outside(place[0])]
    own = [place for place in outside if not place[0].startswith(_INSTALLED)]
    found = own or outside
    return _text(*found[0]) if found else ""


def _add(text: str, tree: str) -> int:
    _texts.append(text)
    library().mpigrad_set_call_site(len(_texts) - 1, text.encode(), tree.encode())
    return len(_texts) - 1


def describe(site: int) -> str:
    """The text of a number: prog.py:12, or the adjoint of prog.py:12 for a negative one."""
    text = _texts[abs(site)] if abs(site) < len(_texts) else _texts[0]
    return f"the adjoint of {text}" if site < 0 else text
