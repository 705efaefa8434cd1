"""Train a PyTorch module on several ranks: gradients travel while the backward pass goes on.

    mpigrad launch -n 2 examples/train_torch.py

The update is that of one process with the whole batch, so that any number of ranks ends with the
same parameters, to rounding.
"""
# pyright: reportMissingImports=false

import torch

from mpigrad.training import Batches, trainer

x = torch.linspace(-1, 1, 400)[:, None]
y = torch.sin(3 * x)

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(1, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), 0.02)


def loss(model, x, y):
    """Mean square error."""
    return torch.nn.functional.mse_loss(model(x), y)


training = trainer(model, optimizer, loss)
batches = Batches(len(x), 40, seed=0, epochs=20, take=lambda rows: (x[rows], y[rows]))
history = training.run(batches)

first, last = history.records[0], history.records[-1]
if training.comm.rank == 0:
    print(f"loss {first.loss:.4f} before the first step, {last.loss:.4f} before step {last.step}")
assert last.loss < 0.1 * first.loss
