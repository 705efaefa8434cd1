"""Solves by PETSc through petsc4py: the strategy, and the data that is kept for one pattern."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import re
import shlex
import weakref
import zlib
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, final

import jax
import numpy as np
from mpi4py import MPI

from mpigrad.extend import HostCall, NativeCall, array_at, describe, primitive
from mpigrad.solution import Result
from mpigrad.sparse.matrix.pattern import Pattern
from mpigrad.sparse.solvers.jax_backend import require_success
from mpigrad.sparse.solvers.libraries import petsc_function, petsc_module
from mpigrad.sparse.solvers.methods import INFO, LinearSolver, check_steps, request_text
from mpigrad.sparse.solvers.preconditioners import Preconditioner, sealed

__all__ = [
    "PETSc",
    "assert_options_read",
    "assert_same_settings",
    "check",
    "check_build",
    "csr_arrays",
    "delete_options",
    "give_options",
    "make_matrix",
    "option_pairs",
    "option_text",
    "run",
]


@final
@sealed
@dataclasses.dataclass(frozen=True)
class PETSc(LinearSolver):
    """Any KSP and PC of PETSc, by PETSc's own options, for matrices. It needs petsc4py.

    (Balay et al., PETSc/TAO users manual; Dalcin et al. 2011.) LU by MUMPS or SuperLU_DIST, GAMG,
    hypre with its options, and all else that the PETSc of this site was built with. The derivatives
    are those of `solve`. The matrix and its set-up are kept while the values stay the same to the
    bit. The adjoint of a factorization ("lu", "cholesky") is a solve with the same factors. Other
    adjoints take the transposed matrix, with a set-up of its own. With `symmetric` they take A.

    Attributes
    ----------
    options
        PETSc's options for one KSP, as text or as a dictionary of names and values, such as
        "-ksp_type cg -pc_type gamg" or {"pc_type": "lu", "ksp_view": None}. Default: PETSc's
        defaults. Options of the matrix, such as "-mat_block_size 3", belong to them. An option that
        PETSc does not read is an error.
    rtol, max_steps
        The tolerance |b - A x| <= rtol |b|, and the largest number of steps. As PETSc may stop by
        another norm, the residual is computed from x, and the KSP solves for what is left.
    symmetric
        True for symmetric matrices, which is checked for all new values.

    Examples
    --------
    >>> from mpigrad.sparse import PETSc, why_no_petsc
    >>> solver = PETSc("-ksp_type preonly -pc_type lu -pc_factor_mat_solver_type mumps")
    >>> PETSc({"ksp_type": "cg", "pc_type": "gamg"}, symmetric=True).options
    '-ksp_type cg -pc_type gamg'
    >>> isinstance(why_no_petsc(), str)  # "" if solves can use it
    True
    """

    options: str | Mapping[str, Any] = ""
    rtol: float = 1e-8
    max_steps: int = 10_000
    symmetric: bool = False  # pyright: ignore
    preconditioner: Preconditioner | None = dataclasses.field(
        default=None, init=False, repr=False, compare=False
    )
    needs_matrix: ClassVar[bool] = True
    judges_residual: ClassVar[bool] = True
    keeps_factors: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_steps("PETSc", self.rtol, self.max_steps)
        names = {
            "ksp_rtol": "rtol=",
            "ksp_max_it": "max_steps=",
            "ksp_initial_guess_nonzero": "x0= of solve",
        }
        text = option_text("PETSc", self.options, names, "-pc_type gamg -ksp_type cg")
        object.__setattr__(self, "options", text)

    @property
    def backend(self) -> Literal["jax", "hypre", "boxmg", "petsc"]:
        return "petsc"

    def iterate(self, system: Any) -> Any:
        raise TypeError("PETSc: only PETSc runs it. Solve with a Matrix.")


# ---- Options, settings and matrices, which are those of SLEPc, too ----


def option_text(name: str, options: Any, names: Mapping[str, str], example: str) -> str:
    """Return the options of a strategy as one text, or raise an error.

    Parameters
    ----------
    name
        The strategy, as errors name it.
    options
        A text, or a dictionary of names and values.
    names
        The options that are arguments of mpigrad, with the name of the argument.
    example
        Valid options.
    """
    if isinstance(options, Mapping):
        options = " ".join(
            f"-{str(key).removeprefix('-')} "
            + ("" if value is None or value is True else shlex.quote(str(value)))
            for key, value in options.items()
        )
    if not isinstance(options, str):
        raise TypeError(
            f"{name}: options must be a text or a dictionary, got {options!r}. Give PETSc's "
            f'options, such as "{example}".'
        )
    options = " ".join(options.split())
    for key, _ in option_pairs(options, name, example.split(maxsplit=1)[0]):
        if key in names:
            raise ValueError(f"{name}: -{key} is {names[key]} here. Give it as that.")
    return options


def option_pairs(
    options: str, name: str = "PETSc", example: str = "-pc_type"
) -> list[tuple[str, str]]:
    """Return names without a dash, and values, "" for options without one."""
    pairs: list[tuple[str, str]] = []
    for word in shlex.split(options):
        if re.match(r"-{1,2}[A-Za-z]", word):
            pairs.append((word.lstrip("-"), ""))
        elif pairs and not pairs[-1][1]:
            pairs[-1] = pairs[-1][0], word
        else:
            raise ValueError(
                f"{name}: expected an option such as {example}, got {word!r} in {options!r}. Write "
                "each name with a dash, and one value after it."
            )
    return pairs


def check_build(name: str, arrays: str, n_rows: int, dtype: Any) -> None:
    """Raise an error if this PETSc has other scalars, or integers that are too short."""
    module = petsc_module()
    if np.dtype(dtype) != np.dtype(module.ScalarType):
        expected = np.dtype(module.ScalarType).name
        remedy = f"Convert {arrays}."
        if np.dtype(dtype).kind == "c" != np.dtype(expected).kind:
            remedy = "Take a PETSc for complex numbers, or GMRES(preconditioner=Jacobi())."
        elif name == "SLEPc" and np.dtype(expected).kind == "c":
            remedy = "Take a SLEPc for real numbers."
        elif expected == "float64":
            remedy = f'Convert {arrays}, with jax.config.update("jax_enable_x64", True).'
        raise TypeError(
            f"{name}: this PETSc solves in {expected}, got {np.dtype(dtype).name}. {remedy}"
        )
    if n_rows > np.iinfo(module.IntType).max:
        raise ValueError(
            f"{name}: {n_rows} rows are more than this PETSc can number. Build it with "
            "--with-64-bit-indices."
        )


def assert_same_settings(comm: MPI.Intracomm, text: str, *flags: bool) -> np.ndarray:
    """Return the flags that are true on any rank, or raise an error if the texts differ."""
    digest = zlib.crc32(text.encode())
    numbers = np.array([digest, -digest, *flags], float)
    comm.Allreduce(MPI.IN_PLACE, numbers, MPI.MAX)
    if numbers[0] != -numbers[1]:
        texts = comm.allgather(text)
        listed = "; ".join(f"rank {rank} has {each}" for rank, each in enumerate(texts))
        raise ValueError(f"all ranks must solve with the same settings, but {listed}.")
    return numbers[2:]


def give_options(comm: MPI.Intracomm, prefix: str, options: list[tuple[str, str]]) -> None:
    """Write options into PETSc's database, before its objects are made (collective)."""
    module = petsc_module()
    if hasattr(module, "garbage_cleanup"):  # of what is no longer used, on all ranks
        module.garbage_cleanup(comm)
    database = module.Options()
    for name, value in options:
        database.setValue(prefix + name, value or None)


