"""Elastic waves on the tiles of a grid."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpigrad.collective_errors import raise_on_all_ranks
from mpigrad.extend import Array, Float, as_array
from mpigrad.grid import Grid
from mpigrad.operations import allreduce
from mpigrad.waves import arguments
from mpigrad.waves.absorbing import Side, Surface, WaveTile, layer, surface_of, without_layer
from mpigrad.waves.arguments import assert_same_run, staggered_limit
from mpigrad.waves.elastic import reference
from mpigrad.waves.elastic.attenuation import (
    Lame,
    largest_step,
    loss_of,
    low_q_text,
    moduli,
    require_factors,
    require_stable,
    smallest,
)
from mpigrad.waves.elastic.media import (
    AnelasticState,
    ElasticMedium,
    State,
    VolumeState,
    at_rest,
    axis_pairs,
    effective_media,
    native_models,
    stagger_of,
)
from mpigrad.waves.elastic.scheme import Component, Scheme, Source, check_settings, tables
from mpigrad.waves.native_run import propagate
from mpigrad.waves.options import Storage, runs_native
from mpigrad.waves.relaxation import Relaxation
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
        This rank's fields after the last step: a `State`, a `VolumeState` on three axes, or an
        `AnelasticState` of a run with attenuation.
    """

    gathers: Float[Array, "shots components receivers steps"]
    state: State | VolumeState | AnelasticState


