"""What is known while a job is traced."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from mpigrad.operations.carrier import forbid_messages, without_carriers

__all__ = ["Job", "UserJob", "inside_job", "job_number", "traced"]

# (shared, mine, record) -> (what is added up over jobs, what is kept of each job).
Job = Callable[[Any, Any, Any], tuple[Any, Any]]

_REASON = (
    "a job has no messages of its own: the other ranks are busy with other jobs. Communicate "
    "before or after the map"
)
# Part of JAX's cache keys, 0 outside: a function that was traced inside a job is not used outside
# one, and one that has the number of a job is used in no later trace.
_inside = jax.make_user_context(0)
_era = 1  # ends where the number of a job is asked for
_numbers: list[Any] = []


def inside_job() -> bool:
    """Whether what is traced now is part of a job; a pool then computes by itself."""
    return bool(_inside.value)


def job_number() -> Any:
    """The number of the job that is traced now, the outermost one; -1 outside."""
    global _era
    if not _numbers:
        return -1
    _era += 1
    return _numbers[0]


@contextlib.contextmanager
def _in_job(number: Any) -> Iterator[None]:
    _numbers.append(number)
    try:
        with _inside(_era), forbid_messages(_REASON), without_carriers():
            yield
    finally:
        _numbers.pop()


@dataclass(frozen=True)
class UserJob:
    """The user's function as a job, whose result is added up or kept."""

    fn: Callable[..., Any]
    total: bool

    def __call__(self, shared: Any, mine: Any, record: Any) -> tuple[Any, Any]:
        result = jax.tree.map(jnp.asarray, self.fn(shared, mine, record))
        if not self.total:
            return (), result
        # Truth values are counted.
        return jax.tree.map(lambda y: y.astype(int) if y.dtype == bool else y, result), ()


def traced(job: Job, shared: Any, mine: Any, record: Any, number: Any) -> tuple[Any, Any]:
    """What `job` gives, traced as the job of this number."""
    with _in_job(number):
        return job(shared, mine, record)
