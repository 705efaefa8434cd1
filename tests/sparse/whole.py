"""Programs on striped arrays compared with the same programs on whole ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import mpigrad as mg
from helpers import close
from mpigrad.sparse import Pattern


@dataclass(frozen=True)
class Striped:
    """An array, and which of its leading axis this rank has."""

    whole: Any
    mine: slice

    @property
    def part(self) -> Any:
        return jnp.asarray(self.whole[self.mine])

    def like(self, seed: int) -> Striped:
        generator = np.random.default_rng(seed)
        numbers = generator.standard_normal(self.whole.shape)
        if np.iscomplexobj(self.whole):
            numbers = numbers + 1j * generator.standard_normal(self.whole.shape)
        return Striped(numbers, self.mine)


def stripe(comm: Any, n_local: int) -> slice:
    start = comm.mpi.scan(n_local) - n_local
    return slice(start, start + n_local)


def rows_of(pattern: Pattern, *rest: int, seed: int = 1) -> Striped:
    mine = slice(pattern.offset, pattern.offset + pattern.n_local)
    return Striped(np.zeros((pattern.n_rows, *rest)), mine).like(seed)


def columns_of(pattern: Pattern, *rest: int, seed: int = 2) -> Striped:
    mine = slice(pattern.column_offset, pattern.column_offset + pattern.n_local_columns)
    return Striped(np.zeros((pattern.n_columns, *rest)), mine).like(seed)


@dataclass(frozen=True)
class Entries:
    """The stored entries of all ranks, in the order of the ranks."""

    pattern: Pattern
    rows: np.ndarray
    columns: np.ndarray
    mine: slice

    @staticmethod
    def of(pattern: Pattern) -> Entries:
        stored = np.empty((2, pattern.nnz), np.int64)
        stored[:, pattern.order] = pattern.rows + pattern.offset, pattern.columns
        parts = np.concatenate(pattern.comm.mpi.allgather(stored), axis=1)
        return Entries(pattern, *parts, stripe(pattern.comm, pattern.nnz))

    def values(self, seed: int) -> Striped:
        return Striped(np.zeros(len(self.rows)), self.mine).like(seed)

    def dense(self, values: Any) -> Any:
        shape = (self.pattern.n_rows, self.pattern.n_columns)
        return jnp.zeros(shape, values.dtype).at[self.rows, self.columns].set(values)

    def pick(self, dense: Any) -> Any:
        return dense[self.rows, self.columns]


def prove(
    f: Callable[..., Any],
    F: Callable[..., Any],
    operands: Sequence[Striped],
    result: slice,
    how: Callable[[Any], Any] = mg.jit,
    rtol: float = 1e-11,
) -> None:
    """Values, jvp, gradient and Hessian-vector product of f on the ranks are those of F.

    `result` says which of the leading axis of F's result is this rank's.
    """
    directions = [x.like(10 + k) for k, x in enumerate(operands)]
    shape = jax.eval_shape(F, *(x.whole for x in operands)).shape
    weights = Striped(np.zeros(shape), result).like(9)

    def derivatives(kit: Any, f: Any, weights: Any) -> Any:
        def loss(*xs: Any) -> Any:
            return jnp.sum(weights * jnp.sin(f(*xs)))

        def program(xs: Any, ts: Any) -> Any:
            gradient = kit.grad(loss, tuple(range(len(xs))))
            return *kit.jvp(f, xs, ts), *kit.jvp(gradient, xs, ts)

        return program

    xs, ts = (tuple(x.part for x in part) for part in (operands, directions))
    Xs, Ts = (tuple(jnp.asarray(x.whole) for x in part) for part in (operands, directions))
    value, tangent, gradient, hessian = how(derivatives(mg, f, weights.part))(xs, ts)
    Value, Tangent, Gradient, Hessian = jax.jit(derivatives(jax, F, weights.whole))(Xs, Ts)
    close((value, tangent), (Value[result], Tangent[result]), rtol)
    for got, expected in ((gradient, Gradient), (hessian, Hessian)):
        parts = tuple(x[operand.mine] for x, operand in zip(expected, operands, strict=True))
        close(got, parts, rtol)
