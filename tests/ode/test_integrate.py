"""Reaction and diffusion over ranks, compared with the same program on one rank."""

import resource

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.integrate
from mpi4py import MPI

import mpigrad as mg
from helpers import close
from mpigrad import ode, sparse
from mpigrad.grid import Grid, halo_exchange
from mpigrad.loops import Files
from mpigrad.solution import Result

SHAPE = (6, 5)
TS = np.array([0.0, 0.2, 0.5])
RATES = np.array([0.8, 1.5])
_random = np.random.default_rng(3)
START = _random.uniform(0.2, 1.0, (*SHAPE, 2))
WEIGHTS = _random.uniform(0.5, 1.5, (*SHAPE, 2))
TIGHT = sparse.BiCGStab(rtol=1e-12, preconditioner=sparse.Jacobi())
FREE = sparse.BiCGStab(rtol=1e-12)


class Brusselator:
    """Two reacting fields that diffuse on a periodic grid (stiff: the diffusion is fast)."""

    def __init__(self, comm):
        self.grid = Grid(SHAPE, (0.2, 0.2), comm=comm, periodic=(True, True))

    def tile(self, field):
        return jnp.asarray(field[self.grid.slices])

    def diffusion(self, w):
        p = halo_exchange(w, self.grid)
        around = p[2:, 1:-1] + p[:-2, 1:-1] + p[1:-1, 2:] + p[1:-1, :-2]
        return jnp.array([1.0, 0.3]) * (around - 4 * w) / 0.04

    def reaction(self, t, w, rates):
        u, v = w[..., 0], w[..., 1]
        fast = u * u * v
        rise = rates[0] + 0.1 * jnp.sin(t) - (rates[1] + 1) * u + fast
        return jnp.stack([rise, rates[1] * u - fast], axis=-1)

    def slope(self, t, w, rates):
        return self.diffusion(w) + self.reaction(t, w, rates)

    def pattern(self):
        f = lambda w: self.slope(0.0, w, RATES)
        return sparse.find_pattern(f, self.tile(START), self.grid)

    def loss(self, options):
        weights = self.tile(WEIGHTS)

        def share(w, rates, ts=TS):
            end = ode.integrate(args=(rates,), y0=w, ts=ts, **options)
            return jnp.sum(weights * end.value[1:] ** 2), end

        return share


def ways(model):
    """How the equation is given: as a whole, without a pattern, with a mass, in two parts."""
    common = {"f": model.slope, "rtol": 1e-3, "atol": 1e-4, "linear_rtol": 1e-6, "max_steps": 40}
    mass = jnp.stack([jnp.full(model.grid.local_shape, m) for m in (1.0, 2.0)], axis=-1)
    pattern = model.pattern()
    with_pattern = {**common, "pattern": pattern, "solver": TIGHT, "comm": model.grid.comm}
    scaled = sparse.Pattern(
        np.arange(mass.size) + pattern.offset, np.arange(mass.size) + pattern.offset, mass.size,
        model.grid.comm,
    )  # fmt: skip
    return {
        "pattern": with_pattern,
        "matrix-free": {**common, "solver": FREE, "comm": model.grid.comm},
        "mass": {**with_pattern, "mass": mass},
        "mass-matrix": {**with_pattern, "mass": sparse.Matrix(scaled, mass.ravel())},
        "two-parts": {
            **with_pattern,
            "f": lambda t, w, rates: model.diffusion(w),
            "explicit": model.reaction,
            "method": ode.KenCarp4(),
        },
    }


def results(comm, way):
    """Return the value and gradient of the loss, with the statistics."""
    model = Brusselator(comm)
    share = model.loss(ways(model)[way])
    gradient = mg.value_and_grad(share, (0, 1, 2), has_aux=True, replicated=(1, 2), comm=comm)
    (value, end), slopes = mg.jit(gradient)(model.tile(START), jnp.asarray(RATES), jnp.asarray(TS))
    return model, value, end, slopes


