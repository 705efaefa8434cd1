"""Functions with rules of their own whose operand is constant on some ranks, inside loops.

JAX takes what does not depend on a loop's step out of the loop: messages must stay in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpigrad as mg
from helpers import close
from mpigrad.communicator import Communicator
from mpigrad.operations.carrier import mark_common_branch
from product_space import TRANSFORMED, operand, prove

Rule = Callable[[Communicator], Callable[[Any], Any]]


def _sum_of_sines(c: Communicator) -> Callable[[Any], Any]:
    return lambda x: mg.allreduce(jnp.sin(x), comm=c)


def _by_jvp(c: Communicator) -> Callable[[Any], Any]:
    f = mg.custom_jvp(_sum_of_sines(c))
    f.defjvp(lambda p, t: (f(*p), mg.allreduce(jnp.cos(p[0]) * t[0], comm=c)))
    return f


def _by_jvp_with_the_value_anew(c: Communicator) -> Callable[[Any], Any]:
    f = mg.custom_jvp(_sum_of_sines(c))
    f.defjvp(lambda p, t: (_sum_of_sines(c)(*p), mg.allreduce(jnp.cos(p[0]) * t[0], comm=c)))
    return f


def _by_jvp_with_calls(c: Communicator) -> Callable[[Any], Any]:
    """What the rule does for the value stands in a loop in a compiled function."""
    f = mg.custom_jvp(_sum_of_sines(c))

    @jax.jit
    def anew(x: Any) -> Any:
        half = lambda y, _: (y + 0.5 * _sum_of_sines(c)(x), None)
        return jax.lax.scan(half, jnp.zeros_like(x), length=2)[0]

    f.defjvp(lambda p, t: (anew(*p), mg.allreduce(jnp.cos(p[0]) * t[0], comm=c)))
    return f


def _by_vjp(c: Communicator) -> Callable[[Any], Any]:
    f = mg.custom_vjp(_sum_of_sines(c))
    f.defvjp(lambda x: (f(x), x), lambda x, ct: (jnp.cos(x) * mg.allreduce(ct, comm=c),))
    return f


def _by_vjp_with_the_value_anew(c: Communicator) -> Callable[[Any], Any]:
    f = mg.custom_vjp(_sum_of_sines(c))
    f.defvjp(
        lambda x: (_sum_of_sines(c)(x), x), lambda x, ct: (jnp.cos(x) * mg.allreduce(ct, comm=c),)
    )
    return f


def _by_linear_solve(c: Communicator) -> Callable[[Any], Any]:
    """x + 0.1 times the left neighbour's x is sin(b), by as many steps as it takes."""
    right, left = (c.rank + 1) % c.size, (c.rank - 1) % c.size

    def solve(matvec: Callable[[Any], Any], b: Any) -> Any:
        step = lambda x, _: (x + b - matvec(x), None)
        return jax.lax.scan(step, jnp.zeros_like(b), length=20)[0]

    return lambda b: jax.lax.custom_linear_solve(
        lambda x: x + 0.1 * mg.sendrecv(x, right, left, comm=c),
        jnp.sin(b),
        solve,
        lambda vecmat, b: solve(vecmat, b),
    )


def _reduced(X: Any) -> Any:
    return jnp.broadcast_to(jnp.sin(X).sum(0), X.shape)


def _solved(X: Any) -> Any:
    matrix = jnp.eye(len(X)) + 0.1 * jnp.roll(jnp.eye(len(X)), 1, axis=0)
    return jnp.tensordot(jnp.linalg.inv(matrix), jnp.sin(X), 1)


RULES: dict[str, tuple[Rule, Callable[[Any], Any]]] = {
    "custom_jvp": (_by_jvp, _reduced),
    "custom_jvp, the value anew": (_by_jvp_with_the_value_anew, _reduced),
    "custom_jvp, the value by calls": (_by_jvp_with_calls, _reduced),
    "custom_vjp": (_by_vjp, _reduced),
    "custom_vjp, the value anew": (_by_vjp_with_the_value_anew, _reduced),
    "custom_linear_solve": (_by_linear_solve, _solved),
}


