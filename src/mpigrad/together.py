"""What one rank finds out alone, all ranks raise together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

from mpigrad.communicator import Communicator

__all__ = ["equal_everywhere", "from_root", "together"]

T = TypeVar("T")
_PLAIN = (ValueError, TypeError, FileNotFoundError, PermissionError, OSError)


@contextlib.contextmanager
def together(comm: Communicator) -> Iterator[None]:
    """A block without messages whose error, on any rank, is raised by every rank of `comm`.

    Raises
    ------
    Exception
        A rank's own error where it has one; on the others that of the lowest rank that has one,
        of its type where that is a plain built-in error, else a RuntimeError with its text.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:  # any error has to reach the other ranks
        error = raised
    report = None
    if error is not None:  # a type of the user's own need not be known elsewhere
        report = (
            next((base for base in _PLAIN if isinstance(error, base)), RuntimeError),
            str(error),
        )
    for found in comm.mpi.allgather(report):
        if found is None:
            continue
        if error is not None:
            raise error
        kind, text = found
        raise kind(text)


def from_root(comm: Communicator, read: Callable[[], T]) -> T:
    """What `read()` returns on rank 0, on every rank; its error is raised by every rank."""
    value: T | None = None
    with together(comm):
        if comm.rank == 0:
            value = read()
    return comm.mpi.bcast(value, root=0)  # type: ignore[no-any-return]


def equal_everywhere(comm: Communicator, value: object, what: str) -> None:
    """Raise a ValueError on every rank unless the value is equal on all of them (collective)."""
    values = comm.mpi.allgather(value)
    for rank, other in enumerate(values):
        if other != values[0]:
            raise ValueError(
                f"{what} must be equal on all ranks: rank 0 {values[0]}, {rank} {other}"
            )
