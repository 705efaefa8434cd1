"""The acoustic wave equation on the tiles of a grid."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from mpigrad.collective_errors import assert_same_on_all_ranks, raise_on_all_ranks
from mpigrad.communicator import Communicator
from mpigrad.extend import Array, Float, as_array
from mpigrad.grid import Grid
from mpigrad.operations import allreduce, require
from mpigrad.waves import arguments
from mpigrad.waves.absorbing import (
    Side,
    WaveTile,
    damping,
    layer_filter,
    surface_of,
    without_layer,
)
from mpigrad.waves.acoustic.reference import (
    Buoyancy,
    buoyancy_of,
    limiting_square,
    propagate_plane,
    propagate_volume,
)
from mpigrad.waves.acoustic.scheme import AcousticMedium, Scheme, State, at_rest, memory_cells
from mpigrad.waves.arguments import SECOND_DERIVATIVES, assert_same_run, wave_equation_limit
from mpigrad.waves.native_run import native_axes, propagate
from mpigrad.waves.options import Storage, runs_native
from mpigrad.waves.survey import Survey, point_table

__all__ = ["Acoustic", "Recording"]


class Recording(NamedTuple):
    """Result of `Acoustic.propagate`.

    Attributes
    ----------
    gathers
        The pressure at the receivers, shape (n_shots, n_receivers, steps). Complete and equal on
        every rank of the grid, unless shares were requested. Sample n is taken at time n dt.
    state
        This rank's fields after the last step.
    """

    gathers: Float[Array, "shots receivers steps"]
    state: State


@dataclasses.dataclass(frozen=True)
class Acoustic:
    """The acoustic wave equation (1/c^2) p_tt - Laplacian(p) = s on a grid with two or three axes.

    With a density rho it is (1/c^2) p_tt - rho div((1/rho) grad p) = s.

    Central differences in space, leapfrog in time, and absorbing layers around the grid: the PML of
    Grote and Sim on two axes, a convolutional PML on three. docs/acoustic.md describes the scheme.
    The fields lie at the cell centres.

    Parameters
    ----------
    grid
        The grid of the model. The absorbing layers lie outside of it.
    dt
        Time step in s.
    steps
        Number of time steps.
    order
        Order of accuracy of the differences in space: 4 or 8.
    pml
        Number of cells of the absorbing layers: one for all sides, or ((x0, x1), (y0, y1)), with
        one more pair (z0, z1) on three axes. If it is 0, the pressure is zero beyond the side, a
        free surface. A single number leaves out `free_surface`. At order 8 it is 0 or at least 4.
    reflection
        Fraction of the amplitude of a wave of `max_velocity` that the layers reflect at normal
        incidence, without the error of the differences. The damping is chosen for it.
    max_velocity
        Velocity that the layers are made for, in the model's unit (m/s). Default: the velocity for
        which `dt` is the largest stable step. It does not depend on the model, so the gradient with
        respect to the model is that of one fixed scheme.
    storage
        What a run stores for its gradient, and how: a `Storage`. Default: as much as fits into half
        of the free memory of a rank's host.
    threads
        Number of threads of the native kernels on each rank. Default: 1.
    backend
        "native" for the C++ kernels, or "xla" for a JAX program of the same scheme. Default:
        "native" if JAX computes on CPUs.
    free_surface
        A side without a layer, on which the pressure is zero: "x0" and "x1" are the sides before
        the first and behind the last cell along x, and so on. Default: none.

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
    >>> from mpigrad.waves import Acoustic, Survey, ricker
    >>> grid = Grid((40, 30), (10.0, 10.0))
    >>> model = Acoustic(grid, dt=2e-3, steps=80)
    >>> survey = Survey(np.array([[[55.0, 55.0]]]), np.array([[[205.0, 55.0], [305.0, 55.0]]]))
    >>> wavelet = jnp.asarray(ricker(15.0, 2e-3, 80), jnp.float32)[None, None]
    >>> velocity = jnp.full(grid.local_shape, 2000.0, jnp.float32)  # this rank's tile
    >>> model.propagate(velocity, wavelet, survey).gathers.shape  # shots, receivers, steps
    (1, 2, 80)
    >>> def energy(velocity):
    ...     return jnp.sum(model.propagate(velocity, wavelet, survey).gathers ** 2)
    >>> mpigrad.grad(energy, loss="replicated")(velocity).shape
    (40, 30)
    """

    grid: Grid
    dt: float
    steps: int
    order: int = 4
    pml: Any = 20
    reflection: float = 1e-4
    max_velocity: float | None = None
    storage: Storage = dataclasses.field(default_factory=Storage)
    threads: int | None = None
    backend: Literal["native", "xla"] | None = None
    free_surface: Side | None = None

    def __post_init__(self) -> None:
        surface = surface_of(self.free_surface, self.grid.ndim, "Acoustic")
        pml = without_layer(self.pml, surface, self.grid.ndim, "Acoustic")
        object.__setattr__(self, "pml", pml)
        if not (isinstance(self.order, int) and self.order in SECOND_DERIVATIVES):
            raise ValueError(
                f"Acoustic: order must be one of {tuple(SECOND_DERIVATIVES)}, got {self.order!r}."
            )
        if self.order == 8 and any(0 < width < 4 for pair in self.pml for width in pair):
            raise ValueError(
                f"Acoustic: pml must be 0 or at least 4 cells at order 8, got {self.pml!r}. "
                "Use wider layers, or order 4."
            )
        arguments.check_settings(self, ("dt", "steps"), self.order // 2, axes=(2, 3))

    @property
    def stable_length(self) -> float:
        """The largest stable time step, times the largest velocity, in m, without a density."""
        return wave_equation_limit(self.grid, self.order)

    @property
    def tile(self) -> WaveTile:
        """This rank's tile with its absorbing layers."""
        return WaveTile(self.grid, self.pml)

    def largest_time_step(
        self,
        medium: AcousticMedium | Float[Array | np.ndarray, "*tile"],
    ) -> float:
        """Return the largest stable time step for a model, in s (collective).

        It does not depend on the absorbing layers. With a density it is a safe bound: up to
        sqrt(2) times smaller if cells are much heavier than their neighbours.

        Parameters
        ----------
        medium
            This rank's tiles, or the velocity alone.

        Raises
        ------
        ValueError
            On all ranks: if a velocity or density is not positive and finite, the shape or dtype
            of a density is not that of the velocity, or only some ranks give a density.
        """
        comm = self.grid.comm
        with raise_on_all_ranks(comm):
            velocity, density = _as_medium("Acoustic.largest_time_step", medium)
            _check_values("velocities", np.asarray(velocity))
        _check_presence("Acoustic.largest_time_step", density, comm)
        if density is None:
            fastest = comm.mpi.allreduce(float(np.max(velocity)), op=MPI.MAX)
            return self.stable_length / fastest
        c, rho = as_array(velocity), as_array(density)
        with raise_on_all_ranks(comm):
            tiles = {"velocity": c, "density": rho}
            arguments.check_tiles("Acoustic.largest_time_step", self.grid, tiles)
            _check_values("densities", np.asarray(density))
        c = jnp.pad(c, self.tile.extension, mode="edge")
        buoyancy = buoyancy_of(self.tile, self.order, rho)
        square = float(limiting_square(self.grid, self.order, c, buoyancy))
        fastest = math.sqrt(comm.mpi.allreduce(square, op=MPI.MAX))
        return self.stable_length / fastest

    def propagate(
        self,
        medium: AcousticMedium | Float[Array | np.ndarray, "*tile"],
        wavelets: Float[Array | np.ndarray, "_ sources steps"],
        survey: Survey,
        state: State | None = None,
        gathers: Literal["complete", "share"] = "complete",
    ) -> Recording:
        """Propagate the waves of all shots of a survey (collective).

        Differentiable with respect to medium, wavelets and state, in forward and reverse mode. Each
        rank has a copy of the wavelets, so their gradient is the sum over ranks: declare them
        `replicated=`, or `bcast` them.

        Parameters
        ----------
        medium
            This rank's tiles, or the velocity alone, an array. The fields have its dtype. Cells of
            the layers have the values of the nearest cell.
        wavelets
            Time functions of the sources, shape (n_shots, n_sources, steps), or (1, n_sources,
            steps) if all shots have the same ones. The same on all ranks. Sample n acts at n dt as
            s = wavelet(t) delta(x - x_s), so in two dimensions wavelets have the unit of pressure,
            and in three that of pressure times length.
        survey
            The shots.
        state
            This rank's fields at the start, from an earlier recording. Default: at rest.
        gathers
            "complete", or "share" for this rank's share without the message that adds the shares.
            A receiver at a cell centre is complete on the rank of the cell, and 0 on other ranks.

        Returns
        -------
        Recording
            The gathers, and the state after the last step.

        Raises
        ------
        ValueError
            On all ranks, before the first step: if a shape or dtype is wrong, a source or receiver
            lies outside the model, the survey has another number of axes than the grid, only some
            ranks give a density, or a setting or dtype differs between ranks (the text names it).
        RuntimeError
            On all ranks, before the first step: if a velocity or density is not positive and
            finite, or if `dt` is not stable (the text gives the largest stable one).

        Examples
        --------
        >>> import jax.numpy as jnp
        >>> import numpy as np
        >>> import mpigrad
        >>> from mpigrad.grid import Grid
        >>> from mpigrad.waves import Acoustic, AcousticMedium, Survey, ricker
        >>> grid = Grid((40, 30), (10.0, 10.0))
        >>> model = Acoustic(grid, dt=2e-3, steps=80)
        >>> survey = Survey(np.array([[[55.0, 55.0]]]), np.array([[[205.0, 55.0]]]))
        >>> wavelet = jnp.asarray(ricker(15.0, 2e-3, 80), jnp.float32)[None, None]
        >>> velocity = jnp.full(grid.local_shape, 2000.0, jnp.float32)
        >>> density = jnp.asarray(1000.0 + 800.0 * (grid.centers()[1] > 150), jnp.float32)
        >>> def energy(medium):
        ...     return jnp.sum(model.propagate(medium, wavelet, survey).gathers ** 2)
        >>> slope = mpigrad.grad(energy, loss="replicated")(AcousticMedium(velocity, density))
        >>> slope.velocity.shape, slope.density.shape
        ((40, 30), (40, 30))
        """
        with raise_on_all_ranks(self.grid.comm):
            velocity, density = _as_medium("Acoustic.propagate", medium)
            velocity, wavelets = as_array(velocity), as_array(wavelets)
        _check_presence("Acoustic.propagate", density, self.grid.comm)
        rho = None if density is None else as_array(density)
        with raise_on_all_ranks(self.grid.comm):
            name = "Acoustic.propagate"
            arguments.check_gathers(name, gathers)
            tiles = {"velocity": velocity}
            if rho is not None:
                tiles["density"] = rho
            arguments.check_tiles(name, self.grid, tiles)
            arguments.check_wavelets(name, wavelets, survey, self.steps)
            scheme = _scheme(self, survey)
            if state is not None:
                rest = jax.eval_shape(lambda: at_rest(scheme.tile, survey.n_shots, velocity.dtype))
                arguments.check_state(name, scheme.tile, state, rest)
        native = runs_native(self)
        settings = scheme.settings | {"backend": "native" if native else "xla"}
        assert_same_run(name, settings, velocity.dtype, self.grid.comm)
        fastest = jnp.max(jax.lax.stop_gradient(velocity))
        arguments.warn_of_units(self, scheme.limit / fastest, fastest)
        shape = (survey.n_shots, survey.n_sources, self.steps)
        amplitudes = jnp.broadcast_to(wavelets.astype(velocity.dtype), shape)
        buoyancy = None if rho is None else buoyancy_of(scheme.tile, self.order, rho)
        if not native or buoyancy is not None:
            _require_stable(scheme, velocity, buoyancy)
        if native and buoyancy is not None:
            share, last = _propagate_native(scheme, velocity, buoyancy, amplitudes, state)
        elif native:
            share, last = propagate(scheme.native, [velocity], amplitudes, state)
            last = State(*last)
        else:
            if state is None:
                state = at_rest(scheme.tile, survey.n_shots, velocity.dtype)
            program = propagate_plane if self.grid.ndim == 2 else propagate_volume
            share, last = program(scheme, velocity, amplitudes, state, buoyancy)
        if gathers == "complete":
            share = allreduce(share, comm=self.grid.comm)
        return Recording(share, last)


