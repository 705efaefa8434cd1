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

from mpigrad._shapes import Array, Float
from mpigrad.collective_errors import raise_on_all_ranks
from mpigrad.grid.grid import Grid
from mpigrad.operations import allreduce, require
from mpigrad.waves.absorbing import WaveTile, damping, widths_of
from mpigrad.waves.acoustic import reference
from mpigrad.waves.acoustic.scheme import Scheme
from mpigrad.waves.acoustic.state import State, at_rest
from mpigrad.waves.checkpoints import Checkpoints, check_checkpoints, native_number
from mpigrad.waves.interpolation import point_table
from mpigrad.waves.primitive import propagate
from mpigrad.waves.run_agreement import require_same
from mpigrad.waves.stability import SECOND_DERIVATIVES, wave_equation_limit
from mpigrad.waves.survey import Survey

__all__ = ["Acoustic", "Recording"]


class Recording(NamedTuple):
    """What `Acoustic.propagate` returns.

    Attributes
    ----------
    gathers
        The pressure at the receivers, shape (n_shots, n_receivers, steps), complete and equal on
        every rank of the grid unless shares were asked for; sample n is at time n dt.
    state
        This rank's fields after the last step.
    """

    gathers: Float[Array, "shots receivers steps"]
    state: State


@dataclasses.dataclass(frozen=True)
class Acoustic:
    """The acoustic wave equation (1/c^2) p_tt - (p_xx + p_yy) = s on a grid with two axes.

    Central differences in space, leapfrog in time, absorbing layers around the grid (Grote and
    Sim's PML); docs/acoustic.md writes the scheme out. The fields lie at the cell centres.

    Parameters
    ----------
    grid
        The model's grid; the absorbing layers lie outside of it.
    dt
        Time step, s.
    steps
        Number of time steps.
    order
        Of the differences in space: 2 or 4.
    pml
        Cells of the absorbing layers: a number, or ((x0, x1), (y0, y1)). Where it is 0 the
        pressure is zero beyond the side (a free surface).
    reflection
        What the layers' damping is chosen for: how much of a wave of `max_velocity` returns from
        them at normal incidence, without the error of the differences.
    max_velocity
        For which the layers are made, in the model's unit (m/s). Not given: that for which `dt` is
        the largest stable step. It is not taken from the model, so that the gradient with respect
        to the model is that of one and the same scheme.
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
    order: int = 4
    pml: Any = 20
    reflection: float = 1e-4
    max_velocity: float | None = None
    checkpoints: Checkpoints = None
    threads: int | None = None
    method: Literal["native", "xla"] | None = None
    memory: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "pml", widths_of(self.pml))
        _check_settings(self)
        _ = self.tile

    @property
    def tile(self) -> WaveTile:
        """This rank's tile with its absorbing layers."""
        return WaveTile(self.grid, self.pml)

    def largest_time_step(self, velocity: Float[Array | np.ndarray, "lx ly"]) -> float:
        """The largest stable time step for a model, s (collective).

        The absorbing layers take no part in it.

        Parameters
        ----------
        velocity
            This rank's tile of the model.
        """
        with raise_on_all_ranks(self.grid.comm):
            _check_values(np.asarray(velocity))
        fastest = self.grid.comm.mpi.allreduce(float(np.max(velocity)), op=MPI.MAX)
        return wave_equation_limit(self.grid, self.order) / fastest

    def propagate(
        self,
        velocity: Float[Array | np.ndarray, "lx ly"],
        wavelets: Float[Array | np.ndarray, "_ sources steps"],
        survey: Survey,
        state: State | None = None,
        gathers: Literal["complete", "share"] = "complete",
    ) -> Recording:
        """All shots of a survey (collective).

        Differentiable in velocity, wavelets and state, in forward and reverse mode. The ranks'
        wavelets are copies: their gradient is the sum over ranks (`replicated=`, or `bcast` them).

        Parameters
        ----------
        velocity
            This rank's tile of the model, shape (lx, ly), m/s; float32 or float64, and the fields
            are of that dtype. In the layers: the value of the nearest cell.
        wavelets
            The sources' time functions, shape (n_shots, n_sources, steps), or (1, n_sources,
            steps) for the same ones in every shot; equal on all ranks. Sample n acts at n dt, as
            s = wavelet(t) delta(x - x_s), so they have the unit of pressure (in two dimensions).
        survey
            The shots.
        state
            To go on from: this rank's fields, as an earlier recording has them. Default: at rest.
        gathers
            "complete", or this rank's "share" of them, without the message that adds the shares up.
            A receiver at a cell's centre is complete on the rank that has the cell, and 0
            elsewhere.

        Raises
        ------
        ValueError
            Before the first step, on the rank that has it: if a shape or dtype is wrong, or a
            source or receiver lies outside the model.
        RuntimeError
            On all ranks, before the first step: if a velocity is not positive and finite, or `dt`
            is not stable; the message has the largest stable one.
        """
        if gathers not in ("complete", "share"):
            raise ValueError(f'acoustic: gathers are "complete" or a "share", not {gathers!r}')
        velocity, wavelets = jnp.asarray(velocity), jnp.asarray(wavelets)
        scheme = _scheme(self, survey)
        _check_arguments(scheme, velocity, wavelets, state)
        shape = (survey.n_shots, survey.n_sources, self.steps)
        amplitudes = jnp.broadcast_to(wavelets.astype(velocity.dtype), shape)
        if self._is_native():
            share, last = propagate(scheme.native, [velocity], amplitudes, state)
            last = State(*last)
        else:
            require_same(scheme.fingerprint, self.grid.comm)
            _require_stable(scheme, velocity)
            if state is None:
                state = at_rest(scheme.tile, survey.n_shots, velocity.dtype)
            share, last = reference.propagate(scheme, velocity, amplitudes, state)
        if gathers == "complete":
            share = allreduce(share, comm=self.grid.comm)
        return Recording(share, last)

    def _is_native(self) -> bool:
        return (self.method or ("native" if jax.default_backend() == "cpu" else "xla")) == "native"