@pytest.mark.parametrize("way", ["pattern", "matrix-free", "mass", "mass-matrix", "two-parts"])
@pytest.mark.cases("pattern", reason="the others take as long, and differ in a few lines")
@pytest.mark.long("an adaptive loop and its derivative, over all ranks and on one")
def test_value_and_gradient_are_those_of_one_rank(comm, way):
    model, value, end, slopes = results(comm, way)
    _, one, end_of_one, slopes_of_one = results(mg.Communicator(MPI.COMM_SELF), way)
    mine = model.grid.slices
    close(value, one, 1e-9)
    close(end.value, end_of_one.value[(slice(None), *mine)], 1e-9)
    close(slopes[0], slopes_of_one[0][mine], 1e-8)
    close(slopes[1], slopes_of_one[1], 1e-8)
    close(slopes[2], slopes_of_one[2], 1e-8)
    assert int(end.stats["num_steps"]) == int(end_of_one.stats["num_steps"]) > 3
    assert end.result == Result.SUCCESSFUL


EXACT = {"adaptive": False, "dt0": 0.1, "rtol": 1e-9, "atol": 1e-12, "max_steps": 8}


def fixed_steps(comm):
    """Return the model, and the loss after five steps of one length with tight solves."""
    model = Brusselator(comm)
    return model, model.loss({**ways(model)["pattern"], **EXACT})


@pytest.mark.full("the gradient with a pattern is that of test_differential_algebraic_equation")
@pytest.mark.long("the gradient of a loop; test_newton is the shorter twin")
def test_taylor(comm):
    model, share = fixed_steps(comm)
    start = model.tile(START)
    mg.taylor_test(
        lambda rates: share(start, rates)[0], RATES, replicated=True, comm=comm, halvings=2
    )


@pytest.mark.full("the gradient is differentiated; test_newton does that for one stage")
@pytest.mark.long("the gradient is differentiated")
def test_dot_taylor_in_the_state_and_hessian_vector_product(comm):
    model, share = fixed_steps(comm)
    start = model.tile(START)
    options = ways(model)["pattern"] | EXACT
    states = lambda w: ode.integrate(args=(RATES,), y0=w, ts=TS, **options).value
    mg.dot_test(states, start, comm=comm, rtol=1e-10)
    mg.taylor_test(lambda w: share(w, RATES)[0], start, comm=comm, step=1e-3, halvings=2)

    gradient = mg.grad(lambda r: share(start, r)[0], replicated=0, comm=comm)
    direction = np.array([0.6, -0.8])
    along = mg.jit(lambda r: mg.jvp(gradient, (r,), (direction,))[1])
    compiled, h = mg.jit(gradient), 1e-4
    difference = compiled(RATES + h * direction) - compiled(RATES - h * direction)
    close(along(RATES), difference / (2 * h), 1e-5)


@pytest.mark.ranks(1)
@pytest.mark.full("takes long; the gradient is that of one rank above")
@pytest.mark.long("the adaptive loop, its derivative and its adjoint")
def test_derivative_in_forward_mode_is_that_in_reverse_mode():
    f = lambda t, y, k: -k * (y - jnp.cos(t)) * y
    end = lambda k, ts: ode.integrate(f, np.ones(2), ts, (k,), rtol=1e-6, atol=1e-9).value[-1, 0]
    ts = np.array([0.0, 0.5, 1.5])
    slopes = mg.jit(mg.grad(end, (0, 1)))(3.0, ts)
    _, along = mg.jit(lambda: mg.jvp(end, (3.0, ts), (1.0, np.array([0.0, 0.0, 1.0]))))()
    close(along, slopes[0] + slopes[1][2], 1e-7)
    close(slopes[1][1], 0.0 * slopes[1][1], 1e-3)  # an output time in between changes nothing


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.cases("1", reason="the second derivative takes as long again")
@pytest.mark.long("an adaptive loop and its derivative")
def test_event(comm, order):
    """The sum over ranks falls to a threshold c at t = log(sum / c) / k."""
    start = jnp.asarray(1.0 + np.arange(comm.rank + 2))
    total = comm.mpi.allreduce(float(jnp.sum(start)))

    def sums(y):
        return mg.allreduce(jnp.sum(y), comm=comm)

    def end(p):
        return ode.integrate(
            lambda t, y, k, c: -k * y, start, np.array([0.0, 0.2, 9.0]), tuple(p), ode.KenCarp4(),
            event=lambda t, y, k, c: sums(y) - c, rtol=1e-7, atol=1e-9, comm=comm, max_steps=100,
        )  # fmt: skip

    def share(p):
        solution = end(p)
        return solution.stats["time"] / comm.size, solution

    k, c = 0.5, 0.7 * total
    t = np.log(total / c) / k
    slope = mg.grad(share, replicated=0, has_aux=True, comm=comm)
    if order == 1:
        compiled = mg.jit(slope)
        first, solution = compiled(np.array([k, c]))
        assert solution.result == Result.SUCCESSFUL
        close(solution.stats["time"], t, 1e-6)
        close(sums(solution.value[-1]), c, 1e-8)
        close(solution.value[1], np.exp(-0.1) * start, 1e-5)
        close(first, np.array([-t / k, -1 / (k * c)]), 1e-5)
        np.testing.assert_array_equal(compiled(np.array([1e-3, c]))[0], 0.0)  # no event
    else:
        along = lambda p: mg.jvp(lambda p: slope(p)[0], (p,), (jnp.array([1.0, 0.0]),))[1]
        second = mg.jit(along)(np.array([k, c]))
        close(second, np.array([2 * t / k**2, 1 / (k**2 * c)]), 1e-4)


