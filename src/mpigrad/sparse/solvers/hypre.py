"""Solves by hypre, and the data that hypre keeps for one pattern and one preconditioner."""

from __future__ import annotations

import ctypes
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from mpigrad.extend import NativeCall, Primitive, describe, primitive
from mpigrad.sparse.matrix.pattern import Pattern
from mpigrad.sparse.solvers.libraries import check_size, hypre_available, library, why_no_hypre
from mpigrad.sparse.solvers.methods import INFO, Cycle, LinearSolver, request_text
from mpigrad.sparse.solvers.preconditioners import (
    COARSENINGS,
    INTERPOLATIONS,
    PFMG,
    RELAXATIONS,
    BoomerAMG,
    Preconditioner,
    why_not_structured,
)

__all__ = [
    "check",
    "check_pfmg",
    "run",
    "solve_primitive",
    "structured",
]

# ---- Grid stencils in the form of hypre's structured interface, for PFMG ----


_JACOBI, _RED_BLACK = 1, 2  # hypre's codes
_GALERKIN, _NON_GALERKIN = 0, 1


class _Options(ctypes.Structure):
    """One PFMG configuration, as native/hypre/structured.h lays it out."""

    _fields_ = (
        ("coarse_operator", ctypes.c_int32),
        ("relaxation", ctypes.c_int32),
        ("sweeps", ctypes.c_int32),
        ("skips_relaxation", ctypes.c_int32),
        ("max_levels", ctypes.c_int32),
        ("keeps_stale", ctypes.c_int32),
        ("symmetric", ctypes.c_int32),
    )


def check_pfmg(name: str, pattern: Pattern, preconditioner: PFMG) -> None:
    """Raise an error, the same on every rank, if PFMG cannot solve such a system."""
    problem = why_not_structured(pattern)
    if not problem and preconditioner.relaxation == "red-black" and not _has_faces_only(pattern):
        problem = (
            "red-black relaxation needs a stencil of face neighbours alone. Take "
            'PFMG(relaxation="jacobi")'
        )
    if problem:
        raise ValueError(
            f"{name}: PFMG cannot take this pattern: {problem}, or solve with "
            "preconditioner=BoomerAMG()."
        )


def structured(pattern: Pattern, preconditioner: PFMG, symmetric: bool) -> int:
    """Make a system of a stencil's matrix, preconditioned by PFMG, and return its id."""
    assert pattern.stencil is not None
    grid, offsets = pattern.stencil.grid, pattern.stencil.offsets
    faces = _has_faces_only(pattern)
    # hypre has no stencils on a line: a line is a plane that is one cell wide.
    axes = max(2, grid.ndim)
    zero = [
        offset
        for offset in (_faces(axes) if faces else itertools.product((-1, 0, 1), repeat=axes))
        if offset not in {(*[0] * (axes - grid.ndim), *present) for present in offsets}
    ]
    red_black = faces and preconditioner.relaxation != "jacobi"
    options = _Options(
        _NON_GALERKIN if faces else _GALERKIN,
        _RED_BLACK if red_black else _JACOBI,
        preconditioner.sweeps,
        preconditioner.skip_relaxation,
        preconditioner.max_levels,
        preconditioner.reuse == "stale",
        symmetric,
    )
    lower = [part.start for part in grid.slices]
    upper = [part.stop for part in grid.slices]
    arrays = [
        _hypre_order(grid.shape, 1),
        _hypre_order(lower, 0),
        _hypre_order(upper, 1),
        np.concatenate([_hypre_order(offset, 0) for offset in (*offsets, *zero)]),
    ]
    shape, first, last, steps = (ctypes.c_void_p(a.ctypes.data) for a in arrays)
    create = library().mpigrad_hypre_create_structured
    create.restype = ctypes.c_int64
    return create(
        ctypes.c_int64(pattern.solver_communicator.handle),
        ctypes.c_int64(pattern.offset),
        ctypes.c_int(axes),
        shape,
        first,
        last,
        ctypes.c_int64(len(offsets)),
        ctypes.c_int64(len(zero)),
        steps,
        ctypes.byref(options),
    )


