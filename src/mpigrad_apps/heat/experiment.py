"""A plate, its diffusivity, and a heater that moves around on the plate."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

import mpigrad
from mpigrad.communicator import Communicator
from mpigrad.grid import Grid
from mpigrad.loops import Budget
from mpigrad_apps.heat.model import Heat
from mpigrad_apps.heat.settings import Settings
from mpigrad_apps.poisson.fields import TRUTHS
from mpigrad_apps.poisson.model import unit_square
from mpigrad_apps.poisson.parametrization import CellValues

__all__ = ["Experiment", "heater", "make_experiment"]

_IMPLICIT_STEPS = 100
_MARGIN = 0.5  # part of the largest stable time step if kappa is unknown, as it may double


@dataclasses.dataclass(frozen=True)
class Experiment:
    """The discrete equation and its inputs, as this rank's tiles (lx, ly)."""

    model: Heat
    kappa: Float[Array, "lx ly"]
    initial: Float[Array, "lx ly"]
    source: Callable[[Any], Array]

    @property
    def grid(self) -> Grid:
        """The grid of the model."""
        return self.model.grid


def heater(grid: Grid, duration: float) -> Callable[[Any], Float[Array, "lx ly"]]:
    """Return the source f(t): a spot of total strength 1 that circles once in the unit square."""
    x, y = (jnp.asarray(axis) for axis in grid.centers())
    width = 0.08

    def source(t: Any) -> Array:
        angle = 2 * jnp.pi * t / duration
        square = (x - 0.5 - 0.28 * jnp.cos(angle)) ** 2 + (y - 0.5 - 0.28 * jnp.sin(angle)) ** 2
        return jnp.exp(-square / (2 * width**2)) / (2 * jnp.pi * width**2)

    return source


def make_experiment(settings: Settings, comm: Communicator) -> Experiment:
    """Make the experiment that the settings describe (collective). The plate starts at u = 0.

    Raises
    ------
    ValueError
        On all ranks, if the model file is not valid, or if the time steps are unstable.
    """
    grid = unit_square(settings.cells, comm)
    x, y = (jnp.asarray(axis) for axis in grid.centers())
    if settings.model is not None:
        values = CellValues(grid)
        kappa = values.kappa(values.load(settings.model))
    elif settings.kappa == "one":
        kappa = jnp.ones_like(x)
    else:
        kappa = TRUTHS[settings.kappa](x, y)
    budget = None if settings.budget is None else Budget(settings.budget)
    model = Heat(grid, settings.duration, 1, settings.theta, settings.boundary, budget)
    steps = settings.steps
    if steps is None and settings.theta >= 0.5:
        steps = _IMPLICIT_STEPS
    if steps is None:
        largest = float(mpigrad.jit(model.largest_time_step)(kappa))
        margin = 1.0 if settings.unknown == "nothing" else _MARGIN
        steps = math.ceil(settings.duration / (margin * largest))
    if settings.unknown == "nothing":  # the same number of steps between all pictures
        steps = settings.frames * math.ceil(steps / settings.frames)
    if settings.steps is not None and settings.theta < 0.5:
        largest = float(mpigrad.jit(model.largest_time_step)(kappa))
        needed = math.ceil(settings.duration / largest * (1 - 1e-9))
        if steps < needed:
            raise ValueError(
                f"--steps: {steps} time steps of {settings.duration / steps:.3g} are unstable for "
                f"this diffusivity. Use --steps {needed} or more, or --theta 0.5 or more."
            )
    model = dataclasses.replace(model, dt=settings.duration / steps, steps=steps)
    return Experiment(model, kappa, jnp.zeros_like(x), heater(grid, settings.duration))
