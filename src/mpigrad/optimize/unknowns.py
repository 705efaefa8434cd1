"""Unknowns over ranks, replicated or sharded: as one vector, and their inner products."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpigrad.checkpoint import Stripes
from mpigrad.collective_errors import raise_on_all_ranks
from mpigrad.communicator import Communicator, resolve
from mpigrad.extend import as_array, root_of_sums, sums_of_squares
from mpigrad.grid import Grid
from mpigrad.operations import allgatherv, allreduce, bcast, jit, max_norm, reduce

__all__ = [
    "NOT_DECLARED",
    "ProgramCache",
    "Unknowns",
    "Vector",
    "clip_by_global_norm",
    "declared_kinds",
    "dot",
    "global_norm",
    "inner_products",
    "product",
    "require_declarations",
]

# ---- The declaration of unknowns: which leaves are replicated, and which are sharded over
# ranks


NOT_DECLARED = "not declared"

Kind = bool | Grid | None  # True or a grid if sharded, False if replicated, None if not declared


def declared_kinds(x0: Any, names: Sequence[str], sharded: Any, replicated: Any) -> list[Kind]:
    """Return how each leaf of x0 is declared by the two arguments of `minimize`."""
    kinds: list[Kind] = []
    both = _leaves("sharded", sharded, x0), _leaves("replicated", replicated, x0)
    for name, kind, same in zip(names, *both, strict=True):
        if not (kind is None or isinstance(kind, bool | Grid)):
            raise TypeError(f"minimize: sharded has {kind!r}, expected False, True or a Grid")
        if not (same is None or isinstance(same, bool)):
            raise TypeError(f"minimize: replicated has {same!r}, expected True or False")
        if same and kind:
            raise ValueError(
                f"minimize: {name} is declared both sharded and replicated. Give one of the two."
            )
        kinds.append(False if same else kind)
    return kinds


@dataclasses.dataclass(frozen=True)
class _Declared:
    """An entry of a declaration. To JAX it is a leaf, which None is not."""

    kind: Any


def _leaves(name: str, prefix: Any, x0: Any) -> list[Any]:
    entries = jax.tree.map(_Declared, prefix, is_leaf=lambda x: x is None)
    try:
        return [entry.kind for entry in jax.tree.leaves(jax.tree.broadcast(entries, x0))]
    except ValueError as error:
        raise ValueError(f"minimize: {name} is not a prefix of x0: {error}") from error


def require_declarations(everywhere: Sequence[Sequence[tuple[Any, ...]]]) -> None:
    """Raise an error if an array is not declared, from the descriptions of all ranks' leaves."""
    for rank, leaves in enumerate(everywhere):
        for i, (name, how, dtype, shape, *digest) in enumerate(leaves):
            if how != NOT_DECLARED:
                continue
            others = [other[i][4:] if i < len(other) else [] for other in everywhere]
            differs = next((r for r, other in enumerate(others) if [*other] != digest), None)
            bits = (
                "has the same values on all ranks"
                if differs is None
                else f"differs between ranks {rank} and {differs}"
            )
            raise ValueError(
                f"minimize: {name} is {dtype}{list(shape)} on rank {rank} of {len(everywhere)} and "
                f"is not declared sharded or replicated. It {bits}. Give sharded=True if each rank "
                "has its own rows, sharded=grid if each rank has its tile of a Grid, or "
                "replicated=True if every rank has the same whole array."
            )


# ---- The unknowns of an optimization as one vector that is distributed over the ranks ----


Vector = tuple[Any, ...]  # arrays: this rank's part of a vector
_DTYPES = (np.dtype("float32"), np.dtype("float64"))