@pytest.mark.ranks(2)
@pytest.mark.long("an adaptive loop on two ranks")
def test_an_event_of_one_rank_alone_is_an_error(comm):
    start = np.full(2, 1.0 + comm.rank)
    with pytest.raises(jax.errors.JaxRuntimeError, match="the value of the event is not the same"):
        ode.integrate(
            lambda t, y: -y, start, np.array([0.0, 1.0]), event=lambda t, y: y[0] - 0.5, comm=comm
        )


@pytest.mark.ranks(1)
@pytest.mark.full("compiles two gradients; test_checkpoints_reduce_memory is the shorter twin")
@pytest.mark.long("compiles two gradients")
def test_memory_of_stages_in_files_does_not_depend_on_max_steps(tmp_path):
    def states(max_steps):
        end = lambda y: jnp.sum(
            ode.integrate(
                lambda t, y: -(y**2), y, np.array([0.0, 0.5, 1.0]), max_steps=max_steps,
                checkpoints=Files(tmp_path),
            ).value[1:]
        )  # fmt: skip
        program = jax.jit(jax.grad(end)).lower(np.ones(20_000)).compile()
        return program.memory_analysis().temp_size_in_bytes / (8 * 20_000)

    assert states(200) < states(20) + 1


@pytest.mark.ranks(1)
@pytest.mark.long("two adaptive loops")
def test_events_that_are_hard_to_find():
    """Just before an output time, and behind a pulse that short steps see and long ones do not."""
    near = ode.integrate(
        lambda t, y: -jnp.ones_like(y), np.ones(2), np.array([0.0, 1.0]), adaptive=False, dt0=0.1,
        event=lambda t, y: 1e-200 * (y[0] - 5e-4),
    )  # fmt: skip
    close(near.stats["time"], 0.9995, 1e-12)
    pulse = lambda t, y: -y + 250 * jnp.exp(-(((t - 8.363503739945136) / 0.0064088938962) ** 2))
    behind = ode.integrate(
        pulse,
        np.ones(1),
        np.array([0.0, 10.0]),
        rtol=1e-4,
        event=lambda t, y: t - 8.372172556558661,
    )
    close(behind.stats["time"], 8.372172556558661, 1e-7)


# ---- methods ----


def oscillator(t, y, k):
    return jnp.stack([-k * (y[0] - jnp.cos(t)), y[0] * y[1] * jnp.sin(t) - y[1]])


METHODS = [
    ode.ImplicitEuler(), ode.Kvaerno3(), ode.Kvaerno5(), ode.KenCarp3(), ode.KenCarp4(),
    ode.KenCarp5(),
]  # fmt: skip


