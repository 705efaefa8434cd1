"""The interface to one rank's copy of a model and its optimizer, and the one for pytrees."""

from __future__ import annotations

import abc
import functools
import hashlib
import io
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpigrad.autodiff import grad
from mpigrad.checkpoint import leaf_from_bytes, leaf_to_bytes
from mpigrad.collective_errors import raise_on_all_ranks
from mpigrad.communicator import Communicator
from mpigrad.extend import as_array
from mpigrad.operations import jit
from mpigrad.training.flat_buffer import HEADER, FlatBuffer, Parameter

__all__ = [
    "Batch",
    "JaxReplica",
    "Replica",
    "bcast_bytes",
    "check_settings",
    "synchronize",
    "warn_if_replicas_differ",
]

# ---- The interface of the strategies to one rank's copy of a model and its optimizer ----


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


# ---- Synchronization of replicas: check that they fit, and copy rank 0's state to all ranks ----


_PIECE = 1 << 30  # bytes in a message: counts of MPI are 32 bits
_SHOWN = 100  # characters of a setting that an error shows


def synchronize(replica: Replica, comm: Communicator) -> None:
    """Copy rank 0's parameters, buffers and optimizer state to all replicas (collective).

    Raises
    ------
    ValueError
        On every rank, if names, shapes or dtypes of parameters, or the optimizers, differ.
    """
    everywhere = comm.mpi.allgather(replica.parameters)
    for rank, theirs in enumerate(everywhere):
        ours = everywhere[0]
        for a, b in zip(ours, theirs, strict=False):
            if a != b:
                raise ValueError(
                    f"trainer: parameters must be the same on all ranks, got {a} on rank 0 and {b} "
                    f"on rank {rank}. Build the same model on all ranks."
                )
        if len(ours) != len(theirs):
            more, fewer = (0, rank) if len(ours) > len(theirs) else (rank, 0)
            extra = max(ours, theirs, key=len)[min(len(ours), len(theirs))]
            raise ValueError(
                f"trainer: parameters must be the same on all ranks, but rank {more} has {extra} "
                f"and rank {fewer} does not. Build the same model on all ranks."
            )
    check_settings(replica, comm)
    warn_if_replicas_differ(
        replica, comm, "differed from rank 0's. All ranks now start with rank 0's"
    )
    state = b""
    with raise_on_all_ranks(comm):
        if comm.rank == 0:
            state = replica.state()
    state = bcast_bytes(comm, state)
    with raise_on_all_ranks(comm):
        if comm.rank > 0:
            replica.load(state)


def check_settings(replica: Replica, comm: Communicator) -> None:
    """Raise a ValueError on every rank if the optimizers, or their settings, differ."""
    local: dict[str, str] = {}
    with raise_on_all_ranks(comm):
        local = replica.settings()
    settings = comm.mpi.allgather(local)
    for rank, other in enumerate(settings):
        for name in {**settings[0], **other}:
            a, b = settings[0].get(name), other.get(name)
            if a != b:
                raise ValueError(
                    f"trainer: the optimizer must be the same on all ranks, got {name} = "
                    f"{_short(a)} on rank 0 and {_short(b)} on rank {rank}. Make and change the "
                    "optimizer in the same way on all ranks."
                )


def warn_if_replicas_differ(replica: Replica, comm: Communicator, message: str) -> None:
    """Print on rank 0 which ranks have parameters or buffers with other bits (collective)."""
    prints = comm.mpi.allgather(replica.fingerprint())
    others = [str(rank) for rank, value in enumerate(prints) if value != prints[0]]
    if others and comm.rank == 0:
        print(
            f"mpigrad: trainer: the parameters of rank{'s' * (len(others) > 1)} "
            f"{', '.join(others)} {message}",
            file=sys.stderr,
            flush=True,
        )


def _short(text: str | None) -> str:
    return "none" if text is None else text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def bcast_bytes(comm: Communicator, data: bytes, root: int = 0) -> bytes:
    """Broadcast the root's bytes, of any length (collective)."""
    size = comm.mpi.bcast(len(data), root)
    memory = np.frombuffer(data, np.uint8) if comm.rank == root else np.empty(size, np.uint8)
    for start in range(0, size, _PIECE):
        comm.mpi.Bcast(memory[start : start + _PIECE], root)
    return data if comm.rank == root else memory.tobytes()


# ---- A replica of a pytree of parameters and an optax transformation ----


