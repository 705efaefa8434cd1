"""Reductions other than sums: zeros, ties, places, truths and bits, and the user's own."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mpi4py import MPI

import mpigrad as mg
from helpers import REDUCING, close, reducing
from mpigrad.communicator import Communicator


@pytest.mark.thin(3)
def test_product_with_zeros(comm: Communicator) -> None:
    """Column k has k zeros; first and second derivatives are exact."""
    ranks, size = np.arange(comm.size)[:, None], comm.size
    X = jnp.asarray(np.where(ranks < np.arange(4), 0.0, ranks + 2.0))
    f = lambda x: jnp.sum(mg.allreduce(x, MPI.PROD) ** 2 + mg.allreduce(x, MPI.PROD)) / size
    F = lambda X: jnp.sum(jnp.prod(X, 0) ** 2 + jnp.prod(X, 0))
    V = X + 1
    x, v = X[comm.rank], V[comm.rank]
    close(mg.grad(f)(x), jax.grad(F)(X)[comm.rank])
    both = jax.jvp(jax.grad(F), (X,), (V,))[1]
    close(mg.jit(lambda x: mg.jvp(mg.grad(f), (x,), (v,))[1])(x), both[comm.rank])
    one_zero = jnp.float64(0 if comm.rank == 0 else comm.rank + 1)
    others = np.prod(np.arange(2.0, size + 1))
    gradient = mg.grad(lambda x: mg.reduce(x, MPI.PROD, root=size - 1))(one_zero)
    assert float(gradient) == (others if comm.rank == 0 else 0)


@pytest.mark.thin(3)
@pytest.mark.parametrize("op", [MPI.MAX, MPI.MIN], ids=["MAX", "MIN"])
def test_ties_share_the_derivative(op: MPI.Op, comm: Communicator) -> None:
    x = jnp.array([3.0, comm.rank, 1.0 if comm.rank else 2.0])
    gradient = mg.grad(lambda x: jnp.sum(mg.allreduce(x, op)) / comm.size)(x)
    first, last = comm.rank == 0, comm.rank == comm.size - 1
    others = 1.0 if comm.size == 1 else (not first) / (comm.size - 1)
    expected = (last, first) if op == MPI.MAX else (first, others)
    close(gradient, np.array([1 / comm.size, *expected]))


@pytest.mark.thin(3)
def test_values_and_the_ranks_that_hold_them(comm: Communicator) -> None:
    """The lowest rank of ties; the derivative goes to it alone."""
    rank, size = comm.rank, comm.size
    x = {"a": jnp.array([5.0, rank, -rank]), "b": jnp.int32(rank // 2)}
    value, place = mg.allreduce(x, MPI.MAXLOC)
    assert (value["a"].tolist(), int(value["b"])) == ([5, size - 1, 0], (size - 1) // 2)
    assert (place["a"].tolist(), int(place["b"])) == ([0, size - 1, 0], (size - 1) // 2 * 2)
    assert place["a"].dtype == np.int32
    value, place = mg.reduce(x["a"], MPI.MINLOC, root=size - 1)
    root = rank == size - 1
    assert value.tolist() == [5 * root, 0, (1 - size) * root]
    assert place.tolist() == [0, 0, (size - 1) * root]
    gradient = mg.grad(lambda x: jnp.sum(mg.scan(x, MPI.MAXLOC)[0]))(x["a"])
    assert gradient.tolist() == [size * (rank == 0), 1, size * (rank == 0)]
    value, place = mg.exscan(x["a"], MPI.MAXLOC)
    assert value.tolist() == [5 * (rank > 0), max(rank - 1, 0), 0]
    assert place.tolist() == [0, max(rank - 1, 0), 0]


LOGICAL = {"LAND": np.logical_and, "LOR": np.logical_or, "LXOR": np.logical_xor}
BITWISE = {"BAND": np.bitwise_and, "BOR": np.bitwise_or, "BXOR": np.bitwise_xor}


def reduced(f: np.ufunc, rows: Any, dtype: str) -> np.ndarray:
    """In the dtype itself, as MPI does it."""
    truth = f in LOGICAL.values()
    return f.reduce(np.asarray(rows), axis=0, **({} if truth else {"dtype": dtype})).astype(dtype)


WHOLE = {"PROD": np.multiply, "MAX": np.maximum, "MIN": np.minimum}


@pytest.mark.cases("bool", "uint64", reason="test_sums_and_products_wrap_around has other widths")
@pytest.mark.parametrize(
    "dtype",
    ["bool", "uint8", "int32", "uint64", "int8", "int16", "uint16", "uint32", "int64"],
)
def test_whole_numbers(dtype: str, comm: Communicator) -> None:
    """MPI's own reductions of them, by every operation: the values, and zero tangents."""
    rank, size = comm.rank, comm.size
    X = np.random.default_rng(5).integers(0, 2 if dtype == "bool" else 7, (size, size, 5))
    X = X.astype(dtype)
    if dtype.startswith("uint"):  # above the largest of the signed kind, beside small ones
        X[0, :, 0] = np.iinfo(dtype).max
    bits = {} if dtype == "bool" else {**BITWISE, **WHOLE}
    for name, f in {**LOGICAL, **bits}.items():
        for operation, (run, simulate) in REDUCING.items():
            S = X if operation == "reduce_scatter" else X[:, 0]
            y = run(jnp.asarray(S[rank]), getattr(MPI, name), comm)
            truths = S != 0 if name in LOGICAL else S
            rows = lambda rows, f=f: jnp.asarray(reduced(f, rows, dtype))
            expected = simulate(rows, jnp.asarray(truths))[rank]
            np.testing.assert_array_equal(np.asarray(y), np.asarray(expected), (name, operation))
            assert y.dtype == dtype
    tangent = np.zeros(5, jax.dtypes.float0)
    x = jnp.asarray(X[rank, 0])
    out = mg.jvp(lambda x: mg.allreduce(x, MPI.LAND), (x,), (tangent,))[1]
    assert out.dtype == jax.dtypes.float0


