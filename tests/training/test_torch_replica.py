# pyright: reportMissingImports=false
"""PyTorch modules are trained by all ranks as by one."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest
from models import X, Y

from mpigrad.training import Batches, LocalSGD, Synchronous, Trainer, trainer

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
    """One rank with the whole batches, each in the parts that ranks would take."""
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


@pytest.mark.ranks(2)
def test_misuse_is_said_on_all_ranks(comm):
    model = Network(0)

    def twice(m: Any, x: Any, y: Any) -> Any:
        hidden = torch.utils.checkpoint.checkpoint(m.first, x.requires_grad_(), use_reentrant=True)
        more = torch.utils.checkpoint.checkpoint(m.first, x.requires_grad_(), use_reentrant=True)
        return torch.mean(hidden**2) + torch.mean(more**2)

    import torch.utils.checkpoint

    training = trainer(model, momentum(model), twice)
    with pytest.raises(RuntimeError, match=r"first\..* has come twice in one backward pass"):
        training.step(torch.tensor(X[:4]), torch.tensor(Y[:4]))
    model = Network(0)
    trainer(model, momentum(model), twice, Synchronous(overlap=False)).step(
        torch.tensor(X[:4]), torch.tensor(Y[:4])
    )
    with pytest.raises(TypeError, match="LBFGS evaluates the loss several times"):
        trainer(model, torch.optim.LBFGS(model.parameters()), loss)
    with pytest.raises(ValueError, match="holds 1 parameters that are not the module's"):
        trainer(model.first, torch.optim.SGD([*model.first.parameters(), model.never]), loss)
    with pytest.raises(TypeError, match="must be one of torch"):
        trainer(model, None, loss)
    with pytest.raises(ValueError, match=r"parameters differ.*rank 1"):
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
