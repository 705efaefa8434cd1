"""A first program: one parameter, a share of the loss on every rank, and its gradient.

Rank r holds one term of the loss

    L(theta) = theta^0 + theta^1 + ... + theta^(P-1),

and no rank holds all of it. Each rank returns its own share, and `mg.value_and_grad` gives every
rank the sum of the shares and the derivative of the sum. Run it on four ranks:

    mpigrad launch -n 4 examples/quickstart.py

Rank 0 prints L(2) = 1 + 2 + 4 + 8 = 15 and L'(2) = 0 + 1 + 4 + 12 = 17.
"""

import jax
import jax.numpy as jnp
from mpi4py import MPI

import mpigrad as mg

jax.config.update("jax_enable_x64", True)
rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size


def share(theta):
    """Return this rank's term of the loss."""
    return theta**rank


# theta is the same on all ranks and counts as one parameter. Therefore it is declared replicated:
# its gradient is summed over the ranks, and every rank gets the sum.
loss_and_gradient = mg.jit(mg.value_and_grad(share, loss="share", replicated=0))
loss, gradient = loss_and_gradient(2.0)

# The same loss with explicit messages: rank 0 holds the parameter and sends it to all ranks, and
# the loss is reduced to rank 0. The adjoint of the broadcast is a reduction, so the gradient
# arrives on rank 0. It is zero on the other ranks.


def loss_on_root(theta):
    """Return the whole loss on rank 0, and zero on the other ranks."""
    theta = mg.bcast(theta, root=0)
    return mg.reduce(share(theta), op=MPI.SUM, root=0)


gradient_on_root = mg.grad(loss_on_root)(2.0)

assert loss == sum(2.0**r for r in range(size))
assert gradient == sum(r * 2.0 ** (r - 1) for r in range(size))
assert gradient_on_root == (gradient if rank == 0 else 0)
if rank == 0:
    print(f"on {size} ranks: loss {float(loss):g}, gradient {float(gradient):g}")

# Derivatives of derivatives are messages too.
curvature = mg.grad(mg.grad(loss_on_root))(2.0)
assert jnp.isclose(curvature, sum(r * (r - 1) * 2.0 ** (r - 2) for r in range(size)) * (rank == 0))