@pytest.mark.ranks(1)
@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
@pytest.mark.cases("ImplicitEuler", "KenCarp4", reason="tables are compared below")
def test_order(method):
    slope = jax.jit(lambda t, y: oscillator(t, y, 2.0))
    exact = scipy.integrate.solve_ivp(
        lambda t, y: np.asarray(slope(t, y)), (0, 1), np.ones(2), rtol=1e-12, atol=1e-13
    ).y[:, -1]
    parts = {"f": oscillator}
    if method.explicit is not None:
        stiff = lambda t, y, k: jnp.stack([-k * (y[0] - jnp.cos(t)), -y[1]])
        rest = lambda t, y, k: jnp.stack([0 * y[0], y[0] * y[1] * jnp.sin(t)])
        parts = {"f": stiff, "explicit": rest}

    @mg.jit
    def error(dt0):
        end = ode.integrate(
            args=(2.0,), y0=np.ones(2), ts=np.array([0.0, 1.0]), method=method, adaptive=False,
            dt0=dt0, rtol=1e-11, atol=1e-13, linear_rtol=1e-8, **parts,
        )  # fmt: skip
        return jnp.max(jnp.abs(end.value[-1] - exact))

    assert abs(np.log2(error(1 / 4) / error(1 / 8)) - method.order) < 0.4


@pytest.mark.ranks(1)
def test_tables_are_those_of_diffrax():
    diffrax = pytest.importorskip("diffrax")
    for method in METHODS[1:]:
        table = getattr(diffrax, type(method).__name__).tableau
        parts = [table]
        if method.explicit is not None:
            explicit, *parts = table.tableaus
            close(method.explicit_rows()[:-1], _square(explicit.a_lower, method.stages))
        close(method.below_diagonal(), _square(parts[0].a_lower, method.stages))
        close(np.full(method.stages - 1, method.diagonal), parts[0].a_diagonal[1:])
        close(method.nodes(), parts[0].c)
        close(np.asarray(method.error), parts[0].b_error, 1e-9)


def _square(rows, width):
    return np.array([np.pad(row, (0, width - len(row))) for row in rows])


# ---- algebraic equations ----

REACTIONS = np.array([0.04, 1e4, 3e7])
# By differences of the same equations without an algebraic one, with a tolerance of 1e-10.
SENSITIVITY = np.array([0.16990, -0.13731, 0.06865]) / REACTIONS


def robertson(t, y, k):
    a, b, c = y[..., 0], y[..., 1], y[..., 2]
    first, second, third = k[0] * a, k[1] * b * c, k[2] * b * b
    return jnp.stack([second - first, first - second - third, a + b + c - 1], axis=-1)


@pytest.mark.long("a stiff equation by a method of order 5, and its derivative")
def test_differential_algebraic_equation(comm):
    cells = 1 + comm.rank % 2
    y0 = np.broadcast_to([1.0, 0.0, 0.0], (cells, 3))
    mass = np.broadcast_to([1.0, 1.0, 0.0], (cells, 3))
    blocks = comm.mpi.exscan(cells) or 0
    rows, columns = (
        np.concatenate([3 * (blocks + i) + entry for i in range(cells)])
        for entry in np.divmod(np.arange(9), 3)
    )
    pattern = sparse.Pattern.from_coo(rows, columns, 3 * cells, comm)

    def share(k):
        end = ode.integrate(
            robertson, y0, np.array([0.0, 40.0]), (k,), ode.Kvaerno5(), mass=mass, rtol=1e-6,
            atol=1e-10, linear_rtol=1e-9, solver=sparse.GMRES(rtol=1e-12), pattern=pattern,
            comm=comm,
        ).value[-1]  # fmt: skip
        return jnp.sum(end[:, 2]), end[0]

    gradient = mg.grad(share, has_aux=True, replicated=0, comm=comm)
    slope, end = mg.jit(gradient)(REACTIONS)
    close(end, np.array([0.715827069, 9.18553476e-06, 0.284163746]), 1e-6)  # by diffrax
    close(slope / comm.mpi.allreduce(cells), SENSITIVITY, 1e-3)


# ---- failures ----


def decay(t, y, k):
    return -k * y


