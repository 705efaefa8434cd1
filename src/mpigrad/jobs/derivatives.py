"""Derivatives of maps over jobs.

Every derivative of a map is a map itself, of the jobs' results together with their Jacobians, or of
the jobs' pull-backs. So the rules here for one order hold for all orders.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from mpigrad.extend import Activity, allow_messages_in_rules, primitive
from mpigrad.jobs.items import Bucket, JobFunction, result_types

__all__ = ["Derivatives", "Evaluate", "with_adjoint", "with_jacobian"]

Derivatives = Literal["jacobian", "adjoint"]
# (job, params, parameters of each bucket's jobs) -> (sum over jobs, results of each bucket's jobs).
Evaluate = Callable[[JobFunction, Any, Sequence[Any]], tuple[Any, list[Any]]]


# ---- the Jacobian travels with the results ----


def with_jacobian(
    job: JobFunction,
    buckets: Sequence[Bucket],
    evaluate: Evaluate,
    inner: Any,
    types: Sequence[Any] = (),
) -> Any:
    """Return the evaluation of `job` whose derivatives arrive with the results.

    Derivatives then need no further message.

    Parameters
    ----------
    inner
        `inner(job)` evaluates the job that has the Jacobian among its results. Second derivatives
        differentiate it. A batch is evaluated as one job for batches.
    types
        The types of a job's results for each bucket, if they are known.
    """

    def function(params: Any, by_bucket: Sequence[Any]) -> tuple[Any, list[Any]]:
        leaves, structure = jax.tree.flatten((params, list(by_bucket)))
        program = _Program(job, buckets, evaluate, inner, structure, types)
        results = program(*leaves)
        return jax.tree.unflatten(program.result_structure, results)

    return function


class _Program:
    """An evaluation as a function of flat arguments, a parameter of the primitive below."""

    def __init__(
        self,
        job: JobFunction,
        buckets: Sequence[Bucket],
        evaluate: Evaluate,
        inner: Callable[[JobFunction], Any],
        structure: Any,
        types: Sequence[Any] = (),
    ) -> None:
        self.job, self.buckets, self.evaluate, self.inner = job, buckets, evaluate, inner
        self.structure = structure
        params, by_bucket = jax.tree.unflatten(structure, [0] * structure.num_leaves)
        self.n_params = len(jax.tree.leaves(params))
        self.n_item_params = len(jax.tree.leaves(by_bucket[0]))
        self.types = list(types)
        self.avals: list[Any] = []
        self.result_structure: Any = None

    def __call__(self, *xs: Any) -> list[Any]:
        """Return the results, by binding the primitive."""
        self.shapes(*xs)
        return values_p.bind(*xs, program=self)

    def arguments(self, xs: Sequence[Any]) -> Any:
        """Build (params, by_bucket) from their leaves."""
        return jax.tree.unflatten(self.structure, xs)

    def shapes(self, *avals: Any) -> list[Any]:
        """Return the avals of the results."""
        if self.result_structure is not None:
            return self.avals
        if not self.types:
            structs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals]
            params, by_bucket = self.arguments(structs)
            pairs = zip(self.buckets, by_bucket, strict=True)
            self.types = [
                result_types(self.job, bucket, params, item_params) for bucket, item_params in pairs
            ]

        def stack(types: Any, *axes: int) -> Any:
            return jax.tree.map(lambda x: jax.ShapeDtypeStruct((*axes, *x.shape), x.dtype), types)

        kept = [stack(t[1], len(b.jobs)) for b, t in zip(self.buckets, self.types, strict=True)]
        self.avals, self.result_structure = jax.tree.flatten((stack(self.types[0][0]), kept))
        return self.avals

    def values(self, *xs: Any) -> list[Any]:
        """Return the results."""
        return jax.tree.leaves(self.evaluate(self.job, *self.arguments(xs)))

    def with_jacobian(self, active: Sequence[int], xs: Sequence[Any]) -> tuple[list[Any], Any]:
        """Return the results, and the Jacobian with respect to the active arguments."""
        of_params, of_item_params = self._chosen(active)
        n = max(sum(x.size for x in jax.tree.leaves(types)) for types in self.types)
        extended = _AndJacobian(self.job, of_params, of_item_params, n)
        (a, a_by_s), kept = self.inner(extended)(*self.arguments(xs))
        results = [
            _shaped(k, types[1]) for (_, k, _, _), types in zip(kept, self.types, strict=True)
        ]
        jacobian = [a_by_s, *((a_by_m, k_by_s, k_by_m) for a_by_m, _, k_by_s, k_by_m in kept)]
        return jax.tree.leaves((_shaped(a, self.types[0][0]), results)), jacobian

    def tangents(
        self, active: Sequence[int], jacobian: Any, xs: Sequence[Any], kinds: Sequence[Any]
    ) -> list[Any]:
        """Return the tangents of the results along tangents of the arguments, of these kinds."""
        xs = [
            jnp.zeros(kind.shape, kind.dtype) if x is None else x
            for x, kind in zip(xs, kinds, strict=True)
        ]
        of_params, of_item_params = self._chosen(active)
        a_by_s, *by_buckets = jacobian
        s = _flat([xs[i] for i in of_params])
        a_dot, kept = a_by_s @ s, []
        for b, (a_by_m, k_by_s, k_by_m) in enumerate(by_buckets):
            item_tangents = [xs[self.n_params + b * self.n_item_params + i] for i in of_item_params]
            m = jax.vmap(_flat)(item_tangents, k_by_m)
            a_dot = a_dot + jnp.einsum("nij,nj->i", a_by_m, m)
            k_dot = k_by_s @ s + jnp.einsum("nij,nj->ni", k_by_m, m)
            kept.append(_shaped(k_dot, self.types[b][1]))
        return jax.tree.leaves((_shaped(a_dot, self.types[0][0]), kept))

    def _chosen(self, active: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the active leaves of `params`, and the active leaves of a job's `item_params`."""
        of_params = tuple(i for i in active if i < self.n_params)
        of_item_params = {
            (i - self.n_params) % self.n_item_params for i in active if i >= self.n_params
        }
        return of_params, tuple(sorted(of_item_params))

    def batched(self, size: int, args: Sequence[Any], dims: Sequence[Any]) -> Any:
        """Return the results for a batch, and the position of the batch axis in each."""
        flags = [d is not None for d in dims]
        of_params = tuple(flags[: self.n_params])
        item_flags = [
            flags[self.n_params + i :: self.n_item_params] for i in range(self.n_item_params)
        ]
        of_item_params = tuple(any(flag) for flag in item_flags)
        moved = []
        for i, (x, d) in enumerate(zip(args, dims, strict=True)):
            if i < self.n_params:
                moved.append(x if d is None else jnp.moveaxis(x, d, 0))
            elif of_item_params[(i - self.n_params) % self.n_item_params]:
                moved.append(
                    jnp.repeat(x[:, None], size, 1) if d is None else jnp.moveaxis(x, d, 1)
                )
            else:
                moved.append(x)
        # A Jacobian of the batch would be mostly zeros: one member does not depend on another.
        added, kept = self.inner(_Batched(self.job, of_params, of_item_params))(
            *self.arguments(moved)
        )
        added, kept = jax.tree.leaves(added), jax.tree.leaves(kept)
        return [*added, *kept], [0] * len(added) + [1] * len(kept)


