"""Sparse sums of products: one primitive whose derivatives are the primitive itself.

A trilinear contraction is a list of triples of entries of three arrays: `first`, the pool (own
entries, followed by ghosts, as two arrays) and `last`. The sum of first * pool * last over all
triples is linear in each array. The primitive is the derivative of that sum in one array, given the
others: for a matrix A x from (values, x), and its adjoints Aᵀ ȳ from (values, ȳ) and ȳ_i x_j from
(x, ȳ). So jvp, transpose and derivatives of any order come from one rule each. The native library
computes it, and keeps the lists, which would otherwise be constants of each compiled program.
"""

from __future__ import annotations

import ctypes
import functools
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpigrad.extend import Activity, NativeCall, as_array, is_top_level, native_library, primitive

__all__ = [
    "TrilinearContraction",
    "add_up",
    "contract",
    "count_contractions",
    "kernels_library",
    "multiply_patterns",
    "outer",
    "positions",
    "select",
]

FIRST, POOL, LAST = 0, 1, 2
_MATRIX, _PAIRS, _SELECTION = 0, 1, 2
_TOO_MANY = "Pattern: {} on one rank are more than 32 bits can count (2**31 - 1). Use more ranks."


@functools.cache
def kernels_library() -> Any:
    """Return the native library of sparse products, or raise an error."""
    lib = native_library("mpigrad_kernels")
    if lib is None:
        raise ImportError(
            "mpigrad.sparse: the native library of sparse products is missing from this "
            "installation. Build it with `make setup`, or `pip install .`."
        )
    lib.mpigrad_kernels_create.restype = ctypes.c_int64
    lib.mpigrad_kernels_create.argtypes = [ctypes.c_void_p]
    lib.mpigrad_kernels_destroy.argtypes = [ctypes.c_int64]
    lib.mpigrad_kernels_count.restype = ctypes.c_int64
    lib.mpigrad_kernels_multiply_patterns.restype = ctypes.c_int64
    lib.mpigrad_kernels_multiply_patterns.argtypes = [ctypes.c_int64, *[ctypes.c_void_p] * 7]
    return lib


def multiply_patterns(
    starts: np.ndarray, position: np.ndarray, pool_starts: np.ndarray, pool_columns: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the entries of a product of matrices.

    Parameters
    ----------
    starts, position
        The left matrix: the start of each row, and the row of the pool for each entry.
    pool_starts, pool_columns
        The rows of the right matrix.

    Returns
    -------
    The start of each row, the columns in row order, and for each pair of entries, in order, the
    entry to which their product is added.
    """
    meetings = int(np.diff(pool_starts)[position].sum())
    inputs = [
        np.ascontiguousarray(a, np.int64) for a in (starts, position, pool_starts, pool_columns)
    ]
    product_starts, columns = np.empty(len(starts), np.int64), np.empty(meetings, np.int64)
    target = np.empty(meetings, np.int32)
    arrays = (*inputs, product_starts, columns, target)
    entries = kernels_library().mpigrad_kernels_multiply_patterns(
        len(starts) - 1, *(a.ctypes.data for a in arrays)
    )
    if entries < 0:
        raise ValueError(_TOO_MANY.format("the product's entries"))
    return product_starts, columns[:entries].copy(), target


def count_contractions() -> int:
    """Return the number of contractions that the native library keeps now."""
    return kernels_library().mpigrad_kernels_count()


class _Native(ctypes.Structure):
    """The layout of a structure in native/sparse/kernels.cc."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("kind", "first", "pool", "last")),
        *((name, ctypes.c_void_p) for name in ("starts", "order", "position")),
        *((name, ctypes.c_void_p) for name in ("pool_starts", "target")),
        ("rows", ctypes.c_int64),
    )