@dataclasses.dataclass(frozen=True)
class Elastic:
    """Elastic waves on a grid with two axes (P and SV) or three: velocities and stresses.

    A staggered grid, second order in time, fourth or eighth order in space, with convolutional
    perfectly matched layers (C-PML) around the model. docs/elastic.md describes the scheme. Cells
    with mu = 0 are fluid.

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
        Number of cells of the absorbing layers: one for all sides, or ((x0, x1), (y0, y1)), with
        one more pair (z0, z1) on three axes. If it is 0, the fields are zero beyond the side, which
        reflects all waves (not a free surface). A single number leaves out the free surface.
    source
        "explosive": the wavelet is the rate at which the normal stresses are driven, a moment rate
        in N m/s, or per length in N/s on two axes. "force_x", "force_y" or "force_z": the wavelet
        is a force in N, or per length in N/m.
    components
        Components that the receivers record: "vx", "vy", "vz" (on three axes) and "pressure", the
        negative mean of the normal stresses.
    reflection
        Fraction of the amplitude of a wave of `max_velocity` that the layers reflect at normal
        incidence, without the error of the differences. The damping is chosen for it.
    max_velocity
        Velocity that the layers are made for, in m/s. Default: the velocity for which `dt` is the
        largest stable step. It does not depend on the model, so the gradient with respect to the
        model is that of one fixed scheme.
    storage
        What a run stores for its gradient, and how: a `Storage`. Default: as much as fits into half
        of the free memory of a rank's host.
    threads
        Number of threads of the native kernels on each rank. Default: 1.
    backend
        "native" for the C++ kernels, or "xla" for a JAX program of the same scheme. Default:
        "native" if JAX computes on CPUs.
    free_surface
        A side without traction: "x0" and "x1" are the sides before the first and behind the last
        cell along x, and so on. The surface is the side of the grid, and has no layer. Default: no
        free surface.
    relaxation
        Attenuation by standard linear solids, from `fit_relaxation`. Their quality factors are
        arguments of `propagate`. Default: no loss.
    reference
        The frequency at which lam, mu and rho give the phase velocities, in Hz. Default:
        `relaxation.reference`, the geometric mean of its band.
    order
        Order of accuracy in space: 4 or 8. Order 8 needs fewer cells in a wavelength, and a time
        step that is 9 % smaller on the same cells.

    Raises
    ------
    ValueError
        If a parameter is not valid, a tile has fewer cells than the stencil reaches, or an option
        has no effect in this case (the tables in docs/acoustic.md). On all ranks, if all ranks give
        the same parameters.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import numpy as np
    >>> import mpigrad
    >>> from mpigrad.grid import Grid
    >>> from mpigrad.waves import Elastic, ElasticMedium, Survey, ricker
    >>> grid = Grid((40, 30), (10.0, 10.0))
    >>> model = Elastic(grid, dt=2e-3, steps=80, frequency=15.0, source="force_y")
    >>> survey = Survey(np.array([[[55.0, 55.0]]]), np.array([[[205.0, 55.0], [305.0, 55.0]]]))
    >>> wavelet = jnp.asarray(1e6 * ricker(15.0, 2e-3, 80), jnp.float32)[None, None]
    >>> vp, vs, rho = (jnp.full(grid.local_shape, v, jnp.float32) for v in (2000, 1100, 2000))
    >>> medium = ElasticMedium.from_velocities(vp, vs, rho)
    >>> model.propagate(medium, wavelet, survey).gathers.shape  # shots, vx and vy, ...
    (1, 2, 2, 80)
    >>> def energy(vs):
    ...     medium = ElasticMedium.from_velocities(vp, vs, rho)
    ...     return jnp.sum(model.propagate(medium, wavelet, survey).gathers ** 2)
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
    storage: Storage = dataclasses.field(default_factory=Storage)
    threads: int | None = None
    backend: Literal["native", "xla"] | None = None
    free_surface: Side | None = None
    relaxation: Relaxation | None = None
    reference: float | None = None
    order: int = 4

    def __post_init__(self) -> None:
        pml = without_layer(self.pml, self._surface, self.grid.ndim, "Elastic")
        object.__setattr__(self, "pml", pml)
        object.__setattr__(self, "components", tuple(self.components))
        check_settings(self)

    @property
    def _surface(self) -> Surface | None:
        return surface_of(self.free_surface, self.grid.ndim, "Elastic")

    @property
    def _reference(self) -> float:
        """The frequency of the given velocities in Hz, 0 without a relaxation."""
        if self.relaxation is None:
            return 0.0
        return self.relaxation.reference if self.reference is None else self.reference

    @property
    def stable_length(self) -> float:
        """The largest stable time step, times the velocity that limits it, in m."""
        surface = self._surface
        return staggered_limit(self.grid, self.order, surface.axis if surface else None)

    @property
    def _stability(self) -> tuple[int, bool, float]:
        """The settings on which the largest stable step depends."""
        return self.order, self.free_surface is not None, self.stable_length

    @property
    def tile(self) -> WaveTile:
        """This rank's tile with its absorbing layers."""
        return WaveTile(self.grid, self.pml)

    def largest_time_step(self, medium: ElasticMedium) -> float:
        """Return the largest stable time step for a medium, in s (collective).

        It is k / (v sqrt(1/hx^2 + 1/hy^2)), with 1/hz^2 in the sum on three axes, and k = 6/7 at
        order 4, 0.7774 at order 8. The velocity v is little more than the largest P velocity, but
        much more if some cells are as light as air. A free surface makes it larger, by 1 to 2 % in
        rock. With attenuation it is that of the unrelaxed moduli.

        Parameters
        ----------
        medium
            This rank's tiles.

        Raises
        ------
        ValueError
            On all ranks: if a density or lambda + mu (lambda + 2/3 mu on three axes) is not
            positive, mu is negative, a value is not finite, or a quality factor is too small.
        """
        name = "Elastic.largest_time_step"
        with raise_on_all_ranks(self.grid.comm):
            lam, mu, rho, qp, qs = _as_medium(name, medium)
            self._check_factors(name, lam, qp, qs)
        if self.relaxation is not None:
            factors = np.array([smallest(qp), smallest(qs)])
            factors = np.min(self.grid.comm.mpi.allgather(factors), axis=0)
            if not np.all(factors > self.relaxation.smallest_q):
                raise ValueError(f"{name}: {low_q_text(self.relaxation).format(*factors)}")
        parameters = moduli(self.relaxation, self._reference, Lame(lam, mu), qp, qs)
        return largest_step(name, parameters, rho, *self._stability, self.grid.comm)

    def propagate(
        self,
        medium: ElasticMedium,
        wavelets: Float[Array | np.ndarray, "_ sources steps"],
        survey: Survey,
        state: State | VolumeState | AnelasticState | None = None,
        gathers: Literal["complete", "share"] = "complete",
    ) -> Recording:
        """Propagate the waves of all shots of a survey (collective).

        Differentiable with respect to medium, wavelets and state, in forward and reverse mode. Each
        rank has a copy of the wavelets, so their gradient is the sum over ranks: declare them
        `replicated=`, or `bcast` them.

        Parameters
        ----------
        medium
            This rank's tiles. The fields have their dtype. Cells of the layers have the values of
            the nearest cell.
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
            On all ranks, before the first step: if a shape or dtype is wrong, a source or receiver
            lies outside the model, or a setting or dtype differs between ranks (the text names it).
        RuntimeError
            On all ranks, before the first step: if a density or lambda + mu (lambda + 2/3 mu on
            three axes) is not positive, mu is negative or a value is not finite, if `dt` is not
            stable (the text gives the largest stable one), or if a quality factor is NaN or too
            small.
        """
        name = "Elastic.propagate"
        with raise_on_all_ranks(self.grid.comm):
            lam, mu, rho, qp, qs = _as_medium(name, medium)
            wavelets = as_array(wavelets)
            arguments.check_gathers(name, gathers)
            arguments.check_tiles(name, self.grid, {"lam": lam, "mu": mu, "rho": rho})
            self._check_factors(name, lam, qp, qs)
            arguments.check_wavelets(name, wavelets, survey, self.steps)
            scheme = make_scheme(self, survey)
            if state is not None:
                _check_state(name, scheme, state, lam.dtype)
        settings = scheme.settings | {
            "backend": "native" if runs_native(self) else "xla",
            "quality factors of the medium": [q is not None for q in (qp, qs)],
        }
        assert_same_run(name, settings, lam.dtype, self.grid.comm)
        if self.relaxation is not None:
            require_factors(self.relaxation, qp, qs, self.grid.comm)
        both = moduli(self.relaxation, self._reference, Lame(lam, mu), qp, qs)
        limit, fastest = require_stable(both, rho, self.dt, *self._stability, self.grid.comm)
        arguments.warn_of_units(self, limit, fastest)
        shape = (survey.n_shots, survey.n_sources, self.steps)
        amplitudes = jnp.broadcast_to(wavelets.astype(lam.dtype), shape)
        media = effective_media(*both[0], rho, scheme.tile, scheme.surface)
        loss = None
        if self.relaxation is not None:
            slow = effective_media(*both[1], rho, scheme.tile, scheme.surface)
            loss = loss_of(self.relaxation, media, slow)
        if runs_native(self):
            fields = None if state is None else jax.tree.leaves(state)
            models = native_models(media) + ([] if loss is None else native_models(loss))
            share, arrays = propagate(scheme.native, models, amplitudes, fields)
            rest = jax.eval_shape(lambda: _at_rest(scheme, lam.dtype))
            last = jax.tree.unflatten(jax.tree.structure(rest), arrays)
            share = share.reshape(shape[0], len(self.components), -1, self.steps)
        else:
            state = _at_rest(scheme, lam.dtype) if state is None else state
            share, last = reference.propagate(scheme, media, amplitudes, state, loss)
        if gathers == "complete":
            share = allreduce(share, comm=self.grid.comm)
        return Recording(share, last)

    def _check_factors(
        self, name: str, lam: jax.Array, qp: jax.Array | None, qs: jax.Array | None
    ) -> None:
        """Raise a ValueError of `name` if the quality factors do not fit the model."""
        factors = {k: q for k, q in (("qp", qp), ("qs", qs)) if q is not None}
        if factors and self.relaxation is None:
            raise ValueError(
                f"{name}: {' and '.join(factors)} need a relaxation. Make the model with "
                "relaxation=fit_relaxation(q, band)."
            )
        arguments.check_tiles(name, self.grid, {"lam": lam, **factors})


