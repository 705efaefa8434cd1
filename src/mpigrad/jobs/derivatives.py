"""What a pool computes of all jobs, and how its derivatives travel."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.flatten_util import ravel_pytree

from mpigrad.jobs.evaluation import Team, evaluate, result_types
from mpigrad.operations.activity import outside_rules

__all__ = ["Derivatives", "Whole", "differentiable"]

Derivatives = Literal["jacobian", "adjoint"]


@dataclass(frozen=True)
class Whole:
    """What is made of the results of all jobs: their sum, or all of them, in their order."""

    total: bool
    derivatives: Derivatives | None

    def __post_init__(self) -> None:
        if self.derivatives not in (None, "jacobian", "adjoint"):
            raise ValueError(
                f'derivatives={self.derivatives!r}: it is "jacobian", "adjoint" or None'
            )


def differentiable(fn: Callable[..., Any], team: Team, whole: Whole) -> Callable[..., Any]:
    """The function (shared, per_job) -> results of all jobs of the team's data, or their sum."""
    buckets = team.data.buckets

    def function(shared: Any, per_job: Any) -> Any:
        spread = [jax.tree.map(lambda x, b=b: _rows(x, b.jobs), per_job) for b in buckets]
        types = [
            result_types(_values(fn, False), bucket, shared, mine)[1]
            for bucket, mine in zip(buckets, spread, strict=True)
        ]
        types = [
            jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), t) for t in types
        ]
        if whole.total:
            _check_equal(types, team)
        if _jacobian_travels(whole.derivatives, (shared, per_job), types):
            results = _with_jacobian(fn, team, whole.total, shared, per_job, types)
        else:
            found = evaluate(_values(fn, whole.total), shared, spread, team)
            results = [_added([y for y, _ in found])] if whole.total else [y for _, y in found]
        return results[0] if whole.total else _in_order(results, types, team)

    return function


def _rows(x: Any, jobs: np.ndarray) -> Any:
    return x if len(jobs) == len(x) else x[jobs]


def _values(fn: Callable[..., Any], total: bool) -> Callable[..., Any]:
    """The block function of the results."""

    def block(shared: Any, mine: Any, record: Any, counts: Any, numbers: Any) -> Any:
        ys = _each(fn, shared, mine, record, numbers)
        return (_sum_of_block(ys, counts), ()) if total else ((), ys)

    return block


def _each(fn: Callable[..., Any], shared: Any, mine: Any, record: Any, numbers: Any) -> Any:
    def job(mine: Any, record: Any, number: Any) -> Any:
        return jax.tree.map(jnp.asarray, fn(shared, mine, record))

    return jax.vmap(job)(mine, record, numbers)


def _sum_of_block(ys: Any, counts: Any) -> Any:
    def one(y: Any) -> Any:
        counted = counts.reshape(-1, *[1] * (y.ndim - 1))
        return jnp.sum(jnp.where(counted, y, jnp.zeros_like(y)), 0, dtype=y.dtype)

    return jax.tree.map(one, ys)


def _added(of_blocks: Sequence[Any]) -> Any:
    """The sum over the blocks of all buckets, in their order."""
    return jax.tree.map(lambda *ys: jnp.sum(jnp.concatenate(ys), 0, dtype=ys[0].dtype), *of_blocks)


def _check_equal(types: Sequence[Any], team: Team) -> None:
    for bucket, kind in zip(team.data.buckets, types, strict=True):
        if kind != types[0]:
            raise ValueError(
                f"sum: the result of job {bucket.jobs[0]} is {kind}, that of job "
                f"{team.data.buckets[0].jobs[0]} is {types[0]}: only equal shapes can be added"
            )


def _in_order(results: Sequence[Any], types: Sequence[Any], team: Team) -> Any:
    """The results of the buckets as one stack in the order of jobs, or a list of them."""
    if len(results) == 1:
        return results[0]
    jobs = np.concatenate([bucket.jobs for bucket in team.data.buckets])
    order = np.argsort(jobs)
    if all(kind == types[0] for kind in types):
        return jax.tree.map(lambda *ys: jnp.concatenate(ys)[order], *results)
    every = [
        jax.tree.map(lambda y, i=i: y[i], ys)
        for bucket, ys in zip(team.data.buckets, results, strict=True)
        for i in range(len(bucket.jobs))
    ]
    return [every[i] for i in order]


# ---- the Jacobian travels with the results ----


def _size(tree: Any) -> int:
    return sum(math.prod(x.shape) for x in jax.tree.leaves(tree))


def _jacobian_travels(wanted: Derivatives | None, arguments: Any, types: Sequence[Any]) -> bool:
    leaves = jax.tree.leaves((arguments, types))
    real = all(jnp.issubdtype(x.dtype, jnp.floating) for x in jax.tree.leaves(types)) and not any(
        jnp.issubdtype(x.dtype, jnp.complexfloating) for x in leaves
    )
    if wanted == "jacobian" and not real:
        raise TypeError(
            'derivatives="jacobian" is for real floats; take "adjoint" for other results and for '
            "complex arguments"
        )
    if wanted is not None:
        return wanted == "jacobian"
    return real and all(_size(kind) == 1 for kind in types)