def _differentiate(
    xs: Sequence[Any], params: dict[str, Any], activity: Activity
) -> tuple[list[Any], Any, Callable[..., list[Any]]]:
    # Derivatives that nobody asks for are neither computed nor sent.
    program: _Program = params["program"]
    active = tuple(i for i, is_active in enumerate(activity.operands) if is_active)
    results, jacobian = program.with_jacobian(active, xs)
    kinds = [jax.typeof(x) for x in xs]

    def tangent(jacobian: Any, tangents: Sequence[Any]) -> list[Any]:
        return program.tangents(active, jacobian, tangents, kinds)

    return results, jacobian, tangent


def _batch(xs: Sequence[Any], dims: Sequence[Any], params: dict[str, Any]) -> Any:
    size = next(x.shape[d] for x, d in zip(xs, dims, strict=True) if d is not None)
    return params["program"].batched(size, xs, dims)


# (leaves of params and of each bucket's arguments) -> leaves of the results.
values_p = primitive(
    "jobs",
    shapes=lambda *avals, program: program.shapes(*avals),
    run=lambda *xs, program: program.values(*xs),
    impl=lambda *xs, program: program.values(*xs),
    differentiate=_differentiate,
    batch=_batch,
)


def _flat(tree: Any, like: Any = None) -> Any:
    return ravel_pytree(tree)[0]


def _shaped(y: Any, types: Any) -> Any:
    """Split the last axis of `y` into a pytree of these shapes."""
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

    job: JobFunction
    of_params: tuple[bool, ...]
    of_item_params: tuple[bool, ...]

    def __call__(self, params: Any, item_params: Any, item: Any) -> tuple[Any, Any]:
        params_leaves, params_structure = jax.tree.flatten(params)
        item_leaves, item_structure = jax.tree.flatten(item_params)

        def one(xs: Any, ys: Any) -> tuple[Any, Any]:
            ours = jax.tree.unflatten(params_structure, xs)
            return self.job(ours, jax.tree.unflatten(item_structure, ys), item)

        axes = [
            [0 if flag else None for flag in flags]
            for flags in (self.of_params, self.of_item_params)
        ]
        return jax.vmap(one, tuple(axes))(params_leaves, item_leaves)


