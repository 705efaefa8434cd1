"""Operands of each rank, and comparisons of results, for tests of autograd with messages."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import torch

from mpigrad.communicator import Communicator

Tensor = torch.Tensor
ONES = torch.ones(3, dtype=torch.float64)


def points(size: int) -> Any:
    return jnp.asarray(np.random.default_rng(1).standard_normal((size, 3)))


def leaf(comm: Communicator) -> Tensor:
    return torch.tensor(np.asarray(points(comm.size)[comm.rank]), requires_grad=True)


def close(got: Any, expected: Any, rtol: float = 1e-12) -> None:
    got = got.detach().numpy() if isinstance(got, Tensor) else got
    np.testing.assert_allclose(got, np.asarray(expected), rtol=rtol, atol=rtol)
