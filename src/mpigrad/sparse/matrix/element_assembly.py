"""Entries of element matrices: their pattern without a pair of indices for each contribution."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from mpigrad.operations.local_programs import as_array
from mpigrad.sparse.matrix.assembly import Assembly
from mpigrad.sparse.matrix.multilinear import TrilinearContraction, add_up, multiply_patterns

__all__ = ["ElementAssembly", "element_entries"]


def element_entries(unknowns: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return a rank's entries, each once, and the entry of each contribution.

    Parameters
    ----------
    unknowns
        The global index of each unknown of each element, shape (n_elements, k). An unknown may
        occur twice in an element.

    Returns
    -------
    The global rows and columns of the entries, in row order, and for each contribution of the
    element matrices, shape (n_elements, k, k), the entry to which it is added.
    """
    n, k = unknowns.shape
    numbers, local = np.unique(unknowns, return_inverse=True)
    local = local.reshape(n, k)
    order = np.argsort(local, axis=1, kind="stable")
    local = np.take_along_axis(local, order, 1)
    # The pattern is that of a product: (unknowns x elements) times (elements x unknowns).
    by_unknown = np.argsort(local, axis=None, kind="stable")
    starts = np.concatenate([[0], np.cumsum(np.bincount(local.ravel(), minlength=len(numbers)))])
    elements = np.arange(n + 1) * k
    row_starts, columns, target = multiply_patterns(
        starts, by_unknown // k, elements, local.ravel()
    )
    place = np.empty((n * k, k), np.int32)
    place[by_unknown] = target.reshape(-1, k)
    back = np.argsort(order, axis=1)
    place = np.take_along_axis(place.reshape(n, k, k), back[:, :, None], 1)
    place = np.take_along_axis(place, back[:, None, :], 2)
    rows = np.repeat(numbers, np.diff(row_starts))
    return rows, numbers[columns], place


class ElementAssembly:
    """The sum of element matrices (n_elements, k, k) at each stored entry of a pattern.

    This rank's contributions to an entry are added up first, in the order of the elements. Then one
    sum goes to the rank that owns the row, as in `Assembly`.

    Parameters
    ----------
    place, n_entries
        See `element_entries`.
    assembly
        The assembly of these entries, or None if this rank owns all of their rows.
    """

    def __init__(self, place: np.ndarray, n_entries: int, assembly: Assembly | None, rank: int):
        self.shape, self.rank, self.assembly = place.shape, rank, assembly
        self._selection = TrilinearContraction.selection(place.ravel(), n_entries)

    def __call__(self, values: Any) -> jax.Array:
        values = as_array(values)
        flat = (int(np.prod(self.shape)),)
        if values.shape not in (self.shape, flat):
            raise ValueError(
                f"pattern.assemble: values have shape {values.shape} on rank {self.rank}, which "
                f"gave the pattern {self.shape[0]} elements of {self.shape[1]} unknowns. Give "
                f"shape {self.shape}."
            )
        sums = add_up(self._selection, values, ())
        return sums if self.assembly is None else self.assembly(sums)