def _at_rest(scheme: Scheme, dtype: Any) -> State | VolumeState | AnelasticState:
    layers = tuple(layer.before + layer.after for layer in scheme.layers)
    shots, shape = scheme.survey.n_shots, scheme.tile.shape
    state = at_rest(shots, shape, layers, dtype)
    if scheme.relaxation is None:
        return state
    rates = len(shape) + len(axis_pairs(len(shape)))
    return AnelasticState(
        state, jnp.zeros((shots, len(scheme.relaxation.times), rates, *shape), dtype)
    )


def _as_medium(name: str, medium: Any) -> ElasticMedium:
    if isinstance(medium, ElasticMedium):
        if not all(hasattr(x, "dtype") for x in medium[:3]):
            kinds = ", ".join(type(x).__name__ for x in medium[:3])
            raise TypeError(
                f"{name}: lam, mu and rho of the medium must be arrays, got {kinds}. Give this "
                "rank's tiles."
            )
        loss = (None if q is None else as_array(q) for q in (medium.qp, medium.qs))
        return ElasticMedium(*map(as_array, medium[:3]), *loss)
    raise TypeError(
        f"{name}: the medium must be an ElasticMedium, got {type(medium).__name__}. Write "
        "ElasticMedium(lam, mu, rho) or ElasticMedium.from_velocities(vp, vs, rho)."
    )


class _Strain(NamedTuple):
    strain: Any


def _check_state(name: str, scheme: Scheme, state: Any, dtype: Any) -> None:
    """Raise a ValueError of `name` if a state does not fit a run."""
    rest = jax.eval_shape(lambda: _at_rest(scheme, dtype))
    if isinstance(state, AnelasticState) and isinstance(rest, AnelasticState):
        arguments.check_state(name, scheme.tile, _Strain(state.strain), _Strain(rest.strain))
        state, rest = state.elastic, rest.elastic
    if type(state) is not type(rest):
        raise ValueError(
            f"{name}: the state is of type {type(state).__name__}, expected {type(rest).__name__}. "
            "Give the state of a recording of the same model."
        )
    arguments.check_state(name, scheme.tile, state, rest)


@functools.lru_cache(maxsize=128)
def make_scheme(model: Elastic, survey: Survey) -> Scheme:
    """Return the discretisation of a survey on this rank."""
    tile, grid, surface = model.tile, model.grid, model._surface
    absorbs = (
        model.max_velocity or model.stable_length / model.dt,
        model.frequency,
        model.reflection,
    )
    layers = tuple(
        layer(*cells, spacing, model.dt, *absorbs, stagger=stagger_of(surface, axis))
        for axis, (cells, spacing) in enumerate(zip(tile.extension, grid.spacing, strict=True))
    )
    sources, receivers = tables(tile, survey, model.source, model.components, surface)
    return Scheme(
        tile,
        model.order,
        model.dt,
        model.steps,
        layers,
        absorbs,
        survey,
        model.source,
        model.components,
        sources,
        receivers,
        model.threads or 1,
        model.storage,
        surface,
        model.relaxation,
        model._reference,
    )
