"""SciPy's optimizers, unchanged, for an objective whose data lie on several ranks.

Each rank has measured the decay of a mixture of two substances, at times of its own. Rank 0 runs
`scipy.optimize.minimize`. At each request for a value or a gradient the other ranks compute their
parts of it. The data never leave their rank.

    mpigrad launch -n 2 examples/scipy_on_the_root.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import scipy.optimize
from mpi4py import MPI

import mpigrad as mg

jax.config.update("jax_enable_x64", True)
rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size

# 60 times, dealt out to the ranks. The unknowns are the logarithms of two amplitudes and two rates,
# which are positive.
t = np.linspace(0, 4, 60)[rank::size]
truth = {"amplitude": np.log([2.0, 1.0]), "rate": np.log([3.0, 0.4])}
start = {"amplitude": np.zeros(2), "rate": np.log([2.0, 0.5])}


def signal(x):
    return jnp.exp(-t[:, None] * jnp.exp(x["rate"])) @ jnp.exp(x["amplitude"])


observed = signal(truth)


def share(x):
    """Return the contribution of this rank's measurements. The objective is the sum over ranks."""
    return 10 * jnp.sum((signal(x) - observed) ** 2)


GRADIENT = ("CG", "BFGS", "L-BFGS-B", "TNC", "SLSQP")
PRODUCTS = ("Newton-CG", "trust-ncg", "trust-krylov", "trust-constr")  # of Hessian and vector
HESSIAN = ("dogleg", "trust-exact")

with mg.optimize.root_objective(share, start) as objective:
    if objective:  # only on rank 0. The other ranks serve until rank 0 leaves the block
        objective.result = {}
        for method in GRADIENT + PRODUCTS + HESSIAN:
            before = objective.evaluations
            done = scipy.optimize.minimize(
                objective.value_and_gradient,
                # dogleg needs a convex neighbourhood, so it starts near the answer
                objective.x0 if method != "dogleg" else objective.result["BFGS"] + 1e-2,
                jac=True,
                hessp=objective.hessp if method in PRODUCTS else None,
                hess=objective.hessian if method in HESSIAN else None,
                method=method,
            )
            used = objective.evaluations - before
            print(f"{method:13}{done.fun:9.1e} after {used:3d} evaluations", flush=True)
            objective.result[method] = done.x

# The result is on every rank now.
expected = np.concatenate([truth["amplitude"], truth["rate"]])
for method, x in objective.result.items():
    assert np.abs(x - expected).max() < 2e-2, (method, x)
mg.assert_replicated(objective.result["BFGS"])
