"""A history that does not fit into a directory, and one that does: `wave_history.py DIR`."""

import os
import sys

import jax.numpy as jnp
import numpy as np

import mpigrad
from mpigrad.communicator import default_communicator
from mpigrad.grid import Grid
from mpigrad.waves import Acoustic, Storage, Survey

directory = sys.argv[1]
comm = default_communicator()
grid = Grid((40, 40), (10.0, 10.0))
survey = Survey(np.array([[[200.0, 200.0]]]), np.array([[[100.0, 200.0]]]))


def gradient(steps, **settings):
    model = Acoustic(grid, 1e-3, steps, pml=8, **settings)
    wavelets = jnp.sin(jnp.arange(steps) / 9)[None, None].astype("float32")
    loss = lambda c: jnp.sum(model.propagate(c, wavelets, survey, gathers="share").gathers ** 2)
    return np.asarray(mpigrad.grad(loss)(jnp.full(grid.local_shape, 2e3, "float32")))


texts = []
try:
    gradient(3000, storage=Storage(directory=directory))
except Exception as error:
    texts.append(str(error))
(text,) = texts
assert f"in '{directory}' for its file, and " in text, text
assert "MB (" in text and "are free there" in text, text
for _ in range(3):
    own = gradient(100, storage=Storage(directory=directory))
assert os.listdir(directory) == []
assert np.array_equal(own, gradient(100))
print(f"rank {comm.rank}: refused, then equal, nothing left", flush=True)
