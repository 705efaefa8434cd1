"""Handwritten digits: 1797 pictures of 8 x 8 pixels, a data set of scikit-learn.

Source: E. Alpaydin, C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning
Repository, 1998 (its test set).
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float32, Int64
from sklearn.datasets import load_digits

__all__ = ["read_digits"]

_HELD_OUT = 357  # a fifth, so that 45 batches of 32 are left
_SPLIT = 0  # seed: the same samples are held out in every run

Train = tuple[Float32[np.ndarray, "train 1 8 8"], Int64[np.ndarray, " train"]]
HeldOut = tuple[Float32[np.ndarray, "held_out 1 8 8"], Int64[np.ndarray, " held_out"]]


def read_digits() -> tuple[Train, HeldOut]:
    """Read the pictures, with grey values from -1 to 1, and their digits.

    Returns
    -------
    train, held_out
        Pairs of pictures (n, 1, 8, 8) and digits (n,), with n = 1440 and n = 357.

    Examples
    --------
    >>> from mpigrad_apps.sgd import read_digits
    >>> (pictures, digits), held_out = read_digits()
    >>> pictures.shape, digits.shape, len(held_out[0])
    ((1440, 1, 8, 8), (1440,), 357)
    """
    digits = load_digits()
    pictures = (digits.images[:, None] / 8 - 1).astype(np.float32)  # type: ignore[union-attr]
    labels = digits.target.astype(np.int64)  # type: ignore[union-attr]
    order = np.random.default_rng(_SPLIT).permutation(len(labels))
    test, train = order[:_HELD_OUT], order[_HELD_OUT:]
    return (pictures[train], labels[train]), (pictures[test], labels[test])
