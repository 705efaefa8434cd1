"""Methods compared with other libraries, and the records and errors of minimize."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.optimize

from mpigrad.checkpoint import Checkpoint
from mpigrad.grid import Grid
from mpigrad.optimize import (
    LBFGS,
    LBFGSB,
    GaussNewton,
    NewtonCG,
    NonlinearCG,
    NotFiniteError,
    Objective,
    Optax,
    Result,
    StrongWolfe,
    clip_by_global_norm,
    global_norm,
    inner_products,
    minimize,
    multi_start,
)

ADAM = Optax(optax.adam(0.1))


def parabola(x):
    return jnp.sum((x - 2) ** 2)


@pytest.fixture
def directory(tmp_path, comm):
    return comm.mpi.bcast(tmp_path)


# ---- methods ----


def test_gauss_newton_fits_a_sharded_amplitude_and_common_rates(comm):
    """a[i] exp(-k t) + b at 6 times t: each rank has rows of a and of the data; k and b are common.

    SciPy fits all of it; few linearizations are enough, as the residuals vanish nearly.
    """
    t, rows = jnp.linspace(0, 2, 6), 5
    amplitude = np.linspace(1, 3, rows)
    noise = 1e-3 * np.random.default_rng(1).standard_normal((rows, 6))
    data = amplitude[:, None] * np.exp(-0.7 * t) + 0.2 + noise

    def residuals(x, data):
        return x["a"][:, None] * jnp.exp(-x["k"] * t) + x["b"] - data

    ends = [rows * r // comm.size for r in range(comm.size + 1)]
    mine = slice(ends[comm.rank], ends[comm.rank + 1])
    x0 = {"a": jnp.ones(rows)[mine], "b": 0.0, "k": 0.1}
    solution = minimize(
        lambda x: residuals(x, data[mine]),
        x0,
        GaussNewton(),
        sharded={"a": True, "b": False, "k": False},
        rtol=1e-9,
        comm=comm,
    )
    expected = scipy.optimize.least_squares(
        lambda x: np.ravel(residuals({"a": x[:rows], "b": x[rows], "k": x[rows + 1]}, data)),
        np.append(np.ones(rows), [0, 0.1]), xtol=1e-15, ftol=1e-15, gtol=1e-15,
    )  # fmt: skip
    assert solution.result is Result.SUCCESSFUL
    assert np.allclose(solution.value["a"], expected.x[:rows][mine], rtol=1e-7)
    assert float(solution.value["k"]) == pytest.approx(expected.x[-1], rel=1e-7)
    assert solution.stats["loss"] == pytest.approx(expected.cost, rel=1e-9)
    assert solution.stats["evaluations"] < 15


def test_adam_is_optax_on_each_part(comm):
    """Ours, optax through `Optax`, and optax on the whole; the gradient is clipped by all ranks."""
    n = 7
    weights = jnp.arange(1.0, n + 1)
    ends = [n * r // comm.size for r in range(comm.size + 1)]
    mine = slice(ends[comm.rank], ends[comm.rank + 1])
    x0 = jnp.linspace(-1, 1, n)
    transformation = optax.chain(optax.clip_by_global_norm(5.0), optax.adam(0.1))
    x, state = x0, transformation.init(x0)
    for _ in range(6):
        gradient = jax.grad(lambda x: jnp.sum(weights * (x - 2) ** 2))(x)
        change, state = transformation.update(gradient, state)
        x = x + change
    objective = Objective(
        lambda x: jnp.sum(weights[mine] * (x - 2) ** 2), x0[mine], sharded=True, comm=comm
    )
    method = Optax(optax.adam(0.1), clip=5.0, elementwise=True)
    solution = minimize(objective, x0[mine], method, max_steps=6)
    assert np.allclose(solution.value, x[mine], rtol=1e-12, atol=0)
    assert solution.result is Result.MAX_STEPS_REACHED


def test_batches_depend_on_the_iteration(comm):
    """Each rank has its own batch, each iteration another one."""
    seen = []

    def batch(iteration):
        seen.append(iteration)
        return jnp.asarray(10.0 * iteration + comm.rank + 1)

    solution = minimize(
        lambda x, b: jnp.sum(x * b),
        jnp.zeros(2),
        Optax(optax.sgd(1e-3)),
        replicated=True,
        batch=batch,
        max_steps=3,
    )
    total = sum(10.0 * i * comm.size + sum(range(comm.size + 1)) for i in range(3))
    assert np.allclose(solution.value, -1e-3 * total)
    assert seen == [0, 1, 2, 3]


def test_steps_to_nan_are_shortened(comm):
    """Minimise x - log x, which is NaN for negative x; the first full steps lead there."""

    def share(x):
        return 50 * (x - jnp.log(x)) / comm.size

    for method in (LBFGS(first_step=10.0), NonlinearCG(first_step=10.0)):
        solution = minimize(share, 3.0, method, rtol=1e-9)
        assert float(solution.value) == pytest.approx(1, abs=1e-7)


def test_inner_products_count_each_element_once(comm):
    generator = np.random.default_rng(5)
    common, whole = generator.standard_normal((2, 2, 3)), generator.standard_normal((2, 12, 2))
    grid = Grid((6, 2), (1.0, 1.0), comm)
    mine = np.arange(12) % comm.size == comm.rank
    u, v = (
        {"a": common[i], "b": whole[i][mine], "c": grid.scatter(whole[i].reshape(6, 2, 2))[..., 0]}
        for i in range(2)
    )
    sharded = {"a": False, "b": True, "c": grid}
    expected = [
        np.sum(common[i] * common[j]) + np.sum(whole[i] * whole[j])
        + np.sum((whole[i] * whole[j]).reshape(6, 2, 2)[..., 0])
        for i, j in ((0, 1), (0, 0))
    ]  # fmt: skip
    assert np.allclose(inner_products((u, v), (u, u), sharded=sharded, comm=comm), expected)
    norm = np.sqrt(expected[1])
    assert float(global_norm(u, sharded=sharded, comm=comm)) == pytest.approx(norm)
    short = clip_by_global_norm(u, 1.0, sharded=sharded, comm=comm)
    assert np.allclose(short["b"], u["b"] / norm)
    assert clip_by_global_norm(u, 1e3, sharded=sharded, comm=comm)["b"] == pytest.approx(u["b"])


@pytest.mark.full("float32 of one method is tested in test_iterates.py")
def test_squares_of_float32_may_overflow(comm):
    """Losses in units so small or large that float32 cannot hold the gradient's square."""
    with jax.enable_x64(False):
        for unit, other in ((1e-25, LBFGSB()), (1e20, NonlinearCG())):
            x0 = jnp.zeros(3, "float32")
            loss = Objective(
                lambda x, unit=unit: unit * jnp.sum((x - 1) ** 2),
                x0,
                loss="replicated",
                replicated=True,
                comm=comm,
            )
            for method in (LBFGS(), other):
                solution = minimize(loss, x0, method)
                assert solution.stats["history"][0].gradient_norm == pytest.approx(
                    unit * 12**0.5, rel=1e-6
                )
                assert solution.result is Result.SUCCESSFUL
                assert np.allclose(solution.value, 1, rtol=1e-5)
            x = {"a": jnp.full(3, unit, "float32"), "b": jnp.zeros(2, "float32")}
            norm, slope = jax.value_and_grad(lambda x: global_norm(x, comm=comm))(x)
            assert float(norm) == pytest.approx(unit * 3**0.5, rel=1e-6)
            slopes = np.sum(comm.mpi.allgather(slope["a"]))  # of as many norms as ranks
            assert slopes == pytest.approx(comm.size * 3**0.5, rel=1e-6)
            short = clip_by_global_norm(x, 1e-3 * unit, comm=comm)
            assert np.linalg.norm(short["a"] / unit) == pytest.approx(1e-3, rel=1e-6)


