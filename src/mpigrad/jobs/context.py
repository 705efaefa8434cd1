"""Whether a program is being traced inside a job."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax

from mpigrad.operations.activity import no_messages

__all__ = ["in_job", "inside_job"]

_REASON = (
    "a job has no messages of its own: the other ranks are busy with other jobs. Communicate "
    "before or after the map"
)
# Part of JAX's cache keys: a function that was traced inside a job is not used outside one.
_inside = jax.make_user_context(False)


def inside_job() -> bool:
    """Whether what is traced now is part of a job; a pool then computes by itself."""
    return _inside.value


@contextlib.contextmanager
def in_job() -> Iterator[None]:
    """A context in which a job is traced."""
    with _inside(True), no_messages(_REASON):
        yield
