"""The unknown fields as functions of parameters that every rank holds."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from mpigrad.grid import Grid
from mpigrad_apps.fwi.layout import Layout, Window, relative
from mpigrad_apps.fwi.network import Weights, initial_weights, network

__all__ = [
    "BoxValues",
    "CellValues",
    "NetworkValues",
    "Parametrization",
    "Unknown",
    "apply_along_axes",
    "cut_off",
    "gaussian",
]

_EDGE = 1e-3  # smallest distance of a start from a bound, relative to the range


@dataclasses.dataclass(frozen=True)
class Unknown:
    """An unknown field: its name, its start in the held cells with the mean, and its bounds."""

    name: str
    start: Float[np.ndarray, "*held"]
    mean: float
    low: float
    high: float

    def logit(self) -> Float[np.ndarray, "*held"]:
        """Return the start in the unbounded variable."""
        part = np.clip((self.start - self.low) / (self.high - self.low), _EDGE, 1 - _EDGE)
        return np.log(part / (1 - part))


@dataclasses.dataclass(frozen=True)
class Parametrization(abc.ABC):
    """Fields as functions of parameters that are equal on all ranks, or divided among them.

    A field is low + (high - low) / (1 + exp(-(c + c0))), if the class does not say otherwise. The
    correction c is a function of the parameters and zero at first, and c0 is such that c = 0 gives
    the start. No step of a line search can leave the bounds. Cells that are not active keep the
    start's values.

    Attributes
    ----------
    unknowns
        The unknown fields.
    fixed
        Other fields that the waves need, in the held cells.
    active
        Mask of the held cells that may change.
    layout
        The held cells of the arrays, and how the parameters lie on the ranks.
    """

    unknowns: tuple[Unknown, ...]
    fixed: Mapping[str, Float[np.ndarray, "*held"]]
    active: Bool[np.ndarray, "*held"]
    layout: Layout

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of cells of the whole model along each axis."""
        return self.layout.shape

    @property
    def sharded(self) -> Grid | None:
        """The grid that divides the parameters among all ranks, None if they are equal."""
        return None

    @abc.abstractmethod
    def initial(self, seed: int) -> Any:
        """Return the parameters of the start."""

    @abc.abstractmethod
    def corrections(self, parameters: Any, window: Window) -> Float[Array, "unknowns ..."]:
        """Return the corrections in a window of the held cells. Differentiable (collective)."""

    def fields(self, parameters: Any, window: Window) -> dict[str, Float[Array, "*window"]]:
        """Return all fields in a window of the held cells. Differentiable.

        It sends no messages if the parameters are equal on all ranks.
        """
        part = self.layout.part
        fields = {name: jnp.asarray(part(field, window)) for name, field in self.fixed.items()}
        corrections = self.corrections(parameters, window)
        active = part(self.active, window)
        for unknown, correction in zip(self.unknowns, corrections, strict=True):
            value = self.value(unknown, correction, window)
            fields[unknown.name] = jnp.where(active, value, part(unknown.start, window))
        return fields

    def value(
        self, unknown: Unknown, correction: Float[Array, "*window"], window: Window
    ) -> Float[Array, "*window"]:
        """Return a field of a correction. Differentiable."""
        free = jax.nn.sigmoid(correction + self.layout.part(unknown.logit(), window))
        return unknown.low + (unknown.high - unknown.low) * free

    def limits(self) -> tuple[Any, Any] | None:
        """Return the bounds of the parameters for the optimizer, or None."""
        return None

    def start(self, window: Window) -> dict[str, Float[np.ndarray, "*window"]]:
        """Return the start's fields in a window of the held cells."""
        starts = {unknown.name: unknown.start for unknown in self.unknowns}
        fields = {**self.fixed, **starts}
        return {name: self.layout.part(field, window) for name, field in fields.items()}


