"""Synchronous training equals the training of one rank with the global batches."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from models import Linear, X, Y, assert_close, batches

import mpigrad
from mpigrad.training import Batches, ParameterServer, StepError, Synchronous, trainer

STEPS = 20


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize(
    "settings",
    [{}, {"overlap": False, "accumulate": 3}, {"clip": 0.3, "bucket_mib": 5e-5}],
    ids=["plain", "accumulated", "clipped"],
)
def test_it_is_the_training_of_one_rank(comm, capsys, settings):
    alone = Linear()
    losses = alone.train_alone(STEPS, clip=settings.get("clip"))
    replica = Linear(seed=comm.rank)  # they begin with rank 0's
    training = trainer(replica, strategy=Synchronous(**settings))
    said = capsys.readouterr().err
    assert ("differed from rank 0's" in said) == (comm.rank == 0 and comm.size > 1)
    history = training.run(batches(), steps=STEPS)
    # Norms, and with them clipped gradients, are of float32 here, as one parameter is.
    assert_close(training.model, alone.model, 1e-8 if "clip" in settings else 1e-12)
    assert [r.step for r in history.records] == list(range(1, STEPS + 1))
    np.testing.assert_allclose([r.loss for r in history.records], losses, rtol=1e-6)
    assert [r.samples for r in history.records[:3]] == [13, 13, 11]
    names = [span.name for span in training.spans]
    assert names[0] == "gradient" and "bucket 0" in names and names[-1] == "update"
    bits = comm.mpi.allgather([array.tobytes() for array in training.model])
    assert all(other == bits[0] for other in bits)


@pytest.mark.ranks(2, 3)
@pytest.mark.thin(3)  # of two ranks, one would have all samples
def test_ranks_may_have_no_samples_or_fewer_batches(comm):
    # Rank 0 has batches of different sizes, the last rank none at all, the others one of 4 rows.
    sizes = {0: [5, 0, 3], comm.size - 1: []}.get(comm.rank, [4])
    mine = [(X[:n] + comm.rank, Y[:n]) for n in sizes]
    everybody = comm.mpi.allgather(mine)
    whole = [
        tuple(np.concatenate([own[i][k] for own in everybody if i < len(own)]) for k in (0, 1))
        for i in range(3)
    ]
    training, alone = trainer(Linear()), Linear()
    if comm.size == 2:  # the second step has no samples at all
        with pytest.raises(ValueError, match="all ranks are empty"):
            training.run(mine)
        return
    whole[1] = everybody[0][2]
    with pytest.raises(ValueError, match="all ranks are empty"):
        training.run(mine)
    alone.gradient(whole[0], 1.0)
    alone.update()
    assert_close(training.model, alone.model)
    training.run([m for m in mine[1:] if len(m[0])])  # and it can go on
    alone.gradient(whole[1], 1.0)
    alone.update()
    assert_close(training.model, alone.model)


@pytest.mark.ranks(1, 2, 3)
def test_a_failure_is_raised_by_all_ranks_and_changes_nothing(comm, monkeypatch):
    culprit = comm.size - 1
    training = trainer(Linear())
    before = training.model

    def failing(*_: Any, **__: Any) -> float:
        raise KeyError("lost")

    def spoil() -> Any:
        yield from [] if comm.rank == culprit else [(X[:3], Y[:3])]
        raise OSError("disk") if comm.rank == culprit else RuntimeError("not reached")

    expected = KeyError if comm.rank == culprit else StepError
    with monkeypatch.context() as patch:
        if comm.rank == culprit:
            patch.setattr(training.replica, "gradient", failing)
        with pytest.raises(expected, match="lost") as caught:
            training.step(X[:4], Y[:4])
    if comm.rank != culprit:
        assert f"rank {culprit} of {comm.size} has failed: KeyError: 'lost'" in str(caught.value)
        assert "in failing" in str(caught.value)  # its traceback
    with pytest.raises(OSError if comm.rank == culprit else StepError, match="disk"):
        training.run(spoil())
    with pytest.raises(
        ValueError if comm.rank == culprit else StepError, match="weight of a batch"
    ):
        training._run.replica._weight = lambda *_: -1 if comm.rank == culprit else 4
        training.step(X[:4], Y[:4])
    training._run.replica._weight = None

    def callback(record: Any) -> None:
        if comm.rank == culprit:
            raise LookupError("told")

    assert_close(training.model, before, 0)
    with pytest.raises(LookupError if comm.rank == culprit else StepError, match="told"):
        training.run(batches(), steps=3, callback=callback)
    assert training.history.records[-1].step == 1
    with pytest.raises(FloatingPointError, match=rf"step 2 is not made.*w \(from rank {culprit}\)"):
        training.step(X[:4] * (np.nan if comm.rank == culprit else 1), Y[:4])
    assert training.run(batches(), steps=3).records[-1].step == 3  # it goes on
    other = Linear()
    if comm.rank == culprit and culprit > 0:
        other.parameters = (other.parameters[0],)
        with pytest.raises(ValueError, match=f"rank 0 has b .*rank {culprit} does not"):
            trainer(other)
    elif culprit > 0:
        with pytest.raises(ValueError, match=f"rank 0 has b .*rank {culprit} does not"):
            trainer(other)


@pytest.mark.ranks(1, 2)
def test_a_callback_ends_it_on_all_ranks(comm):
    training = trainer(Linear())
    ends = lambda record: comm.rank == comm.size - 1 and record.step == 4
    assert len(training.run(batches(), callback=ends).records) == 4
    assert len(training.run(batches(), steps=6).records) == 6
    with pytest.raises(ValueError, match=r"shard \(1, 9\)"):
        training.run(batches(shard=(1, 9)), steps=7)
    taken = batches()
    for strategy, samples in ((Synchronous(), [13, 13]), (ParameterServer(), [11, 13])):
        history = trainer(Linear(), strategy=strategy).run(taken, steps=2)  # in its own shards
        assert [r.samples for r in history.records] == samples
    training = trainer(Linear(), strategy=Synchronous(accumulate=2))
    with pytest.raises(ValueError, match=r"the length 2 of the samples, got shape \(3,\)"):
        training.step(X[:2], Y[:2], np.ones(3))
    with pytest.raises(TypeError, match=r"Write Synchronous\(\)"):
        trainer(Linear(), strategy=Synchronous)  # type: ignore[arg-type]


def network(dtype: str) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "in": jnp.asarray(rng.standard_normal((5, 8)) * 0.3, dtype),
        "bias": jnp.zeros(8, dtype),
        "out": [jnp.asarray(rng.standard_normal((8, 3)) * 0.3, dtype)],
    }


def loss(parameters: Any, x: Any, y: Any) -> Any:
    hidden = jnp.tanh(x @ parameters["in"] + parameters["bias"])
    return jnp.mean((hidden @ parameters["out"][0] - y) ** 2)


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.cases("float64-adam", reason="other tests of this file have momentum and float32")
@pytest.mark.parametrize(
    ("dtype", "optimizer"),
    [("float64", optax.adam(1e-2)), ("float32", optax.sgd(0.05, momentum=0.9))],
    ids=["float64-adam", "float32-momentum"],
)
def test_a_pytree_is_trained_as_by_optax_on_one_rank(comm, dtype, optimizer):
    def taken(**options: Any) -> Batches:
        x, y = X.astype(dtype), Y.astype(dtype)
        # Two sizes of parts, so that little is compiled.
        return Batches(36, 12 if comm.size < 4 else 14, take=lambda i: (x[i], y[i]), **options)

    training = trainer(network(dtype), optimizer, loss)
    history = training.run(taken(), steps=50)

    @jax.jit
    def step(parameters: Any, state: Any, *batch: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(parameters, *batch)
        updates, state = optimizer.update(gradient, state, parameters)
        return optax.apply_updates(parameters, updates), state, value

    parameters, losses = network(dtype), []
    state = optimizer.init(parameters)
    for _, batch in zip(range(50), taken(), strict=False):
        parameters, state, value = step(parameters, state, *batch)
        losses.append(value)
    bound = {"float64": 1e-12, "float32": 1e-6}[dtype]
    for a, b in zip(jax.tree.leaves(training.model), jax.tree.leaves(parameters), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=0, atol=bound * float(jnp.abs(b).max()))
    np.testing.assert_allclose([r.loss for r in history.records], losses, rtol=10 * bound)
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.ranks(2)
def test_messages_of_a_constant_loss_are_reversed(comm):
    def piped(p: Any, x: Any) -> Any:
        if comm.rank == 1:
            mpigrad.send(x @ p, 0, comm=comm)
            return 0.0
        return jnp.mean((x @ p + mpigrad.recv(jnp.zeros(4), 1, 0, comm)) ** 2)

    training = trainer(jnp.ones(5), optax.sgd(0.5), piped)
    p, x = np.ones(5), X[:4] + X[4:8]
    for _ in range(2):
        record = training.step(X[4 * comm.rank :][:4])
        np.testing.assert_allclose(record.loss, np.mean((x @ p) ** 2) / 2, rtol=1e-12)
        p = p - 0.5 * x.T @ (x @ p) / len(x)
        np.testing.assert_allclose(training.model, p, rtol=1e-12)


@pytest.mark.ranks(2)
def test_rejects_invalid_losses_on_all_ranks(comm):
    with pytest.raises(TypeError, match=r"got int64 at model\['bias'\]"):
        trainer(network("float64") | {"bias": jnp.zeros(3, int)}, optax.sgd(0.1), loss)
    with pytest.raises(TypeError, match="expected an optax optimizer"):
        trainer(network("float64"), None, loss)
    with pytest.raises(TypeError, match="optimizer has no effect with a Replica, got"):
        trainer(Linear(), optax.sgd(0.1))
    training = trainer(
        network("float64"), optax.sgd(0.1), lambda p, x: x @ p["in"], weight=lambda x: len(x) / 2
    )
    with pytest.raises(TypeError, match=r"one real number.*float64 of shape \(4, 8\)"):
        training.step(X[:4])
