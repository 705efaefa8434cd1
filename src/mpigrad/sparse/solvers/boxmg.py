"""Solves on grids by mpigrad's own multigrid, and the data that it keeps for one pattern."""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import jax
import numpy as np

from mpigrad.sparse.matrix.pattern import Pattern
from mpigrad.sparse.solvers.hypre import solve_primitive
from mpigrad.sparse.solvers.libraries import multigrid_library
from mpigrad.sparse.solvers.methods import PCG, Cycle, LinearSolver, request_text
from mpigrad.sparse.solvers.preconditioners import BoxMG, why_not_structured

__all__ = ["check", "run", "why_not"]


def why_not(pattern: Pattern) -> str:
    """Return why BoxMG cannot take a pattern, or an empty string if it can."""
    return why_not_structured(pattern).replace("PFMG", "BoxMG")


def check(solver: LinearSolver, pattern: Pattern, dtype: Any) -> None:
    """Raise an error, the same on every rank, if BoxMG cannot solve such a system."""
    name = "BoxMG" if isinstance(solver, Cycle) else type(solver).__name__
    if type(solver).iterate is not PCG.iterate and not isinstance(solver, Cycle):
        raise TypeError(
            f"{name}: BoxMG works in PCG, for symmetric positive definite matrices. Solve "
            f"with PCG(preconditioner=BoxMG()), or with {name}(preconditioner=PFMG())."
        )
    if dtype != np.float64:
        raise TypeError(
            f"{name}: BoxMG solves in float64, got {np.dtype(dtype).name}. Set "
            'jax.config.update("jax_enable_x64", True) before making arrays, '
            "or solve with preconditioner=Jacobi()."
        )
    problem = why_not(pattern)
    if problem:
        raise ValueError(
            f"{name}: BoxMG cannot take this pattern: {problem}, or solve with "
            "preconditioner=BoomerAMG()."
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
    """Solve for each right-hand side in turn, with the arguments of `jax_backend.run`."""
    del null
    preconditioner = solver.preconditioner
    assert isinstance(preconditioner, BoxMG)
    x, info = solve_p.bind(
        values,
        b,
        x0,
        values_id,
        system=_system(pattern, preconditioner),
        site=site,
        rtol=float(solver.rtol),
        max_steps=int(solver.max_steps),
        throws=bool(throw),
        name=f"{type(solver).__name__} with BoxMG",
        settings=request_text(solver),
    )
    return x, info


class _System:
    """A handle of a system in the native library, which is freed with this object."""

    def __init__(self, pattern: Pattern, preconditioner: BoxMG) -> None:
        assert pattern.stencil is not None
        grid, offsets = pattern.stencil.grid, pattern.stencil.offsets
        # A link without an opposite one is not symmetric: the opposite one is zero.
        zero = [o for o in (tuple(-s for s in offset) for offset in offsets) if o not in offsets]
        dims = _fastest_first(grid.dims, 1)
        starts = [grid.starts(axis) for axis in reversed(range(grid.ndim))]
        starts += [np.array([0, 1], np.int64)] * (3 - grid.ndim)
        arrays = [
            _fastest_first(grid.shape, 1),
            _fastest_first([part.start for part in grid.slices], 0),
            _fastest_first([part.stop for part in grid.slices], 1),
            dims,
            np.concatenate(starts).astype(np.int64),
            np.concatenate([_fastest_first(offset, 0) for offset in (*offsets, *zero)]),
        ]
        shape, lower, upper, tiles, begins, steps = (ctypes.c_void_p(a.ctypes.data) for a in arrays)
        self.id = multigrid_library().mpigrad_multigrid_create(
            ctypes.c_int64(pattern.comm.slot),
            ctypes.c_int(grid.ndim),
            shape,
            lower,
            upper,
            tiles,
            begins,
            ctypes.c_int64(len(offsets)),
            ctypes.c_int64(len(zero)),
            steps,
            ctypes.c_int(preconditioner.reuse == "stale"),
        )
        destroy = multigrid_library().mpigrad_multigrid_destroy
        weakref.finalize(self, destroy, ctypes.c_int64(self.id)).atexit = False


def _fastest_first(numbers: Any, fill: int) -> np.ndarray:
    """Return one entry for each of three axes, the last axis first, with `fill` for absent axes."""
    return np.array([*reversed(numbers), *[fill] * (3 - len(numbers))], np.int64)


def _system(pattern: Pattern, preconditioner: BoxMG) -> _System:
    systems = pattern.solver_systems
    if preconditioner not in systems:
        systems[preconditioner] = _System(pattern, preconditioner)
    return systems[preconditioner]


solve_p = solve_primitive("multigrid_solve", multigrid_library)
