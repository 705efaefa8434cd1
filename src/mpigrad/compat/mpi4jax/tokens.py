"""The two conventions of mpi4jax: with tokens before version 0.8, and without."""

from __future__ import annotations

import os
from typing import Any

import jax

__all__ = ["NEWEST", "NO_TOKEN", "VERSION", "returns_token", "version", "with_token"]

VERSION = "MPIGRAD_MPI4JAX_VERSION"
NEWEST = "0.9.1.post2"
NO_TOKEN: Any = object()  # None is a token of the older versions


def version() -> str:
    """Return the version of mpi4jax that the program was written for."""
    return os.environ.get(VERSION) or NEWEST


def _always_returns_token() -> bool:
    numbers = version().split(".")[:2]
    try:
        return tuple(map(int, numbers)) < (0, 8)
    except ValueError:
        raise ValueError(
            f"mpi4jax: {VERSION} must be a version such as 0.7.2, got {version()!r}. Correct the "
            "environment variable, or remove it."
        ) from None


def returns_token(token: Any) -> bool:
    """Return True if a call with this `token` returns one: it was passed, or the version is old."""
    return token is not NO_TOKEN or _always_returns_token()


def with_token(token: Any, *results: Any) -> Any:
    """Return the results of a call as its convention asks.

    Parameters
    ----------
    token
        The argument `token` of the call.
    results
        The value, or nothing for a call without a value.

    Returns
    -------
    With tokens (value, token), or the token alone for a call without a value. Without tokens the
    value or None. Tokens have no effect, because mpigrad keeps messages in program order.
    """
    if not returns_token(token):
        return results[0] if results else None
    if token is NO_TOKEN or token is None:
        token = jax.lax.create_token()
    return (*results, token) if results else token