class ProgramCache:
    """Base class of objects whose functions are compiled once."""

    def compiled(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """Return function(self, ...) as a compiled program of the further arguments.

        `options` are passed to `mpigrad.jit`.
        """
        programs: dict[Any, Any] = self.__dict__.setdefault("_programs", {})
        if function not in programs:
            programs[function] = jit(functools.partial(function, self), **options)
        return programs[function]  # type: ignore[no-any-return]


class Unknowns(ProgramCache):
    """Conversion between a pytree on every rank and a vector distributed over the ranks.

    In the vector every unknown lies on exactly one rank. The replicated leaves are joined to one
    array for each dtype, of which rank r holds the r-th stripe. Of the sharded leaves each rank
    holds its own part. Three things follow: every inner product is the sum over ranks of local
    inner products, the vectors of a method take 1/P of the memory, and a replicated leaf, which is
    gathered from the stripes, is bitwise equal on all ranks.

    Parameters
    ----------
    x0
        The pytree: floats and arrays of float32 or float64.
    sharded
        A wrong declaration gives wrong results without an error, because tiles that are taken for
        copies of one array are averaged. A pytree prefix of `x0`. True: each rank has its own rows
        of axis 0, in the order of the ranks. Their count may differ and may be zero. A `Grid`:
        each rank has its tile, in the last axes. False: the leaf is the same on all ranks. None:
        not declared. On several ranks an array must be declared, and a scalar is the same on all
        ranks.
    comm
        The ranks that share the unknowns.
    replicated
        A pytree prefix of `x0`. True: the leaf is the same on all ranks, as with sharded=False.
        False or None: `sharded` declares the leaf.

    Attributes
    ----------
    size
        Count of unknowns of all ranks.
    epsilon
        Machine epsilon of the coarsest dtype.

    Raises
    ------
    TypeError, ValueError
        On every rank, if a leaf is not a real array, its shape does not fit, the ranks differ, or
        an array is not declared on several ranks.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import mpigrad as mg
    >>> from mpigrad.optimize import Unknowns
    >>> x0 = {"a": jnp.zeros(3), "b": jnp.ones((2, 2))}
    >>> unknowns = Unknowns(x0, False, mg.default_communicator())
    >>> vector = unknowns.initial_vector(x0)
    >>> print(unknowns.size, unknowns.tree(vector)["b"].shape)
    7 (2, 2)
    """

    def __init__(
        self, x0: Any, sharded: Any, comm: Communicator, *, replicated: Any = None
    ) -> None:
        self.comm = comm
        common: list[tuple[Any, ...]] = []
        with raise_on_all_ranks(comm):
            x0 = jax.tree.map(_real, x0)
            paths, self.structure = jax.tree_util.tree_flatten_with_path(x0)
            self.names = ["x0" + jax.tree_util.keystr(path) for path, _ in paths]
            leaves = [leaf for _, leaf in paths]
            declared = declared_kinds(x0, self.names, sharded, replicated)
            for name, leaf, kind in zip(self.names, leaves, declared, strict=True):
                common.append(_description(name, leaf, kind, comm))
            self.kinds = [kind or False for kind in declared]
            if not leaves:
                raise ValueError(
                    "minimize: expected at least one unknown, got x0 without leaves. Add one."
                )
        _same(common, comm)
        self.shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
        self.replicated = [i for i, kind in enumerate(self.kinds) if kind is False]
        self.sharded = [i for i, kind in enumerate(self.kinds) if kind is not False]
        # The replicated leaves of each dtype, and the count of elements that each rank holds.
        self.joins: list[tuple[list[int], tuple[int, ...]]] = []
        for dtype in _DTYPES:
            members = [i for i in self.replicated if self.shapes[i].dtype == dtype]
            if members:
                n = sum(self.shapes[i].size for i in members)
                ends = [n * rank // comm.size for rank in range(comm.size + 1)]
                counts = tuple(b - a for a, b in itertools.pairwise(ends))
                self.joins.append((members, counts))
        self.epsilon = max(float(jnp.finfo(shape.dtype).eps) for shape in self.shapes)
        local = sum(self.shapes[i].size for i in self.sharded)
        self.size = sum(comm.mpi.allgather(local)) + sum(sum(counts) for _, counts in self.joins)

    def initial_vector(self, x0: Any) -> Vector:
        """Check a tree and return its vector (collective).

        Raises
        ------
        TypeError, ValueError
            On every rank, if the structure, shapes or dtypes are not those of the unknowns, or if a
            replicated leaf differs between ranks.
        """
        digests: list[str] = []
        with raise_on_all_ranks(self.comm):
            x0 = jax.tree.map(_real, x0)
            self.check_like(x0, "x0")
            leaves = jax.tree.leaves(x0)
            for i in self.replicated:
                digests.append(_digest(leaves[i]))
        everywhere = self.comm.mpi.allgather(digests)
        for rank, others in enumerate(everywhere):
            for i, ours, theirs in zip(self.replicated, everywhere[0], others, strict=True):
                if ours != theirs:
                    raise ValueError(
                        f"minimize: {self.names[i]} is not declared sharded, but it differs "
                        f"between ranks 0 and {rank}. Make it the same, for example with "
                        "mpigrad.bcast, or give sharded=True or its Grid."
                    )
        return self.compiled(Unknowns.vector)(x0)  # type: ignore[no-any-return]

    # ---- trees and vectors (these functions may be called in compiled programs) ----

    def vector(self, tree: Any) -> Vector:
        """Return this rank's part of the vector of a tree, without messages."""
        leaves = self.structure.flatten_up_to(tree)
        return self.join([leaves[i] for i in self.replicated], [leaves[i] for i in self.sharded])

    def tree(self, vector: Vector) -> Any:
        """Return the tree of a vector (collective)."""
        return self.unite(*self.split(vector))

    def join(self, replicated: Sequence[Any], sharded: Sequence[Any]) -> Vector:
        """Return the vector of the replicated and sharded leaves, without messages."""
        place = {i: jnp.asarray(leaf) for i, leaf in zip(self.replicated, replicated, strict=True)}
        parts = []
        for members, counts in self.joins:
            first = sum(counts[: self.comm.rank])
            whole = jnp.concatenate([place[i].ravel() for i in members])
            parts.append(whole[first : first + counts[self.comm.rank]])
        return (*parts, *(jnp.asarray(leaf) for leaf in sharded))

    def split(self, vector: Vector) -> tuple[list[Any], list[Any]]:
        """Return the replicated leaves, which are gathered, and the sharded leaves (collective)."""
        place: dict[int, Any] = {}
        for part, (members, counts) in zip(vector, self.joins, strict=False):
            whole = allgatherv(part, counts, comm=self.comm) if self.comm.size > 1 else part
            first = 0
            for i in members:
                shape = self.shapes[i]
                place[i] = whole[first : first + shape.size].reshape(shape.shape)
                first += shape.size
        return [place[i] for i in self.replicated], list(vector[len(self.joins) :])

    def unite(self, replicated: Sequence[Any], sharded: Sequence[Any]) -> Any:
        """Return the tree of the replicated and sharded leaves."""
        place = dict(zip(self.replicated, replicated, strict=True))
        place.update(zip(self.sharded, sharded, strict=True))
        return jax.tree.unflatten(self.structure, [place[i] for i in range(len(self.kinds))])

    # ---- reductions over all ranks ----

    def sum(self, numbers: Any) -> Any:
        """Return the sums over ranks of arrays, bitwise equal on all ranks (collective)."""
        return self.decide(lambda sums: sums, numbers)

    def decide(self, decision: Callable[[Any], Any], numbers: Any) -> Any:
        """Return decision(sums over ranks of arrays), computed on rank 0 (collective)."""
        if self.comm.size == 1:
            return decision(numbers)
        return bcast(decision(reduce(numbers, root=0, comm=self.comm)), 0, self.comm)

    def products(self, *pairs: tuple[Vector, Vector], also: Sequence[Any] = ()) -> Any:
        """Return inner products of vectors, then sums over ranks of `also` (collective).

        They are computed in float64, even if JAX has x64 disabled: squares of float32 values may
        overflow.
        """
        with jax.enable_x64(True):
            numbers = [jnp.asarray(number).astype("float64") for number in also]
            return self.sum(jnp.stack([*(dot(u, v) for u, v in pairs), *numbers]))

    def norm(self, x: Vector) -> float:
        """Return the two-norm of a vector (collective)."""
        return math.sqrt(float(self.compiled(Unknowns._square)(x)))

    def _square(self, x: Vector) -> Any:
        return self.products((x, x))[0]

    def largest(self, x: Vector) -> float:
        """Return the largest absolute value of a vector (collective)."""
        return float(self.compiled(Unknowns._largest)(x))

    def _largest(self, x: Vector) -> Any:
        return max_norm(x, self.comm)

    def visible_step(self, x: Vector, length: float) -> float:
        """Return the length of a first step from x: `length`, or longer if rounding hides it."""
        return max(length, 64 * self.epsilon * self.norm(x))

    # ---- for restart files ----

    def layout(self, leading: int = 0) -> tuple[Any, ...]:
        """Return the layout of a vector, with so many leading axes, for `checkpoint.Store`."""
        parts = [True] * len(self.joins) + [self.kinds[i] for i in self.sharded]
        return tuple(Stripes(leading) if kind is True else kind for kind in parts)

    def check_like(self, tree: Any, name: str) -> None:
        """Raise an error unless `tree` has the structure, shapes and dtypes of the unknowns."""
        structure = jax.tree.structure(tree)
        if structure != self.structure:
            raise ValueError(
                f"minimize: {name} has the structure {structure}, but the unknowns have the "
                f"structure {self.structure}. Give the same structure."
            )
        for shape, leaf in zip(self.shapes, jax.tree.leaves(tree), strict=True):
            other = jnp.shape(leaf), jnp.result_type(leaf)
            if other != (shape.shape, shape.dtype):
                raise ValueError(
                    f"minimize: {name} has an array {other[1]}{list(other[0])}, but the unknowns "
                    f"have {shape.dtype}{list(shape.shape)} there. Give the same shapes and dtypes."
                )


def dot(u: Vector, v: Vector) -> Any:
    """Return this rank's part of the inner product, in float64."""
    with jax.enable_x64(True):
        return functools.reduce(jnp.add, [product(a, b) for a, b in zip(u, v, strict=True)])


def product(a: Any, b: Any) -> Any:
    """Return ⟨a, b⟩, summed in float64 if float32 may overflow or underflow.

    The caller must have enabled x64.
    """
    plain = jnp.vdot(a, b).astype("float64")
    if a.dtype == np.dtype("float64"):
        return plain
    safe = (jnp.abs(plain) > 1e-20) & jnp.isfinite(plain)
    return jax.lax.cond(
        safe, lambda: plain, lambda: jnp.sum(a.astype("float64") * b.astype("float64"))
    )


def _real(leaf: Any) -> jax.Array:
    array = as_array(leaf)
    if array.dtype not in _DTYPES:
        raise TypeError(
            f"minimize: x0 has a leaf of dtype {array.dtype}, expected float32 or float64. Give a "
            "complex unknown as its real and imaginary parts, and keep fixed values out of x0."
        )
    return array


def _digest(leaf: jax.Array) -> str:
    return hashlib.sha256(np.asarray(leaf).tobytes()).hexdigest()


def _description(name: str, leaf: jax.Array, kind: bool | Grid | None, comm: Communicator) -> Any:
    """Return the properties that must be the same on all ranks, or those of an undeclared array."""
    if kind is None and leaf.ndim > 0 and comm.size > 1:
        return name, NOT_DECLARED, str(leaf.dtype), leaf.shape, _digest(leaf)
    if not kind:
        return name, "replicated", str(leaf.dtype), leaf.shape
    if kind is True:
        if leaf.ndim == 0:
            raise ValueError(
                f"minimize: {name} is a scalar, but sharded=True needs axis 0. Give sharded=False."
            )
        return name, "sharded along axis 0", str(leaf.dtype), leaf.shape[1:]
    if leaf.shape[max(0, leaf.ndim - kind.ndim) :] != kind.local_shape:
        raise ValueError(
            f"minimize: {name} has shape {leaf.shape} on rank {comm.rank}, but the tile of this "
            f"rank has shape {kind.local_shape}. Put the axes of the tile last."
        )
    return name, "sharded on a grid", str(leaf.dtype), leaf.shape[: leaf.ndim - kind.ndim]


def _same(common: list[tuple[Any, ...]], comm: Communicator) -> None:
    everywhere = comm.mpi.allgather(common)
    require_declarations(everywhere)
    for rank, others in enumerate(everywhere):
        if len(others) != len(everywhere[0]):
            raise ValueError(
                f"minimize: x0 has {len(everywhere[0])} leaves on rank 0 and {len(others)} on rank "
                f"{rank}. Give the same structure on all ranks."
            )
        for ours, theirs in zip(everywhere[0], others, strict=True):
            if ours != theirs:
                raise ValueError(
                    f"minimize: {_text(ours)} on rank 0, {_text(theirs)} on rank {rank}. Only "
                    "sharded axes may differ between ranks."
                )


def _text(description: tuple[Any, ...]) -> str:
    name, how, dtype, shape = description
    return f"{name} is {dtype}{list(shape)}, {how},"


# ---- Inner products of trees whose leaves may be replicated or sharded over ranks ----


def inner_products(
    *pairs: tuple[Any, Any], sharded: Any = False, comm: Communicator | None = None
) -> jax.Array:
    """Compute ⟨u, v⟩ of each pair of trees over all ranks, in one message (collective).

    It works in compiled programs and is differentiable.

    Parameters
    ----------
    pairs
        (u, v): two trees of real arrays of the same structure and shapes. All pairs have the
        structure of the first.
    sharded
        Without it, of a leaf that is distributed over the ranks only the part of rank 0 counts,
        and the result is wrong without an error. A prefix of the trees, as in `minimize`. True, or
        a Grid: the part of each rank counts. False: the leaf is replicated and counts once.
    comm
        The ranks that hold the trees. Default: the default communicator.

    Returns
    -------
    jax.Array
        Shape (len(pairs),), dtype of the leaves, the same on all ranks. In float32, products above
        1e38 are inf and products below 1e-38 are zero.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from mpigrad.optimize import inner_products
    >>> u, v = {"a": jnp.ones(3)}, {"a": jnp.arange(3.0)}
    >>> print(inner_products((u, v), (v, v)))
    [3. 5.]
    """
    comm = resolve(comm)

    def local(u: Any, v: Any) -> Any:
        def of_leaf(kind: Any, a: Any, b: Any) -> Any:
            counts = kind is not False or comm.rank == 0
            return jnp.vdot(a, b) if counts else 0 * jnp.vdot(a, b)

        kinds = jax.tree.broadcast(sharded, u, is_leaf=lambda x: isinstance(x, bool | Grid))
        return sum(jax.tree.leaves(jax.tree.map(of_leaf, kinds, u, v)))

    return allreduce(jnp.stack([local(u, v) for u, v in pairs]), comm=comm)


def global_norm(tree: Any, *, sharded: Any = False, comm: Communicator | None = None) -> jax.Array:
    """Compute the two-norm of a tree over all ranks (collective).

    It neither overflows nor underflows when its squares do.

    Parameters
    ----------
    tree
        A pytree of real arrays.
    sharded, comm
        As in `inner_products`.

    Returns
    -------
    jax.Array
        A scalar, the same on all ranks.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from mpigrad.optimize import global_norm
    >>> print(global_norm({"a": jnp.full(1, 3.0), "b": jnp.full(1, 4.0)}))
    5.0
    """
    comm = resolve(comm)
    dtype = jnp.result_type(*jax.tree.leaves(tree))

    def of_leaf(kind: Any, leaf: Any) -> Any:
        sums = sums_of_squares(jnp.asarray(leaf, dtype))
        return sums if kind is not False or comm.rank == 0 else 0 * sums

    kinds = jax.tree.broadcast(sharded, tree, is_leaf=lambda x: isinstance(x, bool | Grid))
    total = sum(jax.tree.leaves(jax.tree.map(of_leaf, kinds, tree)), jnp.zeros(3, dtype))
    return root_of_sums(*allreduce(total, comm=comm))


def clip_by_global_norm(
    tree: Any, largest: float, *, sharded: Any = False, comm: Communicator | None = None
) -> Any:
    """Scale a tree so that its two-norm over all ranks is at most `largest` (collective).

    Parameters
    ----------
    tree
        A pytree of real arrays, such as a gradient.
    largest
        The largest two-norm. A tree with a smaller norm is returned unchanged.
    sharded, comm
        As in `inner_products`.

    Returns
    -------
    A tree of the same structure, shapes and dtypes.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from mpigrad.optimize import clip_by_global_norm
    >>> print(clip_by_global_norm(jnp.array([3.0, 4.0]), 1.0))
    [0.6 0.8]
    """
    norm = global_norm(tree, sharded=sharded, comm=comm)
    factor = jnp.where(norm > largest, largest / norm, 1.0)
    return jax.tree.map(lambda leaf: leaf * factor.astype(leaf.dtype), tree)
