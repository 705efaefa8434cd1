"""A neural network of the position, whose values are zero at first."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

__all__ = ["Weights", "initial_weights", "network"]

Weights = dict[str, list[Float[Array, "..."]]]
_SIZES = (64, 64, 64)
_WAVES = 32  # sines and cosines of the position


def initial_weights(key: PRNGKeyArray, outputs: int, fineness: float, axes: int = 2) -> Weights:
    """Draw weights from N(0, 1/n_in). Biases and the last layer are zero, and so is the network.

    The inputs of the first layer are cos and sin of 32 random waves of the position. Their wave
    numbers, from N(0, fineness^2) half waves across the model, are weights too (Fourier features:
    Tancik et al., "Fourier features let networks learn high frequency functions in low dimensional
    domains").
    """
    waves, *keys = jax.random.split(key, len(_SIZES) + 1)
    widths = (2 * _WAVES, *_SIZES)
    layers = [
        jax.random.normal(k, (n_out, n_in), jnp.float64) / n_in**0.5
        for k, n_in, n_out in zip(keys, widths[:-1], widths[1:], strict=True)
    ]
    return {
        "waves": [fineness * jax.random.normal(waves, (_WAVES, axes), jnp.float64)],
        "weights": [*layers, jnp.zeros((outputs, widths[-1]))],
        "biases": [jnp.zeros(n) for n in (*_SIZES, outputs)],
    }


def network(weights: Weights, *position: Float[Array, "*n"]) -> Float[Array, "outputs ..."]:
    """Return the values at points, each axis in [-1, 1]: fully connected layers with tanh."""
    phase = jnp.pi / 2 * weights["waves"][0] @ jnp.stack([jnp.ravel(axis) for axis in position])
    z = jnp.concatenate([jnp.cos(phase), jnp.sin(phase)])
    layers = list(zip(weights["weights"], weights["biases"], strict=True))
    for weight, bias in layers[:-1]:
        z = jnp.tanh(weight @ z + bias[:, None])
    weight, bias = layers[-1]
    z = weight @ z + bias[:, None]
    return z.reshape(len(z), *jnp.shape(position[0]))
