"""Two patterns that meet in an operation: what they must share, and plans kept for them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from mpigrad.collective_errors import raise_error
from mpigrad.sparse.matrix.pattern import Pattern

__all__ = ["cached_plan", "same_communicator"]


def same_communicator(name: str, a: Pattern, b: Pattern) -> None:
    """Raise, on every rank alike, where the patterns live on different communicators."""
    if a.comm.slot != b.comm.slot:
        raise ValueError(
            f"{name}: the matrices have different communicators (of {a.comm.size} and "
            f"{b.comm.size} ranks); make both patterns with the same `comm`"
        )


def cached_plan(
    name: str, a: Pattern, b: Pattern, check: Callable[[], str], make: Callable[[], Any]
) -> Any:
    """What `make` gives for two patterns, made once (collective where it is made).

    `check` tells what is wrong on this rank, or nothing: then all ranks raise it together. A plan
    lives as long as both patterns; as it is looked up with both in hand, all ranks agree.
    """
    plans = a.derived.setdefault(name, weakref.WeakKeyDictionary())
    if b not in plans:
        same_communicator(name, a, b)
        fault = check()
        raise_error(a.comm, ValueError(f"{name}: {fault}") if fault else None)
        plans[b] = make()
    return plans[b]
