"""The Jacobian over all ranks, against the product space simulated without messages."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import mpigrad as mg
from helpers import CASES, Case, close, operand
from mpigrad.communicator import Communicator

MODES = ("forward", "reverse")


def _simulated(joint: Callable[[Any], Any], stack: Any, rank: int) -> Any:
    """d y[rank] / d x[r] at [r], of a function of the stacks of all ranks' arrays."""
    full = jax.jacobian(lambda X: joint(X)[rank])(stack)
    return jnp.moveaxis(full, full.ndim - stack.ndim, 0)


@pytest.mark.cases(
    *("allreduce-forward", "scatterv-reverse", "neighbor_alltoallv-reverse"),
    *("isend and irecv-forward", "recv from anyone-reverse", "one_sided put and get-forward"),
    reason="one operation of each family; the columns are those of derivatives that are tested",
)
@pytest.mark.parametrize(
    ("mode", "case"),
    [pytest.param(mode, CASES[name], id=f"{name}-{mode}") for name in CASES for mode in MODES],
)
def test_jacobian_of_every_operation(mode: Any, case: Case, comm: Communicator) -> None:
    x, stack = operand(case, comm)
    f = lambda x: jnp.sin(case.run(x**2, comm)) * 3
    joint = lambda X: jnp.sin(case.simulate(X**2)) * 3
    got = mg.jit(mg.jacobian(f, mode=mode))(x)
    want = jax.jit(lambda X: _simulated(joint, X, comm.rank))(stack)
    assert got.shape == want.shape
    close(got, want)


def test_both_modes_of_trees_and_several_arguments(comm: Communicator) -> None:
    r, size = comm.rank, comm.size

    def f(p: Any, n: int, x: Any, scale: float = 1.0) -> Any:
        total = mg.allreduce(p["a"] * x[0] * n)
        return {"y": total * x[1] * scale * (r + 1), "z": p["a"].sum().astype("float32")}

    p, x = {"a": jnp.arange(1.0, 4.0)}, jnp.asarray([2.0, 3.0 + r])
    tables = [mg.jacobian(f, (0, -1), mode)(p, 2, x, scale=0.5) for mode in MODES]
    close(tables[0], tables[1])
    by_p, by_x = tables[0]["y"]
    assert by_p["a"].shape == (size, 3, 3) and by_x.shape == (size, 3, 2)
    close(by_p["a"], jnp.broadcast_to(jnp.eye(3) * 2 * (3.0 + r) * (r + 1), (size, 3, 3)))
    of_total = jnp.arange(1.0, 4.0) * 2 * 2 * size * 0.5 * (r + 1)
    close(by_x[:, :, 1], jnp.zeros((size, 3)).at[r].set(of_total))
    close(tables[0]["z"][0]["a"], jnp.zeros((size, 3)).at[r].set(1.0))
    assert tables[0]["z"][0]["a"].dtype == jnp.float32
    # One argument stands alone, as in JAX; and nothing has an empty table.
    close(mg.jacobian(f)(p, 2, x, scale=0.5)["y"]["a"], by_p["a"])
    assert mg.jacobian(lambda x: x)(jnp.zeros((0, 2))).shape == (size, 0, 2, 0, 2)


@pytest.mark.parametrize("mode", MODES)
def test_parts_without_entries(mode: Any, comm: Communicator) -> None:
    f = lambda x: {"a": mg.allreduce(x["p"]) ** 2, "b": x["p"][:0]}
    found = mg.jacobian(f, mode=mode)({"p": jnp.arange(3.0), "none": jnp.zeros(0)})
    assert found["a"]["p"].shape == (comm.size, 3, 3)
    assert found["a"]["none"].shape == (comm.size, 3, 0)
    assert found["b"]["p"].shape == (comm.size, 0, 3)


def test_gradient_of_a_jacobian(comm: Communicator) -> None:
    x = jnp.arange(1.0, 3.0) + comm.rank
    stack = jnp.stack([jnp.arange(1.0, 3.0) + r for r in range(comm.size)])
    joint = lambda X: jnp.broadcast_to(jnp.sum(X**3, 0), X.shape)
    norm = lambda X: sum(jnp.sum(_simulated(joint, X, r) ** 2) for r in range(comm.size))
    for mode in MODES:
        table = mg.jacobian(lambda x: mg.allreduce(x**3), mode=mode)
        got = mg.jit(mg.grad(lambda x, t=table: jnp.sum(t(x) ** 2)))(x)
        close(got, jax.grad(norm)(stack)[comm.rank])


def test_what_jacfwd_and_jacrev_give(comm: Communicator) -> None:
    """Sums over ranks, as the documentation says."""
    f = lambda x: mg.allreduce(x * (comm.rank + 1)) * (comm.rank + 2)
    x = jnp.ones(2)
    table = mg.jacobian(f)(x)
    close(jax.jacfwd(f)(x), table.sum(0))
    close(jax.jacrev(f)(x), mg.allreduce(table)[comm.rank])


