"""Autograd of programs with messages: divergent ranks, orders of derivatives, faults."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch_cases import ONES, Tensor, close, leaf, points

import mpigrad
import mpigrad.torch as mt
from mpigrad.communicator import Communicator

# ---- programs that differ from rank to rank ----


def _sq(y: Any) -> Any:
    return (y**2).sum()


def _sends(x: Tensor, c: Communicator, then: Callable[..., Any], what: Any = None) -> Any:
    mt.send(torch.sin(x) if what is None else what, 1, comm=c)
    return then(x)


def _cube(x: Any) -> Any:
    return (x**3).sum()


FIVE = lambda x: torch.tensor(5.0, dtype=torch.float64)
ZEROS = torch.zeros(3, dtype=torch.float64)

# name -> (rank 0's program, rank 1's program, the joint function of both ranks' arguments)
SCENARIOS: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]] = {
    "both active": (
        lambda x, c: _sends(x, c, _cube),
        lambda x, c: _sq(mt.recv(x, 0, tag=0, comm=c)),
        lambda a, b: _cube(a) + _sq(jnp.sin(a)),
    ),
    "result unused": (
        lambda x, c: _sends(x, c, _cube),
        lambda x, c: (mt.recv(x, 0, tag=0, comm=c), _sq(x))[1],
        lambda a, b: _cube(a) + _sq(b),
    ),
    "sender's loss constant": (
        lambda x, c: _sends(x, c, FIVE),
        lambda x, c: _sq(mt.recv(x, 0, tag=0, comm=c)),
        lambda a, b: _sq(jnp.sin(a)),
    ),
    "receiver's template constant": (
        lambda x, c: _sends(x, c, _cube),
        lambda x, c: _sq(mt.recv(ZEROS, 0, tag=0, comm=c)),
        lambda a, b: _cube(a) + _sq(jnp.sin(a)),
    ),
    "sender's operand constant": (
        lambda x, c: _sends(x, c, _cube, ONES),
        lambda x, c: _sq(mt.recv(x, 0, tag=0, comm=c) * x),
        lambda a, b: _cube(a) + _sq(b),
    ),
    "requests, one unused": (
        lambda x, c: (mt.wait(mt.isend(torch.sin(x), 1, comm=c)), _cube(x))[1],
        lambda x, c: (mt.wait(mt.irecv(ZEROS, 0, comm=c)), _sq(x))[1],
        lambda a, b: _cube(a) + _sq(b),
    ),
    "allreduce of a constant on one rank": (
        lambda x, c: _sq(mt.allreduce(torch.sin(x), comm=c)),
        lambda x, c: (mt.allreduce(ONES, comm=c) * x).sum(),
        lambda a, b: _sq(jnp.sin(a) + 1) + ((jnp.sin(a) + 1) * b).sum(),
    ),
    "two messages, used in the other order": (
        lambda x, c: (mt.allreduce(x, comm=c), _sq(mt.allreduce(x * x, MPI.PROD, comm=c)))[1],
        lambda x, c: torch.mul(
            _sq(mt.allreduce(x, comm=c)), _sq(mt.allreduce(x, MPI.PROD, comm=c))
        ),
        lambda a, b: _sq(a * a * b) + _sq(a * a * b) * _sq(a + b),
    ),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_ranks_that_differ(scenario: str, comm: Communicator) -> None:
    """First derivatives by backward and grad, and the Hessian by a direction in two ways."""
    *programs, joint = SCENARIOS[scenario]
    program, X = programs[comm.rank], points(2)
    F = lambda X: joint(X[0], X[1])
    gradient = jax.grad(F)(X)[comm.rank]
    product = jax.jvp(jax.grad(F), (X,), (X,))[1][comm.rank]
    x = leaf(comm)
    program(x, comm).backward()
    close(torch.zeros(3) if x.grad is None else x.grad, gradient)
    x = leaf(comm)
    options = {"create_graph": True, "materialize_grads": True}
    (g,) = torch.autograd.grad(program(x, comm), x, **options)
    close(g, gradient)
    (h,) = torch.autograd.grad((g * x.detach()).sum(), x, **options)
    close(h, product)
    # With the graph in the leaf, as optimizers of second order do it.
    x = leaf(comm)
    torch.autograd.backward(program(x, comm), create_graph=True)
    g, x.grad = x.grad, None
    (h,) = torch.autograd.grad([] if g is None else (g * x.detach()).sum(), x, **options)
    close(h, product)


@pytest.mark.ranks(3)
def test_chain_of_three_with_tags(comm: Communicator) -> None:
    """0 -> 1 -> 2 and back to 0, the last result unused on rank 0, rank 1's loss constant."""

    def f(x: Tensor) -> Tensor:
        if comm.rank == 0:
            mt.send(torch.sin(x), 1, tag=3)
            mt.recv(ZEROS, 2, tag=9)
            return x.sum()
        if comm.rank == 1:
            y = mt.recv(ZEROS, 0, tag=3)
            mt.send(y * x, 2, tag=4)
            return FIVE(x)
        z = mt.recv(ZEROS, 1, tag=4)
        mt.send(z + x, 0, tag=9)
        return (z**2 * x).sum()

    joint = lambda X: X[0].sum() + ((jnp.sin(X[0]) * X[1]) ** 2 * X[2]).sum()
    x = leaf(comm)
    f(x).backward()
    close(x.grad, jax.grad(joint)(points(3))[comm.rank])


