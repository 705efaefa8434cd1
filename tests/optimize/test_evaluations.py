"""L-BFGS compared with SciPy's L-BFGS-B on functions of the literature."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
from functions import FUNCTIONS

from mpigrad.optimize import LBFGS, Objective, minimize


class Counted:
    """A sum of squares that records the loss of each evaluation."""

    def __init__(self, residuals):
        self.compiled = jax.jit(jax.value_and_grad(lambda x: jnp.sum(residuals(x) ** 2)))
        self.losses = []

    def __call__(self, x):
        value, gradient = self.compiled(x)
        self.losses.append(float(value))
        return value, gradient

    def until(self, enough):
        """Return the count of evaluations until the loss was small enough."""
        small = np.flatnonzero(np.array(self.losses) <= enough)
        return small[0] + 1 if len(small) else None

    def scipys(self, x):
        value, gradient = self(jnp.asarray(x))
        return float(value), np.asarray(gradient)


# Those of 2 and of 4 unknowns: the programs of the method are compiled for two sizes.
FEW = ("rosenbrock", "freudenstein_roth", "beale", "powell_singular", "wood", "kowalik_osborne")


@pytest.mark.ranks(1)
@pytest.mark.cases("some", reason="test-full has the statistics of all functions")
@pytest.mark.parametrize("names", [FEW, None], ids=["some", "all"])
def test_lbfgs_needs_as_few_evaluations_as_scipy(names):
    ratios, objectives = {}, {}
    for residuals, (start, least) in FUNCTIONS.items():
        if names and residuals.__name__ not in names:
            continue
        x0 = np.array(start, float)
        ours, theirs = Counted(residuals), Counted(residuals)
        theirs.compiled = ours.compiled
        if x0.size not in objectives:  # the method's programs are compiled once for each size
            objectives[x0.size] = Objective(None, x0, value_and_grad=lambda x: current(x))  # noqa: B023
        current = ours
        minimize(objectives[x0.size], x0, LBFGS(memory=10), rtol=1e-12, max_steps=300)
        scipy.optimize.minimize(
            theirs.scipys, x0, jac=True, method="L-BFGS-B",
            options={"maxcor": 10, "gtol": 1e-12, "ftol": 0, "maxiter": 300, "maxfun": 1000},
        )  # fmt: skip
        bottom = min(theirs.losses) if least is None else least
        enough = bottom + 1e-8 * (ours.losses[0] - bottom)
        assert ours.until(enough), residuals.__name__
        ratios[residuals.__name__] = ours.until(enough) / theirs.until(enough)
    assert np.median(list(ratios.values())) <= 1.2, ratios
