"""What stands for the unknown fields: parameters that every rank holds."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from mpigrad_apps.fwi.network import Weights, first_weights, network

__all__ = ["CellValues", "NetworkValues", "Parametrization", "Unknown", "gaussian"]

Window = tuple[slice, slice]
_EDGE = 1e-3  # of the range: how near to a bound a start may be


@dataclasses.dataclass(frozen=True)
class Unknown:
    """A field to be found: its name, where it starts, and between which bounds it stays."""

    name: str
    start: Float[np.ndarray, "nx ny"]
    low: float
    high: float

    def logit(self) -> Float[np.ndarray, "nx ny"]:
        """The start in the variable that is not bounded."""
        part = np.clip((self.start - self.low) / (self.high - self.low), _EDGE, 1 - _EDGE)
        return np.log(part / (1 - part))


@dataclasses.dataclass(frozen=True)
class Parametrization(abc.ABC):
    """Fields made of parameters that are equal on all ranks.

    A field is low + (high - low) / (1 + exp(-(c + c0))), with a correction c of the parameters,
    which is zero at first, and c0 such that c = 0 gives the start. So no parameters, however far a
    line search goes, leave the bounds. Where `active` is false the field is the start's.

    Attributes
    ----------
    unknowns
        The fields to be found.
    fixed
        Other fields (nx, ny) that the waves need.
    active
        Which cells may change.
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
    def first(self, seed: int) -> Any:
        """The parameters of the start."""

    @abc.abstractmethod
    def corrections(self, parameters: Any, window: Window) -> Float[Array, "unknowns wx wy"]:
        """The corrections in a window of the grid; differentiable."""

    def fields(self, parameters: Any, window: Window) -> dict[str, Float[Array, "wx wy"]]:
        """All fields, by name, in a window of the grid; differentiable, without messages."""
        found = {name: jnp.asarray(field[window]) for name, field in self.fixed.items()}
        corrections = self.corrections(parameters, window)
        active = self.active[window]
        for unknown, correction in zip(self.unknowns, corrections, strict=True):
            free = jax.nn.sigmoid(correction + unknown.logit()[window])
            value = unknown.low + (unknown.high - unknown.low) * free
            found[unknown.name] = jnp.where(active, value, unknown.start[window])
        return found

    def start(self, window: Window) -> dict[str, Float[np.ndarray, "wx wy"]]:
        """The fields to start from, in a window of the grid."""
        starts = {unknown.name: unknown.start for unknown in self.unknowns}
        return {name: field[window] for name, field in {**self.fixed, **starts}.items()}


@dataclasses.dataclass(frozen=True)
class CellValues(Parametrization):
    """One correction for each cell, smoothed by a Gaussian.

    Every rank holds all of them, of shape (unknowns, nx, ny), and uses its tile's. The smoothing is
    part of the parametrization: corrections are S theta, so that the gradient with respect to theta
    is S^T times that with respect to the corrections, smooth and yet exact.

    Attributes
    ----------
    smoothing
        Standard deviation of the Gaussian in cells; 0: none.
    """

    smoothing: float = 0.0

    def first(self, seed: int) -> Float[Array, "unknowns nx ny"]:
        return jnp.zeros((len(self.unknowns), *self.shape))

    def corrections(
        self, parameters: Float[Array, "unknowns nx ny"], window: Window
    ) -> Float[Array, "unknowns wx wy"]:
        if not self.smoothing:
            return parameters[:, *window]
        along_x, along_y = (jnp.asarray(gaussian(n, self.smoothing)) for n in self.shape)
        return along_x[window[0]] @ parameters @ along_y[window[1]].T


@dataclasses.dataclass(frozen=True)
class NetworkValues(Parametrization):
    """Corrections from one network of the cells' centres, an output for each unknown field.

    Attributes
    ----------
    fineness
        Standard deviation of the numbers of half waves across the model that it begins with.
    """

    fineness: float = 3.0

    def first(self, seed: int) -> Weights:
        return first_weights(jax.random.key(seed), len(self.unknowns), self.fineness)

    def corrections(self, parameters: Weights, window: Window) -> Float[Array, "unknowns wx wy"]:
        along = (
            (2 * np.arange(*part.indices(n)) + 1) / n - 1
            for part, n in zip(window, self.shape, strict=True)
        )
        x, y = np.meshgrid(*along, indexing="ij")
        return network(parameters, jnp.asarray(x), jnp.asarray(y))


def gaussian(cells: int, deviation: float) -> Float[np.ndarray, "cells cells"]:
    """The matrix that smooths along an axis; its rows sum to 1, at the edges too."""
    place = np.arange(cells)
    weights = np.exp(-0.5 * ((place[:, None] - place[None, :]) / deviation) ** 2)
    return weights / weights.sum(axis=1, keepdims=True)