class _Handle:
    """A handle of a contraction in the native library, which is freed with this object.

    Compiled programs keep it alive, but it must not keep them alive.
    """

    def __init__(
        self, owner: TrilinearContraction, kind: int, arrays: Mapping[str, np.ndarray | None]
    ):
        lib = kernels_library()
        self.owner, self.kind, self.arrays = weakref.ref(owner), kind, arrays
        self.sizes = owner.sizes
        addresses = {k: None if a is None else a.ctypes.data for k, a in arrays.items()}
        starts = arrays.get("starts")
        rows = 0 if starts is None else len(starts) - 1
        native = _Native(
            kind=kind,
            first=self.sizes[FIRST],
            pool=self.sizes[POOL],
            last=self.sizes[LAST],
            rows=rows,
            **addresses,
        )
        self.number = lib.mpigrad_kernels_create(ctypes.addressof(native))
        weakref.finalize(self, lib.mpigrad_kernels_destroy, self.number).atexit = False

    def others(self, out: int) -> list[int]:
        """Return the operands of the derivative in `out`."""
        roles = (POOL, LAST) if self.kind == _SELECTION else (FIRST, POOL, LAST)
        return [role for role in roles if role != out]

    def meetings(self) -> dict[int, np.ndarray]:
        """Return for each array the positions in all triples, with one past the end for zero."""
        a = self.arrays
        position = a["position"]
        assert position is not None
        if self.kind == _SELECTION:
            past = np.where(position < 0, self.sizes[POOL], position)
            return {POOL: past, LAST: np.arange(len(position))}
        starts, order = a["starts"], a["order"]
        assert starts is not None
        first = np.arange(len(position)) if order is None else order
        if self.kind == _MATRIX:
            rows = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
            return {FIRST: first, POOL: position, LAST: rows}
        pool_starts, target = a["pool_starts"], a["target"]
        assert pool_starts is not None and target is not None
        counts = np.diff(pool_starts)[position]
        within = np.arange(len(target)) - np.repeat(np.cumsum(counts) - counts, counts)
        return {
            FIRST: np.repeat(first, counts),
            POOL: np.repeat(pool_starts[position], counts) + within,
            LAST: target,
        }


def positions(array: np.ndarray, what: str = "entries") -> np.ndarray:
    """Convert positions to 32 bits, which halves the memory that a product reads."""
    if array.size and int(array.max()) >= 2**31:
        raise ValueError(_TOO_MANY.format(what))
    return np.ascontiguousarray(array, np.int32)


class TrilinearContraction:
    """A list of triples of entries of first, pool and last."""

    def __init__(self, kind: int, sizes: tuple[int, int, int], **arrays: np.ndarray | None) -> None:
        if max(sizes) >= 2**31:
            positions(np.array([max(sizes)]), "entries")
        self.sizes = sizes
        self.handle = _Handle(
            self, kind, {k: None if a is None else positions(a, k) for k, a in arrays.items()}
        )
        self.programs: dict[Any, Any] = {}  # compiled for calls outside any trace

    @classmethod
    def matrix(
        cls, starts: np.ndarray, position: np.ndarray, n_pool: int, order: np.ndarray | None
    ) -> TrilinearContraction:
        """Make the contraction (values, x) -> A x.

        Parameters
        ----------
        starts, position
            The start of each row, and each entry's position in the pool, in row order.
        order
            Each entry's position among the values. None: in row order.
        """
        sizes = (len(position), n_pool, len(starts) - 1)
        return cls(_MATRIX, sizes, starts=starts, position=position, order=order)

    @classmethod
    def pairs(
        cls,
        row: np.ndarray,
        order: np.ndarray | None,
        pool_starts: np.ndarray,
        target: np.ndarray,
        n_last: int,
    ) -> TrilinearContraction:
        """Make the contraction (values of A, values of B) -> values of A B.

        Parameters
        ----------
        row, order
            For each entry of A, in row order, its row of the pool and its position in `first`.
        pool_starts
            The start of each row in the pool.
        target
            The entry to which each product is added, products of the first entry of A first.
        """
        starts = np.array([0, len(row)])
        sizes = (len(row), int(pool_starts[-1]), n_last)
        arrays = {"position": row, "pool_starts": pool_starts, "target": target, "order": order}
        return cls(_PAIRS, sizes, starts=starts, **arrays)

    @classmethod
    def selection(cls, position: np.ndarray, n_pool: int) -> TrilinearContraction:
        """Make the selection pool -> pool[position], with zero for the position -1."""
        return cls(_SELECTION, (0, n_pool, len(position)), position=position, order=None)

    def __repr__(self) -> str:
        return f"TrilinearContraction(sizes={self.sizes})"


def select(
    structure: TrilinearContraction,
    own: Any,
    rest: Any = None,
    lead: tuple[int, ...] | None = None,
) -> jax.Array:
    """Return the selected entries of the pool: (n, ...) -> (len(position), ...) or (*lead, ...)."""
    return contract(structure, None, own, rest, lead)


def add_up(
    structure: TrilinearContraction, values: Any, tail: Any = None, split: int | None = None
) -> Any:
    """Return the adjoint of a selection: the sum of values (len(position), *tail) at each entry.

    Values of another shape are read in the order of their memory. With `split` the sums are two
    arrays, the first of this length.
    """
    values = as_array(values)
    tail = values.shape[1:] if tail is None else tail
    key = ("add_up", tail, split)
    if is_top_level() and not jax.config.jax_disable_jit:  # type: ignore[attr-defined]
        if key not in structure.programs:
            run = functools.partial(_add_up, structure.handle, tail, split)
            structure.programs[key] = jax.jit(run)
        return structure.programs[key](values)
    return _add_up(structure.handle, tail, split, values)


