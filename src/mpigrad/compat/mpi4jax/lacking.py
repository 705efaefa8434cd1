"""Errors for names that mpi4jax has and this module lacks."""

from __future__ import annotations

__all__ = ["explain", "refuse"]

_LACKING = {
    "_src": (
        "the internals of mpi4jax do not exist in mpigrad. Use the public functions of mpi4jax."
    ),
    "_version": "it has one attribute only. Use mpi4jax.__version__.",
    "get_versions": "it has one result only. Use mpi4jax.__version__.",
}


def explain(name: str) -> str | None:
    """Return why a name of mpi4jax is lacking here and what to do, or None for other names."""
    reason = _LACKING.get(name.partition(".")[0])
    return None if reason is None else f"mpi4jax.{name}: {reason}"


def refuse(name: str) -> None:
    """Raise an error for a name that mpi4jax has and this module lacks."""
    reason = explain(name)
    if reason is not None:
        raise NotImplementedError(reason)
