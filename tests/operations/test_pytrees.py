"""Pytrees: every operation treats the leaves alike, and sends one message for each dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpigrad as mg
from compilations import compilations
from helpers import close
from mpigrad.communicator import Communicator
from mpigrad.operations.pytree_packing import pack, unpack
from mpigrad.runtime.native import record


def _counts(c: Communicator) -> list[int]:
    """Of all ranks together as many rows as there are ranks: two, one, ..., one, none."""
    return [2, *[1] * (c.size - 2), 0] if c.size > 1 else [1]


def _own(x: Any, c: Communicator) -> Any:
    """This rank's rows."""
    start = sum(_counts(c)[: c.rank])
    return jax.tree.map(lambda leaf: leaf[start : start + _counts(c)[c.rank]], x)


def _ring(c: Communicator) -> tuple[int, int]:
    return (c.rank + 1) % c.size, (c.rank - 1) % c.size


def _send_and_recv(x: Any, c: Communicator) -> Any:
    mg.send(x, _ring(c)[0], comm=c)
    return mg.recv(x, _ring(c)[1], tag=0, comm=c)


def _from_anyone(x: Any, c: Communicator) -> Any:
    mg.send(x, _ring(c)[0], comm=c)
    return mg.recv(x, comm=c)


def _neighbors(x: Any, c: Communicator) -> Any:
    """A row to each other rank."""
    others = [r for r in range(c.size) if r != c.rank]
    rows = jax.tree.map(lambda leaf: leaf[jnp.array(others, int)], x)
    return mg.neighbor_alltoallv(rows, others, [1] * len(others), [1] * len(others), comm=c)


def _requests(x: Any, c: Communicator) -> Any:
    request = mg.irecv(x, _ring(c)[1], comm=c)
    return mg.waitall([mg.isend(x, _ring(c)[0], comm=c), request])[1]


def _epoch(x: Any, c: Communicator) -> Any:
    row = jax.tree.map(lambda leaf: leaf[:1], x)
    return mg.one_sided(
        x, put=[(row, _ring(c)[0], 0)], get=[(0, 0, 1)], accumulate=[(row, 0, 0)], comm=c
    )


# Of pytrees whose arrays have as many rows as there are ranks.
OPERATIONS: dict[str, Callable[[Any, Communicator], Any]] = {
    "bcast": lambda x, c: mg.bcast(x, comm=c),
    "reduce": lambda x, c: mg.reduce(x, comm=c),
    "allreduce": lambda x, c: mg.allreduce(x, comm=c),
    "gather": lambda x, c: mg.gather(x, comm=c),
    "allgather": lambda x, c: mg.allgather(x, comm=c),
    "scatter": lambda x, c: mg.scatter(x, comm=c),
    "alltoall": lambda x, c: mg.alltoall(x, comm=c),
    "reduce_scatter": lambda x, c: mg.reduce_scatter(x, comm=c),
    "scan": lambda x, c: mg.scan(x, comm=c),
    "exscan": lambda x, c: mg.exscan(x, comm=c),
    "gatherv": lambda x, c: mg.gatherv(_own(x, c), _counts(c), comm=c),
    "scatterv": lambda x, c: mg.scatterv(x, _counts(c), comm=c),
    "allgatherv": lambda x, c: mg.allgatherv(_own(x, c), _counts(c), comm=c),
    "reduce_scatterv": lambda x, c: mg.reduce_scatterv(x, _counts(c), comm=c),
    "alltoallv": lambda x, c: mg.alltoallv(x, _counts(c), [_counts(c)[c.rank]] * c.size, comm=c),
    "neighbor_alltoallv": _neighbors,
    "send and recv": _send_and_recv,
    "recv from anyone": _from_anyone,
    "sendrecv": lambda x, c: mg.sendrecv(x, *_ring(c), comm=c),
    "isend and irecv": _requests,
    "one_sided": _epoch,
}


def _half(first: int) -> pytest.MarkDecorator:
    """Every other one in make test, all in make test-full."""
    marks = lambda i: (
        [pytest.mark.full("the other tests of pytrees run this operation")] * ((i + first) % 2)
    )
    cases = [pytest.param(n, marks=marks(i)) for i, n in enumerate(OPERATIONS)]
    return pytest.mark.parametrize("name", cases)


some, others = _half(0), _half(1)


def _tree(c: Communicator) -> Any:
    """Arrays of three dtypes: two of float64, two of float32, one of int32."""
    numbers = np.random.default_rng(c.rank)
    whole = lambda *shape: numbers.integers(0, 9, (c.size, *shape))  # sums are exact
    array = lambda dtype, *shape: jnp.asarray(whole(*shape), dtype)
    return {
        "u": array("float64", 2),
        "n": (array("int32", 3), None),
        "w": [array("float32"), array("float64", 2, 1), array("float32", 2)],
    }


@some
def test_leaves_are_treated_alike_in_one_message_for_each_dtype(
    name: str, comm: Communicator
) -> None:
    operation, tree = OPERATIONS[name], _tree(comm)

    def calls_of(x: Any) -> tuple[Any, int]:
        before = record().calls
        return operation(x, comm), record().calls - before

    # Leaf by leaf; these messages are compared with programs without any in test_operations.py.
    alone = [calls_of(leaf) for leaf in jax.tree.leaves(tree)]
    together, calls = calls_of(tree)
    assert calls == 3 * alone[0][1]
    for i, (expected, _) in enumerate(alone):
        got = jax.tree.map(lambda t, i=i: jax.tree.leaves(t)[i], together, is_leaf=_like(tree))
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)