def test_jacrev_of_a_number_with_a_message(comm: Communicator) -> None:
    """JAX batches the adjoint that is sent, by one, but not the one that is expected."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size

    def f(x: Any) -> Any:
        arriving, leaving = mg.irecv(x, left, comm=comm), mg.isend(x, right, comm=comm)
        return jnp.sum(mg.waitall([arriving, leaving])[0] * (comm.rank + 1))

    close(jax.jacrev(f)(jnp.ones((3, 2))), jnp.full((3, 2), right + 1.0))


@pytest.mark.parametrize("mode", MODES)
def test_columns_or_rows_of_a_local_function_are_shared_out(
    mode: Any, comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    f = lambda p, k: {"y": jnp.sin(p["a"] @ p["b"]) * k, "s": jnp.sum(p["b"])}
    p = {"a": jnp.arange(6.0).reshape(3, 2) / 7, "b": jnp.asarray([1.0, 2.0])}
    table = mg.jacobian(f, mode=mode, local=True)
    want = jax.jacobian(f)(p, 2.0)
    close(table(p, 2.0), want)
    monkeypatch.setenv("MPIGRAD_GUARD", "1")
    close(mg.jit(table)(p, 2.0), want)
    # Each rank computes its share: 8 columns or 4 rows.
    share = -(-(8 if mode == "forward" else 4) // comm.size)
    batches = re.findall(r"f64\[(\d+),3\] = mul", str(jax.make_jaxpr(table)(p, 2.0)))
    assert batches and {int(n) for n in batches} == {share}
    if comm.size > 1:
        with pytest.raises(jax.errors.JaxRuntimeError, match="an argument, with local=True"):
            table(p, 2.0 + comm.rank)


def test_messages_are_refused_in_local_functions(comm: Communicator) -> None:
    for g in (mg.allreduce, mg.jit(mg.allreduce), jax.jit(mg.allreduce)):
        with pytest.raises(ValueError, match=r"test_jacobian.py:\d+: .*leave `local` out"):
            mg.jacobian(lambda x, g=g: g(x), local=True)(jnp.ones(2))
        close(g(jnp.ones(2)), jnp.full(2, comm.size))


def test_wrong_jacobians(comm: Communicator) -> None:
    for x, f in ((jnp.arange(3), lambda x: x * 1.0), (jnp.ones(3), lambda x: x > 0)):
        with pytest.raises(TypeError, match="real floats"):
            mg.jacobian(f)(x)
    with pytest.raises(TypeError, match="dtype complex128"):
        mg.jacobian(lambda x: x)(jnp.ones(2) + 1j)
    with pytest.raises(ValueError, match='"forward" or "reverse"'):
        mg.jacobian(jnp.sin, mode="backward")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="argnums=1, but there are 1"):
        mg.jacobian(jnp.sin, 1)(1.0)
    if comm.size > 1:
        longer = jnp.ones(2 if comm.rank == 0 else 3)
        for table in (mg.jacobian(jnp.sum), mg.jit(mg.jacobian(jnp.sum, mode="reverse"))):
            with pytest.raises(jax.errors.JaxRuntimeError, match=r"shape or dtype.*Pad shorter"):
                table(longer)
    assert float(mg.allreduce(1.0)) == comm.size


def test_loops_whose_length_is_not_known(comm: Communicator) -> None:
    """Forward mode differentiates a while_loop with messages; reverse mode is refused on all."""

    def f(x: Any, active: Any) -> Any:
        body = lambda s: (s[0] + 1, s[1] * mg.allreduce(active) / comm.size)
        return jax.lax.while_loop(lambda s: s[0] < 3, body, (0, x))[1]

    x = jnp.full(2, 2.0)
    here = lambda x: f(x, x)
    joint = lambda X: X * jnp.mean(X, 0) ** 3
    stack = jnp.stack([x] * comm.size)
    close(mg.jacobian(here)(x), _simulated(joint, stack, comm.rank))
    # On rank 0 the message's operand is constant: nobody is left waiting all the same.
    divergent = lambda x: jnp.sum(f(x, jnp.ones(2) if comm.rank == 0 else x))
    reverse = (
        mg.grad(divergent),
        mg.jit(mg.grad(divergent)),
        lambda x: mg.linearize(divergent, x)[1](x),
        lambda x: mg.vjp(divergent, x)[1](1.0),
        mg.jacobian(divergent, mode="reverse"),
    )
    for g in reverse:
        with pytest.raises(ValueError, match=r"while_loop.* with messages can.t be"):
            g(x)
        assert float(mg.allreduce(1.0)) == comm.size
