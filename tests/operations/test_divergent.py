"""Programs that differ from rank to rank, under every transformation.

The messages of all ranks must come in an order that matches, and gradients must be those of the
joint function, written here without messages. The first test compares the order of messages of two
ranks by tracing alone; the second runs them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpigrad as mg
from helpers import close, trace_only
from mpigrad.communicator import Communicator

Program = Callable[[Any, Communicator], Any]


def _sq(y: Any) -> Any:
    return jnp.sum(y**2)


def _cube(x: Any) -> Any:
    return jnp.sum(x**3)


def _sends(x: Any, c: Communicator, then: Callable[[Any], Any], what: Any = None) -> Any:
    mg.send(jnp.sin(x) if what is None else what, 1, comm=c)
    return then(x)


ZEROS, ONES = jnp.zeros(3), jnp.ones(3)
FIVE, NOTHING = (lambda x: jnp.float64(5)), (lambda x: jnp.float64(0))

# name -> (rank 0's program, rank 1's program, the joint function of both ranks' arguments)
SCENARIOS: dict[str, tuple[Program, Program, Callable[[Any, Any], Any]]] = {
    "both active": (
        lambda x, c: _sends(x, c, _cube),
        lambda x, c: _sq(mg.recv(x, 0, tag=0, comm=c)),
        lambda a, b: _cube(a) + _sq(jnp.sin(a)),
    ),
    "result unused": (
        lambda x, c: _sends(x, c, _cube),
        lambda x, c: (mg.recv(x, 0, tag=0, comm=c), jnp.float64(0))[1],
        lambda a, b: _cube(a),
    ),
    "sender's loss constant": (
        lambda x, c: _sends(x, c, FIVE),
        lambda x, c: _sq(mg.recv(x, 0, tag=0, comm=c)),
        lambda a, b: _sq(jnp.sin(a)),
    ),
    "receiver's template constant": (
        lambda x, c: _sends(x, c, _cube),
        lambda x, c: _sq(mg.recv(ZEROS, 0, tag=0, comm=c)),
        lambda a, b: _cube(a) + _sq(jnp.sin(a)),
    ),
    "sender's operand constant": (
        lambda x, c: _sends(x, c, _cube, ONES),
        lambda x, c: _sq(mg.recv(x, 0, tag=0, comm=c) * x),
        lambda a, b: _cube(a) + _sq(b),
    ),
    "receiver differentiates something else": (
        lambda x, c: _sends(x, c, NOTHING),
        lambda x, c: jnp.sum(mg.recv(ZEROS, 0, tag=0, comm=c) * x),
        lambda a, b: jnp.sum(jnp.sin(a) * b),
    ),
    "allreduce of a constant on one rank": (
        lambda x, c: _sq(mg.allreduce(jnp.sin(x), comm=c)),
        lambda x, c: jnp.sum(mg.allreduce(ONES, comm=c) * x),
        lambda a, b: _sq(jnp.sin(a) + 1) + jnp.sum((jnp.sin(a) + 1) * b),
    ),
}

One = Callable[[Any], Any]
ck = jax.checkpoint


def scan(f: One, n: int = 2) -> One:
    """n f(x): the message in the loop does not depend on the loop."""
    return lambda x: jax.lax.scan(lambda s, _: (s + f(x), None), 0.0, None, length=n)[0]


def scan_carry(f: One) -> One:
    return lambda x: jax.lax.scan(lambda c, _: (c, f(c)), x, None, length=2)[1].sum()


def cond(f: One) -> One:
    return lambda x: jax.lax.cond(jnp.sum(x) > -1e9, f, lambda x: jnp.float64(1), x)


def whiled(f: One) -> One:
    body = lambda s, x: (s[0] + 1, s[1] + f(x))
    return lambda x: jax.lax.while_loop(lambda s: s[0] < 3, lambda s: body(s, x), (0, 0.0))[1]


def gradient(wrap: Callable[[One], One]) -> Callable[[One], One]:
    return lambda f: mg.grad(wrap(f))


def hvp(wrap: Callable[[One], One]) -> Callable[[One], One]:
    return lambda f: lambda x: mg.jvp(mg.grad(wrap(f)), (x,), (x,))[1]


def grad_of_grad(wrap: Callable[[One], One]) -> Callable[[One], One]:
    return lambda f: mg.grad(lambda x: jnp.vdot(mg.grad(wrap(f))(x), x))


def tangent(wrap: Callable[[One], One]) -> Callable[[One], One]:
    return lambda f: lambda x: mg.jvp(wrap(f), (x,), (x,))[1]


def same(f: One) -> One:
    return f


# name -> (transformation, order of the derivative, number of times that f counts)
TRANSFORMATIONS: dict[str, tuple[Callable[[One], One], str, int]] = {
    "grad": (gradient(same), "grad", 1),
    "jax.jit(grad)": (lambda f: jax.jit(mg.grad(f)), "grad", 1),
    "mpigrad.jit(grad)": (lambda f: mg.jit(mg.grad(f)), "grad", 1),
    "grad(jax.jit)": (gradient(jax.jit), "grad", 1),
    "grad(mpigrad.jit)": (gradient(mg.jit), "grad", 1),
    "checkpoint": (gradient(ck), "grad", 1),
    "checkpoint(jit)": (gradient(lambda f: ck(jax.jit(f))), "grad", 1),
    "jit(checkpoint)": (gradient(lambda f: jax.jit(ck(f))), "grad", 1),
    "scan": (gradient(scan), "grad", 2),
    "scan over the carry": (gradient(scan_carry), "grad", 2),
    "scan(checkpoint)": (gradient(lambda f: scan(ck(f))), "grad", 2),
    "checkpoint(scan)": (gradient(lambda f: ck(scan(f))), "grad", 2),
    "scan(checkpoint(scan))": (gradient(lambda f: scan(ck(scan(f)))), "grad", 4),
    "checkpoint(scan(checkpoint))": (gradient(lambda f: ck(scan(ck(f)))), "grad", 2),
    "checkpoint(scan(checkpoint(scan)))": (gradient(lambda f: ck(scan(ck(scan(f))))), "grad", 4),
    "cond": (gradient(cond), "grad", 1),
    "checkpoint(cond)": (gradient(lambda f: ck(cond(f))), "grad", 1),
    "cond(checkpoint)": (gradient(lambda f: cond(ck(f))), "grad", 1),
    "scan(cond(checkpoint))": (gradient(lambda f: scan(cond(ck(f)))), "grad", 2),
    "hvp": (hvp(same), "hvp", 1),
    "hvp(scan)": (hvp(scan), "hvp", 2),
    "hvp(scan(checkpoint))": (hvp(lambda f: scan(ck(f))), "hvp", 2),
    "grad of grad": (grad_of_grad(same), "grad of grad", 1),
    "grad of grad(scan)": (grad_of_grad(scan), "grad of grad", 2),
    "grad of grad(scan(checkpoint))": (grad_of_grad(lambda f: scan(ck(f))), "grad of grad", 2),
    "vmap(grad)": (
        lambda f: lambda x: mg.vmap(mg.grad(f))(jnp.stack([x, 2 * x]))[0],
        "grad",
        1,
    ),
    "grad(vmap)": (
        lambda f: lambda x: mg.grad(lambda X: mg.vmap(f)(X).sum())(jnp.stack([x, 2 * x]))[0],
        "grad",
        1,
    ),
    "linearize(grad)": (lambda f: lambda x: mg.linearize(mg.grad(f), x)[1](x), "hvp", 1),
    "jvp": (tangent(same), "jvp", 1),
    "jvp(while)": (tangent(whiled), "jvp", 3),
    "jvp(scan(checkpoint))": (tangent(lambda f: scan(ck(f))), "jvp", 2),
    "columns of the Jacobian": (
        lambda f: lambda x: mg.vmap(lambda t: mg.jvp(mg.jit(f), (x,), (t,))[1])(jnp.eye(3)).sum(),
        "columns",
        1,
    ),
    "a batch of tangents": (
        lambda f: lambda x: mg.vmap(mg.linearize(f, x)[1])(jnp.eye(3)).sum(),
        "columns",
        1,
    ),
    "a batch of cotangents": (
        lambda f: lambda x: mg.vmap(lambda ct: mg.vjp(f, x)[1](ct)[0])(jnp.arange(1.0, 3)).sum(0),
        "grad",
        3,
    ),
    "jacobian, forward": (lambda f: lambda x: mg.jacobian(f)(x).sum(), "columns", 1),
    "jacobian, forward(scan(checkpoint))": (
        lambda f: lambda x: mg.jacobian(scan(ck(f)))(x).sum(),
        "columns",
        2,
    ),
    "jacobian, reverse": (
        lambda f: lambda x: mg.jacobian(f, mode="reverse")(x).sum(),
        "columns",
        1,
    ),
    "jacobian, forward(while)": (lambda f: lambda x: mg.jacobian(whiled(f))(x).sum(), "columns", 3),
}

# Compared by tracing alone, since they only combine others that are run.
TRACED_ONLY = ("a batch of tangents", "jacobian, forward(scan(checkpoint))")
TRACED_ONLY += ("jacobian, forward(while)",)

POINTS = jnp.stack([jnp.arange(1.0, 4.0), jnp.array([0.5, -1.0, 2.0])])


@functools.cache
def expected(kind: str, scenario: str) -> Any:
    """Of the joint function; per rank where the derivative is an array, else summed over ranks."""
    joint = SCENARIOS[scenario][2]
    F = lambda X: joint(X[0], X[1])
    hessian_product = lambda X: jax.jvp(jax.grad(F), (X,), (X,))[1]
    derivatives = {
        "grad": jax.grad(F),
        "hvp": hessian_product,
        "grad of grad": lambda X: jax.grad(lambda X: jnp.vdot(jax.grad(F)(X), X))(X),
        "jvp": lambda X: jax.jvp(F, (X,), (X,))[1],
        "columns": lambda X: sum(jax.jvp(F, (X,), (jnp.stack([t, t]),))[1] for t in jnp.eye(3)),
    }
    return np.asarray(jax.jit(derivatives[kind])(POINTS))


_OTHER_PAIR = pytest.mark.full("each transformation and each scenario runs in another pair")
RUN = [t for t in TRANSFORMATIONS if t not in TRACED_ONLY]
# What make test runs: the other transformations are parts of these.
RUN_FIRST = (
    *("grad(mpigrad.jit)", "checkpoint(jit)", "checkpoint(scan(checkpoint))", "cond(checkpoint)"),
    *("hvp(scan(checkpoint))", "grad of grad(scan)", "vmap(grad)", "grad(vmap)"),
    *("linearize(grad)", "jvp(while)", "a batch of cotangents", "jacobian, reverse"),
)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("transformation", "scenario"),
    [  # each of RUN_FIRST with one scenario, all of them in make test-full
        pytest.param(
            t,
            s,
            marks=()
            if t in RUN_FIRST and (RUN_FIRST.index(t) + j) % len(SCENARIOS) == 0
            else _OTHER_PAIR,
        )
        for t in RUN
        for j, s in enumerate(SCENARIOS)
    ],
)
def test_derivatives(transformation: str, scenario: str, comm: Communicator) -> None:
    *rank_programs, _ = SCENARIOS[scenario]
    transform, kind, times = TRANSFORMATIONS[transformation]
    program = rank_programs[comm.rank]
    got = transform(lambda x: program(x, comm))(POINTS[comm.rank])
    want = times * expected(kind, scenario)
    if kind in ("jvp", "columns"):
        close(comm.mpi.allreduce(float(got)), want)
    else:
        close(got, want[comm.rank])


def messages(jaxpr: Any) -> list[Any]:
    """The messages of a program in order, loops unrolled, seen from either end alike."""
    found: list[Any] = []
    for eqn in jaxpr.eqns:
        name, params = eqn.primitive.name, eqn.params
        if name in ("mpigrad_send", "mpigrad_recv"):
            partner = params["dest" if name.endswith("send") else "source"]
            # rank 1 receives what goes from 0 to 1
            forth = (name == "mpigrad_send") == (partner == 1)
            shape = eqn.invars[0].aval.shape
            found.append(("forth" if forth else "back", shape))
        elif name.startswith("mpigrad_") and eqn.effects:
            found.append((name, eqn.invars[0].aval.shape))
        inner = [
            getattr(part, "jaxpr", part)
            for value in params.values()
            for part in (value if isinstance(value, (tuple, list)) else (value,))
            if hasattr(part, "eqns") or hasattr(getattr(part, "jaxpr", None), "eqns")
        ]
        if name == "cond":
            branches = [messages(j) for j in inner]
            if any(branches):
                found.append(sorted(map(str, branches)))
        elif name == "while":
            found.append([messages(j) for j in inner])
        else:
            for j in inner:
                found += messages(j) * params.get("length", 1)
    return found


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("transformation", "scenario"),
    [  # each transformation with two or three scenarios, all of them in make test-full
        pytest.param(t, s, marks=_OTHER_PAIR if (i + j) % 3 else ())
        for i, t in enumerate(TRANSFORMATIONS)
        for j, s in enumerate(SCENARIOS)
    ],
)
def test_order_of_messages(transformation: str, scenario: str) -> None:
    transform = TRANSFORMATIONS[transformation][0]
    orders = []
    for rank, program in enumerate(SCENARIOS[scenario][:2]):
        comm = trace_only(rank, 2)
        traced = jax.make_jaxpr(transform(lambda x, p=program, c=comm: p(x, c)))(POINTS[rank])
        orders.append(messages(traced.jaxpr))
    assert orders[0] == orders[1]
    assert str(orders[0]).count("(3,)") + str(orders[0]).count(", 3)") >= 2  # and its derivative


@pytest.mark.ranks(1)
def test_plain_jax_is_not_enough() -> None:
    """What the carrier is for: with jax.grad a constant operand leaves its rank out."""
    orders = []
    for rank, program in enumerate(SCENARIOS["sender's operand constant"][:2]):
        comm = trace_only(rank, 2)
        traced = jax.make_jaxpr(jax.grad(lambda x, p=program, c=comm: p(x, c)))(POINTS[rank])
        orders.append(messages(traced.jaxpr))
    assert orders[0] != orders[1]


@pytest.mark.cases("jax.jit", "eager", reason="mpigrad.jit is jax.jit around the same program")
@pytest.mark.parametrize("jit", [jax.jit, mg.jit, same], ids=["jax.jit", "jit", "eager"])
def test_a_checkpoint_of_which_nothing_is_used(jit: Callable[..., Any], comm: Communicator) -> None:
    """On one rank it depends on nothing, and its result is left: its messages are sent."""

    def f(x: Any) -> Any:
        # Not ONES, which would be an operand.
        total = lambda x: jnp.sum(mg.allreduce(jnp.ones(3) if comm.rank == 1 else x))
        y, z = jax.checkpoint(total)(x), scan(jax.checkpoint(total))(x)
        return jnp.sum(x) if comm.rank == 1 else y + z

    total = 3 * (2 * comm.size - (comm.size > 1))
    assert float(jit(f)(jnp.full(3, 2.0))) == (6 if comm.rank == 1 else 3 * total)


@pytest.mark.ranks(3)
@pytest.mark.cases("jit", "checkpoint", reason="test_derivatives runs the others on 2 ranks")
@pytest.mark.parametrize(
    "wrap", [same, mg.jit, ck, scan], ids=["eager", "jit", "checkpoint", "scan"]
)
def test_chain_of_three_with_tags(wrap: Callable[[One], One], comm: Communicator) -> None:
    """0 -> 1 -> 2 and back to 0, the last result unused on rank 0, rank 1's loss constant."""

    def f(x: Any) -> Any:
        if comm.rank == 0:
            mg.send(jnp.sin(x), 1, tag=3)
            mg.recv(jnp.zeros(3), 2, tag=9)
            return jnp.sum(x)
        if comm.rank == 1:
            y = mg.recv(ZEROS, 0, tag=3)
            mg.send(y * x, 2, tag=4)
            return jnp.float64(1)
        z = mg.recv(ZEROS, 1, tag=4)
        mg.send(z + x, 0, tag=9)
        return jnp.sum(z**2 * x)

    X = jnp.asarray(np.random.default_rng(1).standard_normal((3, 3)))
    joint = lambda X: jnp.sum(X[0]) + 1 + jnp.sum((jnp.sin(X[0]) * X[1]) ** 2 * X[2])
    times = 2 if wrap is scan else 1
    close(mg.grad(wrap(f))(X[comm.rank]), times * jax.grad(joint)(X)[comm.rank])
    hessian = mg.jvp(mg.grad(wrap(f)), (X[comm.rank],), (X[comm.rank],))[1]
    close(hessian, times * jax.jvp(jax.grad(joint), (X,), (X,))[1][comm.rank])
