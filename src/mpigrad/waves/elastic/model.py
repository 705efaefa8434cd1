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
from mpigrad.waves.absorbing import WaveTile, widths_of
from mpigrad.waves.checkpoints import Checkpoints, check_checkpoints, native_number
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
from mpigrad.waves.run_agreement import require_same
from mpigrad.waves.stability import limiting_square
from mpigrad.waves.survey import Survey

__all__ = ["Elastic", "Recording", "scheme_of"]


class Recording(NamedTuple):
    """What `Elastic.propagate` returns.

    Attributes
    ----------
    gathers
        The components at the receivers, shape (n_shots, n_components, n_receivers, steps),
        complete and equal on every rank of the grid, unless shares were asked for. Sample n is
        taken before step n: velocities (m/s) at (n - 1/2) dt, the pressure (Pa) at n dt.
    state
        This rank's fields after the last step.
    """

    gathers: Float[Array, "shots components receivers steps"]
    state: State


@dataclasses.dataclass(frozen=True)
class Elastic:
    """Elastic waves in the plane, P and SV: velocities and stresses on a grid with two axes.

    A staggered grid, fourth order in space and second in time, with convolutional perfectly
    matched layers (C-PML) around the model; docs/elastic.md writes the scheme out. Fluids are
    cells with mu = 0.

    Parameters
    ----------
    grid
        The model's grid; the absorbing layers lie outside of it.
    dt
        Time step, s.
    steps
        Number of time steps.
    frequency
        The sources' dominant frequency, Hz, for which the layers are made.
    pml
        Cells of the absorbing layers: a number, or ((x0, x1), (y0, y1)). Where it is 0 the fields
        are zero beyond the side, which reflects all that comes (not a free surface).
    source
        "explosive": the wavelet is the rate at which sxx and syy are driven, as a moment per
        length in N/s; "force_x" or "force_y": it is a force per length, N/m.
    components
        What receivers record: "vx", "vy", "pressure" (-(sxx + syy) / 2).
    reflection
        What the layers' damping is chosen for: how much of a wave of `max_velocity` returns from
        them at normal incidence, without the error of the differences.
    max_velocity
        For which the layers are made, m/s. Not given: that for which `dt` is the largest stable
        step. It is not taken from the model, so that the gradient with respect to the model is
        that of one and the same scheme.
    checkpoints
        What a gradient keeps of the forward run: "all" fields, one state every k steps, what fits
        into `memory` (None), or the "boundary": the layers, and the cells beside them, of every
        step; what is inside is run backwards, and equal to rounding.
    threads
        Threads of each rank (1).
    method
        "native", the C++ kernels; "xla", a JAX program that does the same. Default: native where
        JAX computes on CPUs.
    memory
        Bytes that each rank keeps of forward runs, for their gradients, at most. Default: half of
        what its host has to spare for it.

    Raises
    ------
    ValueError
        On all ranks: if a parameter makes no sense, or a tile has fewer cells than the stencil
        reaches.
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
        object.__setattr__(self, "pml", widths_of(self.pml))
        object.__setattr__(self, "components", tuple(self.components))
        _check_settings(self)
        _ = self.tile

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
        """The largest stable time step for a model, s (collective).

        1 / (v (27 + 1)/24 sqrt(1/hx^2 + 1/hy^2)), where v is the largest P velocity or little more,
        and much more where cells are as light as air (`waves.stability.limiting_square`).

        Parameters
        ----------
        lam, mu, rho
            This rank's tiles of the model.
        """
        mine = np.asarray(_extremes(lam, mu, rho))
        extremes = np.max(self.grid.comm.mpi.allgather(mine), axis=0)
        if not _sound(extremes):
            raise ValueError(UNSOUND.format(*_shown(extremes)))
        return _limit(self.grid) / math.sqrt(_square(extremes))

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
        """All shots of a survey (collective).

        Differentiable in lam, mu, rho, wavelets and state, in forward and reverse mode. The ranks'
        wavelets are copies: their gradient is the sum over ranks (`replicated=`, or `bcast` them).

        Parameters
        ----------
        lam, mu, rho
            This rank's tiles of the model, shape (lx, ly): Lame's parameters, Pa, and the density,
            kg/m3 (`lame` has them from velocities); float32 or float64, and the fields are of that
            dtype. In the layers: the values of the nearest cell.
        wavelets
            The sources' time functions, shape (n_shots, n_sources, steps), or (1, n_sources,
            steps) for the same ones in every shot; equal on all ranks. Sample n acts in step n: a
            force at n dt, a rate of stress at (n + 1/2) dt.
        survey
            The shots.
        state
            To go on from: this rank's fields, as an earlier recording has them. Default: at rest.
        gathers
            "complete", or this rank's "share" of them, without the message that adds the shares up.
            A receiver where its component lies in a cell is complete on the rank that has the
            cell, and 0 elsewhere.

        Raises
        ------
        ValueError
            On all ranks, before the first step: if a shape or dtype is wrong, or a source or
            receiver lies outside the model.
        RuntimeError
            On all ranks, before the first step: if a density or lambda + mu is not positive, mu is
            negative, one of them is not finite, or `dt` is not stable; the message has the largest
            stable one.
        """
        if gathers not in ("complete", "share"):
            raise ValueError(f'elastic: gathers are "complete" or a "share", not {gathers!r}')
        lam, mu, rho, wavelets = (jnp.asarray(x) for x in (lam, mu, rho, wavelets))
        with raise_on_all_ranks(self.grid.comm):
            scheme = scheme_of(self, survey)
            _check_arguments(scheme, (lam, mu, rho), wavelets, state)
        self._require_stable(lam, mu, rho)
        shape = (survey.n_shots, survey.n_sources, self.steps)
        amplitudes = jnp.broadcast_to(wavelets.astype(lam.dtype), shape)
        media = effective_media(lam, mu, rho, scheme.tile)
        if self._is_native():
            fields = None if state is None else to_native(state)
            share, arrays = propagate(scheme.native, media, amplitudes, fields)
            last = from_native(arrays)
            share = share.reshape(shape[0], len(self.components), -1, self.steps)
        else:
            require_same(scheme.fingerprint, self.grid.comm)
            state = _at_rest(scheme, lam.dtype) if state is None else state
            share, last = reference.propagate(scheme, media, amplitudes, state)
        if gathers == "complete":
            share = allreduce(share, comm=self.grid.comm)
        return Recording(share, last)

    def _is_native(self) -> bool:
        return (self.method or ("native" if jax.default_backend() == "cpu" else "xla")) == "native"

    def _require_stable(self, lam: jax.Array, mu: jax.Array, rho: jax.Array) -> None:
        comm = self.grid.comm
        model = (jax.lax.stop_gradient(x) for x in (lam, mu, rho))
        extremes = allreduce(_extremes(*model), op=MPI.MAX, comm=comm)
        require(_sound(extremes), UNSOUND, *_shown(extremes), comm=comm)
        limit = _limit(self.grid) / jnp.sqrt(_square(extremes))
        vp, light, stiff = jnp.sqrt(extremes[3]), -extremes[2], extremes[4]
        stable = self.dt <= limit * (1 + 1e-6)
        require(stable, UNSTABLE, self.dt, limit, vp, light, stiff, comm=comm)


UNSOUND = (
    "elastic: lambda + mu and the density must be positive, mu must not be negative, and all must "
    "be finite; in this model lambda + mu is at least {}, mu at least {}, the density at least {}, "
    "and the largest vp squared is {}"
)
UNSTABLE = (
    "elastic: the time step dt={} is not stable: the largest stable one is {} (P velocities reach "
    "{}, cells are as light as {} and as stiff, lambda + 2 mu, as {}). Take a smaller dt and more "
    "steps, a coarser grid, or heavier cells where they are lightest"
)


def _extremes(lam: Any, mu: Any, rho: Any) -> jax.Array:
    """Largest -(lambda + mu), -mu, -rho, vp^2 and lambda + 2 mu of a tile."""
    stiffness = lam + 2 * mu
    values = (-(lam + mu), -mu, -rho, stiffness / rho, stiffness)
    # MPI's maximum may lose a NaN, and the maximum of -rho an infinite density.
    return jnp.stack([jnp.max(jnp.where(jnp.isfinite(v), v, jnp.inf)) for v in values])


def _square(extremes: Any) -> Any:
    return limiting_square(extremes[3], -extremes[2], extremes[4])


def _sound(extremes: Any) -> Any:
    bulk, shear, density, square, _ = extremes
    return (bulk < 0) & (shear <= 0) & (density < 0) & (square < np.inf)


def _shown(extremes: Any) -> tuple[Any, ...]:
    return -extremes[0], -extremes[1], -extremes[2], extremes[3]


def _limit(grid: Grid) -> float:
    """The largest stable time step times the P velocity, in length."""
    return 24 / (28 * math.sqrt(sum(1 / h**2 for h in grid.spacing)))


def _check_settings(model: Elastic) -> None:
    for name in ("dt", "steps", "frequency"):
        value = getattr(model, name)
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"Elastic: {name} must be positive, not {value!r}")
    if not 0 < model.reflection < 1:
        raise ValueError(f"Elastic: reflection must lie between 0 and 1, not {model.reflection}")
    if model.max_velocity is not None and not model.max_velocity > 0:
        raise ValueError(f"Elastic: max_velocity must be positive, not {model.max_velocity}")
    if model.source not in SOURCES:
        raise ValueError(f"Elastic: source must be one of {(*SOURCES,)}, not {model.source!r}")
    if not model.components or not set(model.components) <= set(COMPONENTS):
        raise ValueError(
            f"Elastic: components must be some of {COMPONENTS}, not {model.components!r}"
        )
    if model.threads is not None and model.threads < 1:
        raise ValueError(f"Elastic: threads must be at least 1, not {model.threads}")
    if model.method not in (None, "native", "xla"):
        raise ValueError(f'Elastic: method must be "native" or "xla", not {model.method!r}')
    native = model.checkpoints != "boundary" or model._is_native()
    check_checkpoints(model.checkpoints, "Elastic", native=native)
    model.tile.check(REACH)


def _at_rest(scheme: Scheme, dtype: Any) -> State:
    px, py = (layer.before + layer.after for layer in scheme.layers)
    return at_rest(scheme.survey.n_shots, scheme.tile.shape, (px, py), dtype)


def _check_arguments(
    scheme: Scheme, tiles: tuple[jax.Array, ...], wavelets: jax.Array, state: State | None
) -> None:
    grid, survey = scheme.tile.grid, scheme.survey
    for name, tile in zip(("lam", "mu", "rho"), tiles, strict=True):
        if tile.shape != grid.local_shape:
            raise ValueError(
                f"elastic: {name} has shape {tile.shape} on a tile of {grid.local_shape} cells "
                f"(rank {grid.comm.rank})"
            )
        if tile.dtype != tiles[0].dtype or tile.dtype not in (jnp.float32, jnp.float64):
            raise ValueError(
                "elastic: lam, mu and rho are all float32 or all float64, not "
                + ", ".join(str(t.dtype) for t in tiles)
            )
    ends = (survey.n_sources, scheme.steps)
    if wavelets.shape not in ((1, *ends), (survey.n_shots, *ends)):
        raise ValueError(
            f"elastic: wavelets have shape {wavelets.shape}; give ({survey.n_shots} or 1, "
            f"{survey.n_sources}, {scheme.steps}): shots, sources of a shot, steps"
        )
    if state is not None:
        like = jax.eval_shape(lambda: _at_rest(scheme, tiles[0].dtype))
        for name, given, expected in zip(State._fields, state, like, strict=True):
            if (given.shape, given.dtype) != (expected.shape, expected.dtype):
                raise ValueError(
                    f"elastic: {name} of the state is {given.dtype}{list(given.shape)} on "
                    f"rank {grid.comm.rank}, and this run takes "
                    f"{expected.dtype}{list(expected.shape)}"
                )


@functools.lru_cache(maxsize=128)
def scheme_of(model: Elastic, survey: Survey) -> Scheme:
    """The discretisation of a survey on this rank."""
    tile, grid = model.tile, model.grid
    absorbs = (
        model.max_velocity or _limit(grid) / model.dt,
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
        native_number(model.checkpoints),
        model.threads or 1,
        model.memory,
    )
