"""Train a PyTorch module on several ranks. Gradients are sent during the backward pass.

    mpigrad launch -n 2 examples/train_torch.py

The update is equal to the update of one process with the whole batch. Therefore any number of ranks
ends with the same parameters, to rounding.
"""
# pyright: reportMissingImports=false

import torch

import mpigrad as mg

x = torch.linspace(-1, 1, 400)[:, None]
y = torch.sin(3 * x)

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(1, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), 0.02)


def loss(model, x, y):
    """Return the mean square error."""
    return torch.nn.functional.mse_loss(model(x), y)


training = mg.training.trainer(model, optimizer, loss)
batches = mg.training.Batches(len(x), 40, seed=0, epochs=20, take=lambda rows: (x[rows], y[rows]))
history = training.run(batches)

first, last = history.records[0], history.records[-1]
if training.comm.rank == 0:
    print(f"loss {first.loss:.4f} before the first step, {last.loss:.4f} before step {last.step}")
assert last.loss < 0.1 * first.loss
