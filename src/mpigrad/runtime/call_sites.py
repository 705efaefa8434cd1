"""Call sites: the user's source line of every operation, as an id in compiled programs."""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from types import FrameType

from mpigrad.runtime.native import library

__all__ = [
    "Neighbors",
    "at_call_site",
    "call_site",
    "call_site_of",
    "describe",
    "neighbors_by_call",
    "note_neighbors",
    "pass_over",
    "program_line",
    "utf8",
    "utf8_end",
]

# ---- Texts of a limited length in bytes, for native memory ----


def utf8(text: str, room: int) -> bytes:
    """Return the beginning of a text in at most `room` bytes, without half a character.

    Examples
    --------
    >>> from mpigrad.runtime.call_sites import utf8
    >>> utf8("tränen", 3)
    b'tr'
    """
    data = text.encode(errors="replace")
    return data if len(data) <= room else data[:room].decode(errors="ignore").encode()


def utf8_end(text: str, room: int) -> bytes:
    """Return the end of a text in at most `room` bytes, without half a character.

    Examples
    --------
    >>> from mpigrad.runtime.call_sites import utf8_end
    >>> utf8_end("tränen", 5)
    b'nen'
    """
    data = text.encode(errors="replace")
    return data if len(data) <= room else data[len(data) - room :].decode(errors="ignore").encode()


# ---- Call sites: the user's source line of every operation, as an id in compiled programs ----


_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_JAX = os.path.join("site-packages", "jax") + os.sep
_INSTALLED = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "purelib"))
_PACKAGES = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))

# Directories of other libraries, whose lines are not the user's.
_library_directories: list[str] = []


def pass_over(directory: str) -> None:
    """Report the callers of the code in a directory instead of its own lines."""
    _library_directories.append(directory + os.sep)


# Call sites for messages that are traced later than they were written, as in a backward pass.
_current: list[int] = []


@contextlib.contextmanager
def at_call_site(site: int) -> Iterator[None]:
    """Assign messages in this context to the source line with this id."""
    _current.append(site)
    try:
        yield
    finally:
        _current.pop()


_ids: dict[tuple[str, int], int] = {}
_with_trees: dict[tuple[int, str], int] = {}
_TREES = 1024  # of the 4096 ids on the board
_texts: list[str] = ["an unknown line"]


def call_site(tree: str = "") -> int:
    """Return the id of the innermost source line outside the library (1, 2, …).

    `tree` describes the arrays of the pytree that is sent there. Each tree gets its own id, so that
    the guard can compare the trees of ranks. A description that starts with "?" matches any tree.
    """
    site = _current[-1] if _current else _line()
    if not tree:
        return site
    if len(_with_trees) >= _TREES:  # sizes that change in every call would fill the board
        tree = "?"
    key = (site, tree)
    if key not in _with_trees:
        _with_trees[key] = _add(_texts[site], tree)
    return _with_trees[key]


# The neighbours of an exchange: their ranks, and whether a message comes from them in a forward and
# in an adjoint call. Empty if they differ between the calls of one line.
Neighbors = tuple[tuple[int, bool, bool], ...]
neighbors_by_call: dict[tuple[str, int, int], Neighbors] = {}  # by operation, slot and site


def note_neighbors(
    operation: str, slot: int, site: int, counts: Iterable[tuple[int, int, int]]
) -> None:
    """Record for profiles whose messages an exchange waits for.

    `counts` has for each neighbour its rank and the lengths of the messages from and to it.
    """
    new = tuple((rank, received > 0, sent > 0) for rank, received, sent in counts)
    if neighbors_by_call.setdefault((operation, slot, site), new) != new:
        neighbors_by_call[operation, slot, site] = ()


def _is_outside(name: str) -> bool:
    inside = name.startswith((_PACKAGE, *_library_directories)) or _JAX in name
    # contextlib enters the context managers of the library.
    return not inside and not name.startswith("<frozen") and name != contextlib.__file__


def _is_installed(name: str) -> bool:
    return name.startswith(_INSTALLED) or any(folder in name for folder in _PACKAGES)


def _outside(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame outside the library, starting from this frame."""
    while frame is not None and not _is_outside(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


_LONGEST = 100  # bytes of a path: the space on the board is limited


def _cell(file: str) -> str:
    """Return the name of a notebook's cell, such as In[3], or "" for another file."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    name_of = getattr(getattr(shell, "compile", None), "format_code_name", None)
    named = name_of(file) if name_of else None  # ("Cell", "In[3]"), from IPython 8 on
    return named[1] if named else ""


def _text(file: str, line: int | None) -> str:
    if cell := _cell(file):
        return f"{cell}:{line}"
    path = os.path.relpath(file) if file.startswith(os.getcwd()) else file
    end = utf8_end(path, _LONGEST).decode()
    return f"{path if len(end) == len(path) else f'...{end}'}:{line}"


def _line() -> int:
    frame = _outside(sys._getframe(1))
    if frame is None:
        return 0
    key = (frame.f_code.co_filename, frame.f_lineno)
    site = _ids.get(key)
    if site is None:
        site = _ids[key] = _add(_text(*key), "")
    return site


def program_line(places: Iterable[tuple[str, int]]) -> str:
    """Return the line of the user's program in a stack (innermost first), as prog.py:12.

    Lines of the program's own files come before lines of installed packages. "" for an empty stack.
    """
    outside = [place for place in places if _is_outside(place[0])]
    program_places = [place for place in outside if not _is_installed(place[0])]
    candidates = program_places or outside
    return _text(*candidates[0]) if candidates else ""


_loop_ids: dict[str, int] = {}


def call_site_of(places: Iterable[tuple[str, int]]) -> int:
    """Return the id of the program's line in a stack (innermost first).

    JAX keeps only the innermost part of a stack. If it has no line of the program's own files, this
    is the line that is executed now: the call that compiles the function.
    """
    program_places = [place for place in places if not _is_installed(place[0])]
    text = program_line(program_places) or program_line(_stack())
    if text and text not in _loop_ids:
        _loop_ids[text] = _add(text, "")
    return _loop_ids.get(text, 0)


def _stack() -> Iterator[tuple[str, int]]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back


def _add(text: str, tree: str) -> int:
    _texts.append(text)
    text_bytes, tree_bytes = text.encode(errors="replace"), tree.encode(errors="replace")
    library().mpigrad_set_call_site(len(_texts) - 1, text_bytes, tree_bytes)
    return len(_texts) - 1


def describe(site: int) -> str:
    """Return the text of an id: prog.py:12, or "the adjoint of prog.py:12" for a negative id."""
    text = _texts[abs(site)] if abs(site) < len(_texts) else _texts[0]
    return f"the adjoint of {text}" if site < 0 else text
