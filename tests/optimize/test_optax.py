"""Transformations of optax on sharded unknowns: right results, and errors."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mpigrad.optimize import Optax, minimize
from mpigrad.optimize.unknowns import Unknowns


def test_two_rates_as_on_one_rank(comm):
    """A sharded field by adam, and a replicated network by lamb, which needs its norm."""
    n = 8
    ends = [n * r // comm.size for r in range(comm.size + 1)]
    mine = slice(ends[comm.rank], ends[comm.rank + 1])
    field, network = jnp.linspace(-1, 1, n), jnp.array([[0.5, -1.0], [2.0, 0.3]])
    weights = jnp.arange(1.0, n + 1)

    def loss(x, weights, part):
        terms = weights * (x["field"] - jnp.sum(x["network"])) ** 2
        return jnp.sum(terms) + part * jnp.sum(x["network"] ** 4)

    transformation = optax.chain(
        optax.clip(3.0),
        optax.zero_nans(),
        optax.multi_transform(
            {"fast": optax.adam(0.1), "slow": optax.lamb(0.02)},
            {"field": "fast", "network": "slow"},
        ),
        optax.masked(optax.clip_by_global_norm(0.01), {"field": False, "network": True}),
    )
    x = {"field": field, "network": network}
    state = jax.jit(transformation.init)(x)

    @jax.jit
    def step(x, state):
        change, state = transformation.update(jax.grad(loss)(x, weights, 1.0), state, x)
        return optax.apply_updates(x, change), state

    for _ in range(5):
        x, state = step(x, state)
    solution = minimize(
        lambda x: loss(x, weights[mine], 1 / comm.size),
        {"field": field[mine], "network": network},
        Optax(transformation, elementwise=True),
        sharded={"field": True, "network": False},
        max_steps=5,
        comm=comm,
    )
    assert np.allclose(solution.value["field"], x["field"][mine], rtol=1e-12, atol=0)
    assert np.allclose(solution.value["network"], x["network"], rtol=1e-12, atol=0)
    # Its state can be saved: the moments of the field are sharded as the field is.
    unknowns = Unknowns(solution.value, {"field": True, "network": False}, comm)
    kinds = jax.tree.leaves(Optax(transformation, elementwise=True).layout(unknowns).inner)
    assert kinds.count(True) == 2 and len(kinds) == len(jax.tree.leaves(state))


def test_sharded_unknowns_need_a_promise(comm):
    """Nothing is promised by default, because a norm of one rank's part would be silently wrong."""

    def check(transformation, x, sharded=True, **options):
        Optax(transformation, **options).check(Unknowns(x, sharded, comm))

    rows = jnp.zeros((4, 8), "float32")
    clipped = optax.chain(optax.clip_by_global_norm(1e8), optax.sgd(1e-3))
    with pytest.raises(ValueError, match=r"give elementwise=True\. Instead of clip_by_global_norm"):
        check(clipped, rows)
    check(clipped, rows, False)
    check(optax.adam(0.1), rows, elementwise=True)
    # The error of a transformation that cannot be applied says what to write instead.
    labels = optax.multi_transform(
        {"x": optax.lamb(0.1), "y": optax.adam(0.1)}, {"a": "x", "b": "y"}
    )
    with pytest.raises(TypeError, match=r"value_fn.*use LBFGS\(\)"):
        check(optax.lbfgs(), rows, False)
    with pytest.raises(TypeError, match=r"(?s)cannot be applied.*masks and labels must fit x0"):
        check(labels, {"a": rows}, False)