def delete_options(prefix: str, options: list[tuple[str, str]]) -> None:
    """Remove options from PETSc's database, where they are."""
    database = petsc_module().Options()
    for name, _ in options:
        database.delValue(prefix + name)


def make_matrix(
    comm: MPI.Intracomm, size: tuple[int, int], csr: tuple[Any, Any, Any], prefix: str
) -> Any:
    """Make a Mat of this rank's rows. `size` is the number of local and of global rows."""
    module = petsc_module()
    matrix = module.Mat().create(comm)
    matrix.setSizes((size, size))
    matrix.setOptionsPrefix(prefix)
    matrix.setType("aij")
    matrix.setFromOptions()
    matrix.setPreallocationCSR(csr)
    matrix.assemble()
    return matrix


def csr_arrays(
    row_starts: np.ndarray, columns: np.ndarray, order: np.ndarray | None, values: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the rows of a pattern with PETSc's integers, and their values in row order."""
    integer = petsc_module().IntType
    in_rows = values if order is None else values[order]
    return row_starts.astype(integer), columns.astype(integer), np.ascontiguousarray(in_rows)


def assert_options_read(prefix: str, options: list[tuple[str, str]]) -> None:
    """Raise an error if PETSc has not read an option: its name is wrong."""
    unread, flag, used = [], ctypes.c_int(0), petsc_function("PetscOptionsUsed")
    for name, _ in options:
        used(None, f"{prefix}{name}".encode(), ctypes.byref(flag))
        if not flag.value:
            unread.append(f"-{name}")
    if unread:
        raise ValueError(
            f"PETSc did not read {', '.join(unread)}: with these options nothing has such a "
            "setting. Check the names. Options of the whole program go to petsc4py.init."
        )


# ---- Solves by PETSc ----


def check(solver: LinearSolver, pattern: Pattern, dtype: Any) -> None:
    """Raise an error, the same on every rank, if PETSc cannot solve such a system."""
    check_build("PETSc", "the matrix and b", pattern.n_rows, dtype)


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
    """Solve for each right-hand side in turn, with the shapes of `jax_backend.run`."""
    assert isinstance(solver, PETSc)
    singular = null.shape[2] > 0
    derived = pattern.derived
    original = derived.get("transpose of")
    if original is None and "transpose" in derived:
        original = derived["transpose"].pattern
    x, info = solve_p.bind(
        values,
        b,
        x0,
        values_id,
        null,
        call=_Solve(
            solver,
            _system(pattern, solver, singular),
            None if original is None else _system(original, solver, singular),
            tuple(v.shape for v in (values, b, x0, values_id, null)),
            np.dtype(b.dtype),
            throw,
        ),
        slot=pattern.comm.slot,
        site=site,
    )
    if throw:
        failed = info[jax.numpy.argmax(info[:, 0] != Result.SUCCESSFUL)]
        require_success(solver, failed, pattern.comm, f"solve, {describe(site)}: ")
    return x, info


@dataclasses.dataclass(frozen=True, eq=False)
class _Solve(HostCall):
    """One solve of a compiled program. `original` is the system of the transposed matrix."""

    shown_as: ClassVar[str] = "solve"
    solver: PETSc
    system: _System
    original: _System | None
    shapes: tuple[tuple[int, ...], ...]
    dtype: np.dtype
    throw: bool

    def run(self, xs: Any, ys: Any) -> None:
        real = np.finfo(self.dtype).dtype
        types = (self.dtype, self.dtype, self.dtype, real, self.dtype)
        values, b, x0, values_id, null = (
            array_at(xs[i], shape, dtype)
            for i, (shape, dtype) in enumerate(zip(self.shapes, types, strict=True))
        )
        x, info = array_at(ys[0], b.shape, self.dtype), array_at(ys[1], (len(b), INFO), real)
        for k in range(len(b)):
            system, is_transposed = self.system, False
            if self.original is not None and self.original.has_factors_of(values_id):
                system, is_transposed = self.original, True
            result = Result.SUCCESSFUL
            if not is_transposed:
                matrix = values[k if len(values) > 1 else 0]
                vectors = null[k if len(null) > 1 else 0]
                result = system.update(matrix, values_id, vectors, self.solver, len(b))
            steps, residual = 0, 0.0
            if result == Result.SUCCESSFUL:
                first = x0[k] if x0.size else None
                result, steps, residual = system.solve(
                    b[k], x[k], first, self.solver, transposed=is_transposed
                )
            if result == Result.BREAKDOWN and self.throw:
                raise ArithmeticError(
                    f"PETSc did not converge: {system.failure}. Check that the matrix is not "
                    "singular (give nullspace= if it is), or take other options."
                )
            if result not in {Result.SUCCESSFUL, Result.MAX_STEPS_REACHED, Result.STAGNATED}:
                x[k] = np.nan
            info[k] = result, steps, residual, system.setups, system.values_id


# ---- The matrix and the KSP that are kept for one pattern and the same options ----


def _system(pattern: Pattern, solver: PETSc, singular: bool) -> _System:
    key = ("PETSc", solver.options, solver.symmetric, singular)
    if key not in pattern.solver_systems:
        pattern.solver_systems[key] = _System(pattern, solver)
    return pattern.solver_systems[key]


_numbers = itertools.count(1)


class _System:
    """A matrix and a KSP, made by the first solve. They are collective: all ranks make them."""

    def __init__(self, pattern: Pattern, solver: PETSc) -> None:
        self.comm, self.offset = MPI.Intracomm(pattern.solver_communicator), pattern.offset
        self.n_local, self.n_rows = pattern.n_local, pattern.n_rows
        self.row_starts, self.columns = pattern.row_starts, pattern.columns
        self.order = None if pattern.is_ordered else pattern.order
        self.fields = pattern.fields
        assert isinstance(solver.options, str)
        self.options, self.symmetric = option_pairs(solver.options), solver.symmetric
        self.prefix = f"mpigrad_{next(_numbers)}_"
        self.setups = self.values_id = 0
        self.values: np.ndarray | None = None
        self.ksp: Any = None
        self.unread_checked, self.failure = False, ""
        # PETSc has room for 512 options.
        weakref.finalize(self, delete_options, self.prefix, self.options).atexit = False

    def has_factors_of(self, values_id: np.ndarray) -> bool:
        """Return whether the kept matrix has these values, and is factorized."""
        return self._has(values_id) and self.ksp.getPC().getType() in {"lu", "cholesky"}

    def _has(self, values_id: np.ndarray) -> bool:
        """Return whether the kept matrix has these values. 0 is the id of no values."""
        return values_id.size == 1 and 0 != values_id[0] == self.values_id

    def update(
        self, values: np.ndarray, values_id: np.ndarray, null: np.ndarray, solver: PETSc, n: int
    ) -> Result:
        """Set the matrix up if its values are new on any rank."""
        if self._has(values_id):
            return Result.SUCCESSFUL
        bits = f"u{np.finfo(values.dtype).dtype.itemsize}"
        is_kept = self.values is not None and np.array_equal(
            values.view(bits), self.values.view(bits)
        )
        text = f"{request_text(solver)}, {solver!r}, {n} right-hand sides"
        is_new, is_wrong = assert_same_settings(
            self.comm, text, not is_kept, not np.isfinite(values).all()
        )
        if is_wrong:
            return Result.NOT_FINITE
        if not is_new:
            return Result.SUCCESSFUL
        self.values, self.values_id = None, 0
        try:
            self._set_values(values)
            if null.shape[1]:
                self._set_nullspace(null)
            if self.symmetric and not self._is_symmetric():
                return Result.NOT_SYMMETRIC
            self.ksp.setUp()
        except Exception:
            self.ksp = None  # half of it is set up
            raise
        self.setups += 1
        self.values, self.values_id = values.copy(), next(_numbers)
        return Result.SUCCESSFUL

    def _set_values(self, values: np.ndarray) -> None:
        module = petsc_module()
        csr = csr_arrays(self.row_starts, self.columns, self.order, values)
        if self.ksp is not None:
            self.matrix.zeroEntries()
            self.matrix.setValuesCSR(*csr)
            self.matrix.assemble()
            self.ksp.setOperators(self.matrix)
            return
        give_options(self.comm, self.prefix, self.options)
        self.matrix = make_matrix(self.comm, (self.n_local, self.n_rows), csr, self.prefix)
        if self.symmetric:
            self.matrix.setOption(module.Mat.Option.SYMMETRIC, True)
            self.matrix.setOption(module.Mat.Option.SYMMETRY_ETERNAL, True)
        self.given, self.found = self.matrix.createVecs("left"), self.matrix.createVecs("right")
        ksp = module.KSP().create(self.comm)
        ksp.setOptionsPrefix(self.prefix)
        ksp.setOperators(self.matrix)
        if self.fields and ("pc_type", "fieldsplit") in self.options:  # it names them 0, 1, ...
            ksp.getPC().setType("fieldsplit")
            ends = self.offset + np.cumsum(self.fields)
            sets = [
                (str(k), module.IS().createStride(n, end - n, 1, comm=self.comm))
                for k, (n, end) in enumerate(zip(self.fields, ends, strict=True))
            ]
            ksp.getPC().setFieldSplitIS(*sets)
        ksp.setFromOptions()
        self.ksp = ksp

    def _set_nullspace(self, null: np.ndarray) -> None:
        module = petsc_module()
        for vectors, place in (
            (null[0], self.matrix.setNullSpace),
            (null[-1].conj(), self.matrix.setTransposeNullSpace),
        ):
            made = [self._vector(v.copy()) for v in vectors]
            place(module.NullSpace().create(vectors=made, comm=self.comm))

    def _vector(self, values: np.ndarray) -> Any:
        return (
            petsc_module()
            .Vec()
            .createWithArray(values, (self.n_local, self.n_rows), comm=self.comm)
        )

    def _is_symmetric(self) -> bool:
        """Compare x.Ay and y.Ax for two vectors without structure."""
        # Scaled by the diagonal, as in `LinearSystem.begin_symmetric`.
        diagonal = self.matrix.getDiagonal().getArray()
        scale = np.where(diagonal.real > 0, np.abs(diagonal), 1) ** -0.5
        rows = self.offset + np.arange(self.n_local)
        x, y = (np.modf(1e4 * np.sin(rows * step + 1.0))[0] for step in (12.9898, 78.233))
        ax, ay = (scale * self._product(scale * v) for v in (x, y))
        sums = np.array([x @ ay - y @ ax, np.vdot(ax, ax) + np.vdot(ay, ay)])
        total, size = self.comm.allreduce(sums)
        return bool(abs(total) <= np.sqrt(np.finfo(sums.dtype).eps * abs(size)))

    def _product(self, v: np.ndarray, *, transposed: bool = False) -> np.ndarray:
        module = petsc_module()
        v = np.ascontiguousarray(v, module.ScalarType)
        result = np.empty(self.n_local, module.ScalarType)
        self._between(v, result, self.matrix.multTranspose if transposed else self.matrix.mult)
        return result

    def _between(self, given: np.ndarray, found: np.ndarray, operation: Any) -> None:
        """Call an operation of PETSc on two arrays in place."""
        self.given.placeArray(given)
        self.found.placeArray(found)
        try:
            operation(self.given, self.found)
        finally:
            self.given.resetArray()
            self.found.resetArray()

    def _norm(self, v: np.ndarray) -> float:
        return float(np.sqrt(self.comm.allreduce(np.vdot(v, v).real)))

    def solve(
        self,
        b: np.ndarray,
        x: np.ndarray,
        x0: np.ndarray | None,
        solver: PETSc,
        *,
        transposed: bool,
    ) -> tuple[Result, int, float]:
        """Solve for x, and return the result, the steps and the relative residual.

        PETSc judges most methods by a preconditioned norm. Where |b - A x| is still too large, it
        solves for the rest, as iterative refinement does.
        """
        ksp, steps, reason = self.ksp, 0, 0
        size = self._norm(b)
        x[:] = 0 if x0 is None else x0
        if not np.isfinite(size):
            return Result.NOT_FINITE, 0, np.nan
        if size == 0:
            x[:] = 0
            return Result.SUCCESSFUL, 0, 0.0
        rest = b if x0 is None else b - self._product(x, transposed=transposed)
        norm = size if x0 is None else self._norm(rest)
        goal, step = solver.rtol * size, np.empty_like(x)
        while norm > goal and steps < solver.max_steps and reason >= 0:
            aim = min(goal / norm, 0.5) * (1.0 if steps == 0 else 0.3)
            ksp.setTolerances(rtol=aim, atol=0.0, max_it=solver.max_steps - steps)
            self._between(rest, step, ksp.solveTranspose if transposed else ksp.solve)
            reason = int(ksp.getConvergedReason())
            steps += max(int(ksp.getIterationNumber()), 1)
            if not self.unread_checked:
                assert_options_read(self.prefix, self.options)
                self.unread_checked = True
            trial = x + step
            left = b - self._product(trial, transposed=transposed)
            before, after = norm, self._norm(left)
            if not after < before:  # NaN, too
                break
            x[:], rest, norm = trial, left, after
            if reason == -3:  # max_it
                break
            if after > 0.5 * before:
                break
        residual = norm / size
        if norm <= goal:
            return Result.SUCCESSFUL, steps, residual
        if steps >= solver.max_steps:
            return Result.MAX_STEPS_REACHED, steps, residual
        if reason >= 0:
            return Result.STAGNATED, steps, residual
        self.failure = self._failure_of(reason)
        ksp.destroy()  # a factorization that failed would fail with other values, too
        self.ksp, self.values, self.values_id = None, None, 0
        return Result.BREAKDOWN, steps, residual

    def _failure_of(self, reason: int) -> str:
        """Return PETSc's names of a failure, and what often helps."""
        names = {
            number: name
            for name, number in vars(petsc_module().KSP.ConvergedReason).items()
            if not name.startswith("_")
        }
        text = str(names.get(reason, reason))
        failed, handle = ctypes.c_int(0), ctypes.c_void_p(self.ksp.getPC().handle)
        if reason == _PC_FAILED:
            petsc_function("PCGetFailedReason")(handle, ctypes.byref(failed))
            text += f", {_FACTOR_FAILURES.get(failed.value, failed.value)}"
        if failed.value == _OUT_OF_MEMORY:
            text += ". MUMPS gets twice the memory by -mat_mumps_icntl_14 100"
        return text


_PC_FAILED, _OUT_OF_MEMORY = -11, 3  # of PETSc's enumerations
_FACTOR_FAILURES = {
    1: "FACTOR_STRUCT_ZEROPIVOT",
    2: "FACTOR_NUMERIC_ZEROPIVOT",
    _OUT_OF_MEMORY: "FACTOR_OUTMEMORY",
    4: "FACTOR_OTHER",
    5: "SUBPC_ERROR",
}


solve_p = primitive(
    "petsc_solve",
    shapes=lambda values, b, *_, **__: [
        b, jax.ShapeDtypeStruct((b.shape[0], INFO), np.finfo(b.dtype).dtype)
    ],
    native=NativeCall(
        "mpigrad_custom",
        n_inputs=5,
        attributes=lambda params: params["call"].attributes(params["slot"], params["site"]),
        keep_alive="call",
    ),
)  # fmt: skip