@pytest.mark.cases("int8", "uint16", reason="Open MPI stops at the largest number of short ones")
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint64"])
def test_sums_and_products_wrap_around(dtype: str, comm: Communicator) -> None:
    """As JAX's and NumPy's do, in long arrays, too: Open MPI's stop at the largest number there."""
    limits = np.iinfo(dtype)
    shape = (comm.size, comm.size, 300)
    X = np.random.default_rng(8).integers(limits.min, limits.max, shape, dtype, endpoint=True)
    for op, f in ((MPI.SUM, np.add), (MPI.PROD, np.multiply)):
        for operation, (run, simulate) in REDUCING.items():
            S = X if operation == "reduce_scatter" else X[:, 0]
            y = run(jnp.asarray(S[comm.rank]), op, comm)
            rows = lambda rows, f=f: jnp.asarray(reduced(f, rows, dtype))
            expected = simulate(rows, jnp.asarray(S))[comm.rank]
            np.testing.assert_array_equal(np.asarray(y), np.asarray(expected), operation)


def test_decisions_inside_a_derivative(comm: Communicator) -> None:
    """A truth has no derivative, and needs no message in the backward pass."""
    x = jnp.arange(3.0) - comm.rank
    positive = lambda x: mg.allreduce(x > 0, MPI.LAND)
    gradient = mg.grad(lambda x: jnp.sum(jnp.where(positive(x), x**2, x)))(x)
    everywhere = np.arange(3) > comm.size - 1
    close(gradient, np.where(everywhere, 2 * x, 1))


@pytest.mark.thin(3)
def test_own_reductions_keep_the_order_of_ranks(comm: Communicator) -> None:
    """Products of matrices, of which no two commute."""
    X = jnp.asarray(np.random.default_rng(2).standard_normal((comm.size, 3, 3)))
    product = mg.reduction(jnp.matmul)
    for operation in ("reduce", "allreduce", "scan", "exscan"):
        run, simulate = REDUCING[operation]
        rows = lambda rows: rows[0] if len(rows) == 1 else jnp.linalg.multi_dot(list(rows))
        close(run(X[comm.rank], product, comm), simulate(rows, X)[comm.rank])
    mg.dot_test(lambda x: mg.scan(x, product), X[comm.rank])
    words = {"a": jnp.int32(comm.rank + 1), "b": jnp.array([comm.rank > 0, True])}
    first = mg.allreduce(words, mg.reduction(lambda a, b: a))
    assert first["a"] == 1
    assert first["b"].tolist() == [False, True]


def test_own_derivatives_are_used(comm: Communicator) -> None:
    """A sum with a derivative that it does not have: 5 x / y."""
    op = mg.reduction(jnp.add, lambda x, y: 5 * x / y)
    x = jnp.array([1.0, 2.0]) + comm.rank
    total = np.asarray(mg.allreduce(x))
    gradient = mg.grad(lambda x: jnp.sum(mg.allreduce(x, op)))(x)
    close(gradient, comm.size * 5 * x / total)


