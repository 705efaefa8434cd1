"""`mpi4jax.experimental`, which mpi4jax had before version 0.8: programs without tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from mpigrad.compat.mpi4jax.experimental import notoken

__all__ = ["auto_tokenize", "notoken"]

F = TypeVar("F", bound=Callable[..., Any])


def auto_tokenize(f: F, token: Any = None) -> F:
    """Return `f` as it is: mpigrad orders messages without tokens."""
    return f