# ---- what torch.distributed.nn gets wrong ----


@pytest.mark.ranks(2, 4)
@pytest.mark.cases("PROD", "MAX", reason="MIN is the same code as MAX")
@pytest.mark.parametrize("op", ["PROD", "MAX", "MIN"])
def test_reductions_that_are_not_sums(op: str, comm: Communicator) -> None:
    """all_reduce(PROD) and (MAX) of torch.distributed.nn have the gradient of a sum."""
    native = getattr(MPI, op)
    fold = {"PROD": jnp.prod, "MAX": jnp.max, "MIN": jnp.min}[op]
    X = points(comm.size).at[:, 0].set(0.0)  # ties, and products with zeros
    G = jax.grad(lambda X: comm.size * (fold(X, axis=0) ** 2 + fold(X, axis=0)).sum())(X)
    x = torch.tensor(np.asarray(X[comm.rank]), requires_grad=True)
    y = mt.allreduce(x, native)
    (y**2 + y).sum().backward()
    close(x.grad, G[comm.rank])


@pytest.mark.ranks(2)
def test_own_reductions(comm: Communicator) -> None:
    circle = lambda a, b: a * b + a + b  # (1 + a)(1 + b) - 1
    op = mt.reduction(circle, derivative=lambda x, y: (1 + y) / (1 + x))
    fold = lambda X: functools.reduce(circle, X)
    X = points(2)
    F = lambda X: 2 * _cube(fold(X))
    for reduction in (op, mt.reduction(circle)):
        x = leaf(comm)
        (g,) = torch.autograd.grad(_cube(mt.allreduce(x, reduction)), x, create_graph=True)
        close(g, jax.grad(F)(X)[comm.rank])
        (h,) = torch.autograd.grad((g * x.detach()).sum(), x)
        close(h, jax.jvp(jax.grad(F), (X,), (X,))[1][comm.rank])
        mt.dot_test(lambda x, op=reduction: mt.scan(x, op) + mt.exscan(x, op), x)
        rows = mt.reduce_scatter(torch.stack([x, 2 * x]), reduction)
        close(rows, fold((comm.rank + 1) * X))
        close(mt.reduce(x, reduction, root=1), fold(X) * (comm.rank == 1))
    with pytest.raises(ValueError, match=r"reduce_scatterv: counts .* got 1 entries"):
        mt.reduce_scatterv(torch.ones(1), [1], op)


# ---- proofs over all ranks ----


def _program(x: Tensor, z: Tensor, comm: Communicator) -> Any:
    y = mt.allreduce(x, MPI.PROD, comm)
    if comm.rank == 0:
        return y * z.real, mt.scan(z, comm=comm)
    return mt.scan(y * z, comm=comm)


