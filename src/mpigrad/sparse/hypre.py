"""hypre: conjugate gradients preconditioned by algebraic multigrid."""

from __future__ import annotations

import atexit
import ctypes
import dataclasses
import functools
import os
import pathlib
import weakref
from typing import Any, Literal

import jax
import numpy as np
from mpi4py import MPI

from mpigrad.communicator import native_library, record
from mpigrad.operations import _jax_compat as compat
from mpigrad.operations._jax_compat import Primitive, ShapedArray, mlir
from mpigrad.operations.factory import register_target
from mpigrad.operations.sites import describe
from mpigrad.sparse.pattern import Pattern
from mpigrad.sparse.strategy import LinearSolver, check_steps

__all__ = ["PCG", "BoomerAMG", "hypre_available", "solver_seconds", "why_no_hypre"]

_LIBRARY = "mpigrad_hypre"
_MARKER = b"mpigrad-hypre-built-with:"

_COARSENINGS = {"HMIS": 10, "PMIS": 8, "Falgout": 6, "CLJP": 0}
_INTERPOLATIONS = {"ext+i": 6, "standard": 8, "classical": 0, "multipass": 4}
# Symmetric ones only: conjugate gradients need a symmetric preconditioner.
_RELAXATIONS = {"l1-symmetric-gauss-seidel": 8, "l1-jacobi": 18, "chebyshev": 16}


@dataclasses.dataclass(frozen=True)
class BoomerAMG:
    """One V-cycle of hypre's algebraic multigrid, as a preconditioner.

    The defaults suit scalar elliptic equations in two dimensions; in three dimensions take
    `strong_threshold=0.5`, and `aggressive_levels=1` where memory is short.

    Attributes
    ----------
    strong_threshold
        Connections stronger than this part of a row's strongest one guide the coarsening.
    coarsening
        "HMIS", "PMIS", "Falgout" or "CLJP".
    interpolation
        "ext+i", "standard", "classical" or "multipass".
    max_row_elements
        Longest row of an interpolation matrix; 0 leaves rows as they come.
    relaxation
        Smoother: "l1-symmetric-gauss-seidel", "l1-jacobi" or "chebyshev".
    aggressive_levels
        Finest levels on which coarsening is aggressive.
    max_levels
        Most levels of the hierarchy.
    """

    strong_threshold: float = 0.25
    coarsening: Literal["HMIS", "PMIS", "Falgout", "CLJP"] = "HMIS"
    interpolation: Literal["ext+i", "standard", "classical", "multipass"] = "ext+i"
    max_row_elements: int = 4
    relaxation: Literal["l1-symmetric-gauss-seidel", "l1-jacobi", "chebyshev"] = (
        "l1-symmetric-gauss-seidel"
    )
    aggressive_levels: int = 0
    max_levels: int = 25

    def __post_init__(self) -> None:
        for field, known in (
            ("coarsening", _COARSENINGS),
            ("interpolation", _INTERPOLATIONS),
            ("relaxation", _RELAXATIONS),
        ):
            if getattr(self, field) not in known:
                raise ValueError(
                    f"BoomerAMG: {field}={getattr(self, field)!r} is not one of {', '.join(known)}"
                )
        if not 0 <= self.strong_threshold <= 1:
            raise ValueError(
                f"BoomerAMG: strong_threshold={self.strong_threshold} must lie between 0 and 1"
            )
        if min(self.max_row_elements, self.aggressive_levels) < 0 or self.max_levels < 1:
            raise ValueError(
                "BoomerAMG: max_row_elements and aggressive_levels must not be negative, "
                "max_levels must be at least 1"
            )