def _add_up(handle: _Handle, tail: tuple[int, ...], split: int | None, values: jax.Array) -> Any:
    first = handle.sizes[POOL] if split is None else split
    flat = values.reshape(1, handle.sizes[LAST], math.prod(tail))
    parts = contract_p.bind(flat, structure=handle, out=POOL, split=first)
    sums, rest = (part.reshape(part.shape[1], *tail) for part in parts)
    return sums if split is None else (sums, rest)


def outer(structure: TrilinearContraction, own: Any, last: Any) -> jax.Array:
    """Return the derivative in `first`: for a matrix, y_i x_j at each entry of (x, y).

    Parameters
    ----------
    own
        The pool, as one array without columns. For a matrix, x at own and ghost columns.
    last
        For a matrix, y at own rows, in the same dtype.
    """
    operands = as_array(own), as_array(last)
    if is_top_level() and not jax.config.jax_disable_jit:  # type: ignore[attr-defined]
        if "outer" not in structure.programs:
            structure.programs["outer"] = jax.jit(functools.partial(_outer, structure.handle))
        return structure.programs["outer"](*operands)
    return _outer(structure.handle, *operands)


def _outer(handle: _Handle, own: jax.Array, last: jax.Array) -> jax.Array:
    pool = own.reshape(1, -1, 1), jnp.zeros((1, 0, 1), own.dtype)
    results = contract_p.bind(
        *pool, last.reshape(1, -1, 1), structure=handle, out=FIRST, split=len(own)
    )
    return results[0].reshape(-1)


def contract(
    structure: TrilinearContraction,
    first: Any,
    own: Any,
    rest: Any = None,
    lead: tuple[int, ...] | None = None,
) -> jax.Array:
    """Return the derivative in `last`: for a matrix, A x.

    Parameters
    ----------
    first
        Shape (n,), or None for a selection.
    own, rest
        The parts of the pool, shapes (m, ...) and (m', ...). `rest` may be None.
    lead
        The first axes of the result. Default: one axis.
    """
    own = as_array(own)
    operands = [own] if first is None else [as_array(first), own]
    operands += [] if rest is None else [as_array(rest)]
    if is_top_level() and not jax.config.jax_disable_jit:  # type: ignore[attr-defined]
        key = (first is None, rest is None, lead)
        if key not in structure.programs:
            structure.programs[key] = jax.jit(functools.partial(_contract, structure.handle, *key))
        return structure.programs[key](*operands)
    return _contract(structure.handle, first is None, rest is None, lead, *operands)


def _contract(
    handle: _Handle, no_first: bool, no_rest: bool, lead: tuple[int, ...] | None, *operands: Any
) -> jax.Array:
    dtype = functools.reduce(jnp.promote_types, (x.dtype for x in operands))
    arrays = [x.astype(dtype) for x in operands]
    first = [] if no_first else [arrays.pop(0).reshape(1, -1, 1)]
    local = arrays[0]
    tail = local.shape[1:]
    rest = jnp.zeros((0, *tail), dtype) if no_rest else arrays[1]
    if len(local) + len(rest) != handle.sizes[POOL]:
        raise ValueError(
            f"mpigrad.sparse: got {len(local)} own entries and {len(rest)} ghosts, but the pattern "
            f"has {handle.sizes[POOL]} in total. Give this rank's part of the vector."
        )
    pool = [x.reshape(1, len(x), math.prod(tail)) for x in (local, rest)]
    (y,) = contract_p.bind(*first, *pool, structure=handle, out=LAST, split=len(local))
    return y.reshape(*(lead or (handle.sizes[LAST],)), *tail)


# ---- the primitive: (batch, length, width) arrays other than `out` -> the parts of `out` ----
# The batch of an operand is that of all, or 1. `split` is the length of the pool's first part.


def _grouped(operands: Sequence[Any], roles: Sequence[int]) -> dict[int, list[Any]]:
    rest = iter(operands)
    return {role: [next(rest) for _ in range(2 if role == POOL else 1)] for role in roles}


def _bind(groups: Mapping[int, Sequence[Any]], **params: Any) -> list[Any]:
    return contract_p.bind(*(x for role in sorted(groups) for x in groups[role]), **params)