def _with_jacobian(
    fn: Callable[..., Any],
    team: Team,
    total: bool,
    shared: Any,
    per_job: Any,
    types: Sequence[Any],
) -> list[Any]:
    """The results of each bucket, or the sum, whose derivatives need no messages."""
    buckets = team.data.buckets
    leaves, structure = jax.tree.flatten((shared, per_job))
    first_mine = len(jax.tree.leaves(shared))

    def computed(block: Callable[..., Any], xs: Sequence[Any]) -> list[tuple[Any, Any]]:
        whole, mine = jax.tree.unflatten(structure, xs)
        spread = [jax.tree.map(lambda x, b=b: _rows(x, b.jobs), mine) for b in buckets]
        with outside_rules():
            return evaluate(block, whole, spread, team)

    @jax.custom_jvp
    def vectors(*xs: Any) -> tuple[Any, ...]:
        found = computed(_vectors(fn, total), xs)
        return (_added([y for y, _ in found]),) if total else tuple(y for _, y in found)

    def rule(primals: Any, tangents: Any) -> Any:
        # What nobody differentiates by is neither computed nor sent.
        active = [i for i, t in enumerate(tangents) if type(t) is not SymbolicZero]
        of_shared = [i for i in active if i < first_mine]
        of_mine = [i - first_mine for i in active if i >= first_mine]
        found = computed(_vectors_and_jacobian(fn, total, of_shared, of_mine), primals)
        s = ravel_pytree([tangents[i] for i in of_shared])[0]
        ms = [
            _row_of_each([_rows(tangents[i + first_mine], b.jobs) for i in of_mine], b.jobs)
            for b in buckets
        ]
        if total:
            y, by_shared = _added([of_block for of_block, _ in found])
            parts = [
                jnp.einsum("nij,nj->i", by_job, m) for (_, by_job), m in zip(found, ms, strict=True)
            ]
            return (y,), (sum(parts, by_shared @ s).astype(y.dtype),)
        ys = tuple(y for _, (y, _, _) in found)
        y_dots = tuple(
            (by_shared @ s + jnp.einsum("nij,nj->ni", by_job, m)).astype(y.dtype)
            for (_, (y, by_shared, by_job)), m in zip(found, ms, strict=True)
        )
        return ys, y_dots

    vectors.defjvp(rule, symbolic_zeros=True)
    kinds = types[:1] if total else types
    return [_unravelled(y, kind) for y, kind in zip(vectors(*leaves), kinds, strict=True)]


def _unravelled(y: Any, types: Any) -> Any:
    """The last axis of `y` as a pytree of these shapes."""
    leaves, structure = jax.tree.flatten(types)
    ends = np.cumsum([math.prod(x.shape) for x in leaves])[:-1]
    parts = jnp.split(y, [int(end) for end in ends], -1)
    shaped = [
        part.reshape(*y.shape[:-1], *x.shape).astype(x.dtype)
        for part, x in zip(parts, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, shaped)


def _row_of_each(xs: Sequence[Any], jobs: Any) -> Any:
    """The entries of each job side by side, shape (jobs, numbers of a job)."""
    return jax.vmap(lambda leaves, _: ravel_pytree(leaves)[0])(list(xs), jnp.arange(len(jobs)))


def _vectors(fn: Callable[..., Any], total: bool) -> Callable[..., Any]:
    """The block function of the results, each job's as one vector."""

    def vector(*job: Any) -> Any:
        return ravel_pytree(fn(*job))[0]

    return _values(vector, total)


def _vectors_and_jacobian(
    fn: Callable[..., Any], total: bool, of_shared: Sequence[int], of_mine: Sequence[int]
) -> Callable[..., Any]:
    """The block function of the results as vectors, and of their derivatives.

    By shared arguments they are of shape (results, numbers), for each job or for the sum over
    the block; by the arguments of each job (jobs, results, numbers).
    """

    def block(shared: Any, mine: Any, record: Any, counts: Any, numbers: Any) -> Any:
        shared_leaves, shared_structure = jax.tree.flatten(shared)
        mine_leaves, mine_structure = jax.tree.flatten(mine)
        s, unravel_s = ravel_pytree([shared_leaves[i] for i in of_shared])
        unravel_m = ravel_pytree([mine_leaves[i][0] for i in of_mine])[1]
        m = _row_of_each([mine_leaves[i] for i in of_mine], numbers)

        def job(s: Any, m: Any, mine: Any, record: Any) -> Any:
            shared_now, mine_now = list(shared_leaves), list(mine)
            for i, x in zip(of_shared, unravel_s(s), strict=True):
                shared_now[i] = x
            for i, x in zip(of_mine, unravel_m(m), strict=True):
                mine_now[i] = x
            return ravel_pytree(
                fn(
                    jax.tree.unflatten(shared_structure, shared_now),
                    jax.tree.unflatten(mine_structure, mine_now),
                    record,
                )
            )[0]

        if total:

            def summed(s: Any, m: Any) -> Any:
                every = jax.vmap(job, (None, 0, 0, 0))(s, m, mine_leaves, record)
                return _sum_of_block(every, counts)

            y, (by_shared, by_job) = _value_and_jacobian(summed, s, m)
            return (y, by_shared), jnp.moveaxis(by_job, 1, 0)

        def one(m: Any, mine: Any, record: Any) -> Any:
            y, (by_shared, by_job) = _value_and_jacobian(lambda s, m: job(s, m, mine, record), s, m)
            return y, by_shared, by_job

        return (), jax.vmap(one)(m, mine_leaves, record)

    return block


def _value_and_jacobian(f: Callable[..., Any], s: Any, m: Any) -> tuple[Any, tuple[Any, Any]]:
    """f(s, m) and its Jacobians, row by row, or column by column where these are fewer."""
    types = jax.eval_shape(f, s, m)
    if m.ndim == 1 and s.size + m.size < types.size:

        def twice(s: Any, m: Any) -> Any:
            y = f(s, m)
            return y, y

        jacobians, y = jax.jacfwd(twice, (0, 1), has_aux=True)(s, m)
        return y, jacobians
    y, pull_back = jax.vjp(f, s, m)
    return y, jax.vmap(pull_back)(jnp.eye(types.size, dtype=types.dtype))
