"""A training that resumes from a save is the same, bit for bit."""

from __future__ import annotations

import dataclasses
import pathlib

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from models import Linear, X, Y, assert_close, batches

from mpigrad.checkpoint import Checkpoint
from mpigrad.communicator import Communicator
from mpigrad.training import Batches, LocalSGD, Parameter, Synchronous, Trainer, trainer


@pytest.fixture
def directory(tmp_path: pathlib.Path, comm: Communicator) -> pathlib.Path:
    """An empty directory, the same on every rank."""
    return comm.mpi.bcast(tmp_path)


def same(a: Trainer, b: Trainer) -> bool:
    """Assert that two trainings have the same parameters and losses, bit for bit."""
    bits = [[array.tobytes() for array in training.model] for training in (a, b)]
    losses = [[(r.step, r.loss) for r in training.history.records] for training in (a, b)]
    return bits[0] == bits[1] and losses[0] == losses[1]


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("strategy", [Synchronous(), LocalSGD(3)], ids=["synchronous", "local"])
def test_a_resumed_training_is_the_same(comm, directory, strategy):
    whole, first = trainer(Linear(), strategy=strategy), trainer(Linear(), strategy=strategy)
    whole.run(batches(), steps=12)
    first.run(batches(), steps=6)
    first.save(directory)
    again = trainer(Linear(seed=8), strategy=strategy)
    assert not again.resume(directory / "none") and again.resume(directory)
    assert len(again.history.records) == len(first.history.records)
    assert again.run(batches(), steps=12).records[-1].step == 12
    assert same(again, whole)
    # A run with a checkpoint saves at its end, and goes on from there.
    checkpoint = Checkpoint(directory / "own", every=3, minutes=None, signals=False, resume=True)
    for steps in (3, 9, 12):
        part = trainer(Linear(), strategy=strategy)
        part.run(batches(), steps=steps, checkpoint=checkpoint)
        assert part.history.records[-1].step == steps
    assert same(part, whole)
    other = LocalSGD(2) if isinstance(strategy, Synchronous) else Synchronous()
    with pytest.raises(ValueError, match=f"by {type(strategy).__name__}, but this trainer"):
        trainer(Linear(), strategy=other).resume(directory)
    larger = trainer(Linear(), strategy=strategy)
    larger.replica.parameters = (larger.replica.parameters[0], Parameter("b", (4,), "float32"))
    with pytest.raises(ValueError, match=r"b \(float32 \(3,\)\), this model has b \(float32 \(4,"):
        larger.resume(directory)


@pytest.mark.ranks(1, 2)
def test_a_trainer_keeps_its_own_newer_state(comm, directory, monkeypatch):
    checkpoint = Checkpoint(directory / "one", signals=False)
    training = trainer(Linear())
    training.run(batches(), steps=3, checkpoint=checkpoint)
    training.run(batches(), steps=5)
    before = training.model
    assert len(training.run([], checkpoint=checkpoint).records) == 5
    assert_close(training.model, before, 0)

    def failing():
        yield from [(X[:4], Y[:4])] * 2
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        training.run(failing(), checkpoint=checkpoint)
    assert len(training.run([], checkpoint=checkpoint).records) == 7
    training.save(directory / "two")
    training.step(X[:4], Y[:4])
    two = Checkpoint(directory / "two", signals=False)
    assert len(training.run([], checkpoint=two).records) == 8
    other = trainer(Linear(seed=1))
    named = r"one has an earlier run with the last step 7 of 20\d\d-.*\. Use resume=True to"
    with pytest.raises(FileExistsError, match=named):
        other.run([], checkpoint=checkpoint)
    with pytest.raises(FileExistsError, match=r"step 8 .* Use trainer.resume\(directory\) to"):
        other.save(directory / "two")
    checkpoint, two = (dataclasses.replace(c, resume=True) for c in (checkpoint, two))
    assert len(other.run([], checkpoint=checkpoint).records) == 7
    assert len(other.run([], checkpoint=two).records) == 8
    new = trainer(Linear(seed=2))
    replacing = dataclasses.replace(two, resume=False, overwrite=True)
    for _ in range(2):  # the second time, its own save is kept
        assert new.run([], checkpoint=replacing).records == ()
    new.save(directory / "one", overwrite=True)
    assert trainer(Linear()).resume(directory / "one")
    comm.mpi.Barrier()
    assert len(list((directory / "one").glob("save-*"))) == 1

    def state(self):
        raise PermissionError("state")

    with monkeypatch.context() as patch:  # what rank 0 alone is asked for
        if comm.rank == 0:
            patch.setattr(Linear, "state", state)
        with pytest.raises(PermissionError, match="state"):
            training.save(directory)
        with pytest.raises(PermissionError, match="state"):
            trainer(Linear())


@pytest.mark.ranks(3)
def test_it_resumes_on_another_count_of_ranks(comm, directory):
    pair = comm.split(0 if comm.rank < 2 else None)
    whole = trainer(Linear())
    whole.run(batches(), steps=9)
    if pair:
        first = trainer(Linear(), comm=pair)
        first.run(batches(), steps=5)
        first.save(directory)
    comm.mpi.Barrier()
    again = trainer(Linear(seed=4))
    assert again.resume(directory)
    again.run(batches(), steps=9)
    assert_close(again.model, whole.model)


@pytest.mark.ranks(2)
def test_a_pytree_with_the_state_of_its_optimizer_comes_back(comm, directory):
    def loss(p, x, y):
        return jnp.mean((x @ p["w"] - y) ** 2) + jnp.mean(p["h"].astype(float) ** 2)

    def begun():
        parameters = {"w": jnp.ones((5, 3)), "h": jnp.ones(4, "bfloat16")}
        return trainer(parameters, optax.adam(optax.exponential_decay(0.1, 4, 0.5)), loss)

    def taken():
        return Batches(36, 12, take=lambda i: (X[i], Y[i]))

    whole, first, again = begun(), begun(), begun()
    whole.run(taken(), steps=6)
    first.run(taken(), steps=4)
    first.save(directory)
    again.resume(directory)
    again.run(taken(), steps=6)
    for name in ("w", "h"):
        a, b = again.model[name], whole.model[name]
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    assert not np.array_equal(first.model["w"], whole.model["w"])