def _shapes(*operands: Any, structure: _Handle, out: int, split: int) -> list[Any]:
    batches = [x.shape[0] for x in operands]
    batch = 0 if 0 in batches else max(batches)
    width = 1 if out == FIRST else operands[-1].shape[2]  # that of the pool or of `last`
    size = structure.sizes[out]
    lengths = (split, size - split) if out == POOL else (size,)
    return [jax.ShapeDtypeStruct((batch, n, width), operands[0].dtype) for n in lengths]


def _reference(*operands: Any, structure: _Handle, out: int, split: int) -> list[Any]:
    """Compute the same in JAX, for devices and dtypes without a native kernel."""
    meetings = structure.meetings()
    groups = _grouped(operands, structure.others(out))
    factors = []
    for role, parts in groups.items():
        x = jnp.concatenate(parts, axis=1)
        factors.append(x.at[:, meetings[role]].get(mode="fill", fill_value=0))
    product = functools.reduce(jnp.multiply, factors)
    if out == FIRST:
        product = product.sum(2, keepdims=True)
    zeros = jnp.zeros((product.shape[0], structure.sizes[out], product.shape[2]), product.dtype)
    y = zeros.at[:, meetings[out]].add(product, mode="drop")
    return [y[:, :split], y[:, split:]] if out == POOL else [y]


def _programs(params: dict[str, Any]) -> dict[Any, Any]:
    """Return the programs outside any trace, which live as long as the contraction."""
    owner = params["structure"].owner()
    return {} if owner is None else owner.programs


def _differentiate(
    operands: Sequence[Any], params: dict[str, Any], activity: Activity
) -> tuple[list[Any], Any, Callable[..., list[Any]]]:
    roles = params["structure"].others(params["out"])
    results = contract_p.bind(*operands, **params)

    def tangent(operands: Any, tangents: Sequence[Any]) -> list[Any]:
        groups, directions = _grouped(operands, roles), _grouped(tangents, roles)
        moved: list[list[Any]] = []
        for role in roles:
            if not all(t is None for t in directions[role]):
                direction = [
                    jnp.zeros(x.shape, x.dtype) if t is None else t
                    for x, t in zip(groups[role], directions[role], strict=True)
                ]
                moved.append(_bind({**groups, role: direction}, **params))
        if not moved:
            return [None] * len(results)
        return [sum(parts[1:], parts[0]) for parts in zip(*moved, strict=True)]

    return results, operands, tangent


def _transpose(
    cotangents: Sequence[Any],
    operands: Sequence[Any],
    linear: tuple[bool, ...],
    params: dict[str, Any],
) -> list[Any]:
    params = dict(params)
    out = params.pop("out")
    roles = params["structure"].others(out)
    groups, flags = _grouped(operands, roles), _grouped(linear, roles)
    role_of_x = next(role for role in roles if any(flags[role]))
    others = {role: groups[role] for role in roles if role != role_of_x}
    others[out] = list(cotangents)
    results = _bind(others, out=role_of_x, **params)
    back = {role: [None] * len(group) for role, group in groups.items()}
    for k, (x, ct) in enumerate(zip(groups[role_of_x], results, strict=True)):
        if flags[role_of_x][k]:  # an operand shared by all batches gets the sum
            shared = x.shape[0] == 1 and ct.shape[0] != 1
            back[role_of_x][k] = ct.sum(0, keepdims=True) if shared else ct
    return [ct for role in roles for ct in back[role]]


def _batch(args: Sequence[Any], dims: Sequence[Any], params: dict[str, Any]) -> Any:
    n = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    arrays = [
        x[None] if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(args, dims, strict=True)
    ]
    inner = max(x.shape[1] for x in arrays)
    operands = []
    for x, d in zip(arrays, dims, strict=True):
        all_batches = d is not None or x.shape[1] > 1  # otherwise all batches share it
        shape = (n, inner, *x.shape[2:])
        operands.append(
            jnp.broadcast_to(x, shape).reshape(n * inner, *x.shape[2:]) if all_batches else x[0]
        )
    results = contract_p.bind(*operands, **params)
    return [y.reshape(n, inner, *y.shape[1:]) for y in results], [0] * len(results)


contract_p = primitive(
    "contract",
    shapes=_shapes,
    run=_reference,
    native=NativeCall(
        "mpigrad_kernels_contract",
        library=kernels_library,
        attributes=lambda params: {"structure": params["structure"].number, "out": params["out"]},
        keep_alive="structure",  # the program may outlive the pattern
        dtypes=("float32", "float64", "complex64", "complex128"),
    ),
    messages=False,
    programs=_programs,
    differentiate=_differentiate,
    transpose=_transpose,
    batch=_batch,
    weak=_Handle,
)