@pytest.mark.cases("reduce", "exscan", reason="the others have results on more ranks")
@pytest.mark.parametrize("operation", REDUCING)
def test_what_is_constant_on_a_rank(operation: str, comm: Communicator) -> None:
    """The others' derivatives are those of the joint function, in every reduction."""
    X = jnp.asarray(np.random.default_rng(4).standard_normal((comm.size, comm.size, 2)))
    S = X if operation == "reduce_scatter" else X[:, 0]
    cases = [reducing(operation, op) for op in ("PROD", "MAX", "MINLOC", "own derivative")]

    def loss(x: Any) -> Any:
        x = x if comm.rank == comm.size - 1 else S[comm.rank]
        return sum(jnp.sum(case.run(x, comm) ** 3) for case in cases)

    def joint(x: Any) -> Any:
        return sum(jnp.sum(case.simulate(S.at[-1].set(x)) ** 3) for case in cases)

    gradient = mg.jit(mg.grad(loss))(S[comm.rank])
    here = comm.rank == comm.size - 1
    close(gradient, jax.jit(jax.grad(joint))(S[-1]) * here, rtol=1e-10)


def test_a_result_of_one_kind_for_each_dtype(comm: Communicator) -> None:
    """One message for each dtype, each by the way that suits it."""
    tree = {
        "a": jnp.arange(2.0) * comm.rank,
        "b": (jnp.int32(comm.rank), jnp.full((2, 2), -1.0 * comm.rank)),
        "c": jnp.float32(comm.rank),
    }
    last = comm.size - 1.0
    expected = {"a": np.array([0, last]), "b": (last, np.zeros((2, 2))), "c": last}
    for run in (mg.allreduce, lambda x, op: mg.bcast(mg.scan(x, op), root=comm.size - 1)):
        got = run(tree, MPI.MAX)
        close(got, expected)
        assert got["c"].dtype == np.float32


def test_complex_products(comm: Communicator) -> None:
    """Of complex numbers a factor in jvp and vjp alike passes every dot test: beside one rank."""
    r = np.arange(comm.size)
    Z = jnp.stack([jnp.full(comm.size, 1 + 1j), jnp.asarray(2 - r * 1j)], axis=1)
    W = jnp.asarray([3 - 1j, 1 + 2j])
    z = Z[comm.rank]
    close(mg.scan(z, MPI.PROD)[0], (1 + 1j) ** (comm.rank + 1))
    circle = lambda a, b: a * b + a + b
    own = mg.reduction(circle, lambda x, y: (1 + y) / (1 + x))
    for op, total in (
        (MPI.PROD, lambda Z: jnp.prod(Z, 0)),
        (own, lambda Z: functools.reduce(circle, Z)),
    ):
        f = lambda z, op=op: mg.allreduce(z, op)
        mg.dot_test(f, z)
        loss = lambda z, f=f: jnp.real(jnp.sum(W * f(z))) / comm.size
        expected = jax.grad(lambda Z, total=total: jnp.real(jnp.sum(W * total(Z))))(Z)
        close(mg.grad(loss)(z), expected[comm.rank])
        expected = jax.jvp(total, (Z,), (1j * Z,))[1]
        close(mg.jvp(f, (z,), (1j * z,))[1], expected)


def test_wrong_arguments(comm: Communicator) -> None:
    x = jnp.ones(3)
    with pytest.raises(ValueError, match=r"MPI\.SUM, .*MPI\.BXOR or .*mpigrad\.reduction"):
        mg.scan(x, op=MPI.REPLACE)
    with pytest.raises(ValueError, match="op must be"):
        mg.allreduce(x, op="sum")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"MPI\.LAND takes bool and integers.*x != 0"):
        mg.allreduce(x, op=MPI.LAND)
    with pytest.raises(TypeError, match=r"allreduce: .* dtype float0"):
        mg.allreduce(np.zeros(3, jax.dtypes.float0))
    with pytest.raises(TypeError, match=r"MPI\.BOR takes integers, got float64"):
        mg.exscan(x, op=MPI.BOR)
    with pytest.raises(TypeError, match=r"MPI\.MAX takes integers and float32/64"):
        mg.reduce(1j * x, op=MPI.MAX)
    with pytest.raises(ValueError, match="one row for each"):
        mg.reduce_scatter(jnp.ones((comm.size + 1, 2)))
    with pytest.raises(TypeError, match="one array of the same shape and dtype"):
        mg.allreduce(x, op=mg.reduction(lambda a, b: jnp.vdot(a, b)))


