"""Iterates of replicated, sharded and mixed unknowns are those of the serial run."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpigrad as mg
from mpigrad.optimize import LBFGS, LBFGSB, NewtonCG, NonlinearCG, Optax, Result, minimize
from mpigrad.optimize.unknowns import dot

METHODS = {
    "L-BFGS": LBFGS(memory=4),
    "HZ": NonlinearCG("HZ"),
    "PR+": NonlinearCG("PR+"),
    "Adam": Optax(optax.adam(0.1), clip=100.0, elementwise=True),
    "Newton": NewtonCG(),
    "L-BFGS-B": LBFGSB(bounds=(-1.0, 1.05), memory=4),  # the start is moved onto the bounds
}


def iterates(objective, x0, whole, method, max_steps=10):
    found = []
    solution = minimize(
        objective, x0, method, max_steps=max_steps, callback=lambda _, x: found.append(whole(x))
    )
    return np.array(found), solution


@pytest.mark.cases(
    "*-mixed", "L-BFGS-replicated", "L-BFGS-sharded",
    reason="all methods use the same inner products, so one shows the other layouts",
)  # fmt: skip
@pytest.mark.parametrize("layout", ["replicated", "sharded", "mixed"])
@pytest.mark.parametrize("name", METHODS)
def test_iterates_do_not_depend_on_the_layout(chains, comm, name, layout):
    expected, serial = iterates(*chains["serial"], METHODS[name])
    assert len(expected) == 11
    found, solution = iterates(*chains[layout], METHODS[name])
    scale = np.max(np.abs(expected), axis=1, keepdims=True)
    assert np.max(np.abs(found - expected) / scale) < 1e-8
    for count in ("num_steps", "evaluations", "products"):
        assert solution.stats[count] == serial.stats[count]
    assert [r.evaluations for r in solution.stats["history"]] == [
        r.evaluations for r in serial.stats["history"]
    ]
    replicated = solution.value["head"] if layout == "mixed" else solution.value
    if layout != "sharded":
        everywhere = comm.mpi.allgather(np.asarray(replicated).tobytes())
        assert len(set(everywhere)) == 1


@pytest.mark.cases(
    "L-BFGS", "HZ", "Newton", "L-BFGS-B", reason="PR+ differs from HZ in one formula"
)
# Adam needs too many steps in a narrow valley.
@pytest.mark.parametrize("name", [name for name in METHODS if name != "Adam"])
def test_methods_reach_the_minimum(chains, name):
    objective, x0, whole = chains["mixed"]
    # The valley is flat at its end: the gradient has to be that small.
    solution = minimize(objective, x0, METHODS[name], rtol=1e-10, max_steps=3000)
    assert solution.result is Result.SUCCESSFUL
    assert np.allclose(whole(solution.value), 1, atol=1e-7)


def test_gradient_and_hessian_of_mixed_unknowns(chains, comm):
    """Taylor remainders of the loss and of the gradient, and the symmetry of the Hessian."""
    objective, x0, _ = chains["mixed"]
    unknowns = objective.unknowns
    x = unknowns.initial_vector(x0)
    generator = np.random.default_rng(0)
    whole = generator.standard_normal((2, 13))
    tail = [np.split(w[5:], np.cumsum(comm.mpi.allgather(x0["tail"].size))[:-1]) for w in whole]
    v, w = (
        unknowns.vector({"head": a[:5], "tail": b[comm.rank]})
        for a, b in zip(whole, tail, strict=True)
    )
    here = objective.evaluate_along(x, v, 0.0)

    @mg.jit
    def products(x, v, w):
        product = objective.hessian_products(x, ())
        Hv, Hw = product(v), product(w)
        return Hv, unknowns.sum(jnp.stack([dot(Hv, w), dot(v, Hw)]))

    Hv, (one, other) = products(x, v, w)
    assert abs(one - other) <= 1e-12 * abs(one)
    remainders = []
    for h in (1e-3, 5e-4):
        there = objective.evaluate_along(x, v, h)
        gradient = [
            float(np.sum((a - b - h * c) ** 2))
            for a, b, c in zip(there.gradient, here.gradient, Hv, strict=True)
        ]
        remainders.append(
            [abs(there.loss - here.loss), abs(there.loss - here.loss - h * here.slope),
             comm.mpi.allreduce(sum(gradient)) ** 0.5]
        )  # fmt: skip
    rates = np.log2(np.array(remainders[0]) / remainders[1])
    assert np.allclose(rates, [1, 2, 2], atol=0.15), rates


def test_float32(comm):
    with jax.enable_x64(False):
        x0 = jnp.linspace(-1, 1, 4 + comm.rank)
        solution = minimize(lambda x: jnp.sum((x - 3) ** 4), x0, sharded=True, rtol=1e-5)
        assert solution.value.dtype == "float32"
        assert solution.result is Result.SUCCESSFUL
        assert np.allclose(solution.value, 3, atol=0.1)
