"""Eigenpairs by SLEPc through slepc4py: the strategy of `eigh`, and its call."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import operator
from collections.abc import Mapping
from typing import Any, ClassVar, final

import jax
import numpy as np
from mpi4py import MPI

from mpigrad.extend import HostCall, NativeCall, array_at, primitive
from mpigrad.solution import Result
from mpigrad.sparse.matrix.pattern import Pattern
from mpigrad.sparse.solvers.krylov import RUNNING
from mpigrad.sparse.solvers.libraries import petsc_module, slepc_module
from mpigrad.sparse.solvers.petsc import (
    assert_options_read,
    assert_same_settings,
    check_build,
    csr_arrays,
    delete_options,
    give_options,
    make_matrix,
    option_pairs,
    option_text,
)

__all__ = ["SLEPc", "slepc_vectors"]

_ARGUMENTS = {
    "eps_nev": "k=",
    "eps_tol": "rtol=",
    "eps_max_it": "max_steps=",
    "eps_all": "k=",
    "eps_interval": "which=",
    "eps_target": "shift=, with the other sign,",
    "st_shift": "shift=, with the other sign,",
    **{
        f"eps_{end}_{part}": "which="
        for end in ("smallest", "largest", "target")
        for part in ("real", "magnitude", "imaginary")
    },
}


@final
@dataclasses.dataclass(frozen=True)
class SLEPc:
    """Any EPS and ST of SLEPc for `eigh`, by SLEPc's own options. It needs slepc4py.

    (Hernandez, Roman & Vidal, ACM Trans. Math. Softw. 31, 2005.) Krylov-Schur with shift-and-invert
    by a factorization, Jacobi-Davidson, and all other methods that the site's SLEPc has.

    Attributes
    ----------
    options
        SLEPc's options for one EPS, as text or as a dictionary of names and values, such as
        "-eps_type krylovschur -st_type sinvert -st_pc_type lu" or {"eps_ncv": 40}. Default:
        SLEPc's defaults. With "-st_type sinvert" the target is -shift. On several ranks a
        factorization needs a parallel package: "-st_pc_factor_mat_solver_type mumps". An option
        that nothing reads is an error.

    Examples
    --------
    >>> from mpigrad.sparse import SLEPc, why_no_slepc
    >>> solver = SLEPc("-st_type sinvert -st_pc_type lu -st_pc_factor_mat_solver_type mumps")
    >>> SLEPc({"eps_type": "krylovschur", "eps_ncv": 40}).options
    '-eps_type krylovschur -eps_ncv 40'
    >>> isinstance(why_no_slepc(), str)  # "" if eigh can use it
    True
    """

    options: str | Mapping[str, Any] = ""

    def __post_init__(self) -> None:
        example = "-eps_type krylovschur -st_type sinvert"
        text = option_text("SLEPc", self.options, _ARGUMENTS, example)
        object.__setattr__(self, "options", text)

    def check(self, pattern: Pattern, dtype: Any) -> None:
        """Raise an error, the same on every rank, if SLEPc cannot take such matrices."""
        slepc_module()
        check_build("SLEPc", "A and B", pattern.n_rows, dtype)


def slepc_vectors(
    params: dict[str, Any], a: jax.Array, b: jax.Array, state: jax.Array, m: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute vectors of the smallest eigenvalues by SLEPc (collective).

    Parameters
    ----------
    params
        The parameters of `eigh_p`.
    a, b
        The values of A and B.
    state
        `RUNNING`, or a `Result` with which nothing is computed.
    m
        The largest number of vectors. One more than k are computed if there are as many.

    Returns
    -------
    The vectors, shape (k or k + 1, n_local), `state` or `Result.BREAKDOWN`, and the steps.
    """
    pattern, patterns = params["pattern"], (params["pattern"], params["mass"])
    settings = {name: params[name] for name in ("solver", "k", "shift", "rtol", "max_steps")}
    call = _Pairs(
        **settings,
        text=", ".join(f"{name}={value!r}" for name, value in settings.items()),
        comm=MPI.Intracomm(pattern.solver_communicator),
        size=(pattern.n_local, pattern.n_rows),
        offset=pattern.offset,
        rows=tuple(
            (p.row_starts, p.columns, None if p.is_ordered else p.order)
            for p in patterns
            if p is not None
        ),
        free=params["free"],
        count=min(params["k"] + 1, m),
        throw=params["throw"],
        dtype=np.dtype(a.dtype),
    )
    site, slot = params["site"], pattern.comm.slot
    vectors, info = slepc_p.bind(a, b, state, call=call, slot=slot, site=site)
    return vectors, info[0], info[1]


