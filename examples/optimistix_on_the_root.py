"""An optimizer that is itself a compiled JAX program, for an objective spread over ranks.

optimistix traces its objective and compiles the whole descent. It can trace `objective.function`:
at each evaluation the compiled program on rank 0 asks the other ranks for their parts.

    mpigrad launch -n 2 examples/optimistix_on_the_root.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optimistix
from mpi4py import MPI

import mpigrad as mg

jax.config.update("jax_enable_x64", True)
rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size

# A logistic regression. Each rank draws 100 / size points of its own.
generator = np.random.default_rng(rank)
points = generator.normal(size=(100 // size, 2))
labels = np.where(points @ [1.0, -2.0] + 0.5 * generator.normal(size=len(points)) > 0, 1.0, -1.0)
start = {"weights": jnp.zeros(2), "offset": jnp.zeros(())}


def share(x):
    """Return the contribution of this rank's points. The objective is the sum over ranks."""
    margin = labels * (points @ x["weights"] + x["offset"])
    penalty = (jnp.sum(x["weights"] ** 2) + x["offset"] ** 2) / (2 * size)
    return jnp.sum(jnp.logaddexp(0, -margin)) + penalty


with mg.optimize.root_objective(share, start) as objective:
    if objective:  # only on rank 0. The other ranks serve until rank 0 leaves the block
        solution = optimistix.minimise(
            lambda x, _: objective.function(x), optimistix.BFGS(1e-8, 1e-8), start
        )
        gradient = objective.gradient(solution.value)
        objective.result = solution.value, gradient
        print(f"weights {solution.value['weights']} after {objective.evaluations} evaluations")

# The result is on every rank now.
x, gradient = objective.result
assert abs(gradient["weights"]).max() < 1e-5
assert x["weights"][0] > 0 > x["weights"][1]
