# pyright: reportMissingImports=false
"""All ranks train PyTorch modules like one rank."""

from __future__ import annotations

import gc
import pathlib
import weakref
from typing import Any

import numpy as np
import pytest
from models import X, Y

from mpigrad.checkpoint import Checkpoint
from mpigrad.training import Batches, LocalSGD, ParameterServer, Synchronous, Trainer, trainer

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


@pytest.fixture
def directory(tmp_path: pathlib.Path, comm: Any) -> pathlib.Path:
    return comm.mpi.bcast(tmp_path)


class Network(torch.nn.Module):
    """With a tied weight, one without a gradient, and two that some batches don't need."""

    def __init__(self, seed: int, dtype: Any = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = torch.nn.Linear(5, 6, dtype=dtype)
        self.second = torch.nn.Linear(6, 6, dtype=dtype)
        self.third = torch.nn.Linear(6, 6, dtype=dtype)
        self.third.weight = self.second.weight
        self.last = torch.nn.Linear(6, 3, dtype=dtype)
        self.fixed = torch.nn.Parameter(torch.ones(3, dtype=dtype), requires_grad=False)
        self.never = torch.nn.Parameter(torch.ones(2, dtype=dtype))
        self.seldom = torch.nn.Parameter(torch.ones(3, dtype=dtype))

    def forward(self, x: Any) -> Any:
        hidden = torch.tanh(self.second(torch.tanh(self.first(x))))
        y = self.last(torch.tanh(self.third(hidden))) * self.fixed
        return y * self.seldom if (len(x) + int(1000 * x[0, 0].item())) % 3 == 0 else y


def loss(model: Any, x: Any, y: Any) -> Any:
    return torch.mean((model(x) - y) ** 2)


def momentum(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-2)


def adam(model: Any) -> Any:
    return torch.optim.Adam(model.parameters(), lr=1e-2)


def taken(dtype: Any = torch.float64, **options: Any) -> Batches:
    x, y = torch.tensor(X, dtype=dtype), torch.tensor(Y, dtype=dtype)
    return Batches(37, 13, seed=3, take=lambda i: (x[i], y[i]), **options)


def bits(module: Any) -> list[bytes]:
    values = (value.detach().contiguous() for value in module.state_dict().values())
    return [value.view(-1).view(torch.uint8).numpy().tobytes() for value in values]


def train_alone(model: Any, optimizer: Any, steps: int, dtype: Any, parts: int) -> list[float]:
    """One rank with the global batches, each in the parts that ranks would take."""
    losses = []
    for _, (x, y) in zip(range(steps), taken(dtype), strict=False):
        optimizer.zero_grad()
        total = 0.0
        for i in range(parts):
            part = slice(len(x) * i // parts, len(x) * (i + 1) // parts)
            value = loss(model, x[part], y[part])
            value.backward(torch.full_like(value, (part.stop - part.start) / len(x)))
            total += value.item() * (part.stop - part.start) / len(x)
        optimizer.step()
        losses.append(total)
    return losses


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize(
    ("optimizer", "dtype", "settings"),
    [
        (momentum, torch.float64, {}),
        (adam, torch.float32, {"bucket_mib": 1e-4, "first_bucket_mib": 1e-5}),
        (adam, torch.float64, {"overlap": False}),
    ],
    ids=["momentum", "small buckets", "no hooks"],
)
def test_it_is_the_training_of_one_rank(comm, optimizer, dtype, settings):
    alone = Network(0, dtype)
    losses = train_alone(alone, optimizer(alone), 50, dtype, comm.size)
    model = Network(comm.rank, dtype)
    training = trainer(model, optimizer(model), loss, Synchronous(**settings))
    history = training.run(taken(dtype), steps=50)
    assert training.model is model
    bound = 1e-12 if dtype == torch.float64 else 1e-6
    np.testing.assert_allclose([r.loss for r in history.records], losses, rtol=5 * bound)
    for (name, a), b in zip(model.named_parameters(), alone.parameters(), strict=True):
        scale = float(b.detach().abs().max())
        np.testing.assert_allclose(a.detach(), b.detach(), rtol=0, atol=bound * scale, err_msg=name)
    everybody = comm.mpi.allgather(bits(model))
    assert all(other == everybody[0] for other in everybody)


@pytest.mark.ranks(2)
def test_accumulated_and_clipped_gradients_are_those_of_the_whole_batch(comm):
    def plain(m: Any, x: Any, y: Any) -> Any:  # the same whatever the batch
        return torch.mean((m.last(torch.tanh(m.first(x))) - y) ** 2)

    alone, model = Network(0), Network(0)
    optimizer = momentum(alone)
    norms = []
    for _, batch in zip(range(20), taken(), strict=False):
        optimizer.zero_grad()
        plain(alone, *batch).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.3, norm_type=2).item())
        optimizer.step()
    history = trainer(model, momentum(model), plain, Synchronous(accumulate=3, clip=0.3)).run(
        taken(), steps=20
    )
    assert min(norms) < 0.3 < max(norms)
    np.testing.assert_allclose([r.gradient_norm for r in history.records], norms, rtol=2e-5)
    for a, b in zip(model.parameters(), alone.parameters(), strict=True):
        # PyTorch divides by the norm plus 1e-6.
        np.testing.assert_allclose(a.detach(), b.detach(), atol=2e-5)


