"""grad and its kin: JAX's signatures, and the convention of shares and replicated losses."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpigrad as mg
from helpers import close
from mpigrad.communicator import Communicator


def test_value_and_grad_of_shares(comm: Communicator) -> None:
    r, size = comm.rank, comm.size
    value, gradient = mg.value_and_grad(lambda x: jnp.sum(x) * (r + 1))(jnp.ones(2))
    assert float(value) == 2 * sum(range(1, size + 1))
    close(gradient, jnp.full(2, r + 1.0))


def test_replicated_loss_counts_once(comm: Communicator) -> None:
    f = lambda x: mg.allreduce(jnp.sum(x**2))
    x = jnp.arange(3.0) + comm.rank
    value, gradient = mg.value_and_grad(f, loss="replicated")(x)
    assert float(value) == comm.mpi.allreduce(float(jnp.sum(x**2)))
    close(gradient, 2 * x)
    jitted_value, jitted = mg.jit(mg.value_and_grad(f, loss="replicated"))(x)
    close((jitted_value, jitted), (value, gradient))


def test_an_infinite_replicated_loss_stays_infinite() -> None:
    f = mg.value_and_grad(lambda x: mg.allreduce(x) * jnp.inf, loss="replicated")
    assert float(f(1.0)[0]) == np.inf


def test_numbers_and_names_of_the_same_argument() -> None:
    by_number = mg.jit(lambda x, root: mg.bcast(x, root), static_argnums=1)
    close(by_number(jnp.ones(1), root=0), jnp.ones(1))
    close(mg.grad(lambda x, y: jnp.sum(x * y), argnums=np.int64(1))(2.0, 3.0), 2.0)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_loss_that_is_not_replicated_is_an_error_everywhere(
    comm: Communicator, compiled: bool
) -> None:
    f = mg.value_and_grad(lambda x: jnp.sum(x), loss="replicated")
    with pytest.raises(jax.errors.JaxRuntimeError, match="not the same on all ranks") as error:
        (mg.jit(f) if compiled else f)(jnp.ones(2) * (comm.rank + 1))
    assert "test_transforms.py" in str(error.value)
    assert float(mg.allreduce(1.0)) == comm.size  # and the program can go on


def test_replicated_arguments(comm: Communicator) -> None:
    theta = {"a": jnp.ones(3), "b": (jnp.float32(2), jnp.ones((2, 2)))}
    data = jnp.arange(3.0) + comm.rank

    def share(data: Any, theta: Any) -> Any:
        return jnp.sum(data * theta["a"]) * theta["b"][0] + comm.rank * jnp.sum(theta["b"][1])

    _, (by_data, by_theta) = mg.value_and_grad(share, argnums=(0, 1), replicated=1)(data, theta)
    size, ranks = comm.size, sum(range(comm.size))
    close(by_data, 2 * jnp.ones(3))
    close(by_theta["a"], 2 * (size * jnp.arange(3.0) + ranks))
    close(by_theta["b"][1], jnp.full((2, 2), float(ranks)))
    assert by_theta["b"][0].dtype == jnp.float32
    bits = comm.mpi.allgather(np.asarray(by_theta["a"]).tobytes())
    assert len(set(bits)) == 1


def test_replicated_arguments_are_checked_by_the_guard(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPIGRAD_GUARD", "1")
    gradient = mg.grad(jnp.sum, replicated=0)
    close(gradient(jnp.ones(2)), jnp.full(2, float(comm.size)))
    if comm.size > 1:
        with pytest.raises(jax.errors.JaxRuntimeError, match="argument 0, declared replicated"):
            gradient(jnp.ones(2) * comm.rank)


@pytest.mark.ranks(2, 3)
@pytest.mark.cases("True", reason="compiled, an error takes a longer way")
@pytest.mark.parametrize("compiled", [False, True])
def test_replicated_arguments_are_always_compared(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch, compiled: bool
) -> None:
    """Without the guard too. Rounding is allowed, and other arguments may differ."""
    monkeypatch.setenv("MPIGRAD_GUARD", "0")

    def share(own: Any, theta: Any) -> Any:
        return jnp.sum(own) * jnp.sum(theta["a"] ** 2) + jnp.sum(jnp.abs(theta["b"]) ** 2)

    both = mg.value_and_grad(share, argnums=(0, 1), replicated=1)
    if compiled:
        both = mg.jit(both)
    own = jnp.full(2, 1.0 + comm.rank)
    theta = {"a": jnp.linspace(-1, 1, 5), "b": jnp.asarray([1.0j, 2.0])}
    last = comm.rank == comm.size - 1
    rounded = theta | {"a": theta["a"] * (1 + 1e-15 * last)}
    _, (_, gradient) = both(own, rounded)
    close(gradient["a"], 2 * sum(range(1, comm.size + 1)) * 2 * theta["a"])
    for other in (
        {"a": -theta["a"]},  # of the same sum, zero
        {"a": theta["a"].at[3].add(1e-3)},
        {"b": theta["b"].at[0].multiply(-1)},
    ):
        wrong = theta | other if last else theta
        with pytest.raises(jax.errors.JaxRuntimeError, match="argument 1, declared replicated"):
            jax.block_until_ready(both(own, wrong))


def test_signatures_are_those_of_jax(comm: Communicator) -> None:
    f = lambda x, y, scale=1.0: (scale * jnp.sum(mg.allreduce(x) * y), {"aux": x})
    x, y = jnp.arange(3.0), jnp.ones(3)
    (value, aux), (gx, gy) = mg.value_and_grad(f, argnums=(0, 1), has_aux=True)(x, y, scale=2.0)
    assert float(value) == 2 * 3 * comm.size**2
    close(aux["aux"], x)
    close((gx, gy), (2.0 * comm.size * y, 2.0 * comm.size * x))
    gradient, aux = mg.grad(f, argnums=-1, has_aux=True)(x, y)
    close(gradient, comm.size * x)
    out, tangent, aux = mg.jvp(f, (x, y), (x, y), has_aux=True)
    assert float(tangent) == 2 * float(out)
    out, back, aux = mg.vjp(f, x, y, has_aux=True)
    close(back(jnp.ones_like(out)), (comm.size * y, comm.size * x))
    close(mg.linearize(lambda x: mg.allreduce(x), x)[1](y), comm.size * y)


def test_wrong_declarations() -> None:
    with pytest.raises(ValueError, match='"share" or "replicated"'):
        mg.grad(jnp.sum, loss="sum")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="only arguments that are differentiated"):
        mg.grad(jnp.sum, argnums=0, replicated=1)


def test_holomorphic(comm: Communicator) -> None:
    z = jnp.asarray([1.0 + 2.0j, 0.5j])
    gradient = mg.grad(lambda z: jnp.sum(mg.allreduce(z) ** 2), holomorphic=True)(z)
    close(gradient, 2 * comm.size**2 * z)


def test_vmap_axes(comm: Communicator) -> None:
    f = lambda a, b: mg.allreduce(a["x"] * b)
    a = {"x": jnp.arange(6.0).reshape(3, 2)}
    b = jnp.arange(8.0).reshape(2, 4)
    got = mg.vmap(mg.vmap(f, in_axes=(None, 1)), in_axes=({"x": 0}, None), out_axes=2)(a, b)
    expected = comm.size * jnp.einsum("is,sk->ski", a["x"], b).transpose(1, 0, 2)
    close(got, expected)
    close(mg.vmap(lambda: mg.allreduce(1.0), in_axes=(), axis_size=3)(), jnp.full(3, comm.size))
    with pytest.raises(ValueError, match="must have a batch axis"):
        mg.vmap(lambda x: x, in_axes=None)(a)


def test_jit_options(comm: Communicator) -> None:
    traces = []

    @mg.jit
    def f(x: Any, *, k: float = 2.0) -> Any:
        traces.append(None)
        return {"y": mg.allreduce(x) * k}

    close(f(jnp.ones(2))["y"], jnp.full(2, 2.0 * comm.size))
    close(f(2 * jnp.ones(2))["y"], jnp.full(2, 4.0 * comm.size))
    assert len(traces) == 1
    close(f(jnp.ones(2), k=3.0)["y"], jnp.full(2, 3.0 * comm.size))

    @mg.jit(static_argnames="power", donate_argnums=0)
    def g(x: Any, power: int = 1) -> Any:
        assert isinstance(power, int)
        return mg.allreduce(x) ** power

    close(g(jnp.ones(2), 2), jnp.full(2, float(comm.size**2)))
    close(g(jnp.ones(2), power=3), jnp.full(2, float(comm.size**3)))
    close(
        mg.jit(lambda x, n: x * n[0], static_argnums=1)(jnp.ones(1), (7, "text")), 7 * jnp.ones(1)
    )


def test_jit_with_large_constants_and_without_messages() -> None:
    table = jnp.arange(1000.0)
    close(mg.jit(lambda i: table[i] + 1)(3), 4.0)


def test_jit_is_traced_once_under_eager_grad(comm: Communicator) -> None:
    traces = []

    @mg.jit
    def f(x: Any) -> Any:
        traces.append(None)
        return jnp.sum(mg.allreduce(x) ** 2)

    for k in range(3):
        close(mg.grad(f)(jnp.full(2, float(k))), 2.0 * comm.size**2 * jnp.full(2, float(k)))
    assert len(traces) == 1


@pytest.mark.thin(3)
def test_order_between_all_kinds_of_calls(comm: Communicator) -> None:
    """Messages without data dependence, all between the same two ranks with the same tag."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    shift = lambda x: mg.sendrecv(x, right, left)
    fast, plain, total = mg.jit(shift), jax.jit(shift), mg.jit(mg.allreduce)
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 50, lambda i, y: y @ x * 0.01 + 1, x))
    matrix = jnp.ones((100, 100))
    weighted = lambda x: jnp.sum(shift(x) * comm.rank)
    compiled = mg.jit(mg.grad(weighted))
    twice = mg.jit(lambda x: jax.lax.scan(lambda c, _: (shift(c), None), x, None, length=2)[0])
    batch, by_values = mg.vmap(shift), mg.jit(mg.value_and_grad(weighted))
    for k in range(3):
        late = 0 * slow(matrix)[0, 0]
        a = fast(jnp.full(4, comm.rank + 10.0 * k) + late)
        b = total(jnp.full(4, 5.0))
        c = plain(jnp.full(4, comm.rank + 7.0))
        d = shift(jnp.full(4, comm.rank + 9.0))
        e = mg.grad(weighted)(jnp.ones(4))
        f = compiled(jnp.ones(4) + late)
        g = shift(np.full(4, comm.rank + 11.0))  # not an array of JAX's
        y, back = mg.vjp(fast, jnp.full(4, comm.rank + 13.0))
        h = twice(jnp.full(4, comm.rank + 15.0) + late)
        i = batch(jnp.full((1, 4), comm.rank + 17.0))[0]
        (j,) = back(jnp.full(4, comm.rank + 19.0))
        m = mg.jvp(plain, (jnp.ones(4),), (jnp.full(4, comm.rank + 21.0),))[1]
        with jax.disable_jit():
            n = fast(jnp.full(4, comm.rank + 23.0))
        o = by_values(jnp.ones(4))[1]
        got = [float(v[0]) for v in (a, b, c, d, e, f, g, y, h, i, j, m, n, o)]
        want = [left + 10.0 * k, 5.0 * comm.size, left + 7.0, left + 9.0, right, right, left + 11.0]
        want += [left + 13.0, (comm.rank - 2) % comm.size + 15.0, left + 17.0, right + 19.0]
        assert got == [*want, left + 21.0, left + 23.0, right]


