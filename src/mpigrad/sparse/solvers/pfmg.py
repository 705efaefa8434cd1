"""Grid stencils in the form of hypre's structured interface, for PFMG."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator

import numpy as np

from mpigrad.sparse.matrix.pattern import Pattern
from mpigrad.sparse.solvers.hypre_library import library
from mpigrad.sparse.solvers.preconditioners import PFMG

__all__ = ["check", "structured", "why_not"]

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


def why_not(pattern: Pattern) -> str:
    """Return why PFMG cannot take a pattern, or an empty string if it can."""
    if pattern.stencil is None:
        return "it was not made from a grid's stencil. Make it with Pattern.from_stencil"
    far = [offset for offset in pattern.stencil.offsets if any(abs(step) > 1 for step in offset)]
    if far:
        return f"the stencil reaches {far[0]}, but PFMG takes one step along each axis only"
    return ""


def check(name: str, pattern: Pattern, preconditioner: PFMG) -> None:
    """Raise an error, the same on every rank, if PFMG cannot solve such a system."""
    problem = why_not(pattern)
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
    grid, given = pattern.stencil.grid, pattern.stencil.offsets
    faces = _has_faces_only(pattern)
    # hypre has no stencils on a line: a line is a plane that is one cell wide.
    axes = max(2, grid.ndim)
    zero = [
        offset
        for offset in (_faces(axes) if faces else itertools.product((-1, 0, 1), repeat=axes))
        if offset not in {(*[0] * (axes - grid.ndim), *present) for present in given}
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
        np.concatenate([_hypre_order(offset, 0) for offset in (*given, *zero)]),
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
        ctypes.c_int64(len(given)),
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
