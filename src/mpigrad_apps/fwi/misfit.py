"""The distance between predicted and recorded gathers."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from mpi4py import MPI

from mpigrad.communicator import Communicator
from mpigrad.waves.wavelets import low_pass_gain

__all__ = ["Misfit", "low_pass", "make_misfit"]

_WEAKEST = 1e-3  # of the largest norm of a shot or trace: what is weaker is divided by this


@dataclasses.dataclass(frozen=True, eq=False)
class Misfit:
    """Sum ((F p - F d) w)^2 / sum (F d w)^2 over all shots, receivers and times.

    F is the low pass of the stage. It is applied to what is predicted and to what was recorded:
    propagation is linear in the wavelet and does not depend on when, so that this is the misfit of
    filtered data and a filtered wavelet, without the errors at the ends of filtered data.

    Attributes
    ----------
    recorded
        F d w of this group's shots, shape (shots, components, receivers, steps).
    weights
        w, shape (shots, components, receivers, 1), from `normalize`.
    norm
        The denominator.
    corner
        Of F in Hz; None: no filter.
    dt
        Time step in s.
    """

    recorded: Float[np.ndarray, "shots components receivers steps"]
    weights: Float[np.ndarray, "shots components receivers 1"]
    norm: float
    corner: float | None
    dt: float

    def of_group(
        self, predicted: Float[Array, "shots components receivers steps"]
    ) -> Float[Array, ""]:
        """What the group's shots contribute; differentiable. d = 0 would have the misfit 1."""
        predicted = predicted.astype(self.recorded.dtype)
        filtered = low_pass(predicted, self.corner, self.dt)
        return jnp.sum((filtered * self.weights - self.recorded) ** 2) / self.norm


def make_misfit(
    recorded: Float[np.ndarray, "shots components receivers steps"],
    normalize: str,
    corner: float | None,
    dt: float,
    comm: Communicator,
    group: Communicator,
) -> Misfit:
    """The misfit of one stage (collective over `comm`).

    Parameters
    ----------
    recorded
        The data of this group's shots, the same on every rank of the group.
    normalize
        "none"; "shot" or "trace": each shot or trace is divided by its norm, but at least by a
        thousandth of the largest, so that those where nothing has arrived do not count.
    """
    filtered = np.asarray(low_pass(jnp.asarray(recorded, jnp.float64), corner, dt))
    weights = np.ones((*filtered.shape[:-1], 1))
    if normalize != "none":
        axes = (1, 2, 3) if normalize == "shot" else (3,)
        size = np.sqrt(np.sum(filtered**2, axis=axes, keepdims=True))
        largest = comm.mpi.allreduce(float(np.max(size)), op=MPI.MAX)
        weights /= np.maximum(size, _WEAKEST * largest or 1.0)
    filtered = filtered * weights
    norm = comm.mpi.allreduce(float(np.sum(filtered**2)) if group.rank == 0 else 0.0)
    if not norm > 0:
        raise ValueError("fwi: there is nothing in the recorded gathers but zeros")
    return Misfit(filtered, weights, norm, corner, dt)


def low_pass(
    d: Float[Array, "*n steps"], corner: float | None, dt: float
) -> Float[Array, "*n steps"]:
    """Zero-phase low pass along time (`low_pass_gain`); before and after the trace is zero."""
    if corner is None:
        return d
    steps = d.shape[-1]
    gain = low_pass_gain(corner, 2 * steps, dt)
    spectrum = jnp.fft.rfft(d, 2 * steps) * gain
    return jnp.fft.irfft(spectrum, 2 * steps)[..., :steps]
