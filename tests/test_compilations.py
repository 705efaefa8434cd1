"""A first call compiles few programs, and so does a call with another size."""

from __future__ import annotations

import jax
import pytest

from compilation_cases import CASES, count
from mpigrad.communicator import Communicator

# The most programs of a first call, and of a call with another size, on each of two ranks.
LIMITS = {
    "allreduce": (1, 1),
    "allreduce of MAX": (1, 1),
    "allreduce of PROD": (1, 1),
    "allreduce of a pytree": (3, 3),
    "bcast": (1, 1),
    "gather": (1, 1),
    "gatherv": (1, 1),
    "alltoall": (1, 1),
    "sendrecv": (1, 1),
    "isend, irecv": (4, 4),
    "assert_replicated": (6, 2),
    "value_and_grad": (13, 8),
    "jit of grad": (1, 1),
    "jacobian": (19, 12),
    "dot_test": (3, 3),
    "taylor_test": (17, 12),
    "Grid": (0, 0),
    "Grid.scatter, gather": (0, 0),
    "halo_exchange": (3, 3),
    "apply_stencil": (16, 16),
    "fft.fftn": (5, 5),
    "Pattern": (0, 0),
    "Matrix": (0, 0),
    "Matrix.assemble": (1, 1),
    "A @ x": (3, 2),
    "A @ A": (4, 3),
    "A.T + 2 A": (7, 6),
    "solve, Jacobi": (6, 4),
    "solve, BoomerAMG": (5, 4),
    "solve, GMRES": (5, 4),
    "solve, BoxMG": (6, 5),
    "newton": (4, 1),
    "minimize, LBFGS": (9, 8),
    "minimize, Optax": (6, 5),
    "Pool.map": (8, 1),
    "fem.box": (0, 0),
    "fem.Space": (0, 0),
    "Equation.residual": (10, 8),
    "fem.solve": (40, 34),
    "Acoustic.propagate": (4, 3),
    "Trainer.step": (12, 5),
    "Store.save, load": (2, 2),
}


@pytest.mark.skipif(jax.__version_info__[:2] != (0, 10), reason="the numbers are those of JAX 0.10")
@pytest.mark.cases(
    *("allreduce", "allreduce of a pytree", "sendrecv", "value_and_grad", "halo_exchange"),
    *("apply_stencil", "fft.fftn", "A @ x", "solve, BoomerAMG", "minimize, LBFGS", "fem.solve"),
    *("Acoustic.propagate", "Trainer.step"),
    reason="the others use the same packing and local programs",
)
@pytest.mark.ranks(1, 2)  # the limits are those of two ranks
@pytest.mark.long("the first case also compiles what a process needs once")
@pytest.mark.parametrize("name", CASES)
def test_programs_of_a_call(name: str, comm: Communicator) -> None:
    for programs, limit in zip(count(name, comm), LIMITS[name], strict=True):
        assert len(programs) <= limit, programs