@dataclasses.dataclass(frozen=True, eq=False)
class _Pairs(HostCall):
    """One computation of a compiled program, which may outlive the patterns."""

    shown_as: ClassVar[str] = "eigh"
    solver: SLEPc
    k: int
    shift: float
    rtol: float
    max_steps: int
    text: str  # of all settings
    comm: MPI.Intracomm
    size: tuple[int, int]
    offset: int
    rows: tuple[tuple[np.ndarray, np.ndarray, np.ndarray | None], ...]  # of A and B
    free: bytes
    count: int
    throw: bool
    dtype: np.dtype

    def run(self, xs: Any, ys: Any) -> None:
        values = [
            array_at(xs[i], (len(columns),), self.dtype)
            for i, (_, columns, _) in enumerate(self.rows)
        ]
        vectors = array_at(ys[0], (self.count, self.size[0]), self.dtype)
        info, state = array_at(ys[1], (2,), _INT32), array_at(xs[2], (), _INT32)
        vectors[:], info[:] = 0, (state, 0)
        if state != RUNNING:
            return
        assert_same_settings(self.comm, self.text)
        failure = ""
        with contextlib.ExitStack() as stack:  # objects are destroyed on all ranks at once
            try:
                info[1], failure = self._compute(values, vectors, stack)
            except petsc_module().Error as error:
                if error.ierr not in _NUMERICAL:
                    raise
                failure = (
                    f"{str(error).splitlines()[-1]}. If A + shift B is singular, change shift."
                )
        if failure:
            info[0] = Result.BREAKDOWN
            if self.throw:
                raise ArithmeticError(f"SLEPc failed: {failure}")

    def _compute(
        self, values: list[np.ndarray], vectors: np.ndarray, stack: contextlib.ExitStack
    ) -> tuple[int, str]:
        """Write the vectors, and return the steps and the text of a failure."""
        prefix = f"mpigrad_eigh_{next(_numbers)}_"
        assert isinstance(self.solver.options, str)
        options = option_pairs(self.solver.options)
        give_options(self.comm, prefix, options)
        stack.callback(delete_options, prefix, options)
        free = np.frombuffer(self.free, bool) if self.free else np.ones(self.size[0], bool)
        matrices = [
            self._matrix(csr_arrays(*rows, entries), prefix, free, stack)
            for rows, entries in zip(self.rows, values, strict=True)
        ]
        eps = self._eps(matrices, prefix, stack)
        # All values are above -shift, so the nearest ones are the smallest.
        inverts = eps.getST().getType() in {"sinvert", "cayley"}
        which = slepc_module().EPS.Which
        eps.setWhichEigenpairs(which.TARGET_MAGNITUDE if inverts else which.SMALLEST_REAL)
        given, limit = eps.getDimensions()[1:], matrices[0].getSize()[0]
        pairs: list[tuple[float, Any]] = []
        wanted, more, steps, tolerance = self.k, 1, 0, 0.1 * self.rtol
        # Krylov methods may miss copies of equal values. The pairs are complete if the next one,
        # which starts anywhere and is orthogonal to them, is not below the k-th.
        is_complete = False
        while not is_complete:
            eps.setDimensions(wanted, *given)
            eps.setTolerances(max(tolerance, 1e-15), self.max_steps)
            eps.solve()
            assert_options_read(prefix, options)
            steps, count = steps + int(eps.getIterationNumber()), int(eps.getConverged())
            if count < wanted:
                return steps, (
                    f"{_reason(eps)}, {count} of {wanted} pairs after {steps} steps. Raise "
                    f"max_steps={self.max_steps}, loosen rtol, or take other options, such as "
                    "-st_type sinvert."
                )
            new, worst = self._pairs(eps, matrices, min(count, limit - len(pairs)), stack)
            if inverts and new[0][0] < -self.shift:
                return steps, (
                    f"a value {new[0][0]:.6g} below -shift was found, so the shifted matrix is not "
                    f"positive definite. Give a larger shift= than {self.shift:.6g}."
                )
            if worst > 0.9 * self.rtol and tolerance > 1e-6 * self.rtol:
                tolerance *= 0.01  # SLEPc judges other residuals, such as that of the inverse
                continue
            is_complete = bool(pairs) and new[0][0] >= pairs[self.k - 1][0]
            pairs = sorted([*pairs, *new], key=operator.itemgetter(0))
            is_complete |= len(pairs) == limit
            eps.setDeflationSpace([vector for _, vector in pairs])
            wanted, more = min(more, limit - len(pairs)), 2 * more
        for row, (_, vector) in zip(vectors, pairs, strict=False):
            row[free] = vector.getArray(readonly=True)
        return steps, ""

    def _matrix(self, csr: Any, prefix: str, free: np.ndarray, stack: contextlib.ExitStack) -> Any:
        petsc = petsc_module()
        matrix = make_matrix(self.comm, self.size, csr, prefix)
        stack.callback(matrix.destroy)
        if self.free:  # fixed rows would be pairs of their own
            inner = (self.offset + np.flatnonzero(free)).astype(petsc.IntType)
            rows = petsc.IS().createGeneral(inner, comm=self.comm)
            stack.callback(rows.destroy)
            matrix = matrix.createSubMatrix(rows, rows)
            stack.callback(matrix.destroy)
        matrix.setOption(petsc.Mat.Option.SYMMETRIC, True)
        matrix.setOption(petsc.Mat.Option.SYMMETRY_ETERNAL, True)
        return matrix

    def _eps(self, matrices: list[Any], prefix: str, stack: contextlib.ExitStack) -> Any:
        kind = slepc_module().EPS
        eps = kind().create(self.comm)
        stack.callback(eps.destroy)
        eps.setOptionsPrefix(prefix)
        eps.setOperators(*matrices)
        eps.setProblemType(kind.ProblemType.HEP if len(matrices) == 1 else kind.ProblemType.GHEP)
        eps.setTarget(-self.shift)
        eps.setFromOptions()
        return eps

    def _pairs(
        self, eps: Any, matrices: list[Any], count: int, stack: contextlib.ExitStack
    ) -> tuple[list[tuple[float, Any]], float]:
        """Return values and vectors in ascending order, and the largest relative residual."""
        pairs, worst = [], 0.0
        ax, bx = matrices[0].createVecs()
        for i in range(count):
            x = ax.duplicate()
            stack.callback(x.destroy)
            value = self.comm.bcast(float(eps.getEigenpair(i, x).real))
            matrices[0].mult(x, ax)
            x.copy(bx) if len(matrices) == 1 else matrices[1].mult(x, bx)
            scale = (abs(value) + abs(self.shift)) * bx.norm()
            ax.axpy(-value, bx)
            worst = max(worst, ax.norm() / max(scale, np.finfo(self.dtype).tiny))
            pairs.append((value, x))
        ax.destroy()
        bx.destroy()
        return sorted(pairs, key=operator.itemgetter(0)), worst


def _reason(eps: Any) -> str:
    names = {n: name for name, n in vars(type(eps).ConvergedReason).items() if name[0] != "_"}
    return str(names.get(eps.getConvergedReason(), eps.getConvergedReason()))


_INT32 = np.dtype("int32")
# PETSc's codes of zero pivots, of solves that did not converge, and of libraries such as MUMPS.
_NUMERICAL = {71, 76, 81, 82, 91}
_numbers = itertools.count(1)


slepc_p = primitive(
    "slepc_vectors",
    shapes=lambda a, b, state, *, call, **_: [
        jax.ShapeDtypeStruct((call.count, call.size[0]), a.dtype),
        jax.ShapeDtypeStruct((2,), _INT32),
    ],
    native=NativeCall(
        "mpigrad_custom",
        n_inputs=3,
        attributes=lambda params: params["call"].attributes(params["slot"], params["site"]),
        keep_alive="call",
    ),
)
