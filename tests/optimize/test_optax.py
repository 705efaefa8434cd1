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
        Optax(transformation),
        sharded={"field": True, "network": False},
        max_steps=5,
        comm=comm,
    )
    assert np.allclose(solution.value["field"], x["field"][mine], rtol=1e-12, atol=0)
    assert np.allclose(solution.value["network"], x["network"], rtol=1e-12, atol=0)
    # Its state can be saved: the moments of the field are sharded as the field is.
    unknowns = Unknowns(solution.value, {"field": True, "network": False}, comm)
    kinds = jax.tree.leaves(Optax(transformation).layout(unknowns).inner)
    assert kinds.count(True) == 2 and len(kinds) == len(jax.tree.leaves(state))


def test_rejects_transformations_that_mix_elements(comm):
    """The check traces them: it finds thresholds that no run would reach, and global shapes."""

    def check(transformation, x, sharded=True, **options):
        Optax(transformation, **options).check(Unknowns(x, sharded, comm))

    rows = jnp.zeros((256 // comm.size, 128), "float32")  # of 256, too few on three ranks
    mixing = (
        optax.scale_by_factored_rms(),
        optax.chain(optax.clip_by_global_norm(1e8), optax.sgd(1e-3)),
        optax.apply_if_finite(optax.adam(0.1), 3),
        optax.noisy_sgd(0.1, key=0),
        optax.chain(optax.stateless(lambda g, _: jax.tree.map(jnp.flip, g)), optax.sgd(0.1)),
    )
    for transformation in mixing:
        check(transformation, rows, False)
        if comm.size > 1:
            with pytest.raises(ValueError, match=r"not elementwise on sharded.*: x0\. Use"):
                check(transformation, rows)
        check(transformation, rows, elementwise=True)  # a promise of the user
    halves = {"a": jnp.zeros(3), "b": jnp.zeros(4)}
    labels = optax.multi_transform(
        {"x": optax.lamb(0.1), "y": optax.adam(0.1)}, {"a": "x", "b": "y"}
    )
    check(labels, halves, {"a": False, "b": True})
    if comm.size > 1:
        with pytest.raises(ValueError, match=r"own part: x0\['a'\]"):
            check(labels, halves, {"a": True, "b": False})
    for transformation in (
        optax.inject_hyperparams(optax.adamw)(optax.cosine_decay_schedule(0.1, 9)),
        optax.MultiSteps(optax.rmsprop(0.1, momentum=0.9), 2).gradient_transformation(),
        optax.lion(0.1),
    ):
        check(transformation, rows)

    # The error of a transformation that cannot be applied says what to write instead.
    with pytest.raises(TypeError, match=r"value_fn.*use LBFGS\(\)"):
        check(optax.lbfgs(), rows, False)
    with pytest.raises(TypeError, match=r"(?s)cannot be applied.*masks and labels must fit x0"):
        check(labels, {"a": rows}, False)