@pytest.mark.ranks(2, 3)
def test_second_derivatives_of_a_function_with_a_rule_where_ranks_tie(comm: Communicator) -> None:
    X, V = (
        jnp.ones((comm.size, 2)),
        jnp.asarray(np.random.default_rng(2).normal(size=(comm.size, 2))),
    )
    softmax = jax.nn.softmax(X, axis=0)
    expected = softmax * (V - jnp.sum(softmax * V, axis=0))
    f = lambda x: jnp.sum(mg.allreduce(x, op=mg.reduction(jnp.logaddexp))) / comm.size
    x, v = X[comm.rank], V[comm.rank]

    @mg.jit
    def products(x: Any) -> Any:
        reverse = mg.grad(lambda x: jnp.vdot(mg.grad(f)(x), v))(x)
        return mg.jvp(mg.grad(f), (x,), (v,))[1], reverse

    close(products(x), [expected[comm.rank]] * 2)


def test_extremum_of_what_was_sent(comm: Communicator) -> None:
    """XLA may compute an operand twice, rounded differently: for the message, and beside it."""
    size, rank = comm.size, comm.rank
    X, Z, W, V = (np.random.default_rng(k).uniform(-1, 1, (size, 3)) for k in range(4))
    shift = np.arange(size)[:, None] / 8

    def f(x: Any, z: Any) -> Any:
        y = mg.allreduce(x + shift[rank], op=MPI.MAX) * jnp.cos(z)
        return jnp.vdot(y, W[rank]) + jnp.vdot(mg.allreduce(y + shift[rank], op=MPI.MAX), V[rank])

    def joint(X: Any, Z: Any) -> Any:
        Y = jnp.max(X + shift, axis=0) * jnp.cos(Z)
        return jnp.vdot(Y, W) + jnp.sum(jnp.max(Y + shift, axis=0) * V)

    got = mg.jit(mg.grad(f, (0, 1)))(X[rank], Z[rank])
    expected = jax.grad(joint, (0, 1))(
        jnp.asarray(X), jnp.asarray(Z)
    )  # jnp.max has that fault, too
    close(got, [g[rank] for g in expected])


@pytest.mark.thin(3)
@pytest.mark.cases("MAX-float32", "MIN-float64", reason="each operation and each dtype")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("op", [MPI.MAX, MPI.MIN], ids=["MAX", "MIN"])
def test_a_nan_on_any_rank_is_in_the_extremum(comm: Communicator, op: MPI.Op, dtype: str) -> None:
    """As in JAX's and NumPy's; MPI keeps it or loses it, by which rank has it."""
    size, n = comm.size, 33
    X = np.random.default_rng(8).uniform(-1, 1, (size, n)).astype(dtype)
    X[np.arange(n - 1) % size, np.arange(n - 1)] = np.nan
    X[:, 5] = np.nan
    X[:, 6] = [np.inf, -np.inf, 0.0, -0.0][:size]
    expected = (np.max if op == MPI.MAX else np.min)(X, axis=0)
    run = lambda x: mg.allreduce(x, op=op)
    for transformed in (run, mg.jit(run), lambda x: mg.vmap(run)(x[None])[0]):
        np.testing.assert_array_equal(transformed(X[comm.rank]), expected)
    for message in (mg.reduce, mg.scan):
        got = message(X[comm.rank], op=op)
        if comm.rank == (0 if message is mg.reduce else size - 1):
            np.testing.assert_array_equal(got, expected)


@pytest.mark.ranks(2, 3, 4)
def test_zeros_off_the_root_in_memory_that_was_used(comm: Communicator) -> None:
    """MPI leaves there what was there before."""
    n = 1 << 14
    for k in range(3):
        for message in (mg.reduce, mg.gather):
            used = [jnp.full((comm.size, n), 7.0) for _ in range(4)]
            used += [jnp.full(n, 7.0) for _ in range(4)]
            for array in used:
                array.block_until_ready().delete()
            got = message(jnp.full(n, k + 1.0), root=k % comm.size)
            if comm.rank != k % comm.size:
                assert not np.any(got)
            else:
                assert np.all(got)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("op", [MPI.MAX, MPI.PROD], ids=["MAX", "PROD"])
def test_ranks_without_a_result_are_batched_and_differentiated(op, comm):
    """By JAX's own vmap and jvp: what goes on from zeros is a message, too."""
    root, size = comm.size - 1, comm.size

    def everywhere(x):
        return mg.bcast(mg.reduce(x, op, root), root) + mg.allreduce(mg.exscan(x, op))

    def simulated(X):
        fold = jnp.max if op == MPI.MAX else jnp.prod
        return fold(X, 0) + sum(fold(X[:r], 0) for r in range(1, size))

    X = jnp.asarray(np.random.default_rng(2).uniform(1, 2, (size, 3)))
    x = X[comm.rank]
    close(jax.vmap(everywhere)(jnp.stack([x, 2 * x])), jax.vmap(simulated)(jnp.stack([X, 2 * X])))
    close(jax.jvp(everywhere, (x,), (x**2,)), jax.jvp(simulated, (X,), (X**2,)))
