"""Conversion between a pytree of real arrays and the vector that serial optimizers take."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

__all__ = ["Flattening"]


class Flattening:
    """Convert pytrees of the structure of `example` to vectors of float64, and back.

    Parameters
    ----------
    example
        A pytree of real floating-point arrays.

    Attributes
    ----------
    size
        Length of the vector.
    signature
        Path, shape and dtype of each leaf.
    """

    def __init__(self, example: Any) -> None:
        leaves, self._structure = jax.tree.flatten(example)
        paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(example)]
        self._shapes = [np.shape(leaf) for leaf in leaves]
        self._dtypes = [jax.dtypes.canonicalize_dtype(jax.numpy.result_type(x)) for x in leaves]
        self.size = sum(math.prod(shape) for shape in self._shapes)
        self.signature = [
            (path, shape, str(dtype))
            for path, shape, dtype in zip(paths, self._shapes, self._dtypes, strict=True)
        ]
        for path, _, dtype in self.signature:
            if not jax.numpy.issubdtype(dtype, jax.numpy.floating):
                raise TypeError(
                    f"root_driven: x0{path} has dtype {dtype}, expected real floating-point "
                    "arrays. Convert integers to floats, and give a complex array as its real and "
                    "imaginary parts."
                )
        if not self.size:
            raise ValueError(
                "root_driven: expected at least one unknown, got x0 without elements. Add one."
            )

    def flat(self, tree: Any, name: str = "the point") -> NDArray[np.float64]:
        """Return the vector of a pytree of the structure of the example, as a new array."""
        leaves, structure = jax.tree.flatten(tree)
        if structure != self._structure or [np.shape(x) for x in leaves] != self._shapes:
            raise ValueError(
                f"root_driven: {name} has another structure than x0 (of {self.size} elements):\n"
                f"  x0: {self._structure} with shapes {self._shapes}\n"
                f"  {name}: {structure} with shapes {[np.shape(x) for x in leaves]}\n"
                "Give a pytree of the structure of x0, or its vector."
            )
        return np.concatenate([np.asarray(x, np.float64).ravel() for x in leaves])

    def tree(self, flat: NDArray[np.float64]) -> Any:
        """Return the pytree of a vector: NumPy arrays with the example's shapes and dtypes."""
        ends = np.cumsum([math.prod(shape) for shape in self._shapes])[:-1]
        parts = zip(np.split(flat, ends), self._shapes, self._dtypes, strict=True)
        return jax.tree.unflatten(
            self._structure, [part.reshape(shape).astype(dtype) for part, shape, dtype in parts]
        )

    def shapes(self) -> Any:
        """Return the pytree of `jax.ShapeDtypeStruct`."""
        kinds = zip(self._shapes, self._dtypes, strict=True)
        return jax.tree.unflatten(
            self._structure, [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in kinds]
        )
