"""The unknown fields as functions of parameters that every rank holds."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from mpigrad_apps.fwi.network import Weights, initial_weights, network

__all__ = [
    "BoxValues",
    "CellValues",
    "NetworkValues",
    "Parametrization",
    "Unknown",
    "gaussian",
]

Window = tuple[slice, slice]
_EDGE = 1e-3  # smallest distance of a start from a bound, relative to the range


@dataclasses.dataclass(frozen=True)
class Unknown:
    """An unknown field: its name, its start and its bounds."""

    name: str
    start: Float[np.ndarray, "nx ny"]
    low: float
    high: float

    def logit(self) -> Float[np.ndarray, "nx ny"]:
        """Return the start in the unbounded variable."""
        part = np.clip((self.start - self.low) / (self.high - self.low), _EDGE, 1 - _EDGE)
        return np.log(part / (1 - part))


@dataclasses.dataclass(frozen=True)
class Parametrization(abc.ABC):
    """Fields as functions of parameters that are equal on all ranks.

    A field is low + (high - low) / (1 + exp(-(c + c0))), if the class does not say otherwise. The
    correction c is a function of the parameters and zero at first, and c0 is such that c = 0 gives
    the start. No step of a line search can leave the bounds. Cells that are not active keep the
    start's values.

    Attributes
    ----------
    unknowns
        The unknown fields.
    fixed
        Other fields (nx, ny) that the waves need.
    active
        Mask of the cells that may change.
    """

    unknowns: tuple[Unknown, ...]
    fixed: Mapping[str, Float[np.ndarray, "nx ny"]]
    active: Bool[np.ndarray, "nx ny"]

    @property
    def shape(self) -> tuple[int, int]:
        """Number of cells along x and y."""
        nx, ny = self.active.shape
        return nx, ny

    @abc.abstractmethod
    def initial(self, seed: int) -> Any:
        """Return the parameters of the start."""

    @abc.abstractmethod
    def corrections(self, parameters: Any, window: Window) -> Float[Array, "unknowns wx wy"]:
        """Return the corrections in a window of the grid. Differentiable."""

    def fields(self, parameters: Any, window: Window) -> dict[str, Float[Array, "wx wy"]]:
        """Return all fields in a window of the grid. Differentiable, without messages."""
        fields = {name: jnp.asarray(field[window]) for name, field in self.fixed.items()}
        corrections = self.corrections(parameters, window)
        active = self.active[window]
        for unknown, correction in zip(self.unknowns, corrections, strict=True):
            value = self.value(unknown, correction, window)
            fields[unknown.name] = jnp.where(active, value, unknown.start[window])
        return fields

    def value(
        self, unknown: Unknown, correction: Float[Array, "wx wy"], window: Window
    ) -> Float[Array, "wx wy"]:
        """Return a field of a correction. Differentiable."""
        free = jax.nn.sigmoid(correction + unknown.logit()[window])
        return unknown.low + (unknown.high - unknown.low) * free

    def limits(self) -> tuple[Any, Any] | None:
        """Return the bounds of the parameters for the optimizer, or None."""
        return None

    def start(self, window: Window) -> dict[str, Float[np.ndarray, "wx wy"]]:
        """Return the start's fields in a window of the grid."""
        starts = {unknown.name: unknown.start for unknown in self.unknowns}
        return {name: field[window] for name, field in {**self.fixed, **starts}.items()}


@dataclasses.dataclass(frozen=True)
class CellValues(Parametrization):
    """One correction for each cell, smoothed by a Gaussian.

    Every rank holds all parameters, of shape (unknowns, nx, ny), and uses those of its tile. The
    smoothing S is part of the parametrization: the corrections are S theta. The gradient with
    respect to theta is S^T times the gradient with respect to the corrections, smooth and exact.

    Attributes
    ----------
    smoothing
        Standard deviation of the Gaussian in cells, 0 for no smoothing.
    """

    smoothing: float = 0.0

    def initial(self, seed: int) -> Float[Array, "unknowns nx ny"]:
        return jnp.zeros((len(self.unknowns), *self.shape))

    def corrections(
        self, parameters: Float[Array, "unknowns nx ny"], window: Window
    ) -> Float[Array, "unknowns wx wy"]:
        if not self.smoothing:
            return parameters[:, *window]
        along_x, along_y = (jnp.asarray(gaussian(n, self.smoothing)) for n in self.shape)
        return along_x[window[0]] @ parameters @ along_y[window[1]].T


@dataclasses.dataclass(frozen=True)
class BoxValues(CellValues):
    """One correction for each cell: a field is start + (high - low) c / 4, without smoothing.

    The optimizer keeps the bounds, so a cell can be exactly at a bound. Cells that are not active
    have equal bounds.
    """

    def initial(self, seed: int) -> Float[Array, "unknowns nx ny"]:
        lower, upper = self.limits()
        return jnp.clip(super().initial(seed), lower, upper)

    def value(
        self, unknown: Unknown, correction: Float[Array, "wx wy"], window: Window
    ) -> Float[Array, "wx wy"]:
        value = unknown.start[window] + (unknown.high - unknown.low) / 4 * correction
        return jnp.clip(value, unknown.low, unknown.high)  # rounding

    def limits(self) -> tuple[Array, Array]:
        def corrections(end: Literal["low", "high"]) -> Array:
            fields = [
                4 * (getattr(field, end) - field.start) / (field.high - field.low)
                for field in self.unknowns
            ]
            return jnp.where(jnp.asarray(self.active), jnp.stack(fields), 0.0)

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
        return initial_weights(jax.random.key(seed), len(self.unknowns), self.fineness)

    def corrections(self, parameters: Weights, window: Window) -> Float[Array, "unknowns wx wy"]:
        along = (
            (2 * np.arange(*part.indices(n)) + 1) / n - 1
            for part, n in zip(window, self.shape, strict=True)
        )
        x, y = np.meshgrid(*along, indexing="ij")
        return network(parameters, jnp.asarray(x), jnp.asarray(y))


def gaussian(cells: int, deviation: float) -> Float[np.ndarray, "cells cells"]:
    """Return the matrix that smooths along an axis. Its rows sum to 1, also at the edges."""
    place = np.arange(cells)
    weights = np.exp(-0.5 * ((place[:, None] - place[None, :]) / deviation) ** 2)
    return weights / weights.sum(axis=1, keepdims=True)
