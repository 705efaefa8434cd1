"""Positions of the sources and receivers of a survey."""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np

from mpigrad._shapes import Float

__all__ = ["Survey"]


@dataclasses.dataclass(frozen=True, eq=False)
class Survey:
    """Positions of the sources and receivers of one or more shots, the same on every rank.

    Coordinates are those of `Grid.centers()`, measured from the grid's first corner in the unit of
    its spacing. Points may lie between cell centres. Surveys are compared by identity, so make a
    survey once, outside functions that are differentiated or jitted.

    Parameters
    ----------
    sources
        Shape (n_shots, n_sources, axes), with 2 or 3 axes as the grid has.
    receivers
        Shape (n_shots, n_receivers, axes), or (1, n_receivers, axes) if all shots have the same
        ones.

    Raises
    ------
    ValueError
        If a shape is not as above, a coordinate is not finite, or the number of shots is 0.

    Examples
    --------
    Two shots with one source each. Three receivers record both of them:

    >>> import numpy as np
    >>> from mpigrad.waves import Survey
    >>> survey = Survey(
    ...     sources=np.array([[[120.0, 15.0]], [[480.0, 15.0]]]),
    ...     receivers=np.array([[[100.0, 15.0], [300.0, 15.0], [500.0, 15.0]]]),
    ... )
    >>> survey.n_shots, survey.n_sources, survey.n_receivers
    (2, 1, 3)
    """

    sources: Float[np.ndarray, "shots sources axes"]
    receivers: Float[np.ndarray, "_ receivers _"]

    def __post_init__(self) -> None:
        for name in ("sources", "receivers"):
            # Copied, because programs are compiled for these coordinates.
            points = np.array(getattr(self, name), np.float64)
            if points.ndim != 3 or points.shape[2] not in (2, 3):
                raise ValueError(
                    f"Survey: expected {name} of shape (shots, {name}, 2 or 3), got shape "
                    f"{points.shape}. Give one point, (x, y) or (x, y, z), for each of the "
                    f"{name} of each shot."
                )
            if not np.isfinite(points).all():
                raise ValueError(
                    f"Survey: {name} contain NaN or infinity. Give finite coordinates."
                )
            points.flags.writeable = False
            object.__setattr__(self, name, points)
        if self.sources.shape[2] != self.receivers.shape[2]:
            raise ValueError(
                f"Survey: got sources with {self.sources.shape[2]} coordinates and receivers with "
                f"{self.receivers.shape[2]}. Give both as many as the grid has axes."
            )
        if self.n_shots == 0:
            raise ValueError("Survey: expected at least one shot, got 0. Give at least one source.")
        if self.receivers.shape[0] not in (1, self.n_shots):
            raise ValueError(
                f"Survey: got receivers of {self.receivers.shape[0]} shots and sources of "
                f"{self.n_shots} shots. Give one set of receivers, or one set for each shot."
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
        """Return a hash of 48 bits of all coordinates."""
        text = repr((self.sources.shape, self.receivers.shape)).encode()
        data = text + self.sources.tobytes() + self.receivers.tobytes()
        return int.from_bytes(hashlib.blake2b(data, digest_size=6).digest(), "big")