def _require_stable(scheme: Scheme, velocity: jax.Array) -> None:
    """The checks that native runs make at their start, with their messages."""
    comm = scheme.tile.grid.comm
    v = jax.lax.stop_gradient(velocity)
    finite = jnp.isfinite(v)
    most = allreduce(
        jnp.stack([jnp.max(-v), jnp.max(v), jnp.any(~finite).astype(v.dtype)]), MPI.MAX, comm
    )
    require(
        most[2] == 0,
        "the velocity is NaN or infinite somewhere; look for a division by zero or an overflow in "
        "what computes it",
        comm=comm,
    )
    require(
        most[0] < 0,
        "the velocity must be positive everywhere; its smallest value is {}",
        -most[0],
        comm=comm,
    )
    limit = scheme.limit / most[1]
    require(
        scheme.dt <= limit * (1 + 1e-6),
        "the time step {} is not stable: the largest stable one is {} for velocities up to {}; "
        "take it, and more steps, or a coarser grid",
        scheme.dt,
        limit,
        most[1],
        comm=comm,
    )


def _check_settings(model: Acoustic) -> None:
    if model.order not in SECOND_DERIVATIVES:
        raise ValueError(f"Acoustic: order must be 2 or 4, not {model.order!r}")
    for name, positive in (("dt", model.dt), ("steps", model.steps)):
        if not (positive > 0 and math.isfinite(positive)):
            raise ValueError(f"Acoustic: {name} must be positive, not {positive!r}")
    if not 0 < model.reflection < 1:
        raise ValueError(f"Acoustic: reflection must lie between 0 and 1, not {model.reflection}")
    if model.max_velocity is not None and not model.max_velocity > 0:
        raise ValueError(f"Acoustic: max_velocity must be positive, not {model.max_velocity}")
    if model.threads is not None and model.threads < 1:
        raise ValueError(f"Acoustic: threads must be at least 1, not {model.threads}")
    if model.method not in (None, "native", "xla"):
        raise ValueError(f'Acoustic: method must be "native" or "xla", not {model.method!r}')
    native = model.checkpoints != "boundary" or model._is_native()
    check_checkpoints(model.checkpoints, "Acoustic", native=native)
    model.tile.check(model.order // 2)


def _check_values(velocity: np.ndarray) -> None:
    if not (np.min(velocity) > 0 and np.isfinite(np.max(velocity))):
        raise ValueError(
            "acoustic: velocities must be positive and finite; those of this model reach from "
            f"{np.min(velocity)} to {np.max(velocity)}"
        )


def _check_arguments(
    scheme: Scheme, velocity: jax.Array, wavelets: jax.Array, state: State | None
) -> None:
    grid, survey = scheme.tile.grid, scheme.survey
    if velocity.shape != grid.local_shape:
        raise ValueError(
            f"acoustic: velocity has shape {velocity.shape} on a tile of {grid.local_shape} cells "
            f"(rank {grid.comm.rank})"
        )
    if velocity.dtype not in (jnp.float32, jnp.float64):
        raise ValueError(f"acoustic: velocity is {velocity.dtype}; float32 and float64 are taken")
    ends = (survey.n_sources, scheme.steps)
    if wavelets.shape not in ((1, *ends), (survey.n_shots, *ends)):
        raise ValueError(
            f"acoustic: wavelets have shape {wavelets.shape}; give ({survey.n_shots} or 1, "
            f"{survey.n_sources}, {scheme.steps}): shots, sources of a shot, steps"
        )
    if state is not None:
        like = jax.eval_shape(lambda: at_rest(scheme.tile, survey.n_shots, velocity.dtype))
        for name, given, expected in zip(State._fields, state, like, strict=True):
            if (given.shape, given.dtype) != (expected.shape, expected.dtype):
                raise ValueError(
                    f"acoustic: {name} of the state is {given.dtype}{list(given.shape)} on rank "
                    f"{grid.comm.rank}, and this run takes {expected.dtype}{list(expected.shape)}"
                )


@functools.lru_cache(maxsize=128)
def _scheme(model: Acoustic, survey: Survey) -> Scheme:
    tile = model.tile
    velocity = model.max_velocity or wave_equation_limit(model.grid, model.order) / model.dt
    sources, receivers = (
        point_table(points.reshape(-1, 2), tile, what)
        for points, what in ((survey.sources, "sources"), (survey.receivers, "receivers"))
    )
    return Scheme(
        tile,
        model.dt,
        model.steps,
        model.order,
        (velocity, model.reflection),
        (
            damping(tile, 0, velocity, model.reflection),
            damping(tile, 1, velocity, model.reflection),
        ),
        survey,
        sources,
        receivers,
        native_number(model.checkpoints),
        model.threads or 1,
        model.memory,
    )
