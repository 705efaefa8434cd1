"""The module with mpi4jax's names: values, derivatives, tokens, status and errors."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mpi4py import MPI

import mpigrad as mg
from mpigrad.compat import mpi4jax
from mpigrad.compat.mpi4jax import stand_in
from mpigrad.compat.mpi4jax.communicators import ADJOINTS, VERSION
from mpigrad.compat.mpi4jax.experimental import auto_tokenize, notoken

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
LAST = SIZE - 1
RIGHT, LEFT = (RANK + 1) % SIZE, (RANK - 1) % SIZE


def numbers(*shape: int, seed: int = RANK) -> Any:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


def _scatter(x: Any) -> Any:
    return mpi4jax.scatter(x if RANK == LAST else x[0], LAST)


def _send_and_recv(x: Any) -> Any:
    """The last rank sends to every rank before it; others return what they receive."""
    if RANK == LAST:
        for rank in range(LAST):
            mpi4jax.send((rank + 2) * x, rank, tag=rank)
        return x
    return mpi4jax.recv(x, LAST, tag=RANK)


# name: (function, shape, the same by mpi4py on pickled arrays)
CASES: dict[str, tuple[Callable[[Any], Any], tuple[int, ...], Callable[[Any], Any]]] = {
    "allgather": (mpi4jax.allgather, (2, 3), lambda x: np.stack(WORLD.allgather(x))),
    "allreduce": (
        lambda x: mpi4jax.allreduce(x, op=MPI.SUM),
        (2, 3),
        lambda x: WORLD.allreduce(x, MPI.SUM),
    ),
    "allreduce of products": (
        lambda x: mpi4jax.allreduce(x, op=MPI.PROD),
        (2, 3),
        lambda x: WORLD.allreduce(x, MPI.PROD),
    ),
    "alltoall": (mpi4jax.alltoall, (SIZE, 2), lambda x: np.stack(WORLD.alltoall(list(x)))),
    "bcast": (lambda x: mpi4jax.bcast(x, LAST), (3,), lambda x: WORLD.bcast(x, LAST)),
    "gather": (
        lambda x: mpi4jax.gather(x, LAST),
        (3,),
        lambda x: x if (rows := WORLD.gather(x, LAST)) is None else np.stack(rows),
    ),
    "reduce": (
        lambda x: mpi4jax.reduce(x, MPI.SUM, LAST),
        (3,),
        lambda x: x if (y := WORLD.reduce(x, MPI.SUM, LAST)) is None else y,
    ),
    "scan": (lambda x: mpi4jax.scan(x, MPI.SUM), (3,), lambda x: WORLD.scan(x, MPI.SUM)),
    "scatter": (
        _scatter,
        (SIZE, 2),
        lambda x: WORLD.scatter(list(x) if RANK == LAST else None, LAST),
    ),
    "send and recv": (
        _send_and_recv,
        (3,),
        lambda x: WORLD.bcast(x, LAST) * (1 if RANK == LAST else RANK + 2),
    ),
    "sendrecv in a ring": (
        lambda x: mpi4jax.sendrecv(x, jnp.zeros_like(x), LEFT, RIGHT),
        (3,),
        lambda x: WORLD.sendrecv(x, RIGHT, source=LEFT),
    ),
    "sendrecv in a ring with tags": (
        lambda x: mpi4jax.sendrecv(x, x, LEFT, RIGHT, sendtag=RANK, recvtag=LEFT),
        (3,),
        lambda x: WORLD.sendrecv(x, RIGHT, source=LEFT),
    ),
}


@pytest.fixture
def part() -> Iterator[MPI.Intracomm]:
    """The even ranks, or the odd ranks."""
    made = cast(MPI.Intracomm, WORLD.Split(RANK % 2))
    yield made
    made.Free()


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.thin(3)) if "ring" in n else n for n in CASES]
)
def test_values_are_those_of_mpi4py(name: str) -> None:
    function, shape, reference = CASES[name]
    x = numbers(*shape)
    expected = reference(np.asarray(x))
    np.testing.assert_allclose(function(x), expected, rtol=1e-12)
    np.testing.assert_allclose(jax.jit(function)(x), expected, rtol=1e-12)
    assert mpi4jax.barrier() is None


@pytest.mark.parametrize("name", [name for name in CASES if name != "allreduce"])
def test_adjoints_are_exact(name: str) -> None:
    function, shape, _ = CASES[name]
    mg.dot_test(function, numbers(*shape))


def test_adjoint_of_allreduce_is_that_of_mpi4jax(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = numbers(3), numbers(3, seed=7)

    def f(x: Any) -> Any:
        return mpi4jax.allreduce(x, MPI.SUM)

    def pulled_back(x: Any) -> Any:
        return jax.linear_transpose(f, weight)(x)[0]

    total = WORLD.allreduce(np.asarray(x), MPI.SUM)
    for back in (pulled_back, jax.jit(pulled_back)):
        np.testing.assert_array_equal(back(x), x)
    np.testing.assert_allclose(jax.linear_transpose(pulled_back, x)(x)[0], total)
    np.testing.assert_allclose(jax.jvp(f, (weight,), (x,))[1], total)
    for grad in (jax.grad, mg.grad):
        np.testing.assert_allclose(grad(lambda x: jnp.vdot(weight, f(x)))(x), weight)
    rows = jax.vmap(f)(jnp.stack([x, weight]))
    np.testing.assert_allclose(rows, [total, SIZE * weight])
    # The gradient of the first component of the gradient of sum((Σ x)²), the same with mpi4jax.
    second = jax.grad(lambda x: jax.grad(lambda x: jnp.sum(f(x) ** 2))(x)[0])(x)
    np.testing.assert_allclose(second, [2.0 * SIZE, 0, 0])
    monkeypatch.setenv(ADJOINTS, "exact")
    mg.dot_test(f, x)
    np.testing.assert_allclose(pulled_back(x), total)
    monkeypatch.setenv(ADJOINTS, "exactly")
    with pytest.raises(ValueError, match="ADJOINTS must be mpi4jax or exact, got 'exactly'"):
        f(x)


@pytest.mark.thin(3)
def test_plain_jax_grad_goes_through_sendrecv() -> None:
    def f(x: Any) -> Any:
        return jnp.sum((RANK + 1) * mpi4jax.sendrecv(x, x, LEFT, RIGHT, sendtag=3))

    np.testing.assert_allclose(jax.grad(f)(numbers(3)), np.full(3, RIGHT + 1.0))
    np.testing.assert_allclose(jax.jit(jax.grad(f))(numbers(3)), np.full(3, RIGHT + 1.0))


def test_messages_in_the_backward_rule_of_jax() -> None:
    @jax.custom_vjp
    def f(x: Any) -> Any:
        return mpi4jax.allreduce(jnp.sin(x), MPI.SUM)

    f.defvjp(lambda x: (f(x), x), lambda x, ct: (jnp.cos(x) * mpi4jax.allreduce(ct, MPI.SUM),))
    x = jnp.float64(RANK)
    np.testing.assert_allclose(jax.jit(jax.grad(f))(x), SIZE * np.cos(RANK))


def test_tokens_of_older_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    x, token = numbers(3), jax.lax.create_token()
    value, passed = mpi4jax.allreduce(x, MPI.SUM, token=token)
    assert passed is token
    np.testing.assert_allclose(value, mpi4jax.allreduce(x, MPI.SUM))
    assert mpi4jax.barrier(token=token) is token

    @jax.jit
    def ring(x: Any) -> Any:
        received, token = mpi4jax.sendrecv(x, x, LEFT, RIGHT, token=None)
        token = mpi4jax.barrier(token=token)
        total, token = mpi4jax.allreduce(received, MPI.SUM, token=token)
        return received, total, token

    received, total, last = ring(x)
    np.testing.assert_allclose(received, WORLD.sendrecv(np.asarray(x), RIGHT, source=LEFT))
    np.testing.assert_allclose(total, value)
    assert isinstance(last, type(token))
    assert mpi4jax.__version__ == "0.9.1.post2"
    monkeypatch.setenv(VERSION, "0.7.2")
    assert mpi4jax.__version__ == "0.7.2"
    value, made = mpi4jax.bcast(x, 0)
    assert value.shape == x.shape
    assert isinstance(made, type(token))
    monkeypatch.setenv(VERSION, "new")
    with pytest.raises(ValueError, match=r"VERSION must be a version such as 0\.7\.2, got 'new'"):
        mpi4jax.bcast(x, 0)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_status(wrap: Callable[..., Any]) -> None:
    x, status, other = numbers(3), MPI.Status(), MPI.Status()
    f = wrap(lambda x: mpi4jax.sendrecv(x, x, LEFT, RIGHT, sendtag=RANK, status=status))
    f(x).block_until_ready()
    assert (status.Get_source(), status.Get_tag()) == (LEFT, LEFT)
    assert status.Get_count(MPI.DOUBLE) == 3
    mpi4jax.send(x, RIGHT, tag=40 + RANK)
    g = wrap(lambda like: mpi4jax.recv(like, status=other))
    g(x).block_until_ready()
    assert (other.Get_source(), other.Get_tag()) == (LEFT, 40 + LEFT)


def test_status_in_a_gradient() -> None:
    status = MPI.Status()

    def f(x: Any) -> Any:
        return jnp.sum((RANK + 1) * mpi4jax.sendrecv(x, x, LEFT, RIGHT, sendtag=9, status=status))

    gradient = jax.jit(jax.grad(f))(numbers(3))
    np.testing.assert_allclose(gradient, np.full(3, RIGHT + 1.0))
    assert status.Get_tag() == 9


def test_communicators_of_mpi4py(part: MPI.Intracomm) -> None:
    total = mpi4jax.allreduce(jnp.float64(RANK), MPI.SUM, comm=part)
    assert float(total) == sum(range(RANK % 2, SIZE, 2))
    assert mpi4jax.communicator(part) is mpi4jax.communicator(part)
    assert mpi4jax.communicator(WORLD) is mpi4jax.communicator()
    # A freed communicator is forgotten, also if MPI gives its handle to the next one.
    clone = WORLD.Clone()
    first = mpi4jax.communicator(clone)
    clone.Free()
    clone = cast(MPI.Intracomm, WORLD.Split(0, -RANK))
    assert mpi4jax.communicator(clone) is not first
    assert mpi4jax.communicator(clone).rank == LAST - RANK
    clone.Free()


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda x: mpi4jax.allreduce(x, cast(Any, "sum")),
            TypeError,
            r"mpi4jax\.allreduce: op must be mpi4py\.MPI\.Op, got str on rank \d\. Convert it",
        ),
        (
            lambda x: jax.jit(lambda x: mpi4jax.allreduce(x, MPI.SUM))(x > 0),
            TypeError,
            r"mpi4jax\.allreduce: MPI\.SUM takes integers, .* got bool",
        ),
        (
            lambda x: jax.jit(mpi4jax.bcast)(x, 0),
            TypeError,
            r"mpi4jax\.bcast: root must be a Python integer, got \w*Tracer .* make it static",
        ),
        (
            lambda x: mpi4jax.bcast(x, 0, comm=cast(Any, 3)),
            TypeError,
            r"comm must be mpi4py\.MPI\.Intracomm",
        ),
        (lambda x: mpi4jax.bcast(x, SIZE), ValueError, f"got {SIZE} on rank {RANK}"),
        (
            lambda x: mpi4jax.alltoall(jnp.zeros((SIZE + 1, 2))),
            ValueError,
            rf"Alltoall input must have shape \(nproc, \.\.\.\), with nproc = {SIZE} ranks, got",
        ),
        (
            lambda x: mpi4jax.scatter(jnp.zeros((SIZE + 1, 2)), RANK),
            ValueError,
            r"Scatter input must have shape \(nproc, \.\.\.\)",
        ),
        (
            lambda x: mpi4jax.allgather({"a": "text"}),
            TypeError,
            r"mpi4jax\.allgather: expected an array .* got str \('text'\)",
        ),
        (
            lambda x: mpi4jax.allgather({"a": x}),
            TypeError,
            r"mpi4jax\.allgather: x must be an array, got dict",
        ),
        (lambda x: mpi4jax._src, NotImplementedError, r"mpi4jax\._src: the internals of mpi4jax"),
        (lambda x: mpi4jax.nothing, AttributeError, "module 'mpi4jax' has no attribute 'nothing'"),
    ],
)
def test_errors(call: Callable[[Any], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call(jnp.zeros(2))


@pytest.mark.ranks(1)
def test_import_gives_this_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    for name in ("", ".experimental", ".experimental.notoken"):
        monkeypatch.setitem(sys.modules, f"mpi4jax{name}", None)  # its value returns after the test
    stand_in.install()
    assert importlib.import_module("mpi4jax") is mpi4jax
    for module, reason in (
        ("mpi4jax._src.utils", "the internals of mpi4jax do not exist"),
        ("mpi4jax.other", "there is no module mpi4jax.other"),
    ):
        with pytest.raises(ModuleNotFoundError, match=reason):
            importlib.import_module(module)


@pytest.mark.parametrize("version", ["0.7.2", "0.9.1"])
def test_experimental_functions_have_no_tokens(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VERSION, version)
    x = jnp.arange(2.0) + RANK
    total = notoken.allreduce(x, op=MPI.SUM)
    assert np.array_equal(total, SIZE * np.arange(2.0) + SIZE * (SIZE - 1) / 2)
    assert notoken.barrier() is None
    y = notoken.sendrecv(x, x, LEFT, RIGHT)
    assert np.array_equal(y, np.arange(2.0) + LEFT)
    f = auto_tokenize(lambda x: mpi4jax.bcast(x, 0, token=jax.lax.create_token())[0])
    assert np.array_equal(mg.jit(f)(x), np.arange(2.0))
