"""The declaration of unknowns: which leaves are replicated, and which are sharded over ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from mpigrad.grid.grid import Grid

__all__ = ["NOT_DECLARED", "declared_kinds", "require_declarations"]

NOT_DECLARED = "not declared"

Kind = bool | Grid | None  # True or a grid if sharded, False if replicated, None if not declared


def declared_kinds(x0: Any, names: Sequence[str], sharded: Any, replicated: Any) -> list[Kind]:
    """Return how each leaf of x0 is declared by the two arguments of `minimize`."""
    kinds: list[Kind] = []
    both = _leaves("sharded", sharded, x0), _leaves("replicated", replicated, x0)
    for name, kind, same in zip(names, *both, strict=True):
        if not (kind is None or isinstance(kind, bool | Grid)):
            raise TypeError(f"minimize: sharded has {kind!r}, expected False, True or a Grid")
        if not (same is None or isinstance(same, bool)):
            raise TypeError(f"minimize: replicated has {same!r}, expected True or False")
        if same and kind:
            raise ValueError(
                f"minimize: {name} is declared both sharded and replicated. Give one of the two."
            )
        kinds.append(False if same else kind)
    return kinds


@dataclasses.dataclass(frozen=True)
class _Declared:
    """An entry of a declaration. To JAX it is a leaf, which None is not."""

    kind: Any


def _leaves(name: str, prefix: Any, x0: Any) -> list[Any]:
    entries = jax.tree.map(_Declared, prefix, is_leaf=lambda x: x is None)
    try:
        return [entry.kind for entry in jax.tree.leaves(jax.tree.broadcast(entries, x0))]
    except ValueError as error:
        raise ValueError(f"minimize: {name} is not a prefix of x0: {error}") from error


def require_declarations(everywhere: Sequence[Sequence[tuple[Any, ...]]]) -> None:
    """Raise an error if an array is not declared, from the descriptions of all ranks' leaves."""
    for rank, leaves in enumerate(everywhere):
        for i, (name, how, dtype, shape, *digest) in enumerate(leaves):
            if how != NOT_DECLARED:
                continue
            others = [other[i][4:] if i < len(other) else [] for other in everywhere]
            differs = next((r for r, other in enumerate(others) if [*other] != digest), None)
            bits = (
                "has the same values on all ranks"
                if differs is None
                else f"differs between ranks {rank} and {differs}"
            )
            raise ValueError(
                f"minimize: {name} is {dtype}{list(shape)} on rank {rank} of {len(everywhere)} and "
                f"is not declared sharded or replicated. It {bits}. Give sharded=True if each rank "
                "has its own rows, sharded=grid if each rank has its tile of a Grid, or "
                "replicated=True if every rank has the same whole array."
            )