@dataclasses.dataclass(frozen=True)
class CellValues(Parametrization):
    """One correction for each cell, smoothed by a Gaussian.

    In two dimensions every rank holds all parameters, of shape (unknowns, nx, ny), and uses those
    of its tile. In volumes they are divided among all ranks (`TileLayout`).

    The smoothing S is part of the parametrization: the corrections are S theta. The gradient with
    respect to theta is S^T times the gradient with respect to the corrections, smooth and exact.

    Attributes
    ----------
    smoothing
        Standard deviation of the Gaussian in cells, 0 for no smoothing. In volumes the Gaussian
        ends at `cut_off` cells.
    """

    smoothing: float = 0.0

    @property
    def sharded(self) -> Grid | None:
        return self.layout.sharded

    def initial(self, seed: int) -> Float[Array, "unknowns ..."]:
        return jnp.zeros((len(self.unknowns), *self.layout.local_shape))

    def corrections(
        self, parameters: Float[Array, "unknowns ..."], window: Window
    ) -> Float[Array, "unknowns ..."]:
        cells, place = self.layout.read(parameters), self.layout.read_cells
        if not self.smoothing:
            return cells[:, *relative(window, place, self.shape)]
        end = cut_off(self.smoothing) if len(self.shape) == 3 else None
        matrices = [
            gaussian(n, self.smoothing, end)[part][:, other]
            for n, part, other in zip(self.shape, window, place, strict=True)
        ]
        return apply_along_axes(matrices, cells)


@dataclasses.dataclass(frozen=True)
class BoxValues(CellValues):
    """One correction for each cell: a field is start + (high - low) c / 4, without smoothing.

    The optimizer keeps the bounds, so a cell can be exactly at a bound. Cells that are not active
    have equal bounds.
    """

    def initial(self, seed: int) -> Float[Array, "unknowns ..."]:
        lower, upper = self.limits()
        return jnp.clip(super().initial(seed), lower, upper)

    def value(
        self, unknown: Unknown, correction: Float[Array, "*window"], window: Window
    ) -> Float[Array, "*window"]:
        value = (
            self.layout.part(unknown.start, window) + (unknown.high - unknown.low) / 4 * correction
        )
        return jnp.clip(value, unknown.low, unknown.high)  # rounding

    def limits(self) -> tuple[Array, Array]:
        def corrections(end: Literal["low", "high"]) -> Array:
            fields = [
                4 * (getattr(field, end) - field.start) / (field.high - field.low)
                for field in self.unknowns
            ]
            values = jnp.where(jnp.asarray(self.active), jnp.stack(fields), 0.0)
            return self.layout.collect(values)

        return corrections("low"), corrections("high")


@dataclasses.dataclass(frozen=True)
class NetworkValues(Parametrization):
    """Corrections from one network of the cell centres, with one output for each unknown field.

    Attributes
    ----------
    fineness
        Standard deviation of the initial numbers of half waves across the model.
    """

    fineness: float = 3.0

    def initial(self, seed: int) -> Weights:
        axes = len(self.shape)
        return initial_weights(jax.random.key(seed), len(self.unknowns), self.fineness, axes)

    def corrections(self, parameters: Weights, window: Window) -> Float[Array, "unknowns ..."]:
        along = (
            (2 * np.arange(*part.indices(n)) + 1) / n - 1
            for part, n in zip(window, self.shape, strict=True)
        )
        return network(parameters, *map(jnp.asarray, np.meshgrid(*along, indexing="ij")))


def cut_off(deviation: float) -> int:
    """Return the distance in cells beyond which a Gaussian is cut off in volumes: 4 deviations."""
    return math.ceil(4 * deviation)


def gaussian(
    cells: int, deviation: float, end: int | None = None
) -> Float[np.ndarray, "cells cells"]:
    """Return the matrix that smooths along an axis. Its rows sum to 1, also at the edges.

    Parameters
    ----------
    end
        Largest distance in cells with a weight. None: no end.
    """
    place = np.arange(cells)
    distance = place[:, None] - place[None, :]
    weights = np.exp(-0.5 * (distance / deviation) ** 2)
    if end is not None:
        weights = weights * (np.abs(distance) <= end)
    return weights / weights.sum(axis=1, keepdims=True)


def apply_along_axes(matrices: Sequence[Any], fields: Any, xp: Any = jnp) -> Any:
    """Multiply fields by a matrix along each of their last axes. Differentiable with `xp` JAX."""
    first = fields.ndim - len(matrices)
    for axis, matrix in enumerate(matrices[:-1], start=first):
        fields = xp.moveaxis(xp.tensordot(xp.asarray(matrix), fields, (1, axis)), 0, axis)
    return fields @ xp.asarray(matrices[-1]).T
