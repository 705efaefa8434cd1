"""How derivatives of all jobs travel.

Every derivative of a map is a map: of the jobs' results together with their Jacobians, or of the
jobs' pull-backs. So what is said here of one order holds for all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.flatten_util import ravel_pytree

from mpigrad.jobs.blocks import result_types
from mpigrad.jobs.context import Job
from mpigrad.jobs.records import Bucket
from mpigrad.operations.activity import outside_rules

__all__ = ["Derivatives", "Evaluate", "with_adjoint", "with_jacobian"]

Derivatives = Literal["jacobian", "adjoint"]
# (job, shared, per_job of each bucket) -> (what is added, what is kept of each bucket).
Evaluate = Callable[[Job, Any, Sequence[Any]], tuple[Any, list[Any]]]


# ---- the Jacobian travels with the results ----


def with_jacobian(job: Job, buckets: Sequence[Bucket], evaluate: Evaluate, inner: Any) -> Any:
    """`evaluate` of `job`, whose derivatives come with the results and need no further message.

    `inner(job)` evaluates the job that has the Jacobian among its results, and is differentiated
    for second derivatives.
    """

    def function(shared: Any, per_job: Sequence[Any]) -> tuple[Any, list[Any]]:
        leaves, structure = jax.tree.flatten((shared, list(per_job)))
        n_shared = len(jax.tree.leaves(shared))
        n_mine = (len(leaves) - n_shared) // len(buckets)
        types = [result_types(job, b, shared, m) for b, m in zip(buckets, per_job, strict=True)]

        @jax.custom_jvp
        def values(*xs: Any) -> tuple[Any, list[Any]]:
            with outside_rules():
                return evaluate(job, *jax.tree.unflatten(structure, xs))

        def rule(primals: Any, tangents: Any) -> Any:
            # What nobody differentiates by is neither computed nor sent.
            moving = [type(t) is not SymbolicZero for t in tangents]
            of_shared = tuple(i for i in range(n_shared) if moving[i])
            of_mine = tuple(i for i in range(n_mine) if any(moving[n_shared + i :: n_mine]))
            extended = _AndJacobian(job, of_shared, of_mine)
            with outside_rules():
                added, kept = inner(extended)(*jax.tree.unflatten(structure, primals))
            (a, a_by_s), s = added, _flat([_dense(tangents[i]) for i in of_shared])
            a_dot, results, tangents_kept = a_by_s @ s, [], []
            for b, (a_by_m, k, k_by_s, k_by_m) in enumerate(kept):
                offset = n_shared + b * n_mine
                m = jax.vmap(_flat)([_dense(tangents[offset + i]) for i in of_mine], k)
                a_dot = a_dot + jnp.einsum("nij,nj->i", a_by_m, m)
                k_dot = k_by_s @ s + jnp.einsum("nij,nj->ni", k_by_m, m)
                results.append(_shaped(k, types[b][1]))
                tangents_kept.append(_shaped(k_dot, types[b][1]))
            return (
                (_shaped(a, types[0][0]), results),
                (_shaped(a_dot, types[0][0]), tangents_kept),
            )

        values.defjvp(rule, symbolic_zeros=True)
        return values(*leaves)

    return function


def _flat(tree: Any, like: Any = None) -> Any:
    return ravel_pytree(tree)[0]


def _dense(t: Any) -> Any:
    if type(t) is not SymbolicZero:
        return t
    aval: Any = t.aval
    return jnp.zeros(aval.shape, aval.dtype)


def _shaped(y: Any, types: Any) -> Any:
    """The last axis of `y` as a pytree of these shapes."""
    leaves, structure = jax.tree.flatten(types)
    ends = np.cumsum([x.size for x in leaves])[:-1]
    parts = jnp.split(y, [int(end) for end in ends], -1) if leaves else []
    shaped = [
        part.reshape(*y.shape[:-1], *x.shape).astype(x.dtype)
        for part, x in zip(parts, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, shaped)


@dataclass(frozen=True)
class _AndJacobian:
    """The job that gives its results as vectors, and their Jacobians by chosen arguments.

    Added: (a, da/ds); kept: (da/dm, k, dk/ds, dk/dm), where a is what was added, k what was kept,
    s the chosen shared arguments and m the chosen ones of the job, all of them vectors.
    """

    job: Job
    of_shared: tuple[int, ...]
    of_mine: tuple[int, ...]

    def __call__(self, shared: Any, mine: Any, record: Any) -> tuple[Any, Any]:
        shared_leaves, shared_structure = jax.tree.flatten(shared)
        mine_leaves, mine_structure = jax.tree.flatten(mine)
        s, unravel_s = ravel_pytree([shared_leaves[i] for i in self.of_shared])
        m, unravel_m = ravel_pytree([mine_leaves[i] for i in self.of_mine])

        def vectors(s: Any, m: Any) -> tuple[Any, Any]:
            ours, own = list(shared_leaves), list(mine_leaves)
            for i, x in zip(self.of_shared, unravel_s(s), strict=True):
                ours[i] = x
            for i, x in zip(self.of_mine, unravel_m(m), strict=True):
                own[i] = x
            added, kept = self.job(
                jax.tree.unflatten(shared_structure, ours),
                jax.tree.unflatten(mine_structure, own),
                record,
            )
            return ravel_pytree(added)[0], ravel_pytree(kept)[0]

        (a, k), ((a_by_s, a_by_m), (k_by_s, k_by_m)) = _value_and_jacobian(vectors, s, m)
        return (a, a_by_s), (a_by_m, k, k_by_s, k_by_m)


def _value_and_jacobian(f: Callable[..., Any], s: Any, m: Any) -> tuple[Any, Any]:
    """f(s, m), a pair of vectors, and its Jacobians, by rows or by columns, whichever are fewer."""
    types = jax.eval_shape(f, s, m)
    if s.size + m.size < sum(y.size for y in types):

        def twice(s: Any, m: Any) -> Any:
            y = f(s, m)
            return y, y

        jacobians, y = jax.jacfwd(twice, (0, 1), has_aux=True)(s, m)
        return y, jacobians
    y, pull_back = jax.vjp(f, s, m)
    rows = []
    for i, own in enumerate(types):
        if own.size == 0:
            rows.append(tuple(jnp.zeros((0, x.size), x.dtype) for x in (s, m)))
            continue
        seeds = [jnp.zeros((own.size, t.size), t.dtype) for t in types]
        seeds[i] = jnp.eye(own.size, dtype=own.dtype)
        rows.append(jax.vmap(pull_back)(tuple(seeds)))
    return y, tuple(rows)


# ---- cotangents travel to the jobs ----


def with_adjoint(job: Job, evaluate: Evaluate) -> Any:
    """`evaluate` of `job`, whose adjoint computes it again where cotangents arrive.

    For evaluations that JAX can't see through; in reverse mode, of any order.
    """

    def function(shared: Any, per_job: Sequence[Any]) -> tuple[Any, list[Any]]:
        @jax.custom_vjp
        def values(shared: Any, per_job: Any) -> tuple[Any, list[Any]]:
            with outside_rules():
                return evaluate(job, shared, per_job)

        def forward(shared: Any, per_job: Any) -> Any:
            return values(shared, per_job), (shared, per_job)

        def backward(arguments: Any, cotangents: Any) -> Any:
            (shared, per_job), (added, kept) = arguments, cotangents
            mine = [(x, _floats(y)) for x, y in zip(per_job, kept, strict=True)]
            with outside_rules():
                back = with_adjoint(_PullBack(job), evaluate)
                by_shared, by_mine = back((shared, _floats(added)), mine)
            pairs = zip(per_job, by_mine, strict=True)
            return _refilled(shared, by_shared), [_refilled(x, y) for x, y in pairs]

        values.defvjp(forward, backward)
        return values(shared, list(per_job))

    return function


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _floats(tree: Any) -> list[Any]:
    """The leaves that have derivatives."""
    return [x for x in jax.tree.leaves(tree) if _is_float(x)]


def _refilled(tree: Any, floats: Sequence[Any]) -> Any:
    """Cotangents of `tree`: these, and none for leaves that have no derivative."""
    rest = iter(floats)
    return jax.tree.map(
        lambda x: next(rest) if _is_float(x) else np.zeros(x.shape, jax.dtypes.float0), tree
    )


@dataclass(frozen=True)
class _PullBack:
    """The job that adds up cotangents of shared arguments, and keeps those of the job's own."""

    job: Job

    def __call__(self, shared: Any, mine: Any, record: Any) -> tuple[Any, Any]:
        (shared, of_added), (mine, of_kept) = shared, mine

        def floats(s: Any, m: Any) -> Any:
            added, kept = self.job(s, m, record)
            return _floats(added), _floats(kept)

        by_shared, by_mine = jax.vjp(floats, shared, mine)[1]((of_added, of_kept))
        return _floats(by_shared), _floats(by_mine)