# ---- records and files ----


def test_history_and_callback(comm, directory):
    path = directory / "history.jsonl"
    solution = minimize(
        parabola, jnp.arange(3.0), ADAM, replicated=True, max_steps=9, history=path,
        callback=lambda record, x: record.iteration == 4 and comm.rank == comm.size - 1,
    )  # fmt: skip
    assert solution.result is Result.STOPPED
    comm.mpi.Barrier()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["iteration"] for line in lines] == [0, 1, 2, 3, 4]
    if comm.rank == 0:
        assert lines[-1]["loss"] == solution.stats["loss"] == solution.stats["history"][-1].loss
    assert lines[0]["gradient_norm"] == pytest.approx(comm.size * np.sqrt(4 * (4 + 1 + 0)))
    again = functools.partial(
        minimize,
        parabola,
        jnp.arange(3.0),
        Optax(optax.adam(0.1)),
        replicated=True,
        max_steps=2,
        history=path,
    )
    with pytest.raises(FileExistsError, match=r"last step 4 of .* delete it to replace it"):
        again()
    assert len(path.read_text().splitlines()) == 5
    again(checkpoint=Checkpoint(directory / "run", overwrite=True))
    comm.mpi.Barrier()
    assert len(path.read_text().splitlines()) == 3


@pytest.mark.thin(1)
def test_results(comm):
    x0 = jnp.ones(2)
    run = functools.partial(minimize, replicated=True)
    assert run(parabola, 2 * x0).result is Result.SUCCESSFUL
    assert run(parabola, x0, max_steps=0).result is Result.MAX_STEPS_REACHED
    slow = run(parabola, x0, Optax(optax.adam(1e-9)), ftol=1e-3)
    assert slow.result is Result.SMALL_DECREASE
    # A gradient that points the wrong way: nothing decreases along it.
    wrong = run(None, x0, value_and_grad=lambda x: (parabola(x), 2 * (2 - x)))
    assert wrong.result is Result.NO_DECREASE
    assert wrong.value is not x0 and np.allclose(wrong.value, x0)