def _has_faces_only(pattern: Pattern) -> bool:
    assert pattern.stencil is not None
    return all(sum(map(abs, offset)) <= 1 for offset in pattern.stencil.offsets)


def _faces(axes: int) -> Iterator[tuple[int, ...]]:
    """Yield the zero offset, and one step back or forth along each axis."""
    for offset in itertools.product((-1, 0, 1), repeat=axes):
        if sum(map(abs, offset)) <= 1:
            yield offset


def _hypre_order(numbers: tuple[int, ...] | list[int], fill: int) -> np.ndarray:
    """Return one entry for each of three axes, the last axis first, with `fill` for absent axes."""
    return np.array([*reversed(numbers), *[fill] * (3 - len(numbers))], np.int64)


# ---- Solves by hypre, and the data that hypre keeps for one pattern and one preconditioner ----


def check(solver: LinearSolver, pattern: Pattern, dtype: Any) -> None:
    """Raise an error, the same on every rank, if hypre cannot solve such a system."""
    preconditioner = solver.preconditioner
    name, kind = type(solver).__name__, type(preconditioner).__name__
    if isinstance(solver, Cycle):
        name = kind
    if solver.hypre_method is None:
        raise TypeError(
            f"{name}: {kind} works in hypre's PCG, GMRES, BiCGStab and Multigrid only, but {name} "
            "has iterations of its own. Choose preconditioner=Jacobi(), a Preconditioner of your "
            "own or None."
        )
    if getattr(solver, "flexible", False):
        raise ValueError(
            f"{name}: flexible=True is for preconditioners that change from step to step, but "
            f"{kind} is a fixed one. Leave it out."
        )
    if not hypre_available():
        raise RuntimeError(
            f"{name}: {kind} needs hypre: {why_no_hypre()} Without hypre, solve "
            "with PCG(preconditioner=Jacobi()) or GMRES(preconditioner=Jacobi())."
        )
    if dtype != np.float64:
        raise TypeError(
            f"{name}: hypre solves in float64, got {np.dtype(dtype).name}. Set "
            'jax.config.update("jax_enable_x64", True) before making arrays, '
            "or solve with preconditioner=Jacobi()."
        )
    check_size(pattern.n_rows, pattern.nnz, library().mpigrad_hypre_bigint_bits())
    if isinstance(preconditioner, PFMG):
        check_pfmg(name, pattern, preconditioner)
    if isinstance(preconditioner, BoomerAMG):
        unknowns = preconditioner.unknowns_per_cell
        if pattern.n_rows % unknowns:
            raise ValueError(
                f"{name}: {pattern.n_rows} rows are not a multiple of "
                f"unknowns_per_cell={unknowns}. Number the unknowns of a cell one after the other."
            )
        if preconditioner.near_null and pattern.near_null is None:
            raise ValueError(
                f"{name}: near_null=True needs a pattern with near-null vectors, got one without. "
                "Set pattern.near_null, or take the pattern of a fem.Space."
            )


def run(
    solver: LinearSolver,
    pattern: Pattern,
    values: jax.Array,
    b: jax.Array,
    x0: jax.Array,
    values_id: jax.Array,
    null: jax.Array,
    *,
    throw: bool,
    site: int,
) -> tuple[jax.Array, jax.Array]:
    """Solve for each right-hand side in turn, with the shapes of `jax_backend.run`.

    Parameters
    ----------
    values_id
        Shape (1,): the id of the values in the info of an earlier solve. The values must be the
        same, so that they are not compared. Shape (0,): no id.
    null
        Shape (1 or B, 1 or 2, k, n_local): right null vectors, and left ones if they differ.
    """
    preconditioner = solver.preconditioner
    assert preconditioner is not None
    name, kind = type(solver).__name__, type(preconditioner).__name__
    x, info = solve_p.bind(
        values,
        b,
        x0,
        values_id,
        system=_system(pattern, preconditioner, solver.symmetric, null.shape[2] > 0),
        method=solver.hypre_method,
        restart=int(getattr(solver, "restart", 0)),
        rtol=float(solver.rtol),
        max_steps=int(solver.max_steps),
        throws=bool(throw),
        slot=pattern.comm.slot,
        site=site,
        name=f"{name} with {kind}",
        settings=request_text(solver),
        where=describe(site),
    )
    return x, info


