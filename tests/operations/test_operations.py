"""Every operation under every transformation, against the same map without messages."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mpi4py import MPI

import mpigrad as mg
from helpers import CASES, REDUCING, Case, close, operand
from mpigrad.communicator import Communicator
from product_space import TRANSFORMED, prove


def marks_of(case: Case) -> list[Any]:
    return [pytest.mark.full("another case reduces in the same way")] * case.full


cases = pytest.mark.parametrize(
    "name", [pytest.param(n, marks=marks_of(c)) for n, c in CASES.items()]
)


def programs(case: Case, comm: Communicator) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """A non-linear program around the operation: with messages, and on the stack."""
    return (
        lambda x: jnp.cos(case.run(jnp.sin(x), comm)),
        lambda X: jnp.cos(case.simulate(jnp.sin(X))),
    )


# These run on 3 ranks, too: a rank has two neighbours, and there is a rank in the middle.
UNEVEN = (
    *("sendrecv ring with tags", "neighbor_alltoallv", "alltoallv", "exscan"),
    *("isend and irecv", "one_sided accumulate"),
)


def pairs() -> list[Any]:
    """Each operation under each transformation."""
    found = []
    for name, case in CASES.items():
        for how in TRANSFORMED:
            marks = marks_of(case)
            if name in UNEVEN and how == "jit":
                marks.append(pytest.mark.thin(2, 3, reason="on 3 ranks, the neighbours differ"))
            found.append(pytest.param(name, how, marks=marks))
    return found


@pytest.mark.cases(
    "*-jit",
    *("send and recv-eager", "one_sided accumulate-eager"),
    *("allreduce-scan", "isend and irecv-scan", "custom_operation-scan"),
    *("neighbor_alltoallv-vmap", "recv of any tag-vmap"),
    *("sendrecv ring with tags-checkpoint", "recv from anyone-checkpoint"),
    *("allgather-cond", "irecv from anyone-cond"),
    *("reduce-jax.jit", "scatterv-vmap over the last axis", "gather-jit(vmap)"),
    *("sendrecv of any tag-checkpoint(scan)", "one_sided put and get-scan(checkpoint)"),
    reason="all operations compiled; one of each family under each transformation, whose rules "
    "are the same for all operations; test_eager_calls_and_batches has the batch axes of all",
)
@pytest.mark.parametrize(("name", "how"), pairs())
def test_values_and_derivatives(name: str, how: str, comm: Communicator) -> None:
    case = CASES[name]
    prove(lambda x: case.run(x, comm), case.simulate, comm, how, X=operand(case, comm)[1])


@pytest.mark.full("float64 runs the same rules; test_dtypes runs each dtype once")
@cases
@pytest.mark.parametrize("how", ["jit", "scan", "vmap", "checkpoint", "cond"])
@pytest.mark.parametrize("dtype", ["float32", "complex64", "complex128"])
def test_derivatives_of_other_dtypes(name: str, how: str, dtype: str, comm: Communicator) -> None:
    case = CASES[name]
    if case.takes == "real numbers" and dtype.startswith("complex"):
        pytest.skip("a reduction of real numbers")
    X = operand(case, comm, np.dtype(dtype))[1]
    rtol = 1e-11 if dtype == "complex128" else 2e-4

    prove(lambda x: case.run(x, comm), case.simulate, comm, how, X=X, rtol=rtol)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("operation", ["allreduce", "isend and irecv"])
def test_checkpoint_keeps_complex_numbers(operation: str, comm: Communicator) -> None:
    case = CASES[operation]
    X = operand(case, comm, np.dtype("complex128"))[1]
    prove(lambda x: case.run(x, comm), case.simulate, comm, "checkpoint", X=X, rtol=1e-11)


@pytest.mark.full("test_dtypes runs integers without transformations")
@cases
@pytest.mark.parametrize("how", ["jit", "scan", "vmap", "checkpoint", "cond"])
@pytest.mark.parametrize("dtype", ["int32", "uint8"])
def test_integers_under_transformations(
    name: str, how: str, dtype: str, comm: Communicator
) -> None:
    case = CASES[name]
    x, X = operand(case, comm, np.dtype(dtype))
    transform, reference = TRANSFORMED[how]
    got = mg.jit(transform(lambda x: case.run(x, comm)))(x)
    close(got, jax.jit(reference(case.simulate))(X)[comm.rank])


def _both(x: Any) -> Any:
    return jnp.stack([x, x[::-1]])


SAME_SHAPE = ("reduce", "allreduce", "scan", "exscan")

# Without sums, which are none of truths: (with messages, on the stack), each on an operand and on
# its rows turned over.
MOVED: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "jit": (lambda f: f, lambda F: F),
    "scan": (
        lambda f: lambda x: jax.lax.scan(lambda _, s: (None, f(s)), None, _both(x))[1],
        lambda F: lambda X: jnp.stack([F(X), F(X[:, ::-1])], axis=1),
    ),
    "vmap": (
        lambda f: lambda x: mg.vmap(f)(_both(x)),
        lambda F: lambda X: jnp.stack([F(X), F(X[:, ::-1])], axis=1),
    ),
    "checkpoint": (jax.checkpoint, lambda F: F),
    "cond": (
        lambda f: lambda x: jax.lax.cond(jnp.all(jnp.isfinite(x)), f, f, x),
        lambda F: F,
    ),
}


@pytest.mark.full("test_dtypes_that_only_move runs these dtypes without transformations")
@pytest.mark.parametrize("name", [n for n, case in CASES.items() if case.takes == "anything"])
@pytest.mark.parametrize("how", MOVED)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "bool"])
def test_what_only_moves_under_transformations(
    name: str, how: str, dtype: str, comm: Communicator
) -> None:
    case = CASES[name]
    x, X = operand(case, comm, jnp.dtype(dtype))
    transform, reference = MOVED[how]
    got = mg.jit(transform(lambda x: case.run(x, comm)))(x)
    assert got.dtype == jnp.dtype(dtype)
    np.testing.assert_array_equal(
        np.asarray(got), np.asarray(reference(case.simulate)(X)[comm.rank])
    )


@pytest.mark.full("test_reductions runs these operations without transformations")
@pytest.mark.parametrize("how", ["jit", "scan", "vmap", "checkpoint", "cond"])
@pytest.mark.parametrize("op", ["LAND", "LOR", "LXOR", "BAND", "BOR", "BXOR"])
@pytest.mark.parametrize("dtype", ["bool", "int32", "uint8"])
def test_truths_and_bits_under_transformations(
    op: str, dtype: str, how: str, comm: Communicator
) -> None:
    if dtype == "bool" and op.startswith("B"):
        pytest.skip("bits are of integers")
    reduced = getattr(np, f"{'logical' if op.startswith('L') else 'bitwise'}_{op[1:].lower()}")
    x, X = operand(Case(mg.bcast, jnp.asarray), comm, np.dtype(dtype))

    def rows(X: Any) -> Any:
        return functools.reduce(lambda a, b: reduced(a, b).astype(dtype), X)

    def run(x: Any) -> Any:
        each = [REDUCING[name][0](x, getattr(MPI, op), comm) for name in SAME_SHAPE]
        return jnp.concatenate(each)

    def simulate(X: Any) -> Any:
        X = np.asarray(X)
        X = X if op.startswith("B") else (X != 0).astype(dtype)  # 0 or 1, of one rank alone, too
        each = [np.stack(REDUCING[name][1](rows, X)).astype(dtype) for name in SAME_SHAPE]
        return jnp.asarray(np.concatenate(each, axis=1))

    transform, reference = MOVED[how]
    got = mg.jit(transform(run))(x)
    assert got.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(np.asarray(got), np.asarray(reference(simulate)(X)[comm.rank]))


# Whose adjoints add what they have only moved.
COPIES = ("bcast", "allgather", "allgatherv", "one_sided put and get")


_SAME_ADJOINT = pytest.mark.full("the other cases have adjoints that move or add in the same way")


@pytest.mark.parametrize(
    "name",
    [
        n if n in COPIES or n == "isend and irecv" else pytest.param(n, marks=_SAME_ADJOINT)
        for n, case in CASES.items()
        if case.takes == "anything"
    ],
)
def test_derivatives_of_what_only_moves(name: str, comm: Communicator) -> None:
    """16-bit floats: exact where adjoints move them, too, and refused where they would add."""
    case = CASES[name]
    x, X = operand(case, comm, jnp.dtype("bfloat16"))
    shape = jax.eval_shape(case.simulate, X).shape
    W = jnp.asarray(np.random.default_rng(3).integers(-9, 9, shape), "bfloat16")
    loss = lambda x: jnp.vdot(case.run(x, comm), W[comm.rank])
    if name in COPIES:
        with pytest.raises(TypeError, match=r"the adjoint of tests/.*Convert it first"):
            mg.jit(mg.grad(loss))(x)
        return
    got = mg.jit(mg.grad(loss))(x)
    expected = jax.jit(jax.grad(lambda X: jnp.vdot(case.simulate(X), W)))(X)[comm.rank]
    np.testing.assert_array_equal(np.asarray(got), np.asarray(expected))


@cases
def test_eager_calls_and_batches(name: str, comm: Communicator) -> None:
    """Not compiled: values, the dot test, and a batch, which gives what calls one by one give."""
    case = CASES[name]
    if case.heavy:
        pytest.skip("test_reductions calls these")
    x, X = operand(case, comm)
    run = lambda x: case.run(x, comm)
    batch = jnp.stack([k * x for k in range(1, 5)])
    calls = np.stack([run(x) for x in batch])
    expected = jax.device_get(jax.jit(case.simulate)(X)) if comm.rank == 0 else None
    close(calls[0], comm.mpi.bcast(expected)[comm.rank])
    close(mg.vmap(run)(batch), calls)
    mg.dot_test(run, x)


@pytest.mark.cases(
    *("sendrecv ring with tags", "scatterv", "custom_operation"),
    reason="test_values_and_derivatives has the vjp of all operations",
)
@cases
def test_gradient(name: str, comm: Communicator) -> None:
    """mg.grad of a loss, and the public dot test."""
    case = CASES[name]
    x, X = operand(case, comm)
    f, F = programs(case, comm)
    W = jnp.asarray(np.random.default_rng(3).standard_normal(jax.eval_shape(F, X).shape))
    gradient = mg.jit(mg.grad(lambda x: jnp.vdot(f(x), W[comm.rank])))(x)
    close(gradient, jax.jit(jax.grad(lambda X: jnp.vdot(F(X), W)))(X)[comm.rank])
    mg.dot_test(f, x)


@pytest.mark.cases(
    *("allreduce", "one_sided accumulate"),
    reason="second derivatives are made of rules that are tested; test_reductions has products",
)
@cases
def test_second_order(name: str, comm: Communicator) -> None:
    case = CASES[name]
    x, X = operand(case, comm)
    f, F = programs(case, comm)
    loss = lambda x: jnp.sum(f(x) ** 3)
    Loss = lambda X: jnp.sum(F(X) ** 3)
    expected = jax.jit(lambda X: jax.jvp(jax.grad(Loss), (X,), (X,))[1])(X)[comm.rank]

    @mg.jit
    def products(x: Any) -> Any:
        forward_over_reverse = mg.jvp(mg.grad(loss), (x,), (x,))[1]
        reverse = mg.grad(lambda x: jnp.vdot(mg.grad(loss)(x), x))(x) - mg.grad(loss)(x)
        return forward_over_reverse, reverse, mg.linearize(mg.grad(loss), x)[1](x)

    for product in products(x):
        close(product, expected)
    mg.dot_test(mg.grad(loss), x)


@pytest.mark.cases(
    *("allreduce-*", "reduce-int32", "exscan-uint8", "reduce_scatterv-complex64"),
    *("one_sided accumulate-int32", "one_sided put and get-complex128", "isend and irecv-uint8"),
    *("sendrecv ring with tags-float32", "gatherv-complex64", "custom_operation-complex64"),
    "scan not of sums-complex128",
    reason="all dtypes of one sum, and one dtype of other families: to the rest they are bytes",
)
@pytest.mark.parametrize("dtype", ["float32", "complex64", "complex128", "int32", "uint8"])
@cases
def test_dtypes(name: str, dtype: str, comm: Communicator) -> None:
    case = CASES[name]
    x, X = operand(case, comm, np.dtype(dtype))
    if case.takes == "real numbers" and dtype.startswith("complex"):
        with pytest.raises(TypeError, match="Convert it first"):
            case.run(x, comm)
        return
    y = case.run(x, comm)
    assert y.dtype == dtype
    close(y, case.simulate(X)[comm.rank], rtol=1e-5)
    if jnp.issubdtype(dtype, jnp.inexact):
        mg.dot_test(lambda x: case.run(x, comm), x)
    else:  # zero tangents of dtype float0, and no hang
        tangent = np.zeros(x.shape, jax.dtypes.float0)
        out = mg.jvp(lambda x: case.run(x, comm), (x,), (tangent,))[1]
        assert out.dtype == jax.dtypes.float0


@pytest.mark.cases(
    *("bcast-bfloat16", "alltoallv-float16", "sendrecv ring with tags-bool", "allreduce-bool"),
    *("isend and irecv-bfloat16", "one_sided put and get-bool", "custom_operation-float16"),
    reason="each dtype in a few operations: they move bytes",
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "bool"])
@cases
def test_dtypes_that_only_move(name: str, dtype: str, comm: Communicator) -> None:
    case = CASES[name]
    x, X = operand(case, comm, jnp.dtype(dtype))
    if "own" in name:
        pytest.skip("one's own function decides what it takes")
    if case.takes.endswith("numbers"):
        with pytest.raises(TypeError, match="Convert it first"):
            case.run(x, comm)
        return
    y = case.run(x, comm)
    assert y.dtype == jnp.dtype(dtype)
    np.testing.assert_array_equal(np.asarray(y), np.asarray(case.simulate(X)[comm.rank]))


def test_pytrees(comm: Communicator) -> None:
    tree = {"a": jnp.arange(3.0) + comm.rank, "b": (jnp.int32(comm.rank), jnp.ones((2, 2)))}
    total = mg.allreduce(tree)
    close(total["a"], comm.size * jnp.arange(3.0) + sum(range(comm.size)))
    assert total["b"][0] == sum(range(comm.size))
    other = mg.sendrecv(tree, comm.rank, comm.rank)  # to oneself
    close(other, tree)


def test_scalars_and_empty_arrays(comm: Communicator) -> None:
    assert float(mg.allreduce(1.0)) == comm.size
    assert mg.bcast(jnp.zeros((0, 3))).shape == (0, 3)
    assert mg.gather(jnp.zeros(0)).shape == (comm.size, 0)
    mg.dot_test(lambda x: mg.allreduce(x), jnp.zeros(0))


def test_results_of_the_seed(comm: Communicator) -> None:
    """Small programs of the field, with the figures of four ranks."""
    r, size = comm.rank, comm.size
    value, slope = mg.value_and_grad(lambda theta: theta**r, replicated=0)(2.0)
    assert float(value) == 2.0**size - 1  # 15 on four ranks
    assert float(slope) == sum(k * 2.0 ** (k - 1) for k in range(1, size))  # 17
    ten = jnp.arange(1.0, 11.0)
    close(mg.reduce(r * ten), (r == 0) * sum(range(size)) * ten)
    gradient = mg.grad(lambda x: jnp.sum(mg.reduce(x)))(r * ten)
    close(gradient, jnp.ones(10))


@pytest.mark.ranks(4)
def test_bcast_from_rank_three(comm: Communicator) -> None:
    a = jnp.full(5, float(comm.rank))
    gradient = mg.grad(lambda a: jnp.sum(mg.bcast(a, root=3) ** 2))(a)
    close(gradient, jnp.full(5, 24.0 if comm.rank == 3 else 0.0))


@pytest.mark.ranks(4)
def test_rank_two_sends_to_rank_zero(comm: Communicator) -> None:
    def loss(a: Any) -> Any:
        if comm.rank == 2:
            mg.send(a, 0)
        if comm.rank == 0:
            a = mg.recv(a, 2)
        return jnp.sum(a**2)

    gradient = mg.grad(loss)(jnp.float64(comm.rank))
    assert float(gradient) == [0.0, 2.0, 8.0, 6.0][comm.rank]


def test_sub_communicators(comm: Communicator) -> None:
    group = comm.split(comm.rank % 2, key=-comm.rank)
    members = [r for r in range(comm.size) if r % 2 == comm.rank % 2]
    assert group.size == len(members)
    assert group.rank == members[::-1].index(comm.rank)
    x = jnp.arange(3.0) + comm.rank
    close(mg.allreduce(x, comm=group), sum(jnp.arange(3.0) + r for r in members))
    mg.dot_test(lambda x: jnp.sin(mg.allreduce(jnp.cos(x), comm=group)), x)
    mg.dot_test(lambda x: mg.scan(x, comm=group) - mg.exscan(x, comm=group), x)
    twin = comm.dup()
    assert (twin.rank, twin.size) == (comm.rank, comm.size)
    close(mg.bcast(x, comm=twin), jnp.arange(3.0))


def test_a_communicator_of_mpi4py_is_wrapped_first(comm: Communicator) -> None:
    with pytest.raises(TypeError, match=r"mpigrad\.Communicator\(comm\)"):
        mg.allreduce(1.0, comm=MPI.COMM_WORLD)  # type: ignore[arg-type]
    alone = mg.Communicator(MPI.COMM_SELF)
    assert float(mg.allreduce(3.0, comm=alone)) == 3.0


def test_beside_direct_calls_of_mpi4py(comm: Communicator) -> None:
    """Messages of mpi4py on the same ranks and tags are never taken for ours, nor overtaken."""
    world = MPI.COMM_WORLD
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    request = world.isend(("theirs", comm.rank), right, tag=0)
    slow = mg.jit(lambda x: mg.allreduce(jnp.linalg.matrix_power(x, 3)))(jnp.eye(200))
    ours = mg.sendrecv(jnp.float64(comm.rank), right, left)
    assert world.allreduce(1) == comm.size
    assert world.recv(source=left, tag=0) == ("theirs", left)
    request.wait()
    assert float(ours) == left
    assert float(slow[0, 0]) == comm.size


def test_barrier(comm: Communicator) -> None:
    mg.barrier()

    def f(x: Any) -> Any:
        mg.barrier()
        y = mg.allreduce(x) ** 2
        mg.barrier()
        return y

    x = jnp.float64(comm.rank)
    total = sum(range(comm.size))
    assert float(mg.jit(mg.grad(f))(x)) == 2 * total * comm.size
    close(mg.vmap(f)(jnp.stack([x, 2 * x])), jnp.array([1.0, 4.0]) * total**2)


def test_wrong_arguments(comm: Communicator) -> None:
    x = jnp.ones(3)
    with pytest.raises(ValueError, match=rf"root must be a rank .* got {comm.size} on"):
        mg.bcast(x, root=comm.size)
    with pytest.raises(TypeError, match="Python integer"):
        mg.reduce(x, root=1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="one row for each"):
        mg.scatter(jnp.ones((comm.size + 1, 2)))
    with pytest.raises(ValueError, match=r"MPI\.SUM.*mpigrad\.reduction"):
        mg.allreduce(x, op=MPI.REPLACE)
    with pytest.raises(ValueError, match="tag"):
        mg.send(x, 0, tag=-5)
    with pytest.raises(ValueError, match="sum\\(sendcounts\\)"):
        mg.neighbor_alltoallv(x, [0], [2], [2])
    with pytest.raises(ValueError, match="must not repeat a rank"):
        mg.neighbor_alltoallv(x, [0, 0], [2, 1], [2, 1])
