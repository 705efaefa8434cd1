"""L-BFGS-B with distributed vectors: iterates, numbers of evaluations, bounds and errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
from bounded_functions import FUNCTIONS, SIDE, torsion
from layouts import HEAD, N, rows
from mpi4py import MPI

import mpigrad as mg
from mpigrad.communicator import Communicator
from mpigrad.optimize import LBFGSB, NotFiniteError, Objective, Result, Unknowns, minimize
from mpigrad.optimize.lbfgsb import LBFGSBState, _cauchy_point, _curvature

LOWER = np.where(np.arange(N) % 3 == 0, 0.1, -np.inf)
UPPER = np.where(np.arange(N) % 3 == 1, 0.6, 4.0)


class Counted:
    """A function whose losses are recorded, and that must not leave the bounds."""

    def __init__(self, compiled, lower, upper):
        self.compiled, self.lower, self.upper = compiled, lower, upper
        self.losses = []

    def __call__(self, x):
        assert np.all(self.lower <= x) and np.all(x <= self.upper)
        value, gradient = self.compiled(jnp.asarray(x))
        self.losses.append(float(value))
        return value, gradient

    def until(self, enough):
        """Return the count of evaluations until the loss was small enough."""
        return np.flatnonzero(np.array(self.losses) <= enough)[0] + 1


FEW = ("Rosenbrock, HS 2", "Powell", "Brown almost linear", "trigonometric")


@pytest.mark.ranks(1)
@pytest.mark.cases("some", reason="test-full has the statistics of all functions")
@pytest.mark.parametrize("names", [FEW, tuple(FUNCTIONS)], ids=["some", "all"])
def test_lbfgsb_needs_as_few_evaluations_as_scipy(names):
    ratios, active = {}, {}
    for name in names:
        function, x0, lower, upper = FUNCTIONS[name]
        compiled = jax.jit(jax.value_and_grad(function))
        ours, theirs = Counted(compiled, lower, upper), Counted(compiled, lower, upper)
        found = minimize(
            None, x0, LBFGSB((lower, upper)), value_and_grad=ours, rtol=1e-9, max_steps=300
        )
        scipy.optimize.minimize(
            lambda x, f=theirs: tuple(map(np.asarray, f(x))), x0, jac=True, method="L-BFGS-B",
            bounds=np.stack([lower, upper], 1),
            options={"maxcor": 10, "gtol": 1e-12, "ftol": 0, "maxiter": 300, "maxfun": 1000},
        )  # fmt: skip
        bottom = min(theirs.losses)
        enough = bottom + 1e-8 * (theirs.losses[0] - bottom)
        assert min(ours.losses) <= enough, name
        ratios[name] = ours.until(enough) / theirs.until(enough)
        active[name] = np.sum((found.value == lower) | (found.value == upper))
    assert np.median(list(ratios.values())) <= 1.3, ratios
    assert sum(count > 0 for count in active.values()) >= min(8, len(names)), active


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.cases("mixed", reason="it has replicated and sharded unknowns")
@pytest.mark.parametrize("layout", ["replicated", "sharded", "mixed"])
def test_iterates_do_not_depend_on_the_ranks(chains, comm, layout):
    """Bounds per leaf, as arrays and numbers, of which each rank has its part."""
    own, tail = rows(N, comm), rows(N - HEAD, comm)
    limits = {
        "serial": (LOWER, UPPER),
        "replicated": (LOWER, UPPER),
        "sharded": (LOWER[own], UPPER[own]),
        "mixed": tuple({"head": b[:HEAD], "tail": b[HEAD:][tail]} for b in (LOWER, UPPER)),
    }
    runs = {}
    for name, bounds in ((name, limits[name]) for name in ("serial", layout)):
        objective, x0, whole = chains[name]
        found = []
        solution = minimize(
            objective, x0, LBFGSB(bounds, memory=5), rtol=1e-9, max_steps=60,
            callback=lambda _, x, found=found, whole=whole: found.append(whole(x)),
        )  # fmt: skip
        runs[name] = np.array(found), solution
    expected, serial = runs["serial"]
    assert serial.result is Result.SUCCESSFUL
    assert np.sum((expected[-1] == LOWER) | (expected[-1] == UPPER)) >= 2
    for name, (found, solution) in runs.items():
        assert np.all((found >= LOWER) & (found <= UPPER)), name
        n = min(len(found), len(expected), 15)
        assert n == 15 and np.max(np.abs(found[:n] - expected[:n])) < 1e-8, name
        assert np.allclose(found[-1], expected[-1], atol=1e-7), name
        assert solution.result is Result.SUCCESSFUL


@pytest.mark.full("tiles differ in the inner products only; test_minimize.py has those of a grid")
def test_tiles_of_a_grid(comm):
    """The torsion problem, whose unknowns are tiles, and many of them at their bounds."""
    grid = mg.Grid((SIDE, SIDE), (1.0, 1.0), comm)
    _, x0, lower, upper = FUNCTIONS["torsion"]
    low, high = (b.reshape(SIDE, SIDE)[grid.slices] for b in (lower, upper))

    def share(x):
        p = mg.halo_exchange(x, grid, boundary=0.0)
        sides = (p[2:, 1:-1], p[1:-1, 2:])
        own = 0.5 * sum(jnp.sum((side - x) ** 2) for side in sides)
        for axis in (0, 1):  # the first cells are next to the boundary, where x is 0
            if grid.slices[axis].start == 0:
                own += 0.5 * jnp.sum(jnp.take(x, 0, axis) ** 2)
        return own - 5.0 / (SIDE + 1) ** 2 * jnp.sum(x)

    method = LBFGSB((low, high))
    tiles = minimize(share, jnp.zeros(grid.local_shape), method, sharded=grid, rtol=1e-6, comm=comm)
    alone = Communicator(MPI.COMM_SELF)
    whole = minimize(torsion, x0, LBFGSB((lower, upper)), rtol=1e-6, comm=alone)
    assert tiles.result is whole.result is Result.SUCCESSFUL
    assert abs(tiles.stats["evaluations"] - whole.stats["evaluations"]) <= 1
    assert np.allclose(tiles.value, whole.value.reshape(SIDE, SIDE)[grid.slices], atol=1e-7)
    at_bounds = comm.mpi.allreduce(int(np.sum((tiles.value == low) | (tiles.value == high))))
    assert at_bounds == np.sum((whole.value == lower) | (whole.value == upper)) > 20


@pytest.mark.ranks(1, 2, 3)
def test_the_cauchy_point_is_a_minimum_of_the_path(comm):
    """With many breakpoints, some of them equal, before and after the minimum."""
    n, m = 211, 3
    generator = np.random.default_rng(4)
    own = rows(n, comm)
    S = generator.standard_normal((m, n))
    R = np.concatenate([S, S * (1 + 20 * generator.random(n))])  # y = H s for a diagonal H
    x, g = generator.random(n), generator.standard_normal(n)
    g[:20] = 0.0
    low, high = np.where(np.arange(n) % 5 == 0, -np.inf, 0.0), np.full(n, 1.0)
    x[40:80], g[40:80] = 0.75, -2.5  # these reach their upper bound at the same step
    unknowns = Unknowns(jnp.asarray(x[own]), True, comm)
    vectors = [(jnp.asarray(v[own]),) for v in (x, g, low, high)]
    for scale in (1e-2, 1.0, 10.0):
        pairs = R * np.repeat([1.0, scale], m)[:, None]
        gram = pairs @ pairs.T
        state = LBFGSBState((), (), 0.0, 0.0, 0.0, (), gram, count=m)
        theta, K = _curvature(state)
        local = (jnp.asarray(pairs[:, own]),)
        t = _cauchy_point(unknowns, local, *vectors[:2], tuple(vectors[2:]), theta, K)

        def model(t, pairs=pairs, theta=theta, K=K):
            z = np.clip(x - t * g, low, high) - x
            return g @ z + 0.5 * (theta * z @ z - (pairs @ z) @ K @ (pairs @ z))

        for other in (0.0, t * (1 - 1e-4), t * (1 + 1e-4)):
            assert model(t) <= model(other), (scale, other)


def test_float32_and_fixed_unknowns(comm):
    with jax.enable_x64(False):
        upper = jnp.asarray([0.5, jnp.inf, 4.0, 2.0])
        lower = {"x": jnp.asarray([-jnp.inf, -1.0, 3.5, 2.0])}
        method = LBFGSB((lower, {"x": upper}))
        objective = Objective(
            lambda x: 1e-4 * jnp.sum((x["x"] - 3.0) ** 2) / comm.size,
            {"x": jnp.zeros(4)}, replicated=True, comm=comm,
        )  # fmt: skip
        solution = minimize(objective, {"x": jnp.full(4, 9.0)}, method, rtol=1e-5)
        assert solution.result is Result.SUCCESSFUL and solution.value["x"].dtype == "float32"
        assert np.allclose(solution.value["x"], [0.5, 3.0, 3.5, 2.0], atol=1e-3)


@pytest.mark.ranks(2)
def test_rejects_invalid_bounds(comm):
    def refused(match, bounds):
        with pytest.raises(ValueError, match=match):
            minimize(lambda x: jnp.sum(x**2), jnp.zeros(3), LBFGSB(bounds), replicated=True)

    refused("LBFGSB: every lower bound must be at most", (1.0, np.array([2.0, 0.0, 2.0])))
    refused("LBFGSB: every lower bound must be at most", (np.nan, None))
    refused("LBFGSB: bounds do not fit the unknowns", (np.zeros(2), None))
    refused("tuple .*, got tuple of 3 elements", (1.0, 2.0, 3.0))
    refused("got list of 3 elements. Give two arrays", [(0.0, 1.0)] * 3)
    refused(
        "bounds of replicated unknowns .* must be the same on all ranks",
        (np.full(3, -comm.rank), 1.0),
    )
    with pytest.raises(ValueError, match="memory must be positive"):
        LBFGSB(memory=0)


def test_an_infinite_slope_is_an_error(comm):
    """As for the methods without bounds, and although the projected gradient is finite."""
    loss = lambda x: jnp.sum(jnp.sqrt(x)) / comm.size
    with pytest.raises(NotFiniteError, match="the norm of its gradient is inf"):
        minimize(loss, jnp.array([0.0, 1.0]), LBFGSB((0.0, 2.0)), replicated=True, comm=comm)
