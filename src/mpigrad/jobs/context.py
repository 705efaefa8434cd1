"""The context in which a job is traced."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from mpigrad.operations.carrier import forbid_messages, without_carriers

__all__ = ["JobFunction", "UserJob", "inside_job", "job_id", "traced"]

# (params, item_params, item) -> (results that are summed over jobs, results of each job).
JobFunction = Callable[[Any, Any, Any], tuple[Any, Any]]

_REASON = (
    "a job cannot communicate, because the other ranks are busy with other jobs. Communicate "
    "before or after the map"
)
# Part of JAX's cache keys, 0 outside a job. A function traced inside a job is not reused outside,
# and a function that holds the id of a job is not reused in a later trace.
_inside = jax.make_user_context(0)
_era = 1  # increases when the id of a job is read
_ids: list[Any] = []


def inside_job() -> bool:
    """Return True while a job is traced, when pools compute without messages."""
    return bool(_inside.value)


def job_id() -> Any:
    """Return the id of the outermost job that is traced now, or -1 outside a job."""
    global _era
    if not _ids:
        return -1
    _era += 1
    return _ids[0]


@contextlib.contextmanager
def _in_job(index: Any) -> Iterator[None]:
    _ids.append(index)
    try:
        with _inside(_era), forbid_messages(_REASON), without_carriers():
            yield
    finally:
        _ids.pop()


@dataclass(frozen=True)
class UserJob:
    """The user's function as a job, whose results are summed or returned one by one."""

    fn: Callable[..., Any]
    total: bool

    def __call__(self, params: Any, item_params: Any, item: Any) -> tuple[Any, Any]:
        result = jax.tree.map(jnp.asarray, self.fn(params, item_params, item))
        if not self.total:
            return (), result
        # Booleans are counted.
        return jax.tree.map(lambda y: y.astype(int) if y.dtype == bool else y, result), ()


def traced(
    job: JobFunction, params: Any, item_params: Any, item: Any, index: Any
) -> tuple[Any, Any]:
    """Trace `job` as the job of this id and return its results."""
    with _in_job(index):
        return job(params, item_params, item)
