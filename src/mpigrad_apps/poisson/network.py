"""A neural network for a positive field on the unit square, as a file that loads again."""

from __future__ import annotations

import functools
import json
import os
from typing import BinaryIO

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from mpigrad_apps.atomic_write import write_atomically

__all__ = ["Network", "load_network", "save_network"]

_FORMAT = "mpigrad network 1"


class Network(eqx.Module):
    """kappa(x, y) = scale |N(x, y) + 5|, N fully connected with tanh.

    The network of the ADCME paper: sizes (2, 20, 20, 20, 1), weights drawn from N(0, 1/n_in),
    biases zero. Its inputs are 2x - 1 and 2y - 1 rather than x and y: inputs around zero make the
    result of the training depend less on the first weights.

    Parameters
    ----------
    key
        JAX random key of the first weights.
    sizes
        Width of each layer, from 2 to 1.
    scale
        Unit of kappa; not trained.
    """

    weights: tuple[Float[Array, "_ _"], ...]
    biases: tuple[Float[Array, " _"], ...]
    scale: float = eqx.field(static=True)

    def __init__(
        self,
        key: PRNGKeyArray,
        sizes: tuple[int, ...] = (2, 20, 20, 20, 1),
        scale: float = 1.0,
    ) -> None:
        if len(sizes) < 2 or sizes[0] != 2 or sizes[-1] != 1 or min(sizes) < 1:
            raise ValueError(f"Network: sizes must lead from 2 to 1, not {sizes}")
        if not scale > 0:
            raise ValueError(f"Network: scale must be positive, not {scale}")
        self.weights = _first_weights(key, tuple(sizes))
        self.biases = tuple(jnp.zeros(n, jnp.float64) for n in sizes[1:])
        self.scale = float(scale)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Width of each layer."""
        return (2, *(bias.shape[0] for bias in self.biases))

    def __call__(self, x: Float[Array, "*n"], y: Float[Array, "*n"]) -> Float[Array, "*n"]:
        """Values at the points (x, y), arrays of one shape, which the result has too."""
        z = jnp.stack([2 * jnp.ravel(x) - 1, 2 * jnp.ravel(y) - 1])
        for weight, bias in zip(self.weights[:-1], self.biases[:-1], strict=True):
            z = jnp.tanh(weight @ z + bias[:, None])
        z = self.weights[-1] @ z + self.biases[-1][:, None]
        return self.scale * jnp.abs(z[0] + 5).reshape(jnp.shape(x))


@functools.partial(jax.jit, static_argnums=1)
def _first_weights(key: PRNGKeyArray, sizes: tuple[int, ...]) -> tuple[jax.Array, ...]:
    keys = jax.random.split(key, len(sizes) - 1)
    return tuple(
        jax.random.normal(k, (n_out, n_in), jnp.float64) / n_in**0.5
        for k, n_in, n_out in zip(keys, sizes[:-1], sizes[1:], strict=True)
    )


def save_network(path: str | os.PathLike[str], network: Network) -> None:
    """Write a network to a file: one line that describes it, then its arrays (equinox)."""

    def write(file: BinaryIO) -> None:
        header = {"format": _FORMAT, "sizes": network.sizes, "scale": network.scale}
        file.write(json.dumps(header).encode() + b"\n")
        eqx.tree_serialise_leaves(file, network)

    write_atomically(path, write)


def load_network(path: str | os.PathLike[str]) -> Network:
    """The network that `save_network` wrote; call it with coordinates x and y.

    Raises
    ------
    ValueError
        If the file is no such network, or is damaged.
    """
    with jax.enable_x64(True), open(path, "rb") as file:
        try:
            header = json.loads(file.readline())
            if header["format"] != _FORMAT:
                raise ValueError(f"its format is {header['format']!r}, not {_FORMAT!r}")
            like = Network(jax.random.key(0), tuple(header["sizes"]), header["scale"])
            return eqx.tree_deserialise_leaves(file, like)
        except Exception as error:  # JSON, equinox and NumPy each have errors of their own
            raise ValueError(f"{path} is not a network written by mpigrad: {error}") from error
