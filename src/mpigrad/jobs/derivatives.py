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
from jax.flatten_util import ravel_pytree

from mpigrad.jobs.blocks import result_types
from mpigrad.jobs.context import Job
from mpigrad.jobs.items import Bucket
from mpigrad.operations import _jax_compat as compat
from mpigrad.operations import _jax_repairs as repairs
from mpigrad.operations._jax_compat import Primitive, ShapedArray, ad, batching, mlir
from mpigrad.operations.carrier import allow_messages_in_rules

__all__ = ["Derivatives", "Evaluate", "with_adjoint", "with_jacobian"]

Derivatives = Literal["jacobian", "adjoint"]
# (job, shared, per_job of each bucket) -> (what is added, what is kept of each bucket).
Evaluate = Callable[[Job, Any, Sequence[Any]], tuple[Any, list[Any]]]


# ---- the Jacobian travels with the results ----


def with_jacobian(
    job: Job,
    buckets: Sequence[Bucket],
    evaluate: Evaluate,
    inner: Any,
    types: Sequence[Any] = (),
) -> Any:
    """`evaluate` of `job`, whose derivatives come with the results and need no further message.

    `inner(job)` evaluates the job that has the Jacobian among its results, and is differentiated
    for second derivatives. A batch is evaluated as one job for batches. `types` are those of a
    job's results, for each bucket, where they are known.
    """

    def function(shared: Any, per_job: Sequence[Any]) -> tuple[Any, list[Any]]:
        leaves, structure = jax.tree.flatten((shared, list(per_job)))
        program = _Program(job, buckets, evaluate, inner, structure, types)
        results = program(*leaves)
        return jax.tree.unflatten(program.result_structure, results)

    return function


