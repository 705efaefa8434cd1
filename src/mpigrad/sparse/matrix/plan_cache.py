"""Plans of operations on two patterns, kept as long as both patterns live."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from mpigrad.collective_errors import raise_error
from mpigrad.sparse.matrix.pattern import Pattern

__all__ = ["cached_plan", "same_communicator"]


def same_communicator(name: str, a: Pattern, b: Pattern) -> None:
    """Raise an error, the same on every rank, if the patterns have different communicators."""
    if a.comm.slot != b.comm.slot:
        raise ValueError(
            f"{name}: the matrices have different communicators (of {a.comm.size} and "
            f"{b.comm.size} ranks). Make both patterns with the same `comm`."
        )


def cached_plan(
    name: str, a: Pattern, b: Pattern, check: Callable[[], str], make: Callable[[], Any]
) -> Any:
    """Return the plan that `make` gives for two patterns, made once (collective when it is made).

    `check` returns the text of an error on this rank, which all ranks raise, or an empty string. A
    plan lives as long as both patterns. The caller has both, so all ranks find it or none does.
    """
    plans = a.derived.setdefault(name, weakref.WeakKeyDictionary())
    if b not in plans:
        same_communicator(name, a, b)
        fault = check()
        raise_error(a.comm, ValueError(f"{name}: {fault}") if fault else None)
        plans[b] = make()
    return plans[b]