@dataclasses.dataclass(frozen=True)
class PCG(LinearSolver):
    """hypre's conjugate gradients with a BoomerAMG preconditioner, in double precision.

    The multigrid hierarchy is kept for each pattern and preconditioner while the matrix's values
    stay the same to the bit, on every rank: the adjoint of a solve does no set-up.

    Attributes
    ----------
    rtol
        Stop when the two-norm of the residual is below this part of the right-hand side's.
    max_steps
        Most iterations.
    """

    rtol: float = 1e-8
    max_steps: int = 500
    preconditioner: BoomerAMG = BoomerAMG()

    def __post_init__(self) -> None:
        check_steps("PCG", self.rtol, self.max_steps)
        if not isinstance(self.preconditioner, BoomerAMG):
            raise TypeError(
                f"PCG: the preconditioner must be a BoomerAMG, not {self.preconditioner!r}; "
                "for Jacobi's write mpigrad.sparse.CG()"
            )

    def check(self, pattern: Pattern, dtype: Any) -> None:
        if not hypre_available():
            raise RuntimeError(
                f"mpigrad.sparse.PCG needs hypre: {why_no_hypre()} "
                "Without hypre, solve with mpigrad.sparse.CG()."
            )
        if dtype != np.float64:
            raise TypeError(
                f"mpigrad.sparse.PCG: hypre solves in float64, not {np.dtype(dtype).name}; set "
                'jax.config.update("jax_enable_x64", True) before making arrays, '
                "or solve with mpigrad.sparse.CG()"
            )
        check_size(pattern.n_rows, pattern.nnz, _library().mpigrad_hypre_bigint_bits())

    def run(
        self, pattern: Pattern, values: jax.Array, b: jax.Array, *, throw: bool, site: int
    ) -> tuple[jax.Array, jax.Array]:
        x, info = _solve_primitive().bind(
            values,
            b,
            system=_system(pattern, self.preconditioner),
            rtol=float(self.rtol),
            max_steps=int(self.max_steps),
            throws=bool(throw),
            site=site,
            where=describe(site),
        )
        return x, info


def check_size(n_rows: int, nnz: int, bits: int) -> None:
    """Refuse what hypre's integers cannot count: global rows, and entries of one rank."""
    if bits < 64 and n_rows >= 2**31:
        raise ValueError(
            f"mpigrad.sparse.PCG: {n_rows} rows are more than this hypre can number: its global "
            "indices have 32 bits (fewer than 2**31 rows). Build hypre with --enable-mixedint, "
            "and mpigrad against it."
        )
    if nnz >= 2**31:
        raise ValueError(
            f"mpigrad.sparse.PCG: {nnz} entries on one rank are more than hypre can count "
            "(2**31 - 1); use more ranks"
        )


# ---- the native library: present, built for this MPI, loaded ----


def _built_with(path: pathlib.Path) -> str:
    """The MPI that a hypre module was built with, read without loading it."""
    _, found, rest = path.read_bytes().partition(_MARKER)
    return rest.split(b"\0", 1)[0].decode(errors="replace") if found else "an unknown MPI"


def _mpi_mismatch(built_with: str, vendor: str, version: tuple[int, ...]) -> str:
    """Why a module built with one MPI cannot run on another; empty if it can.

    Releases of Open MPI with one major version share a binary interface.
    """
    runs = f"{vendor} {'.'.join(map(str, version))}"
    name, _, number = built_with.rpartition(" ")
    if name == vendor and number.split(".")[0] == str(version[0]):
        return ""
    return (
        f"this installation's hypre module was built with {built_with}, but mpi4py runs on {runs}. "
        f"Run under {built_with}, or build mpigrad with a hypre made for {runs}."
    )


@functools.cache
def _load() -> tuple[Any, str]:
    """The library or None, and why there is none."""
    if os.environ.get("MPIGRAD_HYPRE", "1") == "0":
        return None, "it is switched off by MPIGRAD_HYPRE=0 in the environment."
    import mpigrad

    paths = [pathlib.Path(d) / "_native" / f"lib{_LIBRARY}.so" for d in mpigrad.__path__]
    path = next((p for p in paths if p.exists()), None)
    if path is None:
        return None, (
            "this installation was built without it. Install hypre and the MPI it was built with "
            "(Debian, Ubuntu: apt-get install libhypre-dev libopenmpi-dev), then build mpigrad "
            "again."
        )
    # Loading a module built for another MPI can crash the process, so ask before.
    mismatch = _mpi_mismatch(_built_with(path), *MPI.get_vendor())
    if mismatch:
        return None, mismatch
    try:
        lib = native_library(_LIBRARY)
    except OSError as error:
        return None, (
            f"its library cannot be loaded ({error}). If two MPI libraries are installed, "
            "uninstall the one that hypre was not built with; `mpigrad doctor` names them."
        )
    assert lib is not None
    lib.mpigrad_hypre_mpi_library.restype = ctypes.c_char_p
    theirs = lib.mpigrad_hypre_mpi_library().decode().strip("\0 \n")
    ours = MPI.Get_library_version().strip("\0 \n")
    if theirs != ours:
        return None, f"hypre runs on another MPI library ({theirs}) than mpi4py ({ours})."
    lib.mpigrad_hypre_create.restype = ctypes.c_int64
    lib.mpigrad_hypre_create.argtypes = [
        ctypes.c_int,
        ctypes.c_int64,
        ctypes.c_int64,
        *[ctypes.c_void_p] * 4,
    ]
    lib.mpigrad_hypre_destroy.argtypes = [ctypes.c_int64]
    lib.mpigrad_hypre_totals.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    lib.mpigrad_hypre_version.restype = ctypes.c_char_p
    lib.mpigrad_hypre_watch.argtypes = [ctypes.c_void_p]
    lib.mpigrad_hypre_watch(ctypes.addressof(record()))
    register_target("mpigrad_hypre_solve", lib)
    atexit.register(lib.mpigrad_hypre_finalize)  # runs before mpi4py ends MPI
    return lib, ""


