"""Messages in custom rules: the rule runs on every rank or on none, or the message is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_divergent import ONES, POINTS, TRANSFORMATIONS, _cube, _sq, messages

import mpigrad as mg
from helpers import close, trace_only
from mpigrad.communicator import Communicator


# Both are x -> allreduce(sin(x)), with rules of their own.
@functools.partial(mg.custom_vjp, nondiff_argnums=(0,))
def by_vjp(c: Communicator, x: Any) -> Any:
    return mg.allreduce(jnp.sin(x), comm=c)


by_vjp.defvjp(
    lambda c, x: (mg.allreduce(jnp.sin(x), comm=c), x),
    lambda c, x, ct: (jnp.cos(x) * mg.allreduce(ct, comm=c),),
)


@functools.partial(mg.custom_jvp, nondiff_argnums=(0,))
def by_jvp(c: Communicator, x: Any) -> Any:
    return mg.allreduce(jnp.sin(x), comm=c)


@by_jvp.defjvp
def _(c: Communicator, primals: Any, tangents: Any) -> Any:
    (x,), (t,) = primals, tangents
    return by_jvp(c, x), mg.allreduce(jnp.cos(x) * t, comm=c)


Rule = Callable[[Communicator, Any], Any]
One = Callable[[Any], Any]
SIN = jnp.sin(ONES)
# name -> (rank 0's program, rank 1's program, the joint function of both ranks' arguments)
SCENARIOS: dict[str, tuple[Any, Any, Callable[[Any, Any], Any]]] = {
    "alike": (
        lambda f, x: _sq(f(x)),
        lambda f, x: _sq(f(2 * x)),
        lambda a, b: 2 * _sq(jnp.sin(a) + jnp.sin(2 * b)),
    ),
    "result unused": (
        lambda f, x: _sq(f(x)),
        lambda f, x: (f(x), _cube(x))[1],
        lambda a, b: _sq(jnp.sin(a) + jnp.sin(b)) + _cube(b),
    ),
    "operand constant": (
        lambda f, x: _sq(f(x)),
        lambda f, x: jnp.sum(f(ONES) * x),
        lambda a, b: _sq(jnp.sin(a) + SIN) + jnp.sum((jnp.sin(a) + SIN) * b),
    ),
    "nothing but the message": (
        lambda f, x: _sq(f(x)),
        lambda f, x: (f(ONES), jnp.float64(1))[1],
        lambda a, b: _sq(jnp.sin(a) + SIN) + 1,
    ),
}
_KINDS = {"custom_vjp": (by_vjp, ("grad", "hvp", "grad of grad")), "custom_jvp": (by_jvp, None)}
_OTHER_PAIR = pytest.mark.full("each transformation and each scenario runs in another pair")
CASES = [
    pytest.param(
        rule,
        transformation,
        scenario,
        id=f"{kind}-{transformation}-{scenario}",
        marks=_OTHER_PAIR if (i + j) % 4 else (),
    )
    for kind, (rule, derivatives) in _KINDS.items()
    for i, (transformation, (_, derivative, _)) in enumerate(TRANSFORMATIONS.items())
    for j, scenario in enumerate(SCENARIOS)
    if derivatives is None or derivative in derivatives
]
RUN = ("grad", "grad(mpigrad.jit)", "hvp", "vmap(grad)", "jvp")  # by tracing, all of them
UNEVEN = ("result unused", "operand constant")


@functools.cache
def expected(kind: str, scenario: str) -> Any:
    joint = SCENARIOS[scenario][2]
    F = lambda X: joint(X[0], X[1])
    product = lambda X: jax.jvp(jax.grad(F), (X,), (X,))[1]
    derivatives = {
        "grad": jax.grad(F),
        "hvp": product,
        "grad of grad": lambda X: jax.grad(lambda X: jnp.vdot(jax.grad(F)(X), X))(X),
        "jvp": lambda X: jax.jvp(F, (X,), (X,))[1],
        "columns": lambda X: sum(jax.jvp(F, (X,), (jnp.stack([t, t]),))[1] for t in jnp.eye(3)),
    }
    return np.asarray(jax.jit(derivatives[kind])(POINTS))


@pytest.mark.ranks(1)
@pytest.mark.parametrize(("rule", "transformation", "scenario"), CASES)
def test_order_of_messages(rule: Rule, transformation: str, scenario: str) -> None:
    orders = []
    for rank, program in enumerate(SCENARIOS[scenario][:2]):
        f = functools.partial(rule, trace_only(rank, 2))
        transform = TRANSFORMATIONS[transformation][0]
        traced = jax.make_jaxpr(transform(lambda x, p=program, f=f: p(f, x)))(POINTS[rank])
        orders.append(messages(traced.jaxpr))
    assert orders[0] == orders[1]
    assert str(orders[0]).count("allreduce") >= 2  # and its derivative


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("rule", "transformation", "scenario"),
    [c for c in CASES if c.values[1] in RUN and c.values[2] in UNEVEN],
)
def test_derivatives(rule: Rule, transformation: str, scenario: str, comm: Communicator) -> None:
    transform, kind, times = TRANSFORMATIONS[transformation]
    program, f = SCENARIOS[scenario][comm.rank], functools.partial(rule, comm)
    got = transform(lambda x: program(f, x))(POINTS[comm.rank])
    want = times * expected(kind, scenario)
    if kind in ("jvp", "columns"):
        close(comm.mpi.allreduce(float(got)), want)
    else:
        close(got, want[comm.rank])


@pytest.mark.cases("linearize", reason="it is a jvp and a transpose")
@pytest.mark.parametrize("derivative", ["jvp", "linearize"])
def test_rules_that_differentiate_the_function(derivative: str, comm: Communicator) -> None:
    """Its operand is constant on one rank: what the rule sends is transposed there, too."""
    inside = lambda x: mg.allreduce(ONES if comm.rank == 0 else jnp.sin(x))

    def rule(primals: Any, tangents: Any) -> Any:
        if derivative == "jvp":
            return mg.jvp(inside, primals, tangents)
        y, linear = mg.linearize(inside, *primals)
        return y, linear(*tangents)

    f = mg.custom_jvp(inside)
    f.defjvp(rule)
    along = lambda g: lambda x: mg.jvp(g, (x,), (jnp.cos(x),))[1]
    x = POINTS[0] + comm.rank
    for transform in (mg.grad, along, lambda g: along(mg.grad(g)), lambda g: mg.grad(along(g))):
        got, want = (transform(lambda x, f=f: jnp.sum(jnp.sin(f(x)) * x))(x) for f in (f, inside))
        close(got, want)


# The same with JAX's own decorators.
@jax.custom_vjp
def plain_vjp(x: Any) -> Any:
    return mg.allreduce(x)


plain_vjp.defvjp(lambda x: (mg.allreduce(x), None), lambda _, ct: (mg.allreduce(ct),))


@jax.custom_jvp
def plain_jvp(x: Any) -> Any:
    return mg.allreduce(x)


plain_jvp.defjvp(lambda p, t: (plain_jvp(*p), mg.allreduce(*t)))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["custom_vjp", "custom_jvp"])
def test_messages_in_rules_of_jax_are_refused(
    name: str, compiled: bool, comm: Communicator
) -> None:
    f = plain_vjp if name == "custom_vjp" else plain_jvp
    wrap = mg.jit if compiled else (lambda f: f)
    total = comm.mpi.allreduce(comm.rank + 1.0)
    close(wrap(f)(jnp.full(2, comm.rank + 1.0)), jnp.full(2, total))  # undifferentiated: all right
    loss = lambda x: jnp.sum(wrap(f)(x))
    where = r"test_custom_rules.py:\d+: expected no message in the .* rule of a "
    for g in (mg.grad(loss), wrap(mg.grad(loss)), jax.grad(loss)):
        with pytest.raises(ValueError, match=f"{where}jax.{name}.*with mpigrad.{name}"):
            g(jnp.ones(2))
    assert float(mg.allreduce(1.0)) == comm.size


def test_rules_of_jax_without_messages(comm: Communicator) -> None:
    """The function, and the forward rule, may have messages; so may what is differentiated."""
    f = jax.custom_vjp(lambda x: mg.allreduce(x))
    f.defvjp(lambda x: (mg.allreduce(x), None), lambda _, ct: (comm.size * ct,))
    close(
        mg.grad(lambda x: jnp.sum(jax.nn.softplus(f(x))))(jnp.zeros(2)),
        jnp.full(2, 0.5 * comm.size),
    )
    g = jax.custom_jvp(lambda x: mg.allreduce(x))
    g.defjvp(lambda p, t: (g(*p), comm.size * t[0]))
    close(mg.jvp(g, (jnp.zeros(2),), (jnp.ones(2),))[1], jnp.full(2, float(comm.size)))


def test_arguments_of_custom_rules(comm: Communicator) -> None:
    """Pytrees, integers, names and defaults, as in JAX."""

    @mg.custom_vjp
    def f(p: Any, n: Any, scale: Any = 2.0) -> Any:
        return {"y": mg.allreduce(p["a"] * n) * scale}

    f.defvjp(
        lambda p, n, scale: (f(p, n, scale), (n, scale)),
        lambda r, ct: ({"a": r[0] * mg.allreduce(r[1] * ct["y"])}, None, jnp.zeros(())),
    )
    loss = lambda p, n: jnp.sum(f(n=n, p=p)["y"])
    close(mg.grad(loss)({"a": jnp.ones(3)}, 3)["a"], jnp.full(3, 6.0 * comm.size))
    with pytest.raises(TypeError, match="forward-mode"):
        mg.jvp(lambda x: f({"a": x}, 3), (jnp.ones(3),), (jnp.ones(3),))

    @mg.custom_jvp
    def g(p: Any, n: Any) -> Any:
        return mg.allreduce(p["a"] * n)

    g.defjvp(lambda p, t: (g(*p), mg.allreduce(t[0]["a"] * p[1])))
    close(
        mg.jvp(lambda x: g({"a": x}, 3), (jnp.ones(3),), (jnp.ones(3),))[1],
        jnp.full(3, 3.0 * comm.size),
    )


def test_a_rule_for_each_argument(comm: Communicator) -> None:
    """As jax.custom_jvp has it: arguments by name that are constant, and a part for each other."""

    @mg.custom_jvp
    def f(x: Any, y: Any) -> Any:
        return mg.allreduce(jnp.sin(x) * y)

    f.defjvps(lambda t, out, x, y: mg.allreduce(jnp.cos(x) * y * t), None)
    x, y = jnp.arange(3.0) + comm.rank, jnp.ones(3)
    total, tangent = mg.jvp(f, (x, y), (ONES, ONES))
    close(total, mg.allreduce(jnp.sin(x)))
    close(tangent, mg.allreduce(jnp.cos(x)))
    x_bar, y_bar = mg.grad(lambda x, y: jnp.sum(f(x, y)), (0, 1))(x, y)
    close(x_bar, comm.size * jnp.cos(x))
    close(y_bar, jnp.zeros(3))

    @functools.partial(mg.custom_vjp, nondiff_argnames=("power",))
    def g(x: Any, power: int) -> Any:
        return mg.allreduce(x**power)

    g.defvjp(
        lambda x, power: (g(x, power), x),
        lambda power, x, ct: (power * x ** (power - 1) * mg.allreduce(ct),),
    )
    close(mg.grad(lambda x: jnp.sum(g(x, power=3)))(x), 3 * x**2 * comm.size)


def test_what_custom_rules_do_not_take() -> None:
    one, rule = (lambda x: x), (lambda *_: None)
    with pytest.raises(NotImplementedError, match="plain zeros"):
        mg.custom_vjp(one).defvjp(rule, rule, symbolic_zeros=True)
    with pytest.raises(NotImplementedError, match="plain zeros"):
        mg.custom_jvp(one).defjvp(rule, symbolic_zeros=True)
    with pytest.raises(ValueError, match=r"must be parameters .* got y"):
        mg.custom_jvp(one, nondiff_argnames=("y",))
    with pytest.raises(ValueError, match="Count arguments from the front"):
        mg.custom_vjp(one, nondiff_argnums=(-1,))
    with pytest.raises(TypeError, match="all arguments of the function"):
        mg.custom_jvp(lambda x, n: x, nondiff_argnums=(1,)).defjvps(rule)
