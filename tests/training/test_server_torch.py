# pyright: reportMissingImports=false
"""The parameter server of a PyTorch module."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import numpy as np
import pytest

from mpigrad.communicator import Communicator
from mpigrad.training import Batches, ParameterServer, Strategy, Synchronous, trainer

with contextlib.suppress(ImportError):
    import torch

pytestmark = pytest.mark.torch

X = np.random.default_rng(1).standard_normal((96, 2, 4)).astype("float32")
Y = (X.sum((1, 2)) > 0).astype("int64")


def train(
    comm: Communicator, strategy: Strategy, epochs: int, dtype: Any, rate: float = 0.05
) -> Any:
    """A classifier with running means and a layer that only some batches use."""
    torch.manual_seed(0)
    model = torch.nn.ModuleDict(
        {
            "first": torch.nn.Sequential(
                torch.nn.Flatten(), torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16)
            ),
            "sometimes": torch.nn.Linear(16, 16),
            "last": torch.nn.Linear(16, 2),
        }
    ).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=1e-3)

    def loss(model: Any, x: Any, y: Any) -> Any:
        hidden = model["first"](x)
        if x[0, 0, 0] > 1:
            hidden = hidden + model["sometimes"](hidden)
        return torch.nn.functional.cross_entropy(model["last"](torch.relu(hidden)), y)

    def take(rows: np.ndarray) -> Any:
        return torch.from_numpy(X[rows]).to(dtype), torch.from_numpy(Y[rows])

    coach = trainer(model, optimizer, loss, strategy, comm=comm)
    history = coach.run(Batches(len(X), 12, epochs=epochs, take=take))
    # With the statistics of all samples: running means of parts of four are noise.
    trained = copy.deepcopy(model)
    with torch.no_grad():
        hidden = torch.relu(trained["first"](torch.from_numpy(X).to(dtype)))
        guess = trained["last"](hidden).argmax(1)
    return model.state_dict(), history, float((guess.numpy() == Y).mean())


@pytest.mark.ranks(2, 3)
@pytest.mark.thin(3)  # a server and two workers
@pytest.mark.cases("float32", reason="the dtype of nearly all models")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_bound_zero_is_the_synchronous_run(comm: Communicator, dtype: str) -> None:
    """Bit for bit: parameters, running means, and what weight decay does to unused layers."""
    served, history, _ = train(comm, ParameterServer(), 3, getattr(torch, dtype))
    assert len(history.records) == 24
    workers = comm.split(None if comm.rank == 0 else 0)
    if workers:
        expected, _, _ = train(workers, Synchronous(), 3, getattr(torch, dtype))
        assert all(torch.equal(served[name], expected[name]) for name in expected)


@pytest.mark.full("test_server has stale gradients of NumPy, and the module is trained above")
@pytest.mark.ranks(4)
def test_stale_gradients_reach_the_same_accuracy(comm: Communicator) -> None:
    # Each worker's gradient makes an update, so there are three for one of a synchronous run.
    strategy, rate = ParameterServer(staleness=3), 0.05 / 3
    served, history, accuracy = train(comm, strategy, 40, torch.float32, rate)
    # Which gradients are stale depends on the machine: 12 runs ended at 0.91 to 0.98.
    assert max(history.staleness) <= 3 and accuracy > 0.8
    assert served["first.2.num_batches_tracked"] == 320
    everywhere = comm.mpi.allgather({k: v.numpy().tobytes() for k, v in served.items()})
    assert everywhere.count(everywhere[0]) == comm.size
