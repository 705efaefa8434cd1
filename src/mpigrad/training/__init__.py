"""Training on all ranks: one interface for PyTorch modules and JAX pytrees, several strategies.

Examples
--------
>>> import numpy as np
>>> import optax
>>> from mpigrad import training
>>> x = np.linspace(0, 1, 32)
>>> loss = lambda params, x, y: ((params["a"] * x - y) ** 2).mean()
>>> trainer = training.trainer({"a": np.float32(0.0)}, optax.sgd(1.0), loss)
>>> batches = training.Batches(32, 8, epochs=20, take=lambda i: (x[i], 3 * x[i]))
>>> history = trainer.run(batches)
>>> print(len(history.records), round(float(trainer.model["a"]), 3))
80 3.0
"""

from mpigrad.training.batches import Batches
from mpigrad.training.flat_buffer import FlatBuffer, Parameter
from mpigrad.training.history import History, Span, StepRecord, mean
from mpigrad.training.replica import Replica
from mpigrad.training.server import ParameterServer
from mpigrad.training.strategy import Run, Session, StepError, Strategy
from mpigrad.training.synchronous import LocalSGD, Synchronous
from mpigrad.training.trainer import Trainer, trainer

__all__ = [
    "Batches",
    "FlatBuffer",
    "History",
    "LocalSGD",
    "Parameter",
    "ParameterServer",
    "Replica",
    "Run",
    "Session",
    "Span",
    "StepError",
    "StepRecord",
    "Strategy",
    "Synchronous",
    "Trainer",
    "mean",
    "trainer",
]
