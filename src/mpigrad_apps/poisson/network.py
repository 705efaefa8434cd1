"""A neural network for a positive field on the unit square, saved to and loaded from files."""

from __future__ import annotations

import functools
import json
import os
from typing import Any, BinaryIO

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from mpigrad import loops
from mpigrad.runtime import write_atomically

__all__ = ["Network", "load_network", "save_network"]

_FORMAT = "mpigrad network 1"
# The values of all layers for a block of points, which the gradient needs, take half of a small
# second-level cache. The order of the gradient's sums must not depend on the processor.
_BLOCK_BYTES = 256 * 1024


class Network(eqx.Module):
    """A positive field kappa(x, y) = scale |N(x, y) + 5|, with N a fully connected tanh network.

    This is the network of the ADCME paper: sizes (2, 20, 20, 20, 1), weights drawn from
    N(0, 1/n_in), and zero biases. Its inputs are 2x - 1 and 2y - 1 instead of x and y. With inputs
    around zero, the result of the training depends less on the first weights.

    Parameters
    ----------
    key
        JAX random key of the first weights.
    sizes
        Width of each layer. The first is 2 and the last is 1.
    scale
        Unit of kappa. It is not trained.

    Raises
    ------
    ValueError
        If `sizes` or `scale` are not valid.

    Examples
    --------
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from mpigrad_apps.poisson import Network
    >>> with jax.enable_x64(True):
    ...     network = Network(jax.random.key(0))
    ...     kappa = network(jnp.array([0.2, 0.7]), jnp.array([0.5, 0.5]))
    >>> network.sizes, kappa.shape
    ((2, 20, 20, 20, 1), (2,))
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
            raise ValueError(f"Network: sizes must begin with 2 and end with 1, got {sizes}.")
        if not scale > 0:
            raise ValueError(f"Network: scale must be positive, got {scale}.")
        self.weights = _first_weights(key, tuple(sizes))
        self.biases = tuple(jnp.asarray(np.zeros(n)) for n in sizes[1:])
        self.scale = float(scale)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Width of each layer."""
        return (2, *(bias.shape[0] for bias in self.biases))

    def __call__(self, x: Float[Array, "*n"], y: Float[Array, "*n"]) -> Float[Array, "*n"]:
        """Compute the values at the points (x, y). The two arrays and the result have one shape."""
        values = loops.map_blocks(
            self._at_points,
            jnp.ravel(x),
            jnp.ravel(y),
            size=max(_BLOCK_BYTES // (8 * sum(self.sizes)), 1),
        )
        return values.reshape(jnp.shape(x))

    def _at_points(self, x: Float[Array, " m"], y: Float[Array, " m"]) -> Float[Array, " m"]:
        z = jnp.stack([2 * x - 1, 2 * y - 1])
        for weight, bias in zip(self.weights[:-1], self.biases[:-1], strict=True):
            z = jnp.tanh(_product(weight, z) + bias[:, None])
        z = self.weights[-1] @ z + self.biases[-1][:, None]
        return self.scale * jnp.abs(z[0] + 5)


@jax.custom_jvp
def _product(weight: Float[Array, "k l"], z: Float[Array, "l m"]) -> Float[Array, "k m"]:
    return weight @ z


@_product.defjvp
def _product_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    """Let the gradient multiply by a transposed copy of the weights.

    XLA's product with weights that are stored the other way takes twice the time.
    """
    (weight, z), (weight_dot, z_dot) = primals, tangents
    copy = jax.lax.optimization_barrier(weight.T)
    return weight @ z, weight_dot @ z + copy.T @ z_dot


@functools.partial(jax.jit, static_argnums=1)
def _first_weights(key: PRNGKeyArray, sizes: tuple[int, ...]) -> tuple[jax.Array, ...]:
    keys = jax.random.split(key, len(sizes) - 1)
    shapes = list(zip(sizes[1:], sizes[:-1], strict=True))
    # One draw for all layers compiles in a fraction of the time. A longer draw begins with the
    # values of a shorter one.
    most = max(n_out * n_in for n_out, n_in in shapes)
    drawn = jax.vmap(lambda k: jax.random.normal(k, (most,), jnp.float64))(keys)
    return tuple(
        values[: n_out * n_in].reshape(n_out, n_in) / n_in**0.5
        for values, (n_out, n_in) in zip(drawn, shapes, strict=True)
    )


def save_network(path: str | os.PathLike[str], network: Network) -> None:
    """Write a network to a file: one line of JSON, then the arrays as equinox writes them.

    Examples
    --------
    >>> import jax
    >>> from mpigrad_apps.poisson import Network, load_network, save_network
    >>> with jax.enable_x64(True):
    ...     save_network("network.eqx", Network(jax.random.key(0)))
    >>> load_network("network.eqx").sizes
    (2, 20, 20, 20, 1)
    """

    def write(file: BinaryIO) -> None:
        header = {"format": _FORMAT, "sizes": network.sizes, "scale": network.scale}
        file.write(json.dumps(header).encode() + b"\n")
        eqx.tree_serialise_leaves(file, network)

    write_atomically(path, write)


def load_network(path: str | os.PathLike[str]) -> Network:
    """Load a network that `save_network` wrote. Call the network with coordinates x and y.

    Raises
    ------
    ValueError
        If the file does not contain a network, or is damaged.
    """
    with jax.enable_x64(True), open(path, "rb") as file:
        try:
            header = json.loads(file.readline())
            if header["format"] != _FORMAT:
                raise ValueError(f"expected the format {_FORMAT!r}, got {header['format']!r}")
            like = Network(jax.random.key(0), tuple(header["sizes"]), header["scale"])
            return eqx.tree_deserialise_leaves(file, like)
        except Exception as error:  # JSON, equinox and NumPy each have errors of their own
            raise ValueError(
                f"load_network: {path} is not a network written by mpigrad: {error}."
            ) from error
