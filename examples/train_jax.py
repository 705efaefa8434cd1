"""Train a JAX model on several ranks. Each rank computes the gradient of its share of a batch.

    mpigrad launch -n 2 examples/train_jax.py

The update is equal to the update of one process with the whole batch. Therefore any number of ranks
ends with the same parameters, to rounding.
"""

import jax.numpy as jnp
import numpy as np
import optax

import mpigrad as mg

x = np.linspace(-1, 1, 400, dtype=np.float32)[:, None]
y = np.sin(3 * x)

generator = np.random.default_rng(0)
parameters = {
    "in": generator.normal(size=(1, 32)).astype(np.float32),
    "bias": generator.normal(size=32).astype(np.float32),
    "out": generator.normal(size=(32, 1)).astype(np.float32) / 32,
}


def loss(p, x, y):
    """Return the mean square error of a network with one hidden layer."""
    return jnp.mean((jnp.tanh(x @ p["in"] + p["bias"]) @ p["out"] - y) ** 2)


training = mg.training.trainer(parameters, optax.adam(0.02), loss)
batches = mg.training.Batches(len(x), 40, seed=0, epochs=10, take=lambda rows: (x[rows], y[rows]))
history = training.run(batches)

first, last = history.records[0], history.records[-1]
if training.comm.rank == 0:
    print(f"loss {first.loss:.4f} before the first step, {last.loss:.4f} before step {last.step}")
assert last.loss < 0.1 * first.loss
