"""The steps of a transform: local transforms, and exchanges that make further axes whole."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Literal

from mpigrad.fft.division import Division

__all__ = ["Exchange", "Kind", "Plan", "Reorder", "Transform"]

Kind = Literal["complex", "real", "cosine", "sine"]


@dataclasses.dataclass(frozen=True)
class Transform:
    """A transform of the last axes in memory, which are whole on each rank."""

    kind: Kind
    axes: tuple[int, ...]  # axes of the array, in the order in memory
    n: int  # entries of the last of them in space


@dataclasses.dataclass(frozen=True)
class Exchange:
    """An exchange that makes the axis `gather` whole and divides the axis `split`.

    `order` is the order in memory before and after it.
    """

    gather: int
    split: int
    division: Division  # before
    order: tuple[tuple[int, ...], tuple[int, ...]]

    def sent(self, rank: int) -> tuple[int, int]:
        """Return how many messages a rank sends, and how many values they have together."""
        after = self.division.moved(self.gather, self.split)
        block = self.division.local_shape(rank)
        row = math.prod(n for axis, n in enumerate(block) if axis != self.split)
        others = (r for r in self.division.group(rank, self.gather) if r != rank)
        values = [row * after.local_shape(r)[self.split] for r in others]
        return sum(n > 0 for n in values), sum(values)


@dataclasses.dataclass(frozen=True)
class Reorder:
    """A transpose on each rank: the order of the axes in memory before and after it."""

    order: tuple[tuple[int, ...], tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Plan:
    """The steps from tiles to a spectrum. The inverse takes them backwards.

    Attributes
    ----------
    steps
        The steps.
    spectrum
        The division of the result.
    """

    steps: tuple[Transform | Exchange | Reorder, ...]
    spectrum: Division

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        """The exchanges among the steps."""
        return tuple(step for step in self.steps if isinstance(step, Exchange))


_MOST = 3  # XLA transforms at most three axes at once


@functools.cache
def make_plan(division: Division, axes: tuple[int, ...], kinds: tuple[Kind, ...]) -> Plan:
    """Plan the transform of `axes`, each of its kind.

    Only the last of the axes may be of the kind "real".

    Raises
    ------
    ValueError
        If an axis is divided and there is no other axis that could be divided instead.
    """
    kind_of = dict(zip(axes, kinds, strict=True))
    natural = tuple(range(len(division.shape)))
    order, todo = natural, list(axes)
    steps: list[Transform | Exchange | Reorder] = []
    while todo:
        first = _next_axis(division, todo, kind_of)
        if division.by[first]:
            target = _new_axis(division, first, todo)
            group = (first, target)
            # The axis that is transformed next comes last in memory.
            after = (*(a for a in order if a not in group), target, first)
            steps.append(Exchange(first, target, division, (order, after)))
            division, order = division.moved(first, target), after
        batch = _together(division, first, todo, kind_of)
        if order[-len(batch) :] != batch:
            if set(order[-len(batch) :]) == set(batch) and kind_of[first] == "complex":
                batch = order[-len(batch) :]
            elif order[-1] == first:
                batch = (first,)
            else:
                after = (*(a for a in order if a not in batch), *batch)
                steps.append(Reorder((order, after)))
                order = after
        steps.append(Transform(kind_of[first], batch, division.shape[batch[-1]]))
        if kind_of[first] == "real":
            division = division.with_shape(first, division.shape[first] // 2 + 1)
        todo = [a for a in todo if a not in batch]
    if order != natural:
        steps.append(Reorder((order, natural)))
    return Plan(tuple(steps), division)


def _next_axis(division: Division, todo: list[int], kind_of: dict[int, Kind]) -> int:
    """Return the axis that is transformed next.

    Transforms of real arrays come first, the one whose result is complex last of them. Among the
    others axes that are whole come first.
    """
    walls = [a for a in todo if kind_of[a] in ("cosine", "sine")]
    real = [a for a in todo if kind_of[a] == "real"]
    some = walls or real or todo
    whole = [a for a in some if not division.by[a]]
    return (whole or some)[-1]


def _together(
    division: Division, first: int, todo: list[int], kind_of: dict[int, Kind]
) -> tuple[int, ...]:
    """Return the axes that one call transforms, with `first` as the last of them."""
    if kind_of[first] in ("cosine", "sine"):
        return (first,)
    whole = [a for a in todo if a != first and not division.by[a] and kind_of[a] == "complex"]
    return (*whole[1 - _MOST :], first)


def _new_axis(division: Division, axis: int, todo: list[int]) -> int:
    """Choose the axis that is divided instead of `axis`."""
    # An axis that is done and whole needs no further exchange. Among equals the longest.
    others = [a for a in range(len(division.shape)) if a != axis]
    if not others:
        raise ValueError(
            "fft: a transform along the only axis of a grid needs this axis whole on each rank, "
            f"got {division.mesh[division.by[axis][0]]} tiles. Use 1 rank, gather the field, or "
            "use a grid with two or three axes."
        )
    return max(others, key=lambda a: (a not in todo, not division.by[a], division.shape[a]))