@pytest.mark.ranks(2)
def test_rejects_differences_between_ranks(comm, capfd, directory):
    rate = np.float64(0.05)  # a number of NumPy's reaches the other ranks, too
    model = Network(0)
    for parameter in model.first.parameters():
        parameter.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    training = trainer(model, optimizer, loss)
    training.run(taken(), steps=2)
    model.first.requires_grad_(True)
    with pytest.raises(ValueError, match=r": first.weight, first.bias\. Make a new trainer"):
        training.run(taken(), steps=4)
    with pytest.raises(ValueError, match=r"lr of group 0 = 0\.1 on rank 0 and 0\.2 on rank 1"):
        trainer(model, torch.optim.SGD(model.parameters(), lr=0.1 * (comm.rank + 1)), loss)
    kinds = torch.optim.SGD if comm.rank else torch.optim.Adam
    with pytest.raises(ValueError, match="the class = Adam on rank 0 and SGD on rank 1"):
        trainer(model, kinds(model.parameters(), lr=0.1), loss)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    training = trainer(model, optimizer, loss)
    with pytest.raises(ValueError, match=r"'seed': 0.* on rank 0 .*'seed': 1"):
        training.run(Batches(9, 3, seed=comm.rank))
    with pytest.raises(ValueError, match="progress=True needs a known count"):
        training.run([], progress=comm.rank == 0)
    before = bits(model)
    optimizer.param_groups[0]["lr"] = 0.1 * (1 + comm.rank)
    with pytest.raises(ValueError, match=r"0\.1 on rank 0 and 0\.2 on rank 1\. Make"):
        training.run(taken(), steps=1)
    assert bits(model) == before
    optimizer.param_groups[0]["lr"] = rate
    model.fixed.data += comm.rank
    for ending in (lambda: training.run(taken(), steps=2), lambda: training.save(directory)):
        capfd.readouterr()
        ending()
        assert ("rank 1 now differ from" in capfd.readouterr().err) == (comm.rank == 0)
    detached = lambda *batch: loss(*batch).detach()
    with pytest.raises(ValueError, match="does not depend on any parameter"):
        trainer(model, optimizer, detached).step(*next(iter(taken())))


@pytest.mark.ranks(2)
def test_messages_of_a_constant_loss_are_reversed(comm, capfd):
    import mpigrad.torch as mt

    failing = True

    def piped(m: Any, x: Any) -> Any:
        y = m(x)
        if comm.rank == 0:
            y = y + mt.recv(torch.zeros_like(y), source=1, tag=0, comm=comm)
        else:
            mt.send(y, dest=0, comm=comm)
        if failing:
            raise OSError("disk")
        return torch.mean(y**2) if comm.rank == 0 else torch.tensor(0.0)

    def gradient() -> Any:
        alone = torch.nn.Linear(5, 3, dtype=torch.float64)
        alone.load_state_dict(model.state_dict())
        (torch.mean((alone(x[:4]) + alone(x[4:])) ** 2) / 2).backward()
        return alone.weight.grad

    torch.manual_seed(0)
    x = torch.tensor(X[:8])
    model = torch.nn.Linear(5, 3, dtype=torch.float64)
    training = trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), piped)
    mine = x[4 * comm.rank :][:4]
    capfd.readouterr()
    with pytest.raises(OSError, match="disk"):
        training.step(mine)
    said = capfd.readouterr().err
    assert "failed after 1 message" in said and "OSError: disk" in said
    failing = False
    for _ in range(2):
        expected = gradient()
        training.step(mine)
        np.testing.assert_allclose(model.weight.grad, expected, rtol=1e-12)
    expected = gradient()
    model.weight.grad = None
    torch.autograd.backward(piped(model, mine) / 2)  # no message of the steps is left
    total = comm.mpi.allreduce(model.weight.grad.numpy())
    np.testing.assert_allclose(total, expected, rtol=1e-12)


@pytest.mark.ranks(1, 2)
def test_a_deleted_trainer_leaves_the_module(comm):
    for strategy in (Synchronous(), LocalSGD(1), ParameterServer()):
        model = Network(0)
        training = trainer(model, momentum(model), loss, strategy)
        training.run(taken(), steps=2)
        replica = weakref.ref(training.replica)
        del training
        gc.collect()
        assert replica() is None
        assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


