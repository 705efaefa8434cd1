"""A law of nature inside a nonlinear equation: learn kappa(u) from the solution u.

The steady equation is div(kappa(u) grad u) + 12 = 0 on the unit square, with u = 0 on the boundary.
The function kappa is unknown, and u is observed. A small network represents kappa and is the same
on all ranks. Newton's method solves for u. Its gradient is one more linear solve, with the
transposed Jacobian.

    mpigrad launch -n 2 examples/nonlinear_diffusion.py kappa.png
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from scipy.optimize import minimize

import mpigrad as mg

jax.config.update("jax_enable_x64", True)

n = 16
grid = mg.Grid((n, n), (1 / n, 1 / n))
here = (slice(1, -1), slice(1, -1))
neighbours = [
    (slice(0, -2), slice(1, -1)),
    (slice(2, None), slice(1, -1)),
    (slice(1, -1), slice(0, -2)),
    (slice(1, -1), slice(2, None)),
]

# The residual of a cell depends on its own u and on the u of its four neighbours. Newton's method
# colours the cells, so that 5 derivatives give the whole Jacobian.
pattern = mg.sparse.Pattern.from_stencil(grid, [(0, 0), (-1, 0), (1, 0), (0, -1), (0, 1)])
solver = mg.sparse.GMRES(rtol=1e-10, preconditioner=mg.sparse.Jacobi(), max_steps=2000)


def residual(u, kappa):
    """Return the flow into each cell of this rank's tile plus the source: zero at the solution."""
    v = mg.halo_exchange(u, grid, boundary=0.0)
    k = kappa(v)  # includes the neighbours' cells, whose u has arrived in v
    flows = [(k[side] + k[here]) / 2 * (v[side] - v[here]) for side in neighbours]
    return sum(flows) + 12 / n**2


def solve(kappa):
    """Solve for u with a law, a Python function. Its closed-over arrays are differentiated."""
    start = jnp.zeros(grid.local_shape)
    return mg.sparse.newton(lambda u: residual(u, kappa), start, solver, pattern=pattern).value


def true_kappa(u):
    """Return kappa by the true law, which the network has to learn."""
    return 0.5 + u**2


def network(theta):
    """Return the law of the parameters theta. It is positive for all parameters."""
    w1, b1, w2, b2 = theta
    return lambda u: jnp.exp(jnp.tanh(u[..., None] * w1 + b1) @ w2 + b2)


observed = mg.jit(lambda: solve(true_kappa))()
highest = max(grid.comm.mpi.allgather(float(observed.max())))


def share(theta):
    """Return this rank's share of the loss."""
    return 1e3 * jnp.sum((solve(network(theta)) - observed) ** 2) / grid.size


# Every rank draws the same weights. The loss and its gradient are bit for bit the same on all
# ranks, so a serial optimizer that runs on each rank takes the same steps everywhere.
generator = np.random.default_rng(0)
theta = (2 * generator.normal(size=8), generator.normal(size=8), np.zeros(8), 0.0)
flat, unravel = ravel_pytree(theta)
loss_and_gradient = mg.jit(
    mg.value_and_grad(lambda p: share(unravel(p)), loss="share", replicated=0)
)
found = minimize(loss_and_gradient, flat, jac=True, method="L-BFGS-B", options={"maxiter": 40})
first = loss_and_gradient(flat)[0]

u = jnp.linspace(0, highest, 50)
learned = network(unravel(found.x))(u)
error = float(jnp.max(jnp.abs(learned - true_kappa(u))))
if grid.comm.rank == 0:
    print(f"loss {float(first):.1e} -> {found.fun:.1e}, largest error of kappa(u): {error:.3f}")
    if sys.argv[-1].endswith(".png"):
        from matplotlib.figure import Figure

        figure = Figure(figsize=(5, 3.2), layout="constrained")
        axes = figure.subplots()
        axes.plot(u, true_kappa(u), "k", label="true")
        axes.plot(u, network(theta)(u), ":", label="at the start")
        axes.plot(u, learned, "--", label="learned")
        axes.set(xlabel="u", ylabel="κ(u)")
        axes.legend()
        figure.savefig(sys.argv[-1], dpi=110)
assert found.fun < 1e-3 * first
