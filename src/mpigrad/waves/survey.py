"""Where a survey's shots are fired and its receivers stand."""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np

from mpigrad._shapes import Float

__all__ = ["Survey"]


@dataclasses.dataclass(frozen=True, eq=False)
class Survey:
    """The sources and the receivers of a number of shots, the same on every rank.

    Coordinates are those of `Grid.centers()`: in the unit of the grid's spacing, from its first
    corner. Points need not be cell centres. A survey is compared by identity: make it once, not
    inside the function that is differentiated or jitted.

    Parameters
    ----------
    sources
        Shape (n_shots, n_sources, 2).
    receivers
        Shape (n_shots, n_receivers, 2), or (1, n_receivers, 2) for the same ones in every shot.

    Raises
    ------
    ValueError
        If a shape is another, a coordinate is not finite, or there is no shot.
    """

    sources: Float[np.ndarray, "shots sources 2"]
    receivers: Float[np.ndarray, "_ receivers 2"]

    def __post_init__(self) -> None:
        for name in ("sources", "receivers"):
            # A copy: programs are compiled for these coordinates.
            points = np.array(getattr(self, name), np.float64)
            if points.ndim != 3 or points.shape[2] != 2:
                raise ValueError(
                    f"mpigrad.waves.Survey: {name} has shape {points.shape}; give "
                    f"(shots, {name}, 2)"
                )
            if not np.isfinite(points).all():
                raise ValueError(f"mpigrad.waves.Survey: {name} has NaN or infinity")
            points.flags.writeable = False
            object.__setattr__(self, name, points)
        if self.n_shots == 0:
            raise ValueError("mpigrad.waves.Survey: there is no shot")
        if self.receivers.shape[0] not in (1, self.n_shots):
            raise ValueError(
                f"mpigrad.waves.Survey: receivers for {self.receivers.shape[0]} shots, "
                f"sources for {self.n_shots}; give one set of receivers, or one for each shot"
            )

    @property
    def n_shots(self) -> int:
        """Number of shots."""
        return self.sources.shape[0]

    @property
    def n_sources(self) -> int:
        """Number of sources of each shot."""
        return self.sources.shape[1]

    @property
    def n_receivers(self) -> int:
        """Number of receivers of each shot."""
        return self.receivers.shape[1]

    def digest(self) -> int:
        """A number that tells surveys apart, the same on every rank."""
        text = repr((self.sources.shape, self.receivers.shape)).encode()
        data = text + self.sources.tobytes() + self.receivers.tobytes()
        return int.from_bytes(hashlib.blake2b(data, digest_size=6).digest(), "big")