class _Program:
    """An evaluation as a parameter of the primitive below: a function of flat arguments."""

    def __init__(
        self,
        job: Job,
        buckets: Sequence[Bucket],
        evaluate: Evaluate,
        inner: Callable[[Job], Any],
        structure: Any,
        types: Sequence[Any] = (),
    ) -> None:
        self.job, self.buckets, self.evaluate, self.inner = job, buckets, evaluate, inner
        self.structure = structure
        shared, per_job = jax.tree.unflatten(structure, [0] * structure.num_leaves)
        self.n_shared = len(jax.tree.leaves(shared))
        self.n_mine = len(jax.tree.leaves(per_job[0]))
        self.types = list(types)
        self.avals: list[Any] = []
        self.result_structure: Any = None

    def __call__(self, *xs: Any) -> list[Any]:
        """The results, as the primitive gives them."""
        self.shapes(*xs)
        return values_p.bind(*xs, program=self)

    def arguments(self, xs: Sequence[Any]) -> Any:
        """(shared, per_job) of these leaves."""
        return jax.tree.unflatten(self.structure, xs)

    def shapes(self, *avals: Any) -> list[Any]:
        """The avals of the results."""
        if self.result_structure is not None:
            return self.avals
        if not self.types:
            structs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals]
            shared, per_job = self.arguments(structs)
            pairs = zip(self.buckets, per_job, strict=True)
            self.types = [result_types(self.job, bucket, shared, mine) for bucket, mine in pairs]

        def stack(types: Any, *axes: int) -> Any:
            return jax.tree.map(lambda x: ShapedArray((*axes, *x.shape), x.dtype), types)

        kept = [stack(t[1], len(b.jobs)) for b, t in zip(self.buckets, self.types, strict=True)]
        self.avals, self.result_structure = jax.tree.flatten((stack(self.types[0][0]), kept))
        return self.avals

    def values(self, *xs: Any) -> list[Any]:
        """The results."""
        return jax.tree.leaves(self.evaluate(self.job, *self.arguments(xs)))

    def with_jacobian(self, active: Sequence[int], xs: Sequence[Any]) -> tuple[list[Any], Any]:
        """The results, and what `tangents` needs; by the active arguments only."""
        of_shared, of_mine = self._chosen(active)
        n = max(sum(x.size for x in jax.tree.leaves(types)) for types in self.types)
        extended = _AndJacobian(self.job, of_shared, of_mine, n)
        (a, a_by_s), kept = self.inner(extended)(*self.arguments(xs))
        results = [
            _shaped(k, types[1]) for (_, k, _, _), types in zip(kept, self.types, strict=True)
        ]
        jacobian = [a_by_s, *((a_by_m, k_by_s, k_by_m) for a_by_m, _, k_by_s, k_by_m in kept)]
        return jax.tree.leaves((_shaped(a, self.types[0][0]), results)), jacobian

    def tangents(self, active: Sequence[int], jacobian: Any, xs: Sequence[Any]) -> list[Any]:
        """Tangents of the results along tangents of the arguments."""
        of_shared, of_mine = self._chosen(active)
        a_by_s, *by_buckets = jacobian
        s = _flat([xs[i] for i in of_shared])
        a_dot, kept = a_by_s @ s, []
        for b, (a_by_m, k_by_s, k_by_m) in enumerate(by_buckets):
            own = [ad.instantiate_zeros(xs[self.n_shared + b * self.n_mine + i]) for i in of_mine]
            m = jax.vmap(_flat)(own, k_by_m)
            a_dot = a_dot + jnp.einsum("nij,nj->i", a_by_m, m)
            k_dot = k_by_s @ s + jnp.einsum("nij,nj->ni", k_by_m, m)
            kept.append(_shaped(k_dot, self.types[b][1]))
        return jax.tree.leaves((_shaped(a_dot, self.types[0][0]), kept))

    def _chosen(self, active: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of shared arguments, and of those of each job, the active ones."""
        of_shared = tuple(i for i in active if i < self.n_shared)
        of_mine = {(i - self.n_shared) % self.n_mine for i in active if i >= self.n_shared}
        return of_shared, tuple(sorted(of_mine))

    def batched(self, size: int, args: Sequence[Any], dims: Sequence[Any]) -> Any:
        """The results for a batch, and where its axis is in them."""
        flags = [d is not None for d in dims]
        of_shared = tuple(flags[: self.n_shared])
        own = [flags[self.n_shared + i :: self.n_mine] for i in range(self.n_mine)]
        of_mine = tuple(any(flag) for flag in own)
        moved = []
        for i, (x, d) in enumerate(zip(args, dims, strict=True)):
            if i < self.n_shared:
                moved.append(x if d is None else jnp.moveaxis(x, d, 0))
            elif of_mine[(i - self.n_shared) % self.n_mine]:
                moved.append(
                    jnp.repeat(x[:, None], size, 1) if d is None else jnp.moveaxis(x, d, 1)
                )
            else:
                moved.append(x)
        # Not its Jacobian, if need not be: most of that, of one member by another's, is zero.
        added, kept = self.inner(_Batched(self.job, of_shared, of_mine))(*self.arguments(moved))
        added, kept = jax.tree.leaves(added), jax.tree.leaves(kept)
        return [*added, *kept], [0] * len(added) + [1] * len(kept)


def _linearize(is_vjp: Any, nonzeros: Any, *xs: Any, program: _Program) -> Any:
    # What nobody differentiates by is neither computed nor sent.
    active = tuple(i for i, moves in enumerate(nonzeros) if moves)
    results, jacobian = program.with_jacobian(active, xs)
    leaves, structure = jax.tree.flatten(jacobian)

    def linear(leaves: Any, *tangents: Any) -> list[Any]:
        return program.tangents(active, jax.tree.unflatten(structure, leaves), tangents)

    return results, [True] * len(results), leaves, linear


def _jvp(primals: Any, tangents: Any, *, program: _Program) -> Any:
    active = tuple(i for i, t in enumerate(tangents) if type(t) is not ad.Zero)
    results, jacobian = program.with_jacobian(active, primals)
    return results, program.tangents(active, jacobian, tangents)


def _batch(args: Any, dims: Any, *, program: _Program) -> Any:
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    return program.batched(size, args, dims)


# (leaves of shared and of each bucket's arguments) -> leaves of the results.
values_p = Primitive("mpigrad_jobs")
compat.make_effectful(values_p, lambda *avals, program: program.shapes(*avals))
values_p.def_impl(lambda *xs, program: program.values(*xs))
mlir.register_lowering(
    values_p,
    mlir.lower_fun(lambda *xs, program: program.values(*xs), multiple_results=True),
)
ad.primitive_jvps[values_p] = _jvp
compat.set_linearization(values_p, _linearize)
repairs.always_stage(values_p)
batching.primitive_batchers[values_p] = _batch


def _flat(tree: Any, like: Any = None) -> Any:
    return ravel_pytree(tree)[0]


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
class _Batched:
    """The job for a batch of arguments."""

    job: Job
    of_shared: tuple[bool, ...]
    of_mine: tuple[bool, ...]

    def __call__(self, shared: Any, mine: Any, record: Any) -> tuple[Any, Any]:
        shared_leaves, shared_structure = jax.tree.flatten(shared)
        mine_leaves, mine_structure = jax.tree.flatten(mine)

        def one(xs: Any, ys: Any) -> tuple[Any, Any]:
            ours = jax.tree.unflatten(shared_structure, xs)
            return self.job(ours, jax.tree.unflatten(mine_structure, ys), record)

        axes = [[0 if flag else None for flag in flags] for flags in (self.of_shared, self.of_mine)]
        return jax.vmap(one, tuple(axes))(shared_leaves, mine_leaves)


@dataclass(frozen=True)
class _AndJacobian:
    """The job that gives its results as vectors, and their Jacobians by chosen arguments.

    Added: (a, da/ds); kept: (da/dm, k, dk/ds, dk/dm), where a is what was added, k what was kept,
    s the chosen shared arguments and m the chosen ones of the job, all of them vectors.
    """

    job: Job
    of_shared: tuple[int, ...]
    of_mine: tuple[int, ...]
    results: int  # how many numbers, at most

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

        # By columns or by rows, whichever are fewer.
        by = _by_columns if s.size + m.size < self.results else _by_rows
        (a, k), ((a_by_s, a_by_m), (k_by_s, k_by_m)) = by(vectors, s, m)
        return (a, a_by_s), (a_by_m, k, k_by_s, k_by_m)


def _by_columns(f: Callable[..., Any], *xs: Any) -> tuple[Any, Any]:
    """f(*xs), a pair of vectors, and its Jacobians."""

    def twice(*xs: Any) -> Any:
        y = f(*xs)
        return y, y

    jacobians, y = jax.jacfwd(twice, (0, 1), has_aux=True)(*xs)
    return y, jacobians


def _by_rows(f: Callable[..., Any], *xs: Any) -> tuple[Any, Any]:
    """f(*xs), a pair of vectors, and its Jacobians."""
    y, pull_back = jax.vjp(f, *xs)
    jacobians = []
    for i, own in enumerate(y):
        if own.size == 0:
            jacobians.append(tuple(jnp.zeros((0, x.size), x.dtype) for x in xs))
            continue
        seeds = [jnp.zeros((own.size, v.size), v.dtype) for v in y]
        seeds[i] = jnp.eye(own.size, dtype=own.dtype)
        jacobians.append(jax.vmap(pull_back)(tuple(seeds)))
    return y, tuple(jacobians)


# ---- cotangents travel to the jobs ----


def with_adjoint(job: Job, evaluate: Evaluate) -> Any:
    """`evaluate` of `job`, whose adjoint computes it again where cotangents arrive.

    For evaluations that JAX can't see through; in reverse mode, of any order.
    """

    def function(shared: Any, per_job: Sequence[Any]) -> tuple[Any, list[Any]]:
        @jax.custom_vjp
        def values(shared: Any, per_job: Any) -> tuple[Any, list[Any]]:
            with allow_messages_in_rules():
                return evaluate(job, shared, per_job)

        def forward(shared: Any, per_job: Any) -> Any:
            return values(shared, per_job), (shared, per_job)

        def backward(arguments: Any, cotangents: Any) -> Any:
            (shared, per_job), (added, kept) = arguments, cotangents
            mine = [(x, _floats(y)) for x, y in zip(per_job, kept, strict=True)]
            with allow_messages_in_rules():
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
