"""Batches are the same global batches on any number of ranks, with every row once per epoch."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from mpigrad.training import Batches


@pytest.mark.ranks(1)
def test_parts_make_the_same_global_batches_on_any_number_of_ranks():
    whole = list(Batches(37, 8, seed=5, epochs=3))
    assert len(whole) == 15
    for count in (2, 3, 4, 11):  # of the last batch of an epoch, with 5 rows, some of 11 have none
        parts = [list(Batches(37, 8, seed=5, epochs=3, shard=(i, count))) for i in range(count)]
        for number, batch in enumerate(whole):
            together = np.concatenate([part[number] for part in parts])
            np.testing.assert_array_equal(together, batch)
    epochs = [np.concatenate(whole[5 * e : 5 * e + 5]) for e in range(3)]
    for rows in epochs:
        np.testing.assert_array_equal(np.sort(rows), np.arange(37))
    assert any(epochs[0] != epochs[1]) and any(epochs[1] != epochs[2])
    assert any(np.concatenate(list(Batches(37, 8, seed=6, epochs=1))) != epochs[0])
    plain = np.concatenate(list(Batches(37, 8, epochs=1, shuffle=False)))
    np.testing.assert_array_equal(plain, np.arange(37))
    assert not list(Batches(37, 8, shard=(0, 0)))  # a rank that takes none


@pytest.mark.ranks(1)
def test_iteration_goes_on_where_it_stopped():
    expected = list(Batches(37, 8, seed=5, epochs=3, take=lambda i: i * 2))
    first = Batches(37, 8, seed=5, epochs=3, take=lambda i: i * 2)
    got = list(itertools.islice(first, 7))
    assert first.left == 8 and (first.epoch, first.batch) == (1, 2)
    then = Batches(37, 8, seed=5, epochs=3, take=lambda i: i * 2)
    then.load(first.state())
    for a, b in zip(got + list(then), expected, strict=True):
        np.testing.assert_array_equal(a, b)
    assert then.left == 0 and not list(then)
    with pytest.raises(ValueError, match="seed=5, but these batches have seed=6"):
        Batches(37, 8, seed=6).load(first.state())


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rows": 0}, "rows must be positive, got 0"),
        ({"size": -1}, "size must be positive, got -1"),
        ({"seed": -1}, "seed must be in .*, got -1"),
        ({"epochs": -2}, "epochs must not be negative, got -2"),
        ({"shard": (2, 2)}, r"shard must be .*, got \(2, 2\)"),
    ],
)
def test_rejects_arguments_out_of_range(arguments, message):
    with pytest.raises(ValueError, match=message):
        Batches(**{"rows": 10, "size": 2, **arguments})