@dataclass(frozen=True)
class _AndJacobian:
    """The job that returns its results as vectors, with Jacobians by chosen arguments.

    Let a be the summed results, k the results of each job, s the chosen leaves of `params` and m
    the chosen leaves of the job's `item_params`, all of them vectors. This job sums (a, da/ds) and
    returns (da/dm, k, dk/ds, dk/dm) for each job.
    """

    job: JobFunction
    of_params: tuple[int, ...]
    of_item_params: tuple[int, ...]
    results: int  # the largest size of a job's results

    def __call__(self, params: Any, item_params: Any, item: Any) -> tuple[Any, Any]:
        params_leaves, params_structure = jax.tree.flatten(params)
        item_leaves, item_structure = jax.tree.flatten(item_params)
        s, unravel_s = ravel_pytree([params_leaves[i] for i in self.of_params])
        m, unravel_m = ravel_pytree([item_leaves[i] for i in self.of_item_params])

        def vectors(s: Any, m: Any) -> tuple[Any, Any]:
            new_params, new_items = list(params_leaves), list(item_leaves)
            for i, x in zip(self.of_params, unravel_s(s), strict=True):
                new_params[i] = x
            for i, x in zip(self.of_item_params, unravel_m(m), strict=True):
                new_items[i] = x
            added, kept = self.job(
                jax.tree.unflatten(params_structure, new_params),
                jax.tree.unflatten(item_structure, new_items),
                item,
            )
            return ravel_pytree(added)[0], ravel_pytree(kept)[0]

        # By columns or by rows, whichever is fewer.
        by = _by_columns if s.size + m.size < self.results else _by_rows
        (a, k), ((a_by_s, a_by_m), (k_by_s, k_by_m)) = by(vectors, s, m)
        return (a, a_by_s), (a_by_m, k, k_by_s, k_by_m)


def _by_columns(f: Callable[..., Any], *xs: Any) -> tuple[Any, Any]:
    """Return f(*xs), a pair of vectors, and its Jacobians by forward mode."""

    def twice(*xs: Any) -> Any:
        y = f(*xs)
        return y, y

    jacobians, y = jax.jacfwd(twice, (0, 1), has_aux=True)(*xs)
    return y, jacobians


def _by_rows(f: Callable[..., Any], *xs: Any) -> tuple[Any, Any]:
    """Return f(*xs), a pair of vectors, and its Jacobians by reverse mode."""
    y, pull_back = jax.vjp(f, *xs)
    jacobians = []
    for i, part in enumerate(y):
        if part.size == 0:
            jacobians.append(tuple(jnp.zeros((0, x.size), x.dtype) for x in xs))
            continue
        seeds = [jnp.zeros((part.size, v.size), v.dtype) for v in y]
        seeds[i] = jnp.eye(part.size, dtype=part.dtype)
        jacobians.append(jax.vmap(pull_back)(tuple(seeds)))
    return y, tuple(jacobians)


# ---- cotangents travel to the jobs ----


def with_adjoint(job: JobFunction, evaluate: Evaluate) -> Any:
    """Return the evaluation of `job` whose adjoint evaluates the jobs' pull-backs.

    This is for evaluations that JAX cannot differentiate. It has reverse mode of any order.
    """

    def function(params: Any, by_bucket: Sequence[Any]) -> tuple[Any, list[Any]]:
        @jax.custom_vjp
        def values(params: Any, by_bucket: Any) -> tuple[Any, list[Any]]:
            with allow_messages_in_rules():
                return evaluate(job, params, by_bucket)

        def forward(params: Any, by_bucket: Any) -> Any:
            return values(params, by_bucket), (params, by_bucket)

        def backward(arguments: Any, cotangents: Any) -> Any:
            (params, by_bucket), (added, kept) = arguments, cotangents
            item_params = [(x, _floats(y)) for x, y in zip(by_bucket, kept, strict=True)]
            with allow_messages_in_rules():
                back = with_adjoint(_PullBack(job), evaluate)
                by_params, by_item_params = back((params, _floats(added)), item_params)
            pairs = zip(by_bucket, by_item_params, strict=True)
            return _refilled(params, by_params), [_refilled(x, y) for x, y in pairs]

        values.defvjp(forward, backward)
        return values(params, list(by_bucket))

    return function


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _floats(tree: Any) -> list[Any]:
    """Return the leaves that have derivatives."""
    return [x for x in jax.tree.leaves(tree) if _is_float(x)]


def _refilled(tree: Any, floats: Sequence[Any]) -> Any:
    """Return cotangents of `tree`, with float0 zeros for integer and boolean leaves."""
    rest = iter(floats)
    return jax.tree.map(
        lambda x: next(rest) if _is_float(x) else np.zeros(x.shape, jax.dtypes.float0), tree
    )


@dataclass(frozen=True)
class _PullBack:
    """The job that sums cotangents of `params`, and returns cotangents of its `item_params`."""

    job: JobFunction

    def __call__(self, params: Any, item_params: Any, item: Any) -> tuple[Any, Any]:
        (params, of_added), (item_params, of_kept) = params, item_params

        def floats(s: Any, m: Any) -> Any:
            added, kept = self.job(s, m, item)
            return _floats(added), _floats(kept)

        by_params, by_item_params = jax.vjp(floats, params, item_params)[1]((of_added, of_kept))
        return _floats(by_params), _floats(by_item_params)
