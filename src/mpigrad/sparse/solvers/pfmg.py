"""Grid stencils as hypre's structured interface takes them, for PFMG."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator

import numpy as np

from mpigrad.sparse.matrix.pattern import Pattern
from mpigrad.sparse.solvers.hypre_library import library
from mpigrad.sparse.solvers.preconditioners import PFMG

__all__ = ["check", "structured", "why_not"]

_JACOBI, _RED_BLACK = 1, 2  # hypre's numbers
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
    """Why PFMG cannot take a pattern; empty where it can."""
    if pattern.stencil is None:
        return "the pattern is not that of a grid's stencil; make it with Pattern.from_stencil"
    far = [offset for offset in pattern.stencil.offsets if any(abs(step) > 1 for step in offset)]
    if far:
        return f"the stencil reaches {far[0]}, and PFMG one step along each axis"
    return ""


def check(name: str, pattern: Pattern, preconditioner: PFMG) -> None:
    """Raise, on every rank alike, if PFMG cannot solve such a system."""
    problem = why_not(pattern)
    if not problem and preconditioner.relaxation == "red-black" and not _has_faces_only(pattern):
        problem = (
            "red-black relaxation takes stencils of face neighbours alone; take "
            'PFMG(relaxation="jacobi")'
        )
    if problem:
        raise ValueError(
            f"mpigrad.sparse.{name}: PFMG cannot take this matrix: {problem}, or solve with "
            "preconditioner=BoomerAMG()"
        )


def structured(pattern: Pattern, preconditioner: PFMG, symmetric: bool) -> int:
    """A system of a stencil's matrix, preconditioned by PFMG: its number in the native library."""
    assert pattern.stencil is not None
    grid, given = pattern.stencil.grid, pattern.stencil.offsets
    faces = _has_faces_only(pattern)
    # hypre knows no stencils on a line: a line is a plane that is one cell wide.
    axes = max(2, grid.ndim)
    zero = [
        offset
        for offset in (_faces(axes) if faces else itertools.product((-1, 0, 1), repeat=axes))
        if offset not in {(*[0] * (axes - grid.ndim), *kept) for kept in given}
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
        ctypes.c_int(pattern.solver_communicator.py2f()),
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
    """No step, and one step back or forth along one axis."""
    for offset in itertools.product((-1, 0, 1), repeat=axes):
        if sum(map(abs, offset)) <= 1:
            yield offset


def _hypre_order(numbers: tuple[int, ...] | list[int], fill: int) -> np.ndarray:
    """One number for each of three axes, the last one first; a grid with fewer is filled up."""
    return np.array([*reversed(numbers), *[fill] * (3 - len(numbers))], np.int64)
