"""The interface of the strategies to one rank's copy of a model and its optimizer."""

from __future__ import annotations

import abc
import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from mpigrad.training.flat_buffer import HEADER, FlatBuffer, Parameter

__all__ = ["Batch", "Replica"]

Batch = tuple[Any, ...]  # the arguments of the loss after the model


class Replica(abc.ABC):
    """A model, its loss and its optimizer on one rank, without messages.

    Subclass it to train a model of another framework, and pass the replica to `trainer`.

    Parameters
    ----------
    parameters
        The trainable parameters, in an order that is the same on all ranks.
    weight
        A function weight(*batch) -> weight of the batch (default: its count of samples).

    Attributes
    ----------
    parameters
        The trainable parameters.
    gradients
        The buffer into which `gradient` writes weight · gradient, and from which `update` reads the
        mean gradient.
    unused
        Indices of parameters on which the last loss did not depend. Their gradients are zeros.

    Examples
    --------
    A model y = a x with least squares and gradient descent, in NumPy:

    >>> import numpy as np
    >>> from mpigrad import training
    >>> class Line(training.Replica):
    ...     def __init__(self):
    ...         super().__init__([training.Parameter("a", (), "float64")])
    ...         self.model_a = np.zeros(())
    ...     model = property(lambda self: float(self.model_a))
    ...     def gradient(self, batch, weight, ready=None, *, add=False):
    ...         x, y = batch
    ...         error, place = self.model_a * x - y, self.gradients.arrays[0]
    ...         place[...] = weight * np.mean(2 * error * x) + (place if add else 0)
    ...         if ready is not None:
    ...             ready(0)
    ...         self.unused = frozenset()
    ...         return float(np.mean(error**2))
    ...     def update(self, skip=frozenset()):
    ...         self.model_a -= 0.3 * self.gradients.arrays[0]
    ...     def read(self):
    ...         self.values.arrays[0][...] = self.model_a
    ...     def write(self):
    ...         self.model_a[...] = self.values.arrays[0]
    ...     def state(self):
    ...         return self.model_a.tobytes()
    ...     def load(self, state):
    ...         self.model_a[...] = np.frombuffer(state)[0]
    >>> x = np.linspace(-1, 1, 16)
    >>> trainer = training.trainer(Line())
    >>> history = trainer.run([(x, 2 * x)] * 50)
    >>> print(round(trainer.model, 3))
    2.0
    """

    def __init__(
        self, parameters: Sequence[Parameter], weight: Callable[..., float] | None = None
    ) -> None:
        self.parameters = tuple(parameters)
        # A backward pass reaches the last layers first.
        self.gradients = FlatBuffer(self.parameters, range(len(self.parameters))[::-1])
        self.unused: frozenset[int] = frozenset()
        self._weight = weight

    @property
    @abc.abstractmethod
    def model(self) -> Any:
        """The model: the module, or a copy of the pytree of parameters."""

    @abc.abstractmethod
    def gradient(
        self,
        batch: Batch,
        weight: float,
        ready: Callable[[int], None] | None = None,
        *,
        add: bool = False,
    ) -> float:
        """Set `gradients` to weight times the gradient of a batch's mean loss, and return the loss.

        Parameters
        ----------
        batch
            A batch with at least one sample.
        weight
            A positive factor of the loss, applied before differentiation.
        ready
            A function that is called once with the index of each parameter, as soon as its gradient
            is complete, and last with the indices in `unused`.
        add
            True to add to `gradients` instead of overwriting them.
        """

    def no_gradient(self) -> None:
        """Set `gradients` to zeros: the gradient of a batch without samples."""
        self.gradients.multiply(0)
        self.unused = frozenset(range(len(self.parameters)))

    @abc.abstractmethod
    def update(self, skip: frozenset[int] = frozenset()) -> None:
        """Make one step of the optimizer with `gradients`, except for the parameters in `skip`."""

    @functools.cached_property
    def values(self) -> FlatBuffer:
        """The buffer of parameter values, which `read` fills and `write` copies to the model."""
        return FlatBuffer(self.parameters)

    @abc.abstractmethod
    def read(self) -> None:
        """Copy the model's parameters into `values`."""

    @abc.abstractmethod
    def write(self) -> None:
        """Copy `values` into the model's parameters."""

    @abc.abstractmethod
    def state(self) -> bytes:
        """Return parameters, buffers and the optimizer's state, for `load` of another replica."""

    @abc.abstractmethod
    def load(self, state: bytes) -> None:
        """Load a state that `state` returned on this or another rank."""

    def settings(self) -> dict[str, str]:
        """Return the settings of the optimizer, which must be the same on all ranks."""
        return {}

    def checksum(self) -> int:
        """Return a cheap checksum, below 2⁵³, of `settings` that may change between steps."""
        return 0

    def fingerprint(self) -> str:
        """Return a digest of the bits of parameters and buffers."""
        self.read()
        return hashlib.sha256(self.values.message[HEADER:].tobytes()).hexdigest()

    def buffers(self) -> bytes:
        """Return the model's state besides parameters, such as running means, or b""."""
        return b""

    def load_buffers(self, buffers: bytes) -> None:  # noqa: B027 (nothing to do)
        """Load `buffers` of another rank, or raise a ValueError if shapes differ."""

    def random_state(self) -> bytes:
        """Return the state of this rank's random generators, if the framework has any."""
        return b""

    def load_random_state(self, state: bytes) -> None:  # noqa: B027 (nothing to do)
        """Load a state that `random_state` returned."""

    def arrange(self, order: Sequence[int]) -> None:
        """Replace `gradients` by zeros in this order of the parameters."""
        self.gradients = FlatBuffer(self.parameters, order)

    # ---- batches ----

    def samples(self, batch: Batch) -> int:
        """Return the length of the leading axis of a batch's first array."""
        for leaf in jax.tree.leaves(batch):
            shape = getattr(leaf, "shape", None)
            if shape is not None and len(shape) > 0:
                return int(shape[0])
        raise ValueError(
            "trainer: expected a batch whose first array has a leading axis of samples, got a "
            "batch without one. Pass weight=, a function of the batch."
        )

    def weight(self, batch: Batch) -> float:
        """Return the weight of a batch in means over ranks: its count of samples by default.

        Raises
        ------
        ValueError
            If the weight is negative or not finite.
        """
        weight = float(self.samples(batch) if self._weight is None else self._weight(*batch))
        if not 0 <= weight < np.inf:
            raise ValueError(
                f"trainer: the weight of a batch must be finite and not negative, got {weight}. "
                "Correct the function weight."
            )
        return weight
