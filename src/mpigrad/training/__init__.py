"""Training on all ranks: one interface for PyTorch modules and JAX pytrees, several strategies."""

from mpigrad.training.batches import Batches
from mpigrad.training.flat_buffer import Flat, Parameter
from mpigrad.training.history import History, Record, Span
from mpigrad.training.local import LocalSGD
from mpigrad.training.metrics import mean
from mpigrad.training.replica import Replica
from mpigrad.training.server import ParameterServer
from mpigrad.training.strategy import Run, Session, StepError, Strategy
from mpigrad.training.synchronous import Synchronous
from mpigrad.training.trainer import Trainer, trainer

__all__ = [
    "Batches",
    "Flat",
    "History",
    "LocalSGD",
    "Parameter",
    "ParameterServer",
    "Record",
    "Replica",
    "Run",
    "Session",
    "Span",
    "StepError",
    "Strategy",
    "Synchronous",
    "Trainer",
    "mean",
    "trainer",
]
