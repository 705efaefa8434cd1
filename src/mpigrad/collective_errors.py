"""Raise one rank's error on all ranks, by one mechanism.

Every function here is collective: all ranks of the communicator call it.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, NoReturn, TypeVar

from mpigrad.communicator import Communicator

__all__ = [
    "FoundError",
    "assert_same_on_all_ranks",
    "assert_same_settings",
    "call_on_root",
    "gather_errors",
    "raise_error",
    "raise_on_all_ranks",
]

T = TypeVar("T")
# Types that every rank can construct from a text. A type of the user may not exist on other ranks.
_PLAIN = (ValueError, TypeError, FileExistsError, FileNotFoundError, PermissionError, OSError)


class FoundError(NamedTuple):
    """An error that a rank has found."""

    rank: int
    kind: str
    text: str
    traceback: str


def gather_errors(comm: Communicator, error: Exception | None) -> list[FoundError]:
    """Return the errors of all ranks, in the order of ranks."""
    report = None
    if error is not None:
        report = type(error).__name__, str(error), "".join(traceback.format_exception(error))
    reports = comm.mpi.allgather(report)
    return [
        FoundError(rank, *details) for rank, details in enumerate(reports) if details is not None
    ]


def raise_error(comm: Communicator, error: Exception | None) -> None:
    """Raise on every rank the error of the lowest rank that has one.

    That rank raises its own error. The others raise one of the same type if it is a plain built-in
    type, else a RuntimeError; its text is followed by the rank on which it was found.
    """
    report = None
    if error is not None:
        kind = next((base for base in _PLAIN if isinstance(error, base)), RuntimeError)
        report = kind, str(error)
    for rank, rank_report in enumerate(comm.mpi.allgather(report)):
        if rank_report is not None:
            _raise(rank_report, rank, error if rank == comm.rank else None)


def _raise(report: tuple[type[Exception], str], rank: int, error: Exception | None) -> NoReturn:
    if error is not None:
        raise error
    kind, text = report
    raise kind(f"{text} (found on rank {rank})")


@contextlib.contextmanager
def raise_on_all_ranks(comm: Communicator) -> Iterator[None]:
    """Raise an error of this block on every rank, as `raise_error` does.

    The block must not send messages: a rank that fails would leave the others waiting.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:  # any error has to reach the other ranks
        error = raised
    raise_error(comm, error)


def call_on_root(comm: Communicator, function: Callable[[], T]) -> T:
    """Call a function on rank 0 and return its result, or raise its error, on every rank."""
    value: T | None = None
    with raise_on_all_ranks(comm):
        if comm.rank == 0:
            value = function()
    return comm.mpi.bcast(value, root=0)  # type: ignore[no-any-return]


def assert_same_on_all_ranks(comm: Communicator, value: object, what: str) -> None:
    """Raise a ValueError on every rank unless the value is the same on all of them.

    Parameters
    ----------
    what
        The subject of the sentence "... must be the same on all ranks".
    """
    _assert_same(comm.mpi.allgather(value), what)


def assert_same_settings(comm: Communicator, settings: Mapping[str, object], name: str) -> None:
    """Raise a ValueError on every rank that names the first setting that differs.

    Parameters
    ----------
    settings
        Values by name, with the same names on all ranks.
    name
        The function that has these settings.
    """
    ranks = comm.mpi.allgather({key: str(value) for key, value in settings.items()})
    for key in settings:
        _assert_same([rank[key] for rank in ranks], f"{name}: {key}")


def _assert_same(values: Sequence[object], what: str) -> None:
    ranks: dict[str, list[int]] = {}
    for rank, other in enumerate(values):
        ranks.setdefault(str(other), []).append(rank)
    if len(ranks) > 1:
        listing = "; ".join(
            f"{value} on rank{'s' * (len(members) > 1)} {_listed(members)}"
            for value, members in ranks.items()
        )
        raise ValueError(f"{what} must be the same on all ranks, got {listing}.")


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
