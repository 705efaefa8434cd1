"""Find equal rows of integers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["group_rows", "repeated_rows", "row_groups", "unique_numbers"]

_LARGEST = 2**63 - 1
_SCRAMBLE = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9  # odd factors, as of SplitMix64


def group_rows(rows: NDArray[np.integer], n: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Group equal rows of integers from 0 to n - 1.

    Returns
    -------
    order, starts
        The rows `order[starts[i]:starts[i + 1]]` are equal. `starts` has one entry more than there
        are groups.
    """
    # As many columns as fit are packed into one key, because one sort is faster than several.
    keys: list[NDArray[np.int64]] = []
    room = 0
    for column in rows.T:
        if room * n > _LARGEST or not keys:
            keys.append(column.astype(np.int64))
            room = n
        else:
            keys[-1] = keys[-1] * n + column
            room *= n
    order = np.argsort(keys[0]) if len(keys) == 1 else np.lexsort(keys[::-1])
    changes = np.zeros(max(len(rows) - 1, 0), bool)
    for key in keys:
        ordered = key[order]
        changes |= ordered[1:] != ordered[:-1]
    ends = [len(rows)] if len(rows) else []
    return order, np.concatenate([[0], np.flatnonzero(changes) + 1, ends]).astype(np.intp)


def row_groups(rows: NDArray[np.integer], n: int) -> tuple[NDArray[np.intp], int]:
    """Return the group of each row, and the number of groups of equal rows."""
    order, starts = group_rows(rows, n)
    group = np.empty(len(rows), np.intp)
    group[order] = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    return group, len(starts) - 1


def repeated_rows(rows: NDArray[np.integer]) -> NDArray[np.intp]:
    """Return the indices of rows that have the same entries as another row, in any order."""
    # Rows of different entries rarely have the same sum of scrambled entries.
    keys = rows.astype(np.uint64)
    for factor, shift in zip(_SCRAMBLE, (29, 32), strict=True):
        keys *= np.uint64(factor)
        keys ^= keys >> np.uint64(shift)
    sums = keys.sum(axis=1)
    ordered = np.sort(sums)
    suspects = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    near = np.flatnonzero(np.isin(sums, suspects)) if len(suspects) else np.zeros(0, np.intp)
    if not len(near):
        return near
    group, n_groups = row_groups(np.sort(rows[near], axis=1), int(rows.max()) + 1)
    return near[np.bincount(group, minlength=n_groups)[group] > 1]


def unique_numbers(
    numbers: NDArray[np.int64], n: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the sorted different numbers, and the place of each given number among them.

    Parameters
    ----------
    numbers
        Integers from 0 to n - 1, of any shape.
    """
    if n > 16 * numbers.size:
        unique, inverse = np.unique(numbers, return_inverse=True)
        return unique, inverse.reshape(numbers.shape)
    used = np.zeros(n, bool)
    used[numbers] = True
    unique = np.flatnonzero(used)
    place = np.empty(n, np.int64)
    place[unique] = np.arange(len(unique))
    return unique, place[numbers]