def failing(comm, bad_rank, f=decay, **options):
    """Return the error of an integration on this rank."""
    options = {"ts": np.array([0.0, 1.0]), "args": (2.0,), **options}
    local = lambda t, y, k: f(t, y, jnp.where(comm.rank == bad_rank, k, 1.0))
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError, TypeError)) as caught:
        jax.block_until_ready(ode.integrate(local, np.ones(2), comm=comm, **options).value)
    return str(caught.value)


@pytest.mark.long("two programs that fail")
def test_failure_on_one_rank_ends_all_with_time_and_reason(comm):
    last = comm.size - 1
    blow_up = lambda t, y, k: jnp.where(k > 1, y * jnp.sqrt(0.3 - t), -y)
    text = failing(comm, last, blow_up)
    assert "a time step became too small after" in text
    assert "t = 0.2" in text or "t = 0.3" in text
    assert "NaN or infinite" in text
    turning = lambda t, y, k: jnp.array([[-5.0, 4.0], [-4.0, -5.0]]) @ y
    text = failing(comm, last, turning, solver=sparse.PCG(), dt0=0.5)
    assert "a step failed after 0 steps and 1 rejected ones, at t = 0: a linear solve by" in text
    assert "ended with NOT_SYMMETRIC" in text


def test_a_pattern_without_an_entry_in_the_first_column_is_refused(comm):
    rows, columns = (np.array(k) + 2 * comm.rank for k in ([0, 0, 1], [0, 1, 1]))
    pattern = sparse.Pattern(rows, columns, 2, comm)
    f = lambda t, y: jnp.stack([-y[0] + 0.1 * y[1], 5 * y[0] - y[1]])
    with pytest.raises(jax.errors.JaxRuntimeError, match="The pattern lacks entries"):
        ode.integrate(f, np.ones(2), np.array([0.0, 1.0]), pattern=pattern)


@pytest.mark.ranks(1)
def test_scales_of_time_and_states_before_a_failure():
    """By one program: 10^12 s, and a slope that is NaN from 1.2 s on."""

    @mg.jit
    def program(y0, ts, rate, goal, last):
        f = lambda t, y: jnp.where(t > last, jnp.nan, rate * (goal - y))
        return ode.integrate(f, y0, ts, throw=False)

    slow = program(np.zeros(2), np.array([0.0, 1e11, 9e11, 1e12]), 1e-12, 1.0, np.inf)
    assert slow.result == Result.SUCCESSFUL
    close(slow.value[-1], 1 - np.exp(-np.ones(2)), 1e-3)
    end = program(np.ones(2), np.array([0.0, 0.5, 1.0, 2.0]), 1.0, 0.0, 1.2)
    assert end.result == Result.STEP_TOO_SMALL
    close(end.value[:3], np.exp(-np.array([[0.0], [0.5], [1.0]])) * np.ones(2), 1e-3)
    assert np.isnan(end.value[3]).all()
    assert 1.0 < end.stats["time"] < 1.2001
    with pytest.raises(jax.errors.JaxRuntimeError, match="in f at the first state, t = 0"):
        ode.integrate(lambda t, y: y * jnp.nan, np.ones(2), np.array([0.0, 1.0]))


@pytest.mark.ranks(1)
def test_short_and_many_steps():
    # After a step of the length of a rounding error the slope is not a difference over it.
    near = np.array([0.0, 1.0, 1 + 1.2e-15, 2.0])
    end = ode.integrate(lambda t, y: -y, np.ones(1), near, adaptive=False, dt0=0.1)
    close(end.value[-1], np.exp(-2 * np.ones(1)), 1e-4)
    single = ode.integrate(
        lambda t, y: -y, np.ones(1, "float32"), np.array([0.0, 1.0]), adaptive=False, dt0=1e-3,
        max_steps=1000,
    )  # fmt: skip
    assert single.stats["num_steps"] == 1000