class JaxReplica(Replica):
    """The replica of a pytree of parameters, see `trainer`.

    Two programs are compiled: loss with gradient, and the optimizer's step. The first program is
    compiled for each shape of a batch. Uneven parts have two or three shapes.
    """

    def __init__(
        self,
        parameters: Any,
        optimizer: Any,
        loss: Callable[..., Any],
        weight: Callable[..., float] | None = None,
    ) -> None:
        if not all(callable(getattr(optimizer, name, None)) for name in ("init", "update")):
            raise TypeError(
                "trainer: expected an optax optimizer such as optax.adam(1e-3) for a pytree, got "
                f"{optimizer!r}. Pass one of optax."
            )
        named = jax.tree.leaves_with_path(parameters)
        for path, leaf in named:
            dtype = getattr(leaf, "dtype", None)
            if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
                raise TypeError(
                    "trainer: expected floating-point arrays as parameters, got "
                    f"{type(leaf).__name__ if dtype is None else dtype} at "
                    f"model{jax.tree_util.keystr(path)}. Keep other values in the loss."
                )
        if not named:
            raise ValueError(
                "trainer: the model must hold at least one parameter, got an empty pytree. Pass a "
                "pytree with arrays."
            )
        self._parameters = _copied(parameters)
        self._structure = jax.tree.structure(parameters)
        super().__init__(
            [
                Parameter(f"model{jax.tree_util.keystr(path)}", leaf.shape, leaf.dtype.name)
                for path, leaf in jax.tree.leaves_with_path(self._parameters)
            ],
            weight,
        )
        self._state = _copied(optimizer.init(self._parameters))

        def weighted(parameters: Any, weight: Any, batch: Batch) -> tuple[Any, Any]:
            value = jnp.asarray(loss(parameters, *batch))
            if value.shape != () or not jnp.issubdtype(value.dtype, jnp.floating):
                raise TypeError(
                    "trainer: loss(params, *batch) must return one real number, got "
                    f"{value.dtype} of shape {value.shape}. Return the mean over the batch's "
                    "samples."
                )
            return value * weight.astype(value.dtype), value

        # mpigrad's `grad` reverses the messages of each rank, even if its own loss is constant.
        self._gradient = jit(grad(weighted, has_aux=True))

        def stepped(parameters: Any, state: Any, sections: Any) -> tuple[Any, Any]:
            import optax

            gradient = self._tree(sections, self.gradients)
            updates, state = optimizer.update(gradient, state, parameters)
            return optax.apply_updates(parameters, updates), state

        # The memory of the old parameters is reused, so `model` returns copies.
        self._stepped = jax.jit(stepped, donate_argnums=(0, 1))
        self._whole = jax.jit(lambda sections: self._tree(sections, self.values))

    @property
    def model(self) -> Any:
        return _copied(self._parameters)

    def gradient(
        self,
        batch: Batch,
        weight: float,
        ready: Callable[[int], None] | None = None,
        *,
        add: bool = False,
    ) -> float:
        tree, loss = self._gradient(self._parameters, np.float64(weight), batch)
        leaves = jax.tree.leaves(tree)
        for index in self.gradients.order:
            place = self.gradients.arrays[index]
            if add:
                np.add(place, np.asarray(leaves[index]), out=place)
            else:
                np.copyto(place, np.asarray(leaves[index]))
            if ready is not None:
                ready(index)  # one bucket is copied while another is sent
        return float(loss)

    def no_gradient(self) -> None:
        super().no_gradient()
        self.unused = frozenset()  # one rank, too, would update with zeros

    def update(self, skip: frozenset[int] = frozenset()) -> None:
        self._parameters, self._state = self._stepped(
            self._parameters, self._state, self.gradients.sections
        )
        # The program reads the memory of `gradients`, so it must end before they change.
        jax.block_until_ready(self._parameters)

    def arrange(self, order: Sequence[int]) -> None:
        super().arrange(order)
        self._stepped.clear_cache()  # type: ignore[attr-defined]

    def _tree(self, sections: Any, flat: FlatBuffer) -> Any:
        """Return the pytree of arrays that sections hold, while traced."""
        leaves = []
        for parameter, (section, start, stop) in zip(self.parameters, flat.places, strict=True):
            part = sections[section][start:stop]
            if jnp.issubdtype(parameter.dtype, jnp.complexfloating):
                pairs = part.reshape(-1, 2)
                part = jax.lax.complex(pairs[:, 0], pairs[:, 1])
            leaves.append(part.reshape(parameter.shape))
        return jax.tree.unflatten(self._structure, leaves)

    def read(self) -> None:
        for place, leaf in zip(self.values.arrays, jax.tree.leaves(self._parameters), strict=True):
            np.copyto(place, np.asarray(leaf))

    def write(self) -> None:
        self._parameters = jax.block_until_ready(self._whole(self.values.sections))

    # ---- state ----

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for leaf in jax.tree.leaves(self._parameters):
            digest.update(leaf_to_bytes(leaf).data)
        return digest.hexdigest()

    def settings(self) -> dict[str, str]:
        lowered = self._stepped.lower(self._parameters, self._state, self.gradients.sections)
        text = lowered.as_text()  # which has the optimizer's settings as constants
        return {"the compiled update": hashlib.sha256(text.encode()).hexdigest()[:16]}

    def state(self) -> bytes:
        file = io.BytesIO()
        leaves = jax.tree.leaves((self._parameters, self._state))
        np.savez(file, *(leaf_to_bytes(leaf) for leaf in leaves))
        return file.getvalue()

    def load(self, state: bytes) -> None:
        like, structure = jax.tree.flatten((self._parameters, self._state))
        with np.load(io.BytesIO(state)) as arrays:
            if len(arrays.files) != len(like):
                raise ValueError(
                    f"trainer: the saved state must have {len(like)} arrays for this model and "
                    f"this optimizer, got {len(arrays.files)}. Use the saved model and optimizer."
                )
            leaves = [
                leaf_from_bytes(arrays[name], leaf)
                for name, leaf in zip(arrays.files, like, strict=True)
            ]
        self._parameters, self._state = jax.tree.unflatten(structure, leaves)


def _copied(tree: Any) -> Any:
    """Copy a tree, so that its arrays do not share memory with the original."""
    return jax.tree.map(
        lambda leaf: as_array(leaf) if isinstance(leaf, np.ndarray) else jnp.array(leaf, copy=True),
        tree,
    )