def test_errors_inside_a_jitted_program_leave_it_usable(comm: Communicator) -> None:
    f = mg.jit(lambda x: mg.require(jnp.all(x > 0), "x is {}, not positive", x[0]))
    f(jnp.ones(2))
    with pytest.raises(jax.errors.JaxRuntimeError, match="x is -1, not positive"):
        f(-jnp.ones(2))
    f(jnp.ones(2))
    with pytest.raises(TypeError):
        mg.jit(lambda x: x + "text")(1.0)
    assert float(mg.allreduce(1.0)) == comm.size


def test_vmap_of_a_bare_pull_back_is_refused(comm: Communicator) -> None:
    cts = jnp.arange(2.0)
    f = lambda x: jnp.sum(mg.allreduce(x))
    back = mg.vjp(f, jnp.ones(3))[1]
    with pytest.raises(ValueError, match="Put vjp inside"):
        mg.vmap(back)(cts)
    got = mg.vmap(lambda ct: mg.vjp(f, jnp.ones(3))[1](ct)[0])(cts)
    close(got, comm.size * cts[:, None] * jnp.ones(3))


def test_a_pull_back_is_differentiated_where_its_cotangent_is_constant(comm: Communicator) -> None:
    x, rank = jnp.array([0.3, -0.5, 0.7]) * (1 + comm.rank), comm.rank
    f = lambda x: jnp.sin(mg.allreduce(x))
    back = mg.vjp(f, x)[1]
    outside = lambda ct: jnp.sum(back(jnp.ones(3) if rank == 0 else ct)[0] ** 2)
    inside = lambda ct: jnp.sum(mg.vjp(f, x)[1](jnp.ones(3) if rank == 0 else ct)[0] ** 2)
    cosine = np.cos(np.asarray(mg.allreduce(x)))
    total = np.asarray(mg.allreduce(jnp.ones(3) if rank == 0 else x)) * cosine
    expected = 2 * comm.size * total * cosine * (rank > 0)
    for loss in (outside, inside):
        close(mg.grad(loss)(x), expected)
        close(mg.allreduce(mg.jvp(loss, (x,), (x,))[1]), mg.allreduce(jnp.vdot(expected, x)))


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("jit", [jax.jit, mg.jit], ids=["jax.jit", "mg.jit"])
def test_a_nan_on_one_rank_sends_no_message_again(jit: Any, comm: Communicator) -> None:
    """JAX's search for its place would run the program a second time, on that rank alone."""
    program = jit(lambda x: mg.allreduce(x) + jnp.log(x))
    wrong = comm.rank == comm.size - 1
    with jax.debug_nans(True):
        if wrong:
            with pytest.raises(FloatingPointError, match="not run again on this rank alone"):
                program(jnp.float64(-1))
        else:
            program(jnp.float64(1))
        with pytest.raises(FloatingPointError, match="log"):
            jit(jnp.log)(jnp.float64(-1))
    assert float(mg.allreduce(jnp.float64(10))) == 10 * comm.size


