"""A first program: one parameter, a share of the loss on every rank, and its gradient.

Rank r holds one term of the loss

    L(theta) = theta^0 + theta^1 + ... + theta^(P-1),

and nobody holds all of it. Each rank returns its own share, and `mpigrad.value_and_grad` gives
every rank the sum of the shares and the derivative of the sum. Run it on four ranks:

    mpigrad launch -n 4 examples/quickstart.py

and rank 0 prints L(2) = 1 + 2 + 4 + 8 = 15 and L'(2) = 0 + 1 + 4 + 12 = 17.
"""

import jax
import jax.numpy as jnp
from mpi4py import MPI

import mpigrad

jax.config.update("jax_enable_x64", True)
rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size


def share(theta):
    """One term of the loss, on the rank that has it."""
    return theta**rank


# theta is the same on all ranks and counts as one parameter, so it is declared replicated: its
# gradient is summed over the ranks, and every rank gets the sum.
loss_and_gradient = mpigrad.jit(mpigrad.value_and_grad(share, loss="share", replicated=0))
loss, gradient = loss_and_gradient(2.0)

# The same loss with a message written out: the parameter lives on rank 0, which sends it to all,
# and the loss is reduced onto rank 0. The adjoint of the broadcast is a reduction, so that the
# gradient arrives where the parameter is; on the other ranks it is zero.


def loss_on_root(theta):
    """The whole loss on rank 0, zero elsewhere."""
    theta = mpigrad.bcast(theta, root=0)
    return mpigrad.reduce(share(theta), op=MPI.SUM, root=0)


gradient_on_root = mpigrad.grad(loss_on_root)(2.0)

assert loss == sum(2.0**r for r in range(size))
assert gradient == sum(r * 2.0 ** (r - 1) for r in range(size))
assert gradient_on_root == (gradient if rank == 0 else 0)
if rank == 0:
    print(f"on {size} ranks: loss {float(loss):g}, gradient {float(gradient):g}")

# Derivatives of derivatives are messages too.
curvature = mpigrad.grad(mpigrad.grad(loss_on_root))(2.0)
assert jnp.isclose(curvature, sum(r * (r - 1) * 2.0 ** (r - 2) for r in range(size)) * (rank == 0))