def test_files_survive_failed_runs(comm, directory, capfd, monkeypatch):
    path, x0 = directory / "history.jsonl", jnp.zeros(3)
    saved = Checkpoint(directory / "saved", every=2, resume=True)
    settings = {"history": path, "checkpoint": saved, "replicated": True}
    minimize(parabola, x0, ADAM, max_steps=4, **settings)
    comm.mpi.Barrier()
    before = path.read_text()
    with pytest.raises(ValueError, match="a state of Optax, but the method is LBFGS"):
        minimize(parabola, x0, LBFGS(), **settings)
    comm.mpi.Barrier()
    assert path.read_text() == before
    assert len(before.splitlines()) == 5

    # A state with a loss that is not finite is not saved: a restart begins before it.
    wild = lambda x: jnp.where(x[0] > 0.8, jnp.nan, parabola(x))
    with pytest.raises(NotFiniteError, match=r"the loss is nan after step \d+") as raised:
        minimize(wild, x0, ADAM, max_steps=50, **settings)
    assert raised.value.solution.stats["num_steps"] > 4
    ended = minimize(wild, x0, ADAM, max_steps=50, throw=False, **settings)
    assert ended.result is Result.NOT_FINITE
    comm.mpi.Barrier()
    last = json.loads(path.read_text().splitlines()[-1])
    assert last["loss"] is None
    again = minimize(parabola, x0, ADAM, max_steps=30, **settings)
    assert again.result is Result.MAX_STEPS_REACHED and again.stats["loss"] < 1

    # A full disk does not end the run.
    def full(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr("mpigrad.checkpoint.manifest.write_manifest", full)
    lost = Checkpoint(directory / "full", every=1)
    settings = {"checkpoint": lost, "replicated": True}
    assert minimize(parabola, x0, max_steps=3, rtol=1e-9, **settings).stats["loss"] < 1e-3
    if comm.rank == 0:
        assert "was not saved in" in capfd.readouterr().err


# ---- errors on every rank ----


def test_rejects_invalid_arguments(comm, directory):
    x0 = jnp.zeros(3)
    last = comm.rank == comm.size - 1
    grid = Grid((4, 4), (1.0, 1.0), comm)

    def refused(kind, match, *args, f=parabola, **options):
        with pytest.raises(kind, match=match):
            minimize(f, *args, **{"replicated": "sharded" not in options} | options)

    refused(TypeError, "a method such as LBFGS.*in parentheses", x0, LBFGS)
    refused(TypeError, "int(32|64), expected float32 or float64", jnp.arange(3))
    refused(TypeError, "f must be a function", x0, f=3)
    refused(ValueError, "x0 without leaves", {})
    refused(ValueError, "not a prefix of x0", {"a": x0}, sharded={"b": True})
    refused(TypeError, "expected False, True or a Grid", x0, sharded="yes")
    refused(ValueError, "needs axis 0", 1.0, sharded=True)
    refused(ValueError, "the tile of this rank has shape", jnp.zeros((1, 1)), sharded=grid)
    refused(ValueError, "Use Optax", x0, batch=lambda i: i)
    refused(ValueError, "must not be negative", x0, rtol=-1)
    refused(
        ValueError,
        "got value_and_grad with GaussNewton",
        x0,
        GaussNewton(),
        value_and_grad=parabola,
    )
    refused(ValueError, "returned a value of shape", x0, value_and_grad=lambda x: (x, x))
    refused(ValueError, "gradient that value_and_grad returns", x0,
            value_and_grad=lambda x: (0.0, x[:2]))  # fmt: skip
    refused(RuntimeError, "loss of x0 is nan", x0, f=lambda x: jnp.sum(jnp.log(x - 1)))
    refused(OSError, "No such file", x0, history=directory / "absent" / "history")
    with pytest.raises(ValueError, match="StrongWolfe: decrease"):
        StrongWolfe(0.5, 0.1)
    own = Objective(parabola, x0, replicated=True, comm=comm)
    with pytest.raises(ValueError, match="already made"):
        minimize(own, x0, sharded=True)
    other = comm.dup()
    with pytest.raises(ValueError, match="minimize: comm has no effect with an Objective"):
        minimize(own, x0, comm=other)
    with pytest.raises(ValueError, match="multi_start: comm has no effect with an Objective"):
        multi_start(own, [x0], comm=other)

    refused(TypeError, "needs products with the Hessian", x0, NewtonCG(), f=None,
            value_and_grad=jax.value_and_grad(parabola))  # fmt: skip

    # An error of one rank, of a type that the other ranks do not know.
    class Local(Exception):
        pass

    def interrupted(record, x):
        if last:
            raise Local("no such thing")

    refused((Local, RuntimeError), "no such thing", x0, callback=interrupted)
    if comm.size > 1:
        refused(ValueError, "must be the same on all ranks", x0, max_steps=5 + comm.rank)
        refused(ValueError, "must be the same on all ranks", x0, LBFGS(memory=5 + comm.rank))
        refused(ValueError, "not declared sharded, but it differs between ranks 0 and", x0 + last)
        refused(ValueError, r"x0 is float64\[2\].* on rank 0", jnp.zeros(2 + last))
        refused(ValueError, "2 leaves on rank 0 and 1 on rank", [x0] * (2 - last), sharded=True)
        lars = Optax(optax.lars(0.1))
        refused(ValueError, "must be elementwise there", x0, lars, sharded=True)
        fitted = minimize(parabola, x0, lars, max_steps=1, replicated=True)
        assert fitted.stats["loss"] < 12 * comm.size
        with pytest.raises(ValueError, match="whether batch, callback"):
            minimize(parabola, x0, replicated=True, callback=interrupted if last else None)


@pytest.mark.ranks(1, 2, 3)
def test_arrays_must_be_declared(comm):
    """Tiles of equal shape that were taken for copies of one array gave 0.5 for 0.727."""
    grid = Grid((6, 2 * comm.size), (1.0, 1.0), comm)
    tile, count = jnp.zeros(grid.local_shape), comm.size
    mine = jnp.full(grid.local_shape, 1.0 + comm.rank)

    def share(x):
        return jnp.sum((x["u"] - mine) ** 2) + (x["a"] - 1) ** 2 / count

    x0 = {"u": tile, "a": 0.0}
    declared = minimize(share, x0, sharded={"u": grid, "a": None}, comm=comm)
    assert np.allclose(declared.value["u"], mine, atol=1e-4)
    if count == 1:
        assert np.allclose(minimize(share, x0, comm=comm).value["u"], mine, atol=1e-4)
        return
    start = {"u": mine, "a": 0.0}
    same = r"x0\['u'\] is float64.* is not declared.*has the same values on all ranks.*Grid"
    with pytest.raises(ValueError, match=same):
        minimize(share, x0, comm=comm)
    differs = r"x0\['u'\] is float64.* is not declared.*differs between ranks 0 and 1.*Grid"
    for settings in ({}, {"sharded": {"u": None, "a": False}}, {"replicated": False}):
        with pytest.raises(ValueError, match=differs):
            minimize(share, start, comm=comm, **settings)
    # Replicated values are compared at the start, with and without a declaration.
    with pytest.raises(ValueError, match=r"x0\['u'\] is not declared sharded, but it differs"):
        minimize(share, start, replicated=True, comm=comm)
    with pytest.raises(ValueError, match=r"x0\['a'\] is not declared sharded, but it differs"):
        minimize(
            share, {"u": tile, "a": 1.0 * comm.rank}, sharded={"u": grid, "a": None}, comm=comm
        )
    with pytest.raises(ValueError, match="both sharded and replicated"):
        minimize(share, x0, sharded=True, replicated={"u": True, "a": None}, comm=comm)
    with pytest.raises(TypeError, match="replicated has 'yes', expected True or False"):
        minimize(share, x0, replicated="yes", comm=comm)