@pytest.mark.ranks(1, 2)
def test_what_has_an_order_of_its_own_is_refused(comm: Communicator) -> None:
    def f(x: Any) -> Any:
        jax.debug.print("x = {}", x, ordered=True)
        return mg.allreduce(x)

    with pytest.raises(NotImplementedError, match="ordered=False, or compile the function by"):
        mg.jit(f)(jnp.float64(1))
    assert float(jax.jit(f)(jnp.float64(1))) == comm.size


def test_the_strict_settings_of_jax(comm: Communicator) -> None:
    """Nothing of mpigrad's leaks a tracer, or broadcasts arrays of another rank."""
    f = lambda x: jnp.sum(mg.allreduce(x, comm=comm) ** 2)
    x = jnp.arange(3.0)
    with jax.numpy_rank_promotion("raise"), jax.checking_leaks():
        value, gradient = mg.jit(mg.value_and_grad(f, loss="replicated"))(x)
        close(mg.jit(f)(x), value)
        close(mg.jvp(f, (x,), (jnp.ones(3),))[1], mg.allreduce(jnp.sum(gradient), comm=comm))
        rows = mg.jacobian(lambda x: mg.allreduce(x, comm=comm))(x)
        close(rows, jnp.broadcast_to(jnp.eye(3), rows.shape))
        mg.assert_replicated(x, comm)


def test_the_program_s_own_error_is_shown_where_an_argument_was_donated(comm: Communicator) -> None:
    def fails(_: Any) -> Any:
        raise ArithmeticError("the callback says no")

    def program(x: Any) -> Any:
        return mg.allreduce(x, comm=comm) + jax.pure_callback(fails, x, x)

    with pytest.raises(jax.errors.JaxRuntimeError, match="the callback says no"):
        jax.block_until_ready(mg.jit(program, donate_argnums=0)(jnp.arange(4.0)))