@pytest.mark.ranks(1)
def test_algebraic_unknowns_are_made_consistent():
    """The error estimate of Euler's method would reject every first step otherwise."""
    f = lambda t, y: jnp.stack([-y[1], y[1] - 2 * y[0]])
    end = ode.integrate(
        f, np.array([1.0, 7.0]), np.array([0.0, 0.1]), (), ode.ImplicitEuler(),
        mass=np.array([1.0, 0.0]), rtol=1e-4,
    )  # fmt: skip
    close(end.value[-1], np.exp(-0.2) * np.array([1.0, 2.0]), 1e-3)


@pytest.mark.long("the gradient of an adaptive loop")
def test_stages_in_files(comm, tmp_path_factory):
    """The gradient has the same bits as with stages in memory. The disk of one rank may fail."""
    scratch = comm.mpi.bcast(str(tmp_path_factory.mktemp("scratch")))

    def f(t, y, rates):
        mean = mg.allreduce(jnp.mean(y), comm=comm) / comm.size
        return rates[0] * (mean - y) - rates[1] * y**2

    def slope(checkpoints):
        def share(rates, ts):
            end = ode.integrate(
                f, START[:3], ts, (rates,), rtol=1e-6, atol=1e-8, max_steps=40, throw=False,
                checkpoints=checkpoints, solver=FREE, comm=comm,
            )  # fmt: skip
            return jnp.sum(WEIGHTS[:3] * end.value[1:] ** 2), end

        return mg.jit(mg.grad(share, has_aux=True, replicated=0, comm=comm))

    expected, _ = slope(None)(RATES, TS)
    in_files = slope(Files(scratch))
    assert in_files(RATES, 1e-6 * TS)[1].stats["num_steps"] < 8  # in the space that is reserved
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if comm.rank == comm.size - 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (36_000, limits[1]))
    found, end = in_files(RATES, TS)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert end.result == Result.NOT_STORED
    assert end.stats["num_steps"] == 8
    np.testing.assert_array_equal(found, 0 * expected)
    np.testing.assert_array_equal(in_files(RATES, TS)[0], expected)


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    "options, words",
    [
        ({"rtol": 1e-8, "y0": np.ones(2, "float32")}, "or compute in float64"),
        ({"ts": np.array([1.0, 0.0])}, "ts must increase"),
        ({"ts": np.array([0.0, np.inf])}, "ts must increase and be finite"),
        ({"ts": np.array([0.0, 1, 1 + 1e-9]), "y0": np.ones(2, "float32")}, "finite in float32"),
        ({"ts": np.array([1.0])}, "k of at least 2"),
        ({"atol": np.ones(2)}, "atol must be a number"),
        ({"y0": (np.ones(2),)}, "must be one array"),
        ({"y0": np.ones(2, int)}, "real and floating-point"),
        ({"explicit": decay}, "Kvaerno3 has no explicit part"),
        ({"explicit": decay, "mass": np.ones(2), "method": ode.KenCarp3()}, "got both"),
        ({"mass": np.ones(3)}, "shape of y0"),
        ({"adaptive": False}, "Give dt0"),
        ({"dt0": -1.0}, "dt0 must be positive"),
        ({"args": 1.0}, "args must be a tuple"),
        ({"method": "Kvaerno3"}, "must be a Method"),
        ({"solver": "GMRES"}, "must be a LinearSolver"),
        ({"f": lambda t, y, k: y[:1]}, "return an array like y"),
        ({"pattern": sparse.Pattern.from_coo([0, 1], [1, 0], 2)}, "diagonal entries"),
        ({"max_steps": 0}, "max_steps must be positive"),
        ({"linear_rtol": 2.0}, "linear_rtol must lie"),
        ({"event": lambda t, y, k: y}, "event must return a number"),
        ({"checkpoints": 4}, "must be None or loops.Files"),
        ({"checkpoints": Files("/tmp", 3)}, "leave out `every` and `inside`"),
        ({"checkpoints": Files("/none")}, "does not exist"),
    ],
)
def test_bad_input(options, words):
    default = {"f": decay, "y0": np.ones(2), "ts": np.array([0.0, 1.0]), "args": (1.0,)}
    with pytest.raises((ValueError, TypeError), match=f"ode.integrate: .*{words}"):
        ode.integrate(**{**default, **options})