def _twice(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: jax.lax.scan(lambda x, _: (f(x), x), x, length=2)


def _twice_simulated(F: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda X: (F(F(X)), jnp.stack([X, F(X)], axis=1))


_OTHER_WAY = pytest.mark.full("the case with jit runs the same rules")


@pytest.mark.cases(
    *("custom_jvp, the value by calls-jit", "custom_vjp, the value anew-jit"),
    "custom_linear_solve-jit",
    reason="the other rules are parts of these",
)
@pytest.mark.parametrize(
    "how",
    ["jit", *(pytest.param(h, marks=_OTHER_WAY) for h in ("eager", "checkpoint", "vmap"))],
)
@pytest.mark.parametrize("name", RULES)
def test_loops_keep_their_messages(name: str, how: str, comm: Communicator) -> None:
    rule, simulated = RULES[name]
    f, (x, X) = rule(comm), operand(comm)
    loop = _twice(lambda x: f(X[0] if comm.rank == 0 else x))
    joint = _twice_simulated(lambda Y: simulated(Y.at[0].set(X[0])))
    if not name.startswith("custom_vjp"):
        prove(loop, joint, comm, how)
        return
    # It has no forward mode.
    transform, reference = TRANSFORMED[how]
    total = lambda f: lambda x: sum(jnp.sum(jnp.cos(y)) for y in jax.tree.leaves(f(x)))
    got = mg.grad(total(transform(loop)))(x)
    close(got, jax.grad(total(reference(joint)))(X)[comm.rank])


def _always(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: jax.lax.cond(jnp.sum(jax.lax.stop_gradient(x)) < 1e9, f, jnp.sin, x)


# A function whose messages depend on no loop around it, as a call that JAX may take out.
CALLS: dict[str, Callable[[Callable[[Any], Any]], Callable[[Any], Any]]] = {
    "scan": lambda f: lambda x: jax.lax.scan(lambda s, _: (s, f(x)), 0, length=1)[1][0],
    "cond": _always,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
}


_OTHER_CALL = pytest.mark.full("the cases in a scan contain each call")


@pytest.mark.parametrize("inner", CALLS)
@pytest.mark.parametrize(
    "outer", ["scan", *(pytest.param(c, marks=_OTHER_CALL) for c in CALLS if c != "scan")]
)
def test_what_only_sends_is_not_forgotten(outer: str, inner: str, comm: Communicator) -> None:
    """Rank 0 sends in each step of a loop, in calls with no result; rank 1 receives without."""
    ends = {0: "sends", 1: "receives"}.get(comm.rank, "neither")

    def message(x: Any) -> Any:
        if ends == "sends" and comm.size > 1:
            CALLS[inner](lambda x: (mg.send(x, 1, comm=comm), jnp.ones_like(x))[1])(x)
        return mg.recv(x, 0, comm=comm) if ends == "receives" else x

    def loop(x: Any) -> Any:
        step = lambda s, _: (jnp.sin(s) + message(x), None)
        return CALLS[outer](lambda x: jax.lax.scan(step, x, length=2)[0])(x)

    def joint(X: Any) -> Any:
        S, got = X, X.at[1:2].set(X[:1])
        for _ in range(2):
            S = jnp.sin(S) + got
        return S

    prove(loop, joint, comm, "checkpoint")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("operation", ["allreduce", "send and recv"])
def test_checkpoints_in_a_loop_and_around_it(operation: str, comm: Communicator) -> None:
    """What is constant on one rank was sent once there, before the loop; on the others in it."""

    def step(x: Any, _: Any) -> Any:
        if operation == "allreduce":
            return x * mg.allreduce(2.0 if comm.rank == 0 else x), None
        if comm.rank == 0:
            value, factor = mg.recv((x, jnp.int32(0)), 1, 7)
            return value * factor, None
        mg.send((x, jnp.int32(3)), 0, 7)
        return x, None

    def loop(step: Any) -> Any:
        return lambda x: jax.lax.scan(step, x, None, length=3)[0]

    expected = mg.grad(loop(step))(1.5)
    got = mg.jit(mg.grad(jax.checkpoint(loop(jax.checkpoint(step)))))(1.5)
    close(got, expected)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("where", ["carry", "branch"])
def test_a_rule_that_linearizes_a_loop(where: str, comm: Communicator) -> None:
    """What is received is carried on one rank alone: JAX took the value for unknown there."""

    def step(x: Any, _: Any) -> Any:
        def exchange(x: Any) -> Any:
            y = mg.sendrecv(jnp.sin(x), 1 - comm.rank, 1 - comm.rank)
            return y if comm.rank == 0 else x * x

        if where == "branch":
            return jax.lax.cond(jnp.sum(x) > -1e9, exchange, jnp.cos, x), None
        return exchange(x), None

    def loop(x: Any) -> Any:
        return jax.lax.scan(step, x, None, length=2)[0]

    g = mg.custom_jvp(loop)
    g.defjvp(lambda primals, tangents: mg.jvp(loop, primals, tangents))
    x = jnp.array([0.3 + comm.rank, 0.5])
    for transformed in (mg.grad, lambda f: mg.jit(mg.grad(f))):
        close(transformed(lambda x: jnp.sum(g(x)))(x), mg.grad(lambda x: jnp.sum(loop(x)))(x))


@pytest.mark.ranks(2)
def test_a_batched_choice_of_messages_is_refused(comm: Communicator) -> None:
    """A selection would pair each branch's messages with the same branch on the other rank."""

    def f(x: Any) -> Any:
        once, twice = (lambda x: mg.allreduce(x)), (lambda x: mg.allreduce(2 * x))
        return jax.lax.cond(x + comm.rank > 0.5, once, twice, x)

    with pytest.raises(ValueError, match=r"loop over the batch by jax\.lax\.map"):
        mg.vmap(f)(jnp.array([0.1, 0.2]))
    close(jax.lax.map(f, jnp.array([0.1, 0.2])), np.array([0.3, 0.6]))

    def g(x: Any) -> Any:
        once, twice = (lambda x: mg.allreduce(x)), (lambda x: 2 * mg.allreduce(x))
        return jax.lax.cond(mg.allreduce(x) * comm.rank > 0.5, once, twice, x)

    with pytest.raises(ValueError, match="take mode='forward'"):
        mg.jacobian(g, mode="reverse")(1.0)
    close(mg.jacobian(g)(1.0), np.full(2, 1.0 if comm.rank else 2.0))


def test_compiled_ahead_of_time(comm: Communicator) -> None:
    compiled = jax.jit(mg.allreduce).lower(1.0).compile()
    for x in (1.0, 2.0, 3.0):
        close(compiled(x), x * comm.size)
    close(mg.allreduce(1.0), 1.0 * comm.size)


def test_any_name_of_a_keyword(comm: Communicator) -> None:
    f = lambda x, c=1.0, turn=1.0: mg.allreduce(x) * c * turn
    for transformed in (mg.jit(f), mg.jit(mg.grad(f)), mg.grad(mg.jit(f)), mg.grad(f)):
        transformed(1.0, c=2.0, turn=3.0)
    close(mg.grad(f)(1.0, c=2.0, turn=3.0), 6.0 * comm.size)
    close(mg.vmap(f)(jnp.ones(2), c=jnp.ones(2), turn=jnp.ones(2)), np.full(2, comm.size))


@pytest.mark.ranks(2)
def test_a_choice_that_all_ranks_make_alike_is_no_mark_of_another(comm: Communicator) -> None:
    """Batched, the inner one becomes a selection: the outer one is refused all the same."""

    def inner(x: Any) -> Any:
        return jax.lax.cond(
            x > 0, mark_common_branch(lambda x: mg.allreduce(x)), lambda x: 3 * x, x
        )

    x = jnp.array([1.0, -1.0])
    close(mg.vmap(inner)(x), np.array([2.0, -3.0]))

    def outer(x: Any, choice: Any) -> Any:
        return jax.lax.cond(choice, mg.vmap(inner), lambda x: x, x)

    with pytest.raises(ValueError, match=r"a cond or switch with messages in its branches"):
        mg.vmap(outer)(jnp.stack([x, x]), jnp.array([True, False]))


def _in_a_call(kind: str, f: Callable[[], Any]) -> Callable[[], Any]:
    return {
        "jit": jax.jit(f),
        "checkpoint": jax.checkpoint(f),
        "jit of checkpoint": jax.jit(jax.checkpoint(f)),
        "scan": lambda: jax.lax.scan(lambda c, _: (c, f()), None, None, length=1)[1][0],
        "jit of scan": jax.jit(lambda: jax.lax.scan(lambda c, _: (c, f()), None, length=1)[1][0]),
    }[kind]


@pytest.mark.ranks(2)
@pytest.mark.cases(
    *("grad0-jit of scan", "grad0-checkpoint", "grad1-jit of checkpoint", "<lambda>-scan"),
    reason="each kind of call, a plain jit inside two of them",
)
@pytest.mark.parametrize("kind", ["jit", "checkpoint", "jit of checkpoint", "scan", "jit of scan"])
@pytest.mark.parametrize("grad", [mg.grad, jax.grad, lambda f: jax.grad(jax.checkpoint(f))])
def test_a_call_without_operands_stays_in_its_loop(
    comm: Communicator, kind: str, grad: Callable[..., Any]
) -> None:
    """Its message is sent in each turn: JAX takes what needs no operand out of a loop."""

    def send() -> jax.Array:
        mg.send(jnp.ones(2), 0)
        return jnp.full(2, 2.0)

    def receive() -> jax.Array:
        return 2 * jax.lax.stop_gradient(mg.recv(jnp.zeros(2), 1))

    # The receives stand in the loop itself: a rank that sends fewer messages is found.
    call = _in_a_call(kind, send) if comm.rank else receive

    def f(x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda s, _: (s + jnp.sum(call() * x), None), 0.0, None, length=3)[0]

    close(grad(f)(jnp.ones(2)), jnp.full(2, 6.0))