# ---- systems: the data that hypre keeps for one pattern and one preconditioner ----


class _BoomerAMGOptions(ctypes.Structure):
    """One BoomerAMG configuration, as native/hypre/assembled.h lays it out."""

    _fields_ = (
        ("coarsening", ctypes.c_int32),
        ("interpolation", ctypes.c_int32),
        ("max_row_elements", ctypes.c_int32),
        ("relaxation", ctypes.c_int32),
        ("aggressive_levels", ctypes.c_int32),
        ("max_levels", ctypes.c_int32),
        ("unknowns_per_cell", ctypes.c_int32),
        ("keeps_stale", ctypes.c_int32),
        ("near_null", ctypes.c_int32),
        ("singular", ctypes.c_int32),
        ("strong_threshold", ctypes.c_double),
    )


def _assembled(pattern: Pattern, amg: BoomerAMG, singular: bool) -> int:
    """Make a system of an assembled matrix, preconditioned by BoomerAMG, and return its id."""
    vectors = np.zeros((0, pattern.n_local))
    # Coarse rows of a vector that another one interpolates hold rounding if the matrix is singular.
    if amg.near_null and pattern.near_null is not None and not singular:
        vectors = np.ascontiguousarray(pattern.near_null.T, float)
    options = _BoomerAMGOptions(
        COARSENINGS[amg.coarsening],
        INTERPOLATIONS[amg.interpolation],
        amg.max_row_elements,
        RELAXATIONS[amg.relaxation],
        amg.aggressive_levels,
        amg.max_levels,
        amg.unknowns_per_cell,
        amg.reuse == "stale",
        len(vectors),
        singular,
        amg.strong_threshold,
    )
    entries = [
        pattern.row_starts,
        pattern.columns,
        *([] if pattern.is_ordered else [pattern.order]),
    ]
    arrays = [np.ascontiguousarray(a, np.int64) for a in entries]
    starts, columns, *order = (ctypes.c_void_p(a.ctypes.data) for a in arrays)
    create = library().mpigrad_hypre_create_assembled
    create.restype = ctypes.c_int64
    return create(
        ctypes.c_int64(pattern.solver_communicator.handle),
        ctypes.c_int64(pattern.offset),
        ctypes.c_int64(pattern.n_local),
        starts,
        columns,
        order[0] if order else None,
        ctypes.byref(options),
        ctypes.c_void_p(vectors.ctypes.data),
    )


class _System:
    """A handle of a system in the native library, which is freed with this object."""

    def __init__(self, id_: int) -> None:
        self.id = id_
        destroy = library().mpigrad_hypre_destroy
        weakref.finalize(self, destroy, ctypes.c_int64(self.id)).atexit = False


def _system(
    pattern: Pattern, preconditioner: Preconditioner, symmetric: bool, singular: bool
) -> _System:
    """Return the system of a preconditioner, which also depends on properties of the matrix."""
    systems = pattern.solver_systems
    is_structured = isinstance(preconditioner, PFMG)
    key = (preconditioner, symmetric if is_structured else singular)
    if key not in systems:
        if is_structured:
            systems[key] = _System(structured(pattern, preconditioner, symmetric))
        else:
            assert isinstance(preconditioner, BoomerAMG)
            systems[key] = _System(_assembled(pattern, preconditioner, singular))
    return systems[key]


def solve_primitive(name: str, load: Callable[[], Any]) -> Primitive:
    """Make the primitive (values, b, x0, values_id) -> (x, info) of a library's handler.

    `solve` has the derivatives. The parameter `system` is the library's data of one pattern.
    """
    return primitive(
        name,
        shapes=lambda values, b, x0, values_id, **_: [
            b, jax.ShapeDtypeStruct((b.shape[0], INFO), b.dtype)
        ],
        native=NativeCall(
            f"mpigrad_{name}",
            n_inputs=4,
            library=load,
            attributes=lambda params: {**params, "system": params["system"].id},
            keep_alive="system",  # the program may outlive the pattern
        ),
    )  # fmt: skip


solve_p = solve_primitive("hypre_solve", library)
