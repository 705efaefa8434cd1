"""The distance between predicted and recorded gathers."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from mpi4py import MPI

from mpigrad.communicator import Communicator
from mpigrad.waves.survey import low_pass_gain

__all__ = ["Misfit", "low_pass", "make_misfit"]

_SMALLEST_NORM = 1e-3  # relative to the largest norm of a shot or trace


@dataclasses.dataclass(frozen=True, eq=False)
class Misfit:
    """The misfit sum ((F p - F d) w)^2 / sum (F d w)^2 over all shots, receivers and times.

    F is the low pass of the stage. It is applied to the predicted gathers p and to the recorded
    gathers d. Propagation is linear in the wavelet and invariant in time, so this is the misfit of
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
        Corner frequency of F in Hz, None for no filter.
    dt
        Time step in s.
    """

    recorded: Float[np.ndarray, "shots components receivers steps"]
    weights: Float[np.ndarray, "shots components receivers 1"]
    norm: float
    corner: float | None
    dt: float

    def group_share(
        self, predicted: Float[Array, "shots components receivers steps"]
    ) -> Float[Array, ""]:
        """Return the group's share of the misfit. Differentiable. The misfit of p = 0 is 1."""
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
    """Make the misfit of one stage (collective over `comm`).

    Parameters
    ----------
    recorded
        The data of this group's shots, the same on every rank of the group.
    normalize
        "none", or "shot" or "trace" to divide each shot or trace by its norm, but at least by a
        thousandth of the largest norm, so that shots or traces without a signal do not count.
    """
    filtered = np.asarray(low_pass(jnp.asarray(recorded, jnp.float64), corner, dt))
    weights = np.ones((*filtered.shape[:-1], 1))
    if normalize != "none":
        axes = (1, 2, 3) if normalize == "shot" else (3,)
        size = np.sqrt(np.sum(filtered**2, axis=axes, keepdims=True))
        largest = comm.mpi.allreduce(float(np.max(size)), op=MPI.MAX)
        weights /= np.maximum(size, _SMALLEST_NORM * largest or 1.0)
    filtered = filtered * weights
    norm = comm.mpi.allreduce(float(np.sum(filtered**2)) if group.rank == 0 else 0.0)
    if not norm > 0:
        raise ValueError("fwi: all recorded gathers are zero. Check --data, --steps and --wavelet.")
    return Misfit(filtered, weights, norm, corner, dt)


def low_pass(
    d: Float[Array, "*n steps"], corner: float | None, dt: float
) -> Float[Array, "*n steps"]:
    """Apply a zero-phase low pass along time (`low_pass_gain`) to traces padded by zeros."""
    if corner is None:
        return d
    steps = d.shape[-1]
    gain = low_pass_gain(corner, 2 * steps, dt)
    spectrum = jnp.fft.rfft(d, 2 * steps) * gain
    return jnp.fft.irfft(spectrum, 2 * steps)[..., :steps]