def _propagate_native(
    scheme: Scheme,
    velocity: jax.Array,
    buoyancy: Buoyancy,
    amplitudes: jax.Array,
    state: State | None,
) -> tuple[jax.Array, State]:
    """Return what the native kernels with buoyancies return.

    They multiply dt^2 c^2 rho and the derivatives of the fluxes, so a source is divided by rho, and
    so are the memories, which are parts of fluxes.
    """
    tile = scheme.tile
    axes, cells = native_axes(tile.grid.ndim), memory_cells(tile)
    root = jnp.sqrt(buoyancy.density[tile.interior])
    models = [velocity * root, *(b for axis in axes for b in buoyancy.between[axis])]
    inverse = buoyancy.wide if len(axes) == 2 else [buoyancy.cells] * len(cells)
    if len(axes) == 2:
        models += buoyancy.wide
    factors = jnp.concatenate([b.ravel()[c] for b, c in zip(inverse, cells, strict=True)])
    if state is not None:
        state = State(state.field, state.previous, state.memory * factors)
    run, sources = scheme.native_with_density, scheme.spread(amplitudes, buoyancy.cells)
    share, (field, previous, memory) = propagate(run, models, sources, state)
    return share, State(field, previous, memory / factors)


def _require_stable(scheme: Scheme, velocity: jax.Array, buoyancy: Buoyancy | None) -> None:
    """Check the model as native runs do at their start, with the same texts (acoustic.h)."""
    comm = scheme.tile.grid.comm
    v, buoyancy = jax.lax.stop_gradient((velocity, buoyancy))
    fields = {"velocity": v}
    if buoyancy is not None:
        fields["density"] = buoyancy.density
    parts = [jnp.max(v)]
    for field in fields.values():
        parts += [jnp.max(-field), jnp.any(~jnp.isfinite(field)).astype(v.dtype)]
    if buoyancy is not None:
        extended = jnp.pad(v, scheme.tile.extension, mode="edge")
        parts.append(limiting_square(scheme.tile.grid, scheme.order, extended, buoyancy))
    most = allreduce(jnp.stack(parts), MPI.MAX, comm)
    for i, name in enumerate(fields):
        require(
            most[2 + 2 * i] == 0,
            f"the {name} is NaN or infinite in some cells. Look for a division by zero or an "
            "overflow in the code that computes it.",
            comm=comm,
        )
        require(
            most[1 + 2 * i] < 0,
            f"the {name} must be positive, and its smallest value is {{}}. Check the model.",
            -most[1 + 2 * i],
            comm=comm,
        )
    fastest = most[0] if buoyancy is None else jnp.sqrt(most[5])
    limit = scheme.limit / fastest
    with_density = "" if buoyancy is None else ", with this density"
    require(
        scheme.dt <= limit * (1 + 1e-6),
        "the time step {} is not stable: the largest stable one is {} for velocities up to {}"
        f"{with_density}. Use that time step and more steps, or a coarser grid.",
        scheme.dt,
        limit,
        most[0],
        comm=comm,
    )


