"""Elastic waves (P-SV) on the tiles of a grid."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from mpigrad._shapes import Array, Float
from mpigrad.collective_errors import raise_on_all_ranks
from mpigrad.grid.grid import Grid
from mpigrad.operations import allreduce, require
from mpigrad.waves import arguments
from mpigrad.waves.absorbing import WaveTile, widths_of
from mpigrad.waves.checkpoints import Checkpoints, checkpoint_code
from mpigrad.waves.elastic import reference
from mpigrad.waves.elastic.absorbing import layer
from mpigrad.waves.elastic.media import effective_media
from mpigrad.waves.elastic.scheme import (
    COMPONENTS,
    REACH,
    SOURCES,
    Component,
    Scheme,
    Source,
    tables,
)
from mpigrad.waves.elastic.state import State, at_rest, from_native, to_native
from mpigrad.waves.primitive import propagate
from mpigrad.waves.run_agreement import require_same_run
from mpigrad.waves.stability import limiting_square, staggered_limit
from mpigrad.waves.survey import Survey

__all__ = ["Elastic", "Recording", "make_scheme"]


class Recording(NamedTuple):
    """Result of `Elastic.propagate`.

    Attributes
    ----------
    gathers
        The components at the receivers, shape (n_shots, n_components, n_receivers, steps).
        Complete and equal on every rank of the grid, unless shares were requested. Sample n is
        taken before step n: velocities (m/s) at (n - 1/2) dt, the pressure (Pa) at n dt.
    state
        This rank's fields after the last step.
    """

    gathers: Float[Array, "shots components receivers steps"]
    state: State


@dataclasses.dataclass(frozen=True)
class Elastic:
    """Elastic waves in the plane, P and SV: velocities and stresses on a grid with two axes.

    A staggered grid, fourth order in space and second order in time, with convolutional perfectly
    matched layers (C-PML) around the model. docs/elastic.md describes the scheme. Cells with mu = 0
    are fluid.

    Parameters
    ----------
    grid
        The grid of the model. The absorbing layers lie outside of it.
    dt
        Time step in s.
    steps
        Number of time steps.
    frequency
        Dominant frequency of the sources in Hz. The layers are made for it.
    pml
        Number of cells of the absorbing layers: one for all sides, or ((x0, x1), (y0, y1)). If it
        is 0, the fields are zero beyond the side, which reflects all waves (not a free surface).
    source
        "explosive": the wavelet is the rate at which sxx and syy are driven, a moment rate per
        length in N/s. "force_x" or "force_y": the wavelet is a force per length in N/m.
    components
        Components that the receivers record: "vx", "vy", "pressure" (-(sxx + syy) / 2).
    reflection
        Fraction of the amplitude of a wave of `max_velocity` that the layers reflect at normal
        incidence, without the error of the differences. The damping is chosen for it.
    max_velocity
        Velocity that the layers are made for, in m/s. Default: the velocity for which `dt` is the
        largest stable step. It does not depend on the model, so the gradient with respect to the
        model is that of one fixed scheme.
    checkpoints
        The part of the forward run that is stored for a gradient. "all": all fields. k: one state
        every k steps. None: as much as fits into `memory`. "boundary": the layers, and the cells
        next to them, of every step. The waves inside are then run backwards, which gives the same
        values up to rounding.
    threads
        Number of threads on each rank. Default: 1.
    method
        "native" for the C++ kernels, "xla" for a JAX program of the same scheme. Default: "native"
        if JAX computes on CPUs.
    memory
        Largest number of bytes that each rank stores of forward runs for their gradients. Default:
        half of the free memory of its host, divided by the number of ranks there.

    Raises
    ------
    ValueError
        If a parameter is not valid, or a tile has fewer cells than the stencil reaches. On all
        ranks, if all ranks give the same parameters.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import numpy as np
    >>> import mpigrad
    >>> from mpigrad.grid import Grid
    >>> from mpigrad.waves import Elastic, Survey, lame, ricker
    >>> grid = Grid((40, 30), (10.0, 10.0))
    >>> model = Elastic(grid, dt=2e-3, steps=80, frequency=15.0, source="force_y")
    >>> survey = Survey(np.array([[[55.0, 55.0]]]), np.array([[[205.0, 55.0], [305.0, 55.0]]]))
    >>> wavelet = jnp.asarray(1e6 * ricker(15.0, 80, 2e-3), jnp.float32)[None, None]
    >>> vp, vs, rho = (jnp.full(grid.local_shape, v, jnp.float32) for v in (2000, 1100, 2000))
    >>> lam, mu = lame(vp, vs, rho)
    >>> model.propagate(lam, mu, rho, wavelet, survey).gathers.shape  # shots, vx and vy, ...
    (1, 2, 2, 80)
    >>> def energy(vs):
    ...     return jnp.sum(model.propagate(*lame(vp, vs, rho), rho, wavelet, survey).gathers ** 2)
    >>> mpigrad.grad(energy, loss="replicated")(vs).shape
    (40, 30)
    """

    grid: Grid
    dt: float
    steps: int
    frequency: float
    pml: Any = 20
    source: Source = "explosive"
    components: tuple[Component, ...] = ("vx", "vy")
    reflection: float = 1e-4
    max_velocity: float | None = None
    checkpoints: Checkpoints = None
    threads: int | None = None
    method: Literal["native", "xla"] | None = None
    memory: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "pml", widths_of(self.pml, self.grid.ndim))
        object.__setattr__(self, "components", tuple(self.components))
        if self.source not in SOURCES:
            raise ValueError(f"Elastic: source must be one of {(*SOURCES,)}, got {self.source!r}.")
        if not self.components or not set(self.components) <= set(COMPONENTS):
            raise ValueError(
                f"Elastic: components must be some of {COMPONENTS}, got {self.components!r}."
            )
        arguments.check_settings(self, ("dt", "steps", "frequency"), REACH)

    @property
    def tile(self) -> WaveTile:
        """This rank's tile with its absorbing layers."""
        return WaveTile(self.grid, self.pml)

    def largest_time_step(
        self,
        lam: Float[Array, "lx ly"],
        mu: Float[Array, "lx ly"],
        rho: Float[Array, "lx ly"],
    ) -> float:
        """Return the largest stable time step for a model, in s (collective).

        It is (6/7) / (v sqrt(1/hx^2 + 1/hy^2)). The velocity v is little more than the largest P
        velocity, but much more if some cells are as light as air
        (`waves.stability.limiting_square`).

        Parameters
        ----------
        lam, mu, rho
            This rank's tiles of the model.

        Raises
        ------
        ValueError
            On all ranks: if a density or lambda + mu is not positive, mu is negative, or a value is
            not finite.
        """
        local = np.asarray(_extremes(lam, mu, rho))
        extremes = np.max(self.grid.comm.mpi.allgather(local), axis=0)
        if not _is_valid(extremes):
            raise ValueError("Elastic.largest_time_step: " + INVALID.format(*_shown(extremes)))
        return staggered_limit(self.grid) / math.sqrt(_square(extremes))

    def propagate(
        self,
        lam: Float[Array, "lx ly"],
        mu: Float[Array, "lx ly"],
        rho: Float[Array, "lx ly"],
        wavelets: Float[Array, "_ sources steps"],
        survey: Survey,
        state: State | None = None,
        gathers: Literal["complete", "share"] = "complete",
    ) -> Recording:
        """Propagate the waves of all shots of a survey (collective).

        Differentiable with respect to lam, mu, rho, wavelets and state, in forward and reverse
        mode. Each rank has a copy of the wavelets, so their gradient is the sum over ranks: declare
        them `replicated=`, or `bcast` them.

        Parameters
        ----------
        lam, mu, rho
            This rank's tiles of the model, shape (lx, ly), float32 or float64: the Lame parameters
            in Pa and the density in kg/m3 (`lame` computes the former from velocities). The fields
            have the same dtype. Cells of the layers have the values of the nearest cell.
        wavelets
            Time functions of the sources, shape (n_shots, n_sources, steps), or (1, n_sources,
            steps) if all shots have the same ones. The same on all ranks. Sample n acts in step n:
            a force at n dt, a rate of stress at (n + 1/2) dt.
        survey
            The shots.
        state
            This rank's fields at the start, from an earlier recording. Default: at rest.
        gathers
            "complete", or "share" for this rank's share without the message that adds the shares.
            A receiver at a point of its component's grid is complete on the rank of that cell, and
            0 on other ranks.

        Returns
        -------
        Recording
            The gathers, and the state after the last step.

        Raises
        ------
        ValueError
            On all ranks, before the first step: if a shape or dtype is wrong, or a source or
            receiver lies outside the model.
        RuntimeError
            On all ranks, before the first step: if a density or lambda + mu is not positive, mu is
            negative or a value is not finite, if `dt` is not stable (the text gives the largest
            stable one), or if the run is not the same on all ranks.
        """
        lam, mu, rho, wavelets = (jnp.asarray(x) for x in (lam, mu, rho, wavelets))
        with raise_on_all_ranks(self.grid.comm):
            name = "Elastic.propagate"
            arguments.check_gathers(name, gathers)
            arguments.check_tiles(name, self.grid, {"lam": lam, "mu": mu, "rho": rho})
            arguments.check_wavelets(name, wavelets, survey, self.steps)
            scheme = make_scheme(self, survey)
            if state is not None:
                rest = jax.eval_shape(lambda: _at_rest(scheme, lam.dtype))
                arguments.check_state(name, scheme.tile, state, rest)
        require_same_run(scheme.fingerprint, lam.dtype, self.grid.comm)
        limit, fastest = self._require_stable(lam, mu, rho)
        arguments.warn_of_units(self, limit, fastest)
        shape = (survey.n_shots, survey.n_sources, self.steps)
        amplitudes = jnp.broadcast_to(wavelets.astype(lam.dtype), shape)
        media = effective_media(lam, mu, rho, scheme.tile)
        if arguments.is_native(self.method):
            fields = None if state is None else to_native(state)
            share, arrays = propagate(scheme.native, media, amplitudes, fields)
            last = from_native(arrays)
            share = share.reshape(shape[0], len(self.components), -1, self.steps)
        else:
            state = _at_rest(scheme, lam.dtype) if state is None else state
            share, last = reference.propagate(scheme, media, amplitudes, state)
        if gathers == "complete":
            share = allreduce(share, comm=self.grid.comm)
        return Recording(share, last)

    def _require_stable(
        self, lam: jax.Array, mu: jax.Array, rho: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Check the model, and return the largest stable step and the largest P velocity."""
        comm = self.grid.comm
        model = (jax.lax.stop_gradient(x) for x in (lam, mu, rho))
        extremes = allreduce(_extremes(*model), op=MPI.MAX, comm=comm)
        require(_is_valid(extremes), INVALID, *_shown(extremes), comm=comm)
        limit = staggered_limit(self.grid) / jnp.sqrt(_square(extremes))
        vp, light, stiff = jnp.sqrt(extremes[3]), -extremes[2], extremes[4]
        stable = self.dt <= limit * (1 + 1e-6)
        require(stable, UNSTABLE, self.dt, limit, vp, light, stiff, comm=comm)
        return limit, vp


INVALID = (
    "lambda + mu and the density must be positive, mu must not be negative, and all must be "
    "finite. In this model the smallest lambda + mu is {}, the smallest mu {}, the smallest "
    "density {}, and the largest vp squared {}. Check the model."
)
UNSTABLE = (
    "the time step {} is not stable: the largest stable one is {} for P velocities up to {}, "
    "densities down to {} and lambda + 2 mu up to {}. Use that time step and more steps, a coarser "
    "grid, or a larger density in the lightest cells."
)


def _extremes(lam: Any, mu: Any, rho: Any) -> jax.Array:
    """Return the largest -(lambda + mu), -mu, -rho, vp^2 and lambda + 2 mu of a tile."""
    stiffness = lam + 2 * mu
    values = (-(lam + mu), -mu, -rho, stiffness / rho, stiffness)
    # MPI's maximum may lose a NaN, and the maximum of -rho would lose an infinite density.
    return jnp.stack([jnp.max(jnp.where(jnp.isfinite(v), v, jnp.inf)) for v in values])


def _square(extremes: Any) -> Any:
    return limiting_square(extremes[3], -extremes[2], extremes[4])


def _is_valid(extremes: Any) -> Any:
    bulk, shear, density, square, _ = extremes
    return (bulk < 0) & (shear <= 0) & (density < 0) & (square < np.inf)


def _shown(extremes: Any) -> tuple[Any, ...]:
    return -extremes[0], -extremes[1], -extremes[2], extremes[3]


def _at_rest(scheme: Scheme, dtype: Any) -> State:
    px, py = (layer.before + layer.after for layer in scheme.layers)
    return at_rest(scheme.survey.n_shots, scheme.tile.shape, (px, py), dtype)


@functools.lru_cache(maxsize=128)
def make_scheme(model: Elastic, survey: Survey) -> Scheme:
    """Return the discretisation of a survey on this rank."""
    tile, grid = model.tile, model.grid
    absorbs = (
        model.max_velocity or staggered_limit(grid) / model.dt,
        model.frequency,
        model.reflection,
    )
    x, y = (
        layer(*cells, spacing, model.dt, *absorbs)
        for cells, spacing in zip(tile.extension, grid.spacing, strict=True)
    )
    sources, receivers = tables(tile, survey, model.source, model.components)
    return Scheme(
        tile,
        model.dt,
        model.steps,
        (x, y),
        absorbs,
        survey,
        model.source,
        model.components,
        sources,
        receivers,
        checkpoint_code(model.checkpoints),
        model.threads or 1,
        model.memory,
    )