@pytest.mark.ranks(1, 2, 3)
def test_gradcheck_over_all_ranks(comm: Communicator) -> None:
    x = torch.tensor([0.5 + comm.rank, -1.5], dtype=torch.float64, requires_grad=True)
    z = torch.tensor([1 - 1j * comm.rank, 0.5 + 2j], requires_grad=True, dtype=torch.complex128)
    f = lambda x, z: _program(x, z, comm)
    assert mt.gradcheck(f, (x, z))
    if comm.size < 3:
        assert mt.gradgradcheck(f, (x, z), atol=1e-4)
    mt.dot_test(f, x, z)
    wrong = lambda x: mt.allreduce(x) * mt.allreduce(x.detach() if comm.rank == 0 else x)
    with pytest.raises(AssertionError, match="finite differences give"):
        mt.gradcheck(wrong, x)
    with pytest.raises(AssertionError, match="dot_test: "):
        mt.dot_test(lambda x: _Wrong.apply(mt.allreduce(x)), x)
    with pytest.raises(ValueError, match=r"torch\.float64"):
        mt.gradcheck(mt.allreduce, torch.ones(2, requires_grad=comm.rank == 0))


class _Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, ct: Tensor) -> Tensor:
        return 3 * ct

    @staticmethod
    def jvp(ctx: Any, t: Tensor) -> Tensor:
        return 2 * t


# ---- transformations and compilation ----


@pytest.mark.ranks(2)
def test_transformations(comm: Communicator) -> None:
    """The message is active and batched on rank 1, although its operand is neither."""
    func = torch.func
    x, X = leaf(comm).detach(), points(2)
    f = lambda x: x * mt.allreduce(torch.sin(x) if comm.rank == 0 else ONES)
    F = lambda X: X * (jnp.sin(X[0]) + 1)
    value, tangent = func.jvp(f, (x,), (x,))
    close(value, F(X)[comm.rank])
    close(tangent, jax.jvp(F, (X,), (X,))[1][comm.rank])
    batch = func.vmap(f)(torch.stack([x, 2 * x]))
    close(batch, [F(X)[comm.rank], F(2 * X)[comm.rank]])
    both = func.vmap(lambda x: func.jvp(f, (x,), (x,))[1])(torch.stack([x, 2 * x]))
    close(both[1], jax.jvp(F, (2 * X,), (2 * X,))[1][comm.rank])
    # Messages in a vmap are on the chain.
    leaf_ = leaf(comm)
    y = func.vmap(lambda x: mt.allreduce(torch.sin(x) if comm.rank == 0 else ONES))(
        torch.stack([leaf_, 2 * leaf_])
    )
    z = mt.allreduce(leaf_)
    (y.sum() if comm.rank == 1 else z.sum()).backward()
    slope = jnp.cos(X[0]) + 2 * jnp.cos(2 * X[0]) if comm.rank == 0 else 0
    close(leaf_.grad, slope + 1 + jnp.zeros(3))
    # Reverse mode works if all ranks do the same.
    g = lambda x: _cube(mt.allreduce(x * x, MPI.PROD))
    G = lambda X: 2 * _cube(X[0] ** 2 * X[1] ** 2)
    close(func.grad(g)(x), jax.grad(G)(X)[comm.rank])
    rows = func.vmap(func.grad(g))(torch.stack([x, 2 * x]))
    close(rows[1], jax.grad(G)(2 * X)[comm.rank])
    product = func.jvp(func.grad(g), (x,), (x,))[1]
    close(product, jax.jvp(jax.grad(G), (X,), (X,))[1][comm.rank])


@pytest.mark.ranks(2)
def test_compilation_breaks_the_graph(comm: Communicator) -> None:
    """The compiler differentiates the code between messages, also in a whole training step."""
    other, X = 1 - comm.rank, points(2)

    def f(x: Tensor) -> Tensor:
        y = mt.allreduce(torch.sin(x) * 2, op=MPI.PROD)
        return (mt.sendrecv(y * x, other, other) ** 2).sum() + (x * x).sum()

    def step(x: Tensor) -> Tensor:
        with mt.messages():
            loss = _sq(mt.allreduce(torch.sin(x)))
            (g,) = torch.autograd.grad(loss, x, retain_graph=True)
            loss.backward()
        return g * 2

    F = lambda X: ((4 * jnp.sin(X[0]) * jnp.sin(X[1]) * X) ** 2).sum() + (X * X).sum()
    compiled, x = torch.compile(f, backend="aot_eager"), leaf(comm)
    for _ in range(2):
        compiled(x).backward()
    close(x.grad, 2 * jax.grad(F)(X)[comm.rank])
    x, G = leaf(comm), 4 * jnp.sin(X).sum(0) * jnp.cos(X[comm.rank])
    close(torch.compile(step, backend="aot_eager")(x), 2 * G)
    close(x.grad, G)