def _like(tree: Any) -> Callable[[Any], bool]:
    return lambda t: jax.tree.structure(t) == jax.tree.structure(tree)


@pytest.mark.cases(
    *("scatterv", "neighbor_alltoallv", "isend and irecv"),
    reason="one code packs the leaves of all operations; one_sided has its own tests",
)
@others
def test_adjoints_are_those_of_the_leaves(name: str, comm: Communicator) -> None:
    operation, tree = OPERATIONS[name], _tree(comm)
    leaves, structure = jax.tree.flatten(tree)
    active = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.inexact)]

    def of(tree: Any) -> Any:  # what depends on floating-point numbers
        return [y for y in jax.tree.leaves(operation(tree, comm)) if y.dtype != np.int32]

    def together(*xs: Any) -> Any:
        given = [*leaves]
        for i, x in zip(active, xs, strict=True):
            given[i] = x
        return of(jax.tree.unflatten(structure, given))

    def alone(*xs: Any) -> Any:
        results = [of(x) for x in xs]
        return [y for kind in zip(*results, strict=True) for y in kind]

    xs = [leaves[i] for i in active]
    weights = [jnp.cos(1.0 + jnp.arange(y.size)).reshape(y.shape).astype(y.dtype)
               for y in mg.jit(together)(*xs)]  # fmt: skip
    adjoint = lambda f: mg.jit(lambda *xs: mg.vjp(f, *xs)[1](weights))(*xs)
    got, expected = adjoint(together), adjoint(alone)
    close(got, expected, rtol=1e-6)
    mg.dot_test(together, *xs, rtol=1e-5)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "complex64", "int8", "bool"])
def test_packed_arrays_are_those_of_a_concatenation(dtype: str) -> None:
    leaves = [np.arange(6).reshape(2, 3), np.zeros((2, 0)), np.array([1, 7]), np.ones((2, 2, 2))]
    leaves = [jnp.asarray(leaf, dtype) for leaf in leaves]
    for leading in (0, 1):
        packed = pack(leaves, leading)
        flat = [leaf.reshape(*leaf.shape[:leading], -1) for leaf in leaves if leaf.size]
        np.testing.assert_array_equal(packed, jnp.concatenate(flat, leading))
        parts = unpack(packed, [leaf.shape[leading:] for leaf in leaves], leading)
        for part, leaf in zip(parts, leaves, strict=True):
            assert part.dtype == leaf.dtype and part.shape == leaf.shape
            np.testing.assert_array_equal(part, leaf)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("how", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_derivatives_of_packed_arrays(how: Callable[..., Any]) -> None:
    """With leaves that are constant or not batched, and parts that are not used."""
    a, b, c = jnp.arange(6.0).reshape(2, 3), jnp.float64(0.5), jnp.arange(4.0)

    def native(a: Any, b: Any) -> Any:
        x, _, z = unpack(jnp.sin(pack([a, b, c])), [(2, 3), (), (4,)])
        return jnp.sum(x**2) * z[1] + jnp.cos(b)

    def expected(a: Any, b: Any) -> Any:
        return jnp.sum(jnp.sin(a) ** 2) * jnp.sin(c[1]) + jnp.cos(b)

    batch = jnp.stack([a, 2 * a], axis=1)
    for by in (0, 1, (0, 1)):
        close(how(jax.grad(native, by))(a, b), how(jax.grad(expected, by))(a, b))
        pair = (how(jax.hessian(f, by))(a, b) for f in (native, expected))
        close(*pair)
    close(how(jax.jacfwd(native))(a, b), jax.grad(expected)(a, b))
    mapped = (how(jax.vmap(jax.grad(f), (1, None)))(batch, b) for f in (native, expected))
    close(*mapped)


def test_many_leaves_are_few_programs(comm: Communicator) -> None:
    tree = [np.full(1 + k % 7, 1.0 + k) for k in range(300)]
    with compilations() as programs:
        total = jax.block_until_ready(mg.allreduce(tree, comm=comm))
    assert len(programs) <= 3, programs
    for y, x in zip(total, tree, strict=True):
        np.testing.assert_array_equal(y, comm.size * x)


def test_what_is_no_array_is_refused(comm: Communicator) -> None:
    for wrong in ("abc", "float32", object(), np.array(["a"]), {"a": jnp.ones(2), "b": "abc"}):
        for operation in (mg.allreduce, mg.bcast, mg.allgather, lambda x: mg.send(x, comm.rank)):
            with pytest.raises(TypeError, match="expected an array or a pytree of arrays, got"):
                operation(wrong)
    with pytest.raises(TypeError, match=r"dtype >f8, which JAX does not .*newbyteorder"):
        mg.allreduce({"a": np.arange(4, dtype=">f8")})
    with pytest.raises(TypeError, match=r"dtype <U1, which .* Convert it to a dtype of numbers"):
        mg.allreduce(np.array(["a"]))
    for operation in (mg.allreduce, mg.bcast):
        with pytest.raises(TypeError, match=r"Send jax\.random\.key_data"):
            operation(jax.random.key(0))


def test_numbers_that_share_a_byte_are_refused(comm: Communicator) -> None:
    x = jnp.ones(4, jnp.int4)
    for call in (mg.allgather, mg.bcast, lambda x: mg.isend([x, jnp.ones(2)], 0)):
        with pytest.raises(TypeError, match="several numbers in a byte"):
            call(x)
