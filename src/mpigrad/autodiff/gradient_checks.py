"""Checks of gradients: the dot test and the Taylor test, and the test of several rank counts."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpigrad.autodiff.transforms import Loss, jvp, value_and_grad, vjp
from mpigrad.collective_errors import raise_on_all_ranks
from mpigrad.communicator import Communicator, resolve
from mpigrad.operations.checks import assert_replicated
from mpigrad.operations.jit import jit
from mpigrad.operations.local_programs import as_array, jit_local

__all__ = [
    "DotTest",
    "RankTest",
    "TaylorTest",
    "assert_replicated",
    "dot_test",
    "largest_difference",
    "rank_test",
    "taylor_test",
]


@dataclass(frozen=True)
class DotTest:
    """The result of `dot_test`.

    Attributes
    ----------
    forward, reverse
        ⟨Fẋ, ȳ⟩ and ⟨ẋ, Fᵀȳ⟩, summed over all ranks: the real parts, if arrays are complex.
    error
        Their difference, relative to the larger of the sums of absolute values.
    """

    forward: float | complex
    reverse: float | complex
    error: float


@dataclass(frozen=True)
class TaylorTest:
    """The result of `taylor_test`: remainders of the Taylor expansion, and their rates.

    Attributes
    ----------
    steps
        The steps. Each is half of the step before.
    remainders_with, rates_with
        With the gradient term. The rates should tend to 2.
    remainders_without, rates_without
        Without the gradient term. The rates should tend to 1.
    """

    steps: tuple[float, ...]
    remainders_with: tuple[float, ...]
    remainders_without: tuple[float, ...]
    rates_with: tuple[float, ...]
    rates_without: tuple[float, ...]


@dataclass(frozen=True)
class RankTest:
    """The result of `rank_test`.

    Attributes
    ----------
    ranks
        The numbers of ranks.
    values
        The value of the objective on each of them.
    errors
        The largest difference of value and gradient from those on the first number of ranks,
        relative to the largest entry of the array, for each number.
    """

    ranks: tuple[int, ...]
    values: tuple[float, ...]
    errors: tuple[float, ...]


def _random_like(tree: Any, generator: np.random.Generator) -> Any:
    def one(leaf: Any) -> Any:
        dtype, shape = jnp.result_type(leaf), jnp.shape(leaf)
        if not jnp.issubdtype(dtype, jnp.inexact):
            return np.zeros(shape, jax.dtypes.float0)
        x = generator.standard_normal(shape)
        if jnp.issubdtype(dtype, jnp.complexfloating):
            x = x + 1j * generator.standard_normal(shape)
        return as_array(x, dtype)

    return jax.tree.map(one, tree)


@jit_local
def _moved(h: Any, x: Any, direction: Any) -> Any:
    return x + jnp.asarray(h, jnp.result_type(x)) * direction


def _inner(a: Any, b: Any) -> float:
    """Return the real part of the inner product without conjugate: JAX's transposition keeps it.

    The imaginary part is kept by maps that are linear over the complex numbers only.
    """
    total = 0.0
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        if np.asarray(x).dtype != jax.dtypes.float0:
            wide = np.result_type(np.asarray(x).dtype, np.float64)
            total += np.sum(np.asarray(x).astype(wide) * np.asarray(y).astype(wide))
    return float(np.real(total))


def dot_test(
    f: Callable[..., Any],
    *primals: Any,
    comm: Communicator | None = None,
    seed: int = 0,
    rtol: float | None = None,
) -> DotTest:
    """Check that reverse mode is the transpose of forward mode, over all ranks.

    Let F be the derivative of `f` on the product space of all ranks' arrays. The test compares ⟨F
    ẋ, ȳ⟩ with ⟨ẋ, Fᵀ ȳ⟩ for random tangents ẋ and cotangents ȳ, which are different on every rank.

    Parameters
    ----------
    f
        Function of arrays or pytrees, with messages. Every rank calls `dot_test`.
    primals
        The arguments at which `f` is differentiated.
    comm
        The communicator over which the products are summed. Default: the communicator of the
        enclosing `with`, or all ranks.
    seed
        The seed of the random numbers.
    rtol
        The largest relative difference. Default: 1e3 times the machine epsilon of the coarsest
        dtype. A function that solves systems iteratively needs the tolerance of its solver.

    Returns
    -------
    DotTest
        Both products and their relative difference.

    Raises
    ------
    AssertionError
        On every rank, with both products, if they differ by more than `rtol`.
    ValueError
        If no rank has a float among its arguments, or among its results.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import mpigrad as mg
    >>> result = mg.dot_test(lambda x: jnp.sin(mg.allreduce(x)), jnp.arange(3.0))
    >>> result.error < 1e-4
    True
    """
    comm = resolve(comm)
    generator = np.random.default_rng([seed, comm.rank])
    _check_floats(comm, "argument", primals)
    tangents = tuple(_random_like(x, generator) for x in primals)
    y, y_dot = jit(lambda x, x_dot: jvp(f, x, x_dot))(primals, tangents)
    _check_floats(comm, "result", y)
    y_bar = _random_like(y, generator)
    jax.block_until_ready(y_dot)
    comm.mpi.Barrier()  # a wildcard receive must not take a message of the next run
    x_bar = jit(lambda x, y_bar: vjp(f, *x)[1](y_bar))(primals, y_bar)
    parts = (
        _inner(y_dot, y_bar),
        _inner(tangents, x_bar),
        _inner(jax.tree.map(_absolute, y_dot), jax.tree.map(_absolute, y_bar)),
        _inner(jax.tree.map(_absolute, tangents), jax.tree.map(_absolute, x_bar)),
    )
    everywhere = np.asarray(comm.mpi.allreduce(np.asarray(parts)))
    forward, reverse = (float(x) for x in everywhere[:2])
    # Relative to the sum of absolute values: the products themselves may cancel.
    scale = max(everywhere[2], everywhere[3])
    error = abs(forward - reverse) / scale if scale > 0 else abs(forward - reverse)
    limit = rtol
    if limit is None:
        floats = [
            jnp.finfo(jnp.result_type(leaf)).eps
            for leaf in jax.tree.leaves((primals, y))
            if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)
        ]
        local = 1e3 * float(max(floats, default=np.finfo(np.float64).eps))
        limit = max(comm.mpi.allgather(local))
    if not error <= limit:
        raise AssertionError(
            f"dot_test: <F x', y'> and <x', F^T y'> must be equal, got {forward} and {reverse} "
            f"over {comm.size} ranks. They differ by {error:.2e} of the sum of absolute values, "
            f"and rtol is {limit:.1e}. If f solves systems iteratively, pass the tolerance of the "
            "solver as rtol. Otherwise test the parts of f separately."
        )
    return DotTest(forward, reverse, float(error))


def _check_floats(comm: Communicator, what: str, tree: Any) -> None:
    """Raise a ValueError on every rank if no rank has an array that can be differentiated."""
    dtypes = [jnp.result_type(leaf) for leaf in jax.tree.leaves(tree)]
    if not comm.mpi.allreduce(any(jnp.issubdtype(d, jnp.inexact) for d in dtypes)):
        raise ValueError(
            f"dot_test: expected a float {what}, got {', '.join(map(str, dtypes)) or 'no array'}, "
            "which has no derivative. Pass floats, for example jnp.arange(3.0)."
        )


def _absolute(x: Any) -> Any:
    return x if np.asarray(x).dtype == jax.dtypes.float0 else jnp.abs(x)


def taylor_test(
    f: Callable[[Any], Any],
    x: Any,
    direction: Any = None,
    *,
    loss: Loss = "share",
    replicated: bool = False,
    comm: Communicator | None = None,
    step: float = 1e-2,
    halvings: int = 4,
    seed: int = 0,
) -> TaylorTest:
    """Check the gradient of an objective by the order of its Taylor remainders, over all ranks.

    |f(x + h v) − f(x)| falls like h, and |f(x + h v) − f(x) − h ⟨∇f, v⟩| falls like h².

    Parameters
    ----------
    f
        Objective of one array or pytree.
    x
        The point of expansion, of each rank, or the same on all ranks if `replicated`.
    direction
        The direction v. Default: random normal numbers.
    loss
        "share" to sum the results of all ranks, or "replicated", as in `value_and_grad`.
    replicated
        True if `x` is the same on all ranks and counts as one argument.
    comm
        The communicator over which values are summed. Default: the communicator of the enclosing
        `with`, or all ranks.
    step
        The largest h.
    halvings
        The number of times that h is halved.
    seed
        The seed of the random direction.

    Returns
    -------
    TaylorTest
        Steps, remainders and rates.

    Raises
    ------
    AssertionError
        On every rank, unless the last rate is within 0.2 of 2, and above 0.8 without the gradient.
        A remainder of the size of rounding errors passes (an objective that is linear along v).

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import mpigrad as mg
    >>> result = mg.taylor_test(lambda x: jnp.sum(jnp.cos(mg.allreduce(x))), jnp.arange(3.0))
    >>> abs(result.rates_with[0] - 2) < 0.2
    True
    """
    comm = resolve(comm)
    if direction is None:
        generator = np.random.default_rng([seed, 0 if replicated else comm.rank])
        direction = _random_like(x, generator)
    value_and_gradient = value_and_grad(
        f, loss=loss, replicated=(0,) if replicated else (), comm=comm
    )

    def global_value(h: float) -> float:
        value = f(jax.tree.map(functools.partial(_moved, h), x, direction))
        return float(value) if loss == "replicated" else comm.mpi.allreduce(float(value))

    value, gradient = value_and_gradient(x)
    slope = _inner(gradient, direction)
    if not replicated:
        slope = comm.mpi.allreduce(slope)
    base = float(value)
    steps = [step * 0.5**k for k in range(halvings + 1)]
    changes = [global_value(h) - base for h in steps]
    without = [abs(c) for c in changes]
    with_gradient = [abs(c - h * slope) for h, c in zip(steps, changes, strict=True)]
    result = TaylorTest(
        tuple(steps),
        tuple(with_gradient),
        tuple(without),
        _rates(with_gradient),
        _rates(without),
    )
    eps = max(
        (
            float(jnp.finfo(jnp.result_type(leaf)).eps)
            for leaf in jax.tree.leaves(x)
            if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)
        ),
        default=float(np.finfo(np.float64).eps),
    )
    rounding = 1e3 * eps * max(abs(base), abs(slope) * step)
    good = with_gradient[-1] <= rounding or abs(result.rates_with[-1] - 2) < 0.2
    # If the slope along v is zero, the plain remainder is of second order, too.
    good &= without[-1] <= rounding or result.rates_without[-1] > 0.8
    if not comm.mpi.allreduce(int(not good)) == 0:
        raise AssertionError(
            f"taylor_test: expected the rates 2 with the gradient and 1 without, got "
            f"{_short(result.rates_with)} and {_short(result.rates_without)} over {comm.size} "
            f"ranks (value {base:.6g}, slope {slope:.6g}, remainders {_short(with_gradient)}). "
            "Check the gradient by dot_test, or take float64 or a larger step."
        )
    return result


def _rates(remainders: list[float]) -> tuple[float, ...]:
    return tuple(
        float(np.log2(a / b)) if a > 0 and b > 0 else float("inf")
        for a, b in itertools.pairwise(remainders)
    )


def _short(numbers: Any) -> str:
    return "[" + ", ".join(f"{n:.3g}" for n in numbers) + "]"


def rank_test(
    f: Callable[..., Any],
    *arguments: Any,
    ranks: Sequence[int] = (1, 2, 4),
    loss: Loss = "share",
    rtol: float | None = None,
    comm: Communicator | None = None,
) -> RankTest:
    """Check that value and gradient do not depend on the number of ranks (collective).

    `f` runs on the first n ranks for each n, with a communicator of them as the default.

    Parameters
    ----------
    f
        Objective of arrays or pytrees. It divides them among the ranks of the default communicator
        itself, and makes its grids, matrices and meshes in the call.
    arguments
        Its arguments, the same on all ranks.
    ranks
        The numbers of ranks. The first one is the reference. Those that are larger than the number
        of ranks of `comm` are left out.
    loss
        "share" to sum the results of all ranks, or "replicated", as in `value_and_grad`.
    rtol
        The largest difference, relative to the largest entry of each array. Default: 1e3 times the
        machine epsilon of the coarsest dtype.
    comm
        The communicator whose ranks are used. Default: the communicator of the enclosing `with`, or
        all ranks.

    Returns
    -------
    RankTest
        The values and the largest differences.

    Raises
    ------
    ValueError
        On all ranks: if less than two of the numbers of ranks are left.
    AssertionError
        On all ranks, if value or gradient differ by more than `rtol`. The text names the array, the
        entry and the rank.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import mpigrad as mg
    >>> def mean(x):  # each rank has every n-th number
    ...     comm = mg.default_communicator()
    ...     return mg.allreduce(jnp.sum(x[comm.rank :: comm.size] ** 2)) / x.size
    >>> if mg.default_communicator().size > 1:
    ...     result = mg.rank_test(mean, jnp.arange(12.0), loss="replicated")
    """
    comm = resolve(comm)
    counts = tuple(n for n in ranks if 1 <= n <= comm.size)
    if len(counts) < 2:
        raise ValueError(
            f"rank_test: expected two of the numbers of ranks {tuple(ranks)} to be at most "
            f"{comm.size}, the number of ranks here. Start more ranks."
        )
    everything = tuple(range(len(arguments)))
    reference: list[tuple[str, np.ndarray]] = []
    limit, values, errors, problem = 0.0, [], [], ""
    for n in counts:
        part, leaves = comm.split(0 if comm.rank < n else None), []
        with raise_on_all_ranks(comm):
            if part:
                with part:
                    run = value_and_grad(f, everything, loss=loss, replicated=everything, comm=part)
                    result = jax.tree_util.tree_leaves_with_path(run(*arguments))
                leaves = [(jax.tree_util.keystr(path), np.asarray(leaf)) for path, leaf in result]
        if part:
            part.free()
        if n == counts[0]:
            reference = comm.mpi.bcast(leaves)
            limit = _rounding(reference) if rtol is None else rtol
        pairs = zip(reference, leaves, strict=True) if leaves else ()
        differences = [
            (*largest_difference(leaf, expected), name) for (name, expected), (_, leaf) in pairs
        ]
        worst = max(differences, key=lambda difference: difference[0], default=None)
        by_rank = comm.mpi.allgather(worst)[:n]
        rank = max(range(n), key=lambda r: by_rank[r][0])
        error, index, here, expected, name = by_rank[rank]
        values.append(float(comm.mpi.bcast(leaves[0][1] if leaves else None)))
        errors.append(error)
        if not (error <= limit or problem):
            problem = (
                f"rank_test: on {n} ranks, rank {rank}, {_entry(name, index)} is {here:.10g}, but "
                f"{expected:.10g} on {counts[0]}: a difference of {error:.2g} of the largest "
                f"entry, with rtol {limit:.2g}. Look for a sum over ranks that is missing or made "
                "twice, and test the parts by dot_test."
            )
    if problem:
        raise AssertionError(problem)
    return RankTest(counts, tuple(values), tuple(errors))


def largest_difference(
    array: np.ndarray, expected: np.ndarray
) -> tuple[float, tuple[int, ...], complex, complex]:
    """Return the largest difference over the largest entry, its place, and both entries there.

    If all expected entries are zero, the difference itself.
    """
    if not expected.size:
        return 0.0, (), 0.0, 0.0
    kind = np.result_type(array, expected, np.float64)  # also of booleans and integers
    a, b = array.astype(kind), expected.astype(kind)
    with np.errstate(invalid="ignore"):
        distance = np.abs(a - b)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    distance = np.where(same, 0.0, np.where(np.isnan(distance), np.inf, distance))
    index = tuple(int(i) for i in np.unravel_index(int(np.argmax(distance)), distance.shape))
    scale = float(np.max(np.abs(b)))
    error = float(distance[index]) / (scale if 0 < scale < np.inf else 1.0)
    return error, index, array[index].item(), expected[index].item()


def _rounding(leaves: list[tuple[str, np.ndarray]]) -> float:
    return max(1e3 * float(np.finfo(leaf.dtype).eps) for _, leaf in leaves if leaf.size)


def _entry(name: str, index: tuple[int, ...]) -> str:
    """Return the words for an entry of a value and its gradients."""
    if name == "[0]":
        return "the value"
    place = f"[{', '.join(map(str, index))}]" if index else ""
    return f"the gradient{name.removeprefix('[1]')}{place}"
