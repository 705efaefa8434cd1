"""One rank's copy of a model and its optimizer, as the strategies see it."""

from __future__ import annotations

import abc
import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from mpigrad.training.flat_buffer import HEADER, Flat, Parameter

__all__ = ["Batch", "Replica"]

Batch = tuple[Any, ...]  # what the loss gets after the model


class Replica(abc.ABC):
    """A model, its loss and its optimizer on one rank: nothing here sends a message.

    Parameters
    ----------
    parameters
        The trainable ones, in an order that is the same on all ranks.
    weight
        batch -> what it weighs; the number of its samples if not given.

    Attributes
    ----------
    parameters
        As above.
    gradients
        Where `gradient` leaves weight · gradient, and from where `update` takes the mean gradient.
    unused
        Indices of parameters that the last `gradient` did not depend on (they count as zeros).
    """

    def __init__(
        self, parameters: Sequence[Parameter], weight: Callable[..., float] | None = None
    ) -> None:
        self.parameters = tuple(parameters)
        # A backward pass reaches the last layers first.
        self.gradients = Flat(self.parameters, range(len(self.parameters))[::-1])
        self.unused: frozenset[int] = frozenset()
        self._weight = weight

    @property
    @abc.abstractmethod
    def model(self) -> Any:
        """What the user trains: the module, or a copy of the parameters' pytree."""

    @abc.abstractmethod
    def gradient(
        self,
        batch: Batch,
        weight: float,
        ready: Callable[[int], None] | None = None,
        *,
        add: bool = False,
    ) -> float:
        """Set `gradients` to weight times the gradient of the mean loss of a batch; the mean loss.

        Parameters
        ----------
        batch
            Not empty.
        weight
            Positive. It multiplies the loss before it is differentiated.
        ready
            Called with the index of each parameter, once, as soon as its gradient is in place;
            those in `unused` are last.
        add
            Add to `gradients` instead.
        """

    def no_gradient(self) -> None:
        """Set `gradients` to zeros: the gradient of a batch without samples."""
        self.gradients.multiply(0)
        self.unused = frozenset(range(len(self.parameters)))

    @abc.abstractmethod
    def update(self, skip: frozenset[int] = frozenset()) -> None:
        """One step of the optimizer along `gradients`; it leaves out the parameters in `skip`."""

    @functools.cached_property
    def values(self) -> Flat:
        """The parameters, after `read`; what `write` gives the model."""
        return Flat(self.parameters)

    @abc.abstractmethod
    def read(self) -> None:
        """Bring the model's parameters into `values`."""

    @abc.abstractmethod
    def write(self) -> None:
        """Make `values` the model's parameters."""

    @abc.abstractmethod
    def state(self) -> bytes:
        """Parameters, buffers and the optimizer's state: what another replica needs to go on."""

    @abc.abstractmethod
    def load(self, state: bytes) -> None:
        """Go on from what `state` has given, here or on another rank."""

    def settings(self) -> dict[str, str]:
        """What else must be equal on all ranks: the optimizer, and its numbers."""
        return {}

    def checksum(self) -> int:
        """Of those `settings` that the program may change between steps: cheap, below 2⁵³."""
        return 0

    def fingerprint(self) -> str:
        """Equal where parameters and buffers are equal, bit for bit."""
        self.read()
        return hashlib.sha256(self.values.message[HEADER:].tobytes()).hexdigest()

    def buffers(self) -> bytes:
        """What the model holds besides parameters, such as running means; b"" if nothing."""
        return b""

    def load_buffers(self, buffers: bytes) -> None:  # noqa: B027 (nothing to do)
        """Take what `buffers` has given on another rank; a ValueError if it does not fit."""

    def random_state(self) -> bytes:
        """The state of this rank's random generators, if the framework has any."""
        return b""

    def load_random_state(self, state: bytes) -> None:  # noqa: B027 (nothing to do)
        """Go on from what `random_state` has given."""

    def arrange(self, order: Sequence[int]) -> None:
        """Lay `gradients` out anew, in this order of the parameters; zeros afterwards."""
        self.gradients = Flat(self.parameters, order)

    # ---- batches ----

    def samples(self, batch: Batch) -> int:
        """Length of the leading axis of a batch's first array."""
        for leaf in jax.tree.leaves(batch):
            shape = getattr(leaf, "shape", None)
            if shape is not None and len(shape) > 0:
                return int(shape[0])
        raise ValueError(
            "trainer: this batch holds no array with a leading axis of samples; give weight=, a "
            "function of the batch"
        )

    def weight(self, batch: Batch) -> float:
        """What a batch weighs in a mean over ranks: its number of samples, or the user's own.

        Raises
        ------
        ValueError
            It is negative or not finite.
        """
        weight = float(self.samples(batch) if self._weight is None else self._weight(*batch))
        if not 0 <= weight < np.inf:
            raise ValueError(f"trainer: the weight of a batch is {weight}; it must be 0 or more")
        return weight