class Caching(torch.nn.Module):
    """With a buffer that is not saved, and as long as the longest batch of a rank."""

    def __init__(self, persistent: bool = False) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(5, 3)
        self.register_buffer("cache", torch.zeros(0), persistent=persistent)

    def forward(self, x: Any) -> Any:
        self.cache = torch.ones(max(len(x), len(self.cache)))
        return self.layer(x) * self.cache[: len(x), None]


@pytest.mark.ranks(2)
def test_between_two_runs_with_a_checkpoint_the_program_may_change_things(comm, directory):
    model = Caching()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = trainer(model, optimizer, loss)
    checkpoint = Checkpoint(directory, signals=False)
    x, y = torch.tensor(X).float(), torch.tensor(Y).float()
    for rate in (0.1, 0.01):
        optimizer.param_groups[0]["lr"] = rate
        weight = model.layer.weight.detach().clone()
        training.run([(x[: 4 + comm.rank], y[: 4 + comm.rank])], checkpoint=checkpoint)
        step = -rate * model.layer.weight.grad
        np.testing.assert_allclose(model.layer.weight.detach() - weight, step, atol=1e-6)
    assert training.history.records[-1].step == 2
    other = Caching()
    again = trainer(other, torch.optim.Adam(other.parameters()), loss)
    with pytest.raises(ValueError, match="to the optimizer SGD, but this trainer has Adam"):
        again.resume(directory)
    other = Caching(persistent=True)
    training = trainer(other, torch.optim.SGD(other.parameters(), lr=0.1), loss)
    with pytest.raises(ValueError, match=r"buffer cache .*\(4,\) and \(5,\)\. Register"):
        training.run([(x[: 4 + comm.rank], y[: 4 + comm.rank])])


class Noisy(torch.nn.Module):
    """Dropout and a running mean."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Linear(5, 8),
            torch.nn.BatchNorm1d(8),
            torch.nn.Dropout(0.5),
            torch.nn.Linear(8, 3),
        )

    def forward(self, x: Any) -> Any:
        return self.body(x)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("strategy", [Synchronous(), LocalSGD(3)], ids=["synchronous", "local"])
def test_a_resumed_training_is_the_same(comm, directory, strategy):
    def begun(seed: int) -> Trainer:
        torch.manual_seed(seed)
        model = Noisy()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        torch.manual_seed(100 * seed + comm.rank)
        return trainer(model, optimizer, loss, strategy)

    whole = begun(0)
    whole.run(taken(torch.float32), steps=9)
    first = begun(0)
    first.run(taken(torch.float32), steps=6)
    first.save(directory)
    again = begun(1)
    again.resume(directory)
    again.run(taken(torch.float32), steps=9)
    assert bits(again.model) == bits(whole.model)
    assert [r.loss for r in again.history.records] == [r.loss for r in whole.history.records]
    everybody = comm.mpi.allgather(bits(again.model))
    assert all(other == everybody[0] for other in everybody)  # running means, too


@pytest.mark.ranks(3)
def test_buffers_are_those_of_a_rank_that_has_samples(comm):
    x, y = torch.tensor(X).float(), torch.tensor(Y).float()
    n = 4 if comm.rank == 2 else 0
    for strategy in (Synchronous(), LocalSGD(1), ParameterServer()):
        model, alone = Noisy(), Noisy()
        training = trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, strategy)
        alone.load_state_dict(model.state_dict())
        training.run([(x[:n], y[:n])])
        alone(x[:4])
        np.testing.assert_array_equal(model.body[1].running_mean, alone.body[1].running_mean)


class Shuffled(torch.nn.Module):
    """Its layers are declared in another order than they are used in."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.last = torch.nn.Linear(40, 3)
        self.second = torch.nn.Linear(50, 40)
        self.first = torch.nn.Linear(5, 50)

    def forward(self, x: Any) -> Any:
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))


@pytest.mark.ranks(1, 2)
def test_a_resumed_training_clips_by_the_same_norms(comm, directory):
    def begun() -> Trainer:
        model = Shuffled()
        settings = Synchronous(clip=0.01, bucket_mib=1e-3, first_bucket_mib=1e-4)
        return trainer(model, torch.optim.SGD(model.parameters(), 0.5, 0.9), loss, settings)

    whole, again, its = begun(), begun(), taken(torch.float32)
    declared = whole.replica.gradients.order
    whole.run(its, steps=10)
    whole.save(directory)
    assert again.resume(directory)
    assert again.replica.gradients.order == whole.replica.gradients.order != declared
    whole.run(its, steps=20)
    again.run(taken(torch.float32), steps=20)
    norms = [[r.gradient_norm for r in t.history.records] for t in (whole, again)]
    assert norms[0] == norms[1] and len(norms[0]) == 20
    assert bits(again.model) == bits(whole.model)


