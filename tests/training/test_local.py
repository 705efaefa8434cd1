"""Local SGD: separate steps, and means of parameters weighted by samples."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from models import Linear, X, Y, assert_close, batches

from mpigrad.training import LocalSGD, StepError, mean, trainer


class Plain(Linear):
    momentum = 0.0


@pytest.mark.ranks(1, 2, 3, 4)
def test_it_is_the_mean_of_separate_trainings(comm):
    # Rank r has r more batches than rank 0, and each batch has another size.
    mine = [(X[r : r + 3 + comm.rank], Y[r : r + 3 + comm.rank]) for r in range(4 + comm.rank)]
    training = trainer(Linear(), strategy=LocalSGD(3))
    history = training.run(mine)
    replicas = [Linear() for _ in range(comm.size)]
    steps, step = [], 0
    while step < 4 + comm.size - 1:
        weights = []
        for rank, replica in enumerate(replicas):
            seen = range(step, min(step + 3, 4 + rank))
            for r in seen:
                replica.gradient((X[r : r + 3 + rank], Y[r : r + 3 + rank]), 1.0)
                replica.update()
            weights.append(len(seen) * (3 + rank))
        for index in (0, 1):
            total = sum(w * r.arrays[index] for w, r in zip(weights, replicas, strict=True))
            for replica in replicas:
                replica.arrays[index] = (total / sum(weights)).astype(total.dtype)
        step = min(step + 3, 4 + comm.size - 1)
        steps.append((step, sum(weights)))
    assert_close(training.model, replicas[0].arrays)
    assert [(r.step, r.samples) for r in history.records] == steps


@pytest.mark.ranks(1, 2, 3)
def test_with_one_step_it_is_synchronous_for_plain_sgd(comm):
    local, whole = trainer(Plain(), strategy=LocalSGD(1)), trainer(Plain())
    local.run(batches(), steps=8)
    whole.run(batches(), steps=8)
    assert_close(local.model, whole.model)
    losses = [[r.loss for r in t.history.records] for t in (local, whole)]
    np.testing.assert_allclose(*losses, rtol=1e-6)


@pytest.mark.ranks(1, 2)
def test_step_by_step_and_failures(comm, tmp_path):
    whole, training = (trainer(Linear(), strategy=LocalSGD(3)) for _ in range(2))
    whole.run(batches(), steps=6)
    for _, batch in zip(range(6), batches(shard=training.shard), strict=False):
        record = training.step(*batch)
        if record.step % 3:
            with pytest.raises(ValueError, match="a save needs the mean"):
                training.save(comm.mpi.bcast(tmp_path))
    assert_close(training.model, whole.model, 0)
    taken = [[(r.step, r.samples, r.loss) for r in t.history.records] for t in (training, whole)]
    assert taken[0] == taken[1]  # of means: no rank's own steps
    training.step(X[:2], Y[:2])
    (rest,) = training.run([]).records[2:]
    assert (rest.step, rest.samples) == (7, 2 * comm.size)
    culprit = comm.size - 1

    def failing():
        yield X[:3], Y[:3]
        if comm.rank == culprit:
            raise KeyError("lost")
        yield X[3:6], Y[3:6]

    with pytest.raises(KeyError if comm.rank == culprit else StepError, match="lost"):
        training.run(failing())
    spoiled = trainer(Linear(), strategy=LocalSGD(2))
    spoiled.replica.arrays[1][2] *= np.nan if comm.rank == culprit else 1
    what = (
        rf"the parameters are not finite: b \(from rank {culprit}\)" if culprit else "the loss is"
    )
    with pytest.raises(FloatingPointError, match=f"after step 2 {what}"):
        spoiled.run([(X[:3], Y[:3])] * 2)


@pytest.mark.ranks(1, 3)
def test_means_of_metrics_are_weighted_and_equal_everywhere(comm):
    weight = float(comm.rank)
    if comm.size > 1:
        found = mean({"loss": np.nan if comm.rank == 0 else 10.0 * comm.rank, "n": 1}, weight)
        assert found == {"loss": (10 + 2 * 20) / 3, "n": 1.0}
        with pytest.raises(ValueError, match="rank 1"):
            mean([1.0] * (1 + (comm.rank == 1)), 1.0)
    with pytest.raises(ValueError, match="weights of all ranks are zero"):
        mean(1.0, 0)
    with pytest.raises(ValueError, match="not negative, got -1"):
        mean(1.0, -1 if comm.rank == comm.size - 1 else 1)


@pytest.mark.ranks(2)
def test_after_batches_without_samples_it_goes_on(comm):
    training, whole = (trainer(Linear(), strategy=LocalSGD(2)) for _ in range(2))
    with pytest.raises(ValueError, match="batches of all ranks are empty"):
        training.run([(X[:0], Y[:0])])
    training.run(batches(), steps=4)
    whole.run(batches(), steps=4)
    assert_close(training.model, whole.model, 0)


@pytest.mark.ranks(2)
def test_equal_replicas_have_their_own_mean_in_16_bits(comm):
    """Also with shares of 1/3 and 2/3, and if the sum over samples overflows float16."""
    start = {
        "a": jnp.array([70.0, 1e-3, 6e4], "float16"),
        "b": jnp.array([1.75, 1.0, 3.0], "bfloat16"),
    }
    training = trainer(
        start, optax.sgd(0.0), lambda p, x: jnp.mean(x * p["a"] * p["b"]), LocalSGD(1)
    )
    training.run([(np.ones((1000 * (1 + comm.rank), 3), np.float32),)])
    for name, array in start.items():
        np.testing.assert_array_equal(training.model[name], array)
    with pytest.raises(ValueError, match="got the compiled update"):
        trainer(start, optax.sgd(0.1 * (comm.rank + 1)), lambda p, x: p["a"].sum())


@pytest.mark.ranks(1, 2)
def test_from_a_save_it_begins_with_a_whole_interval(comm, tmp_path):
    """Also after a failure: a non-finite mean, or a step in the middle of an interval."""
    directory = comm.mpi.bcast(tmp_path)
    whole, training = (trainer(Linear(), strategy=LocalSGD(3)) for _ in range(2))
    whole.run(batches(), steps=6)
    training.run(batches(), steps=3)
    training.save(directory)

    def failing():
        yield X[:3], Y[:3]
        raise KeyError("lost")

    with pytest.raises(FloatingPointError, match="after step 6"):
        training.run([(X[:3] * np.nan, Y[:3])] * 3)
    with pytest.raises(KeyError, match="lost"):
        training.run(failing())
    assert training.resume(directory)
    training.run(batches(), steps=6)
    assert_close(training.model, whole.model, 0)
    assert [r.loss for r in training.history.records] == [r.loss for r in whole.history.records]
    with pytest.raises(FloatingPointError, match="after step 9"):
        training.run([(X[:3] * np.nan, Y[:3])] * 3)
    training.replica.load(Linear().state())  # after a load by hand there are no open steps
    assert np.isfinite(training.run([(X[:3], Y[:3])] * 3).records[-1].loss)