# ---- tensors of all kinds ----


@pytest.mark.ranks(2)
def test_tensors_of_all_kinds(comm: Communicator) -> None:
    right = lambda x: mt.sendrecv(x, 1 - comm.rank, 1 - comm.rank)
    for dtype in (
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
        torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64,
    ):  # fmt: skip
        x = (torch.arange(4) + comm.rank).to(dtype)
        y = right(x)
        assert y.dtype == dtype
        assert torch.equal(y, (torch.arange(4) + 1 - comm.rank).to(dtype)), dtype
    z = torch.arange(6.0, dtype=torch.float64).reshape(2, 3).T + comm.rank
    other = torch.arange(6.0, dtype=torch.float64).reshape(2, 3).T + 1 - comm.rank
    for view in (lambda z: z, lambda z: z[1:, 1], lambda z: z[::2], lambda z: z[0, 0]):
        close(right(view(z)), view(other))
    close(right((1j * z).conj()), -1j * other.numpy())
    close(right((1j * z).conj().imag), -other)  # a view with a negative sign to come
    assert right(torch.zeros(0, 3)).shape == (0, 3)
    assert right(torch.nn.Parameter(torch.ones(2))).tolist() == [1, 1]
    assert float(mt.allreduce(1.5)) == 3
    assert mt.allreduce(np.arange(2)).tolist() == [0, 2]
    tree = right({"a": z, "b": [torch.tensor(comm.rank), torch.ones(2)]})
    assert int(tree["b"][0]) == 1 - comm.rank
    with pytest.raises(TypeError, match="float8"):
        right(torch.ones(2).to(torch.float8_e5m2))
    with pytest.raises(TypeError, match="to_dense"):
        right(torch.eye(2).to_sparse())
    with pytest.raises(TypeError, match="meta"):
        right(torch.ones(2, device="meta"))
    with pytest.raises(TypeError, match="got a JAX array"):
        right(jnp.ones(2))
    with pytest.raises(TypeError, match="float16"):
        mt.allreduce(torch.ones(2, dtype=torch.float16))
    with pytest.raises(TypeError, match="unexpected keyword"):
        mt.allreduce(torch.ones(2), roots=1)


@pytest.mark.ranks(2)
def test_results_are_new_memory(comm: Communicator) -> None:
    """Results share no memory with operands or each other, because PyTorch writes tensors."""
    with torch.no_grad():
        x = torch.ones(1000)
        for f in (mt.allreduce, mt.bcast, mt.scan, lambda x: mt.sendrecv(x, comm.rank, comm.rank)):
            y = f(x)
            before = y.clone()
            x += 1
            assert torch.equal(y, before)
            y.zero_()
            assert not torch.any(x == 0)


@pytest.mark.ranks(2)
def test_mistakes_are_one_error_on_all_ranks(comm: Communicator) -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"(?s)do not agree.*test_torch_autograd"):
        mt.allreduce(torch.ones(2 + comm.rank))
    with pytest.raises(jax.errors.JaxRuntimeError, match="not the same on all ranks"):
        mt.assert_replicated(torch.tensor(float(comm.rank)))
    with pytest.raises(ValueError, match=r"root must be a rank .* got 2"):
        mt.bcast(torch.ones(2), root=2)


@pytest.mark.ranks(2)
def test_communicators(comm: Communicator) -> None:
    alone = comm.split(comm.rank)
    x = leaf(comm)
    with alone:
        y = mt.allreduce(x)
    close(y, x.detach())
    (2 * y).sum().backward()  # outside of the `with`, adjoints use the communicator of the message
    close(x.grad, [2.0] * 3)
    mt.barrier()
    assert mpigrad.Communicator is mt.Communicator
