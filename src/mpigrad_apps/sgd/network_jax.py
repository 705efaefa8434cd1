"""The network that reads digits, in JAX."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Float32, Int

__all__ = ["Network", "accuracy", "loss"]


class Network(eqx.Module):
    """Two convolutions of 3 x 3 pixels, each with max pooling of 2 x 2, and two dense layers."""

    first: eqx.nn.Conv2d
    second: eqx.nn.Conv2d
    hidden: eqx.nn.Linear
    last: eqx.nn.Linear

    def __init__(self, seed: int) -> None:
        keys = jax.random.split(jax.random.key(seed), 4)
        self.first = eqx.nn.Conv2d(1, 16, 3, padding=1, dtype=jnp.float32, key=keys[0])
        self.second = eqx.nn.Conv2d(16, 32, 3, padding=1, dtype=jnp.float32, key=keys[1])
        self.hidden = eqx.nn.Linear(128, 64, dtype=jnp.float32, key=keys[2])
        self.last = eqx.nn.Linear(64, 10, dtype=jnp.float32, key=keys[3])

    def __call__(self, picture: Float32[Array, "1 8 8"]) -> Float32[Array, " 10"]:
        """Compute the logits of the ten digits."""
        x = _largest(jax.nn.relu(self.first(picture)))
        x = _largest(jax.nn.relu(self.second(x)))
        return self.last(jax.nn.relu(self.hidden(x.ravel())))


def _largest(x: Float32[Array, "channels ny nx"]) -> Float32[Array, "channels hy hx"]:
    channels, ny, nx = x.shape
    return jnp.max(x.reshape(channels, ny // 2, 2, nx // 2, 2), axis=(2, 4))


def loss(
    network: Network, pictures: Float32[Array, "samples 1 8 8"], digits: Int[Array, " samples"]
) -> Float[Array, ""]:
    """Compute the mean cross entropy."""
    logits = jax.vmap(network)(pictures)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, digits))


def accuracy(
    network: Network, pictures: Float32[Array, "samples 1 8 8"], digits: Int[Array, " samples"]
) -> Float[Array, ""]:
    """Compute the fraction of digits that the network recognizes."""
    logits = jax.vmap(network)(pictures)
    return jnp.mean(jnp.argmax(logits, axis=1) == digits, dtype=logits.dtype)