def _as_medium(name: str, medium: Any) -> AcousticMedium:
    if not isinstance(medium, AcousticMedium):
        medium = AcousticMedium(medium)
    if not hasattr(medium.velocity, "dtype"):
        raise TypeError(
            f"{name}: the medium must be a velocity (an array) or an AcousticMedium, got "
            f"{type(medium.velocity).__name__}. Write AcousticMedium(velocity, density)."
        )
    return medium


def _check_presence(name: str, density: Any, comm: Communicator) -> None:
    """Raise a ValueError of `name` on all ranks if only some of them have a density."""
    description = "None" if density is None else "an array"
    assert_same_on_all_ranks(comm, description, f"{name}: density (an array or None)")


def _check_values(name: str, values: np.ndarray) -> None:
    if not (np.min(values) > 0 and np.isfinite(np.max(values))):
        raise ValueError(
            f"Acoustic.largest_time_step: {name} must be positive and finite, got values from "
            f"{np.min(values)} to {np.max(values)}. Check the model."
        )


@functools.lru_cache(maxsize=128)
def _scheme(model: Acoustic, survey: Survey) -> Scheme:
    tile = model.tile
    velocity = model.max_velocity or wave_equation_limit(model.grid, model.order) / model.dt
    sources, receivers = (
        point_table(points.reshape(-1, points.shape[2]), tile, what)
        for points, what in ((survey.sources, "sources"), (survey.receivers, "receivers"))
    )
    layers: tuple[Any, ...]
    if tile.grid.ndim == 2:
        layers = tuple(damping(tile, axis, velocity, model.reflection) for axis in range(2))
    else:
        layers = tuple(
            layer_filter(tile, axis, model.dt, velocity, model.reflection) for axis in range(3)
        )
    return Scheme(
        tile,
        model.dt,
        model.steps,
        model.order,
        (velocity, model.reflection),
        layers,
        survey,
        sources,
        receivers,
        model.threads or 1,
        model.storage,
    )
