"""A replica of a pytree of parameters and an optax transformation."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpigrad.autodiff.transforms import grad
from mpigrad.checkpoint.leaves import dtype_of, kind_of, local_shape, to_host, to_leaf
from mpigrad.operations.jit import jit
from mpigrad.operations.local_programs import as_array
from mpigrad.training.flat_buffer import FlatBuffer, Parameter
from mpigrad.training.replica import Batch, Replica

__all__ = ["JaxReplica"]


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
            digest.update(to_host(leaf).reshape(-1).view(np.uint8).data)
        return digest.hexdigest()

    def settings(self) -> dict[str, str]:
        lowered = self._stepped.lower(self._parameters, self._state, self.gradients.sections)
        text = lowered.as_text()  # which has the optimizer's settings as constants
        return {"the compiled update": hashlib.sha256(text.encode()).hexdigest()[:16]}

    def state(self) -> bytes:
        file = io.BytesIO()
        leaves = jax.tree.leaves((self._parameters, self._state))
        np.savez(file, *(to_host(leaf).reshape(-1).view(np.uint8) for leaf in leaves))
        return file.getvalue()

    def load(self, state: bytes) -> None:
        like, structure = jax.tree.flatten((self._parameters, self._state))
        with np.load(io.BytesIO(state)) as found:
            if len(found.files) != len(like):
                raise ValueError(
                    f"trainer: the saved state must have {len(like)} arrays for this model and "
                    f"this optimizer, got {len(found.files)}. Use the saved model and optimizer."
                )
            leaves = [
                to_leaf(found[name].view(dtype_of(kind_of(leaf))).reshape(local_shape(leaf)), leaf)
                for name, leaf in zip(found.files, like, strict=True)
            ]
        self._parameters, self._state = jax.tree.unflatten(structure, leaves)


def _copied(tree: Any) -> Any:
    """Copy a tree, so that its arrays do not share memory with the original."""
    return jax.tree.map(
        lambda leaf: as_array(leaf) if isinstance(leaf, np.ndarray) else jnp.array(leaf, copy=True),
        tree,
    )