class Kinds(torch.nn.Module):
    """Parameters of several dtypes and orders in memory, one with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(7, 3, sparse=True)
        self.small = torch.nn.Parameter(torch.randn(3, dtype=torch.bfloat16))
        self.wave = torch.nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.filter = torch.nn.Conv2d(3, 3, 2).to(memory_format=torch.channels_last)

    def forward(self, x: Any) -> Any:
        rows = self.table((x[:, 0].abs() * 3).long() % 7)
        image = (
            (rows * self.small.float() * self.wave.abs()).reshape(-1, 3, 1, 1).expand(-1, 3, 2, 2)
        )
        return self.filter(image)[:, :, 0, 0]


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("strategy", [Synchronous(), LocalSGD(1)], ids=["synchronous", "local"])
def test_all_kinds_of_parameters(comm, strategy):
    alone, model = Kinds(), Kinds()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for _, batch in zip(range(10), taken(torch.float32), strict=False):
        optimizer.zero_grad()
        loss(alone, *batch).backward()
        optimizer.step()
    training = trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, strategy)
    training.run(taken(torch.float32), steps=10)
    for (name, a), b in zip(model.named_parameters(), alone.parameters(), strict=True):
        bound = 0.05 if name == "small" else 2e-3 if comm.size > 1 else 1e-3
        assert a.dtype == b.dtype
        np.testing.assert_allclose(
            torch.view_as_real(a.detach()) if a.is_complex() else a.detach().float(),
            torch.view_as_real(b.detach()) if b.is_complex() else b.detach().float(),
            atol=bound, err_msg=name,
        )  # fmt: skip
    everybody = comm.mpi.allgather(bits(model))
    assert all(other == everybody[0] for other in everybody)


class Elsewhere(torch.Tensor):
    """A parameter that claims to be on another device than the buffers."""

    device = torch.device("cpu", 0)  # type: ignore[assignment]


@pytest.mark.ranks(2)
def test_misuse_is_an_error_on_all_ranks(comm):
    model = Network(0)

    def twice(m: Any, x: Any, y: Any) -> Any:
        hidden = torch.utils.checkpoint.checkpoint(m.first, x.requires_grad_(), use_reentrant=True)
        more = torch.utils.checkpoint.checkpoint(m.first, x.requires_grad_(), use_reentrant=True)
        return torch.mean(hidden**2) + torch.mean(more**2)

    import torch.utils.checkpoint

    training = trainer(model, momentum(model), twice)
    with pytest.raises(RuntimeError, match=r"first\..* was computed twice in one backward pass"):
        training.step(torch.tensor(X[:4]), torch.tensor(Y[:4]))
    model = Network(0)
    trainer(model, momentum(model), twice, Synchronous(overlap=False)).step(
        torch.tensor(X[:4]), torch.tensor(Y[:4])
    )
    found = [model.first.weight.grad.clone()]
    for accumulate in (1, 2):
        model = Network(0)
        training = trainer(
            model, momentum(model), twice, Synchronous(overlap=False, accumulate=accumulate)
        )
        places = training.replica._places  # type: ignore[attr-defined]
        places[:] = [place.as_subclass(Elsewhere) for place in places]
        training.step(torch.tensor(X[:4]), torch.tensor(Y[:4]))
        found.append(model.first.weight.grad.clone())
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], atol=1e-13)
    with pytest.raises(TypeError, match="LBFGS cannot be used, because it evaluates the loss"):
        trainer(model, torch.optim.LBFGS(model.parameters()), loss)
    with pytest.raises(ValueError, match="holds 1 parameters that do not belong to the module"):
        trainer(model.first, torch.optim.SGD([*model.first.parameters(), model.never]), loss)
    with pytest.raises(TypeError, match="expected an optimizer of torch"):
        trainer(model, None, loss)
    with pytest.raises(ValueError, match=r"parameters must be the same.*rank 1"):
        other = torch.nn.Linear(5, 3 + comm.rank)
        trainer(other, momentum(other), loss)
    training = trainer(model, momentum(model), lambda m, x: m(x))
    with pytest.raises(TypeError, match=r"one real number.*float64 and shape \(4, 3\)"):
        training.step(torch.tensor(X[:4]))
    spoiled = Network(0)
    training = trainer(spoiled, momentum(spoiled), loss)
    before = bits(spoiled)
    x = torch.tensor(X[:4])
    if comm.rank == 1:
        x[0, 1] = np.nan
    with pytest.raises(FloatingPointError, match=r"step 1 is not made.*\(from rank 1\)"):
        training.step(x, torch.tensor(Y[:4]))
    assert bits(spoiled) == before