def _library() -> Any:
    lib, reason = _load()
    if lib is None:
        raise RuntimeError(f"mpigrad.sparse: no hypre: {reason}")
    return lib


def hypre_available() -> bool:
    """Whether solves can use hypre in this process."""
    return _load()[0] is not None


def why_no_hypre() -> str:
    """Why hypre is not available and how to get it; empty where it is."""
    return _load()[1]


def hypre_version() -> str:
    """Name and release, as in "hypre 2.26.0"; empty where there is none."""
    return _library().mpigrad_hypre_version().decode() if hypre_available() else ""


def solver_seconds() -> dict[str, float]:
    """What this rank has spent in hypre so far.

    Returns
    -------
    Seconds `setup` and `solve`, and the numbers `setups` and `solves`.
    """
    seconds, counts = np.zeros(2), np.zeros(2, np.int64)
    if hypre_available():
        _library().mpigrad_hypre_totals(seconds.ctypes.data, counts.ctypes.data)
    return {
        "setup": float(seconds[0]),
        "solve": float(seconds[1]),
        "setups": int(counts[0]),
        "solves": int(counts[1]),
    }


# ---- systems: what hypre keeps for one pattern and one preconditioner ----


class _Options(ctypes.Structure):
    """One BoomerAMG configuration, as native/hypre.cc lays it out."""

    _fields_ = (
        ("coarsening", ctypes.c_int32),
        ("interpolation", ctypes.c_int32),
        ("max_row_elements", ctypes.c_int32),
        ("relaxation", ctypes.c_int32),
        ("aggressive_levels", ctypes.c_int32),
        ("max_levels", ctypes.c_int32),
        ("strong_threshold", ctypes.c_double),
    )


class _System:
    """A structure that the native library knows by a number, until this object is gone."""

    def __init__(self, pattern: Pattern, amg: BoomerAMG) -> None:
        lib = _library()
        options = _Options(
            _COARSENINGS[amg.coarsening],
            _INTERPOLATIONS[amg.interpolation],
            amg.max_row_elements,
            _RELAXATIONS[amg.relaxation],
            amg.aggressive_levels,
            amg.max_levels,
            amg.strong_threshold,
        )
        arrays = [
            np.ascontiguousarray(a, np.int64)
            for a in (pattern.row_starts, pattern.columns, pattern.order)
        ]
        starts, columns, order = (a.ctypes.data for a in arrays)
        self.number = lib.mpigrad_hypre_create(
            pattern.solver_communicator.py2f(),
            pattern.offset,
            pattern.n_local,
            starts,
            columns,
            None if pattern.is_ordered else order,
            ctypes.addressof(options),
        )
        weakref.finalize(self, lib.mpigrad_hypre_destroy, self.number).atexit = False


def _system(pattern: Pattern, amg: BoomerAMG) -> _System:
    if amg not in pattern.solver_systems:
        pattern.solver_systems[amg] = _System(pattern, amg)
    return pattern.solver_systems[amg]


@functools.cache
def _solve_primitive() -> Primitive:
    """(values, b) -> (x, info) by the native library; derivatives are `solve`'s affair."""
    primitive = Primitive("mpigrad_hypre_solve")

    def shapes(values: Any, b: Any, **_: Any) -> list[ShapedArray]:
        return [b, ShapedArray((b.shape[0], 4), b.dtype)]

    def attributes(avals: Any, params: dict[str, Any]) -> dict[str, Any]:
        return {**params, "system": params["system"].number}

    call = compat.lowering("mpigrad_hypre_solve", 2, attributes=attributes)

    def lower(ctx: Any, *operands: Any, **params: Any) -> Any:
        ctx.module_context.add_keepalive(params["system"])  # the program may outlive the pattern
        return call(ctx, *operands, **params)

    compat.make_effectful(primitive, shapes)
    mlir.register_lowering(primitive, lower, platform="cpu")
    return primitive
