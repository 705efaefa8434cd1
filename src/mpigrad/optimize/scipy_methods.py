"""SciPy's optimizers as methods of `minimize`. They run on rank 0, on the global vector."""

from __future__ import annotations

import dataclasses
import enum
import math
import queue
import threading
import weakref
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from mpigrad.optimize.bounds import (
    check_bounds,
    check_pair,
    clip,
    projected_norm,
    vectors_of_bounds,
)
from mpigrad.optimize.method import Method
from mpigrad.optimize.objective import Objective
from mpigrad.optimize.root_protocol import first_error, request, shared_evaluation
from mpigrad.optimize.unknowns import Unknowns, Vector
from mpigrad.solution import Result

__all__ = ["SciPy", "SciPyState"]

_METHODS = (
    *("L-BFGS-B", "CG", "BFGS", "TNC", "SLSQP"),
    *("Newton-CG", "trust-ncg", "trust-krylov", "trust-constr"),  # these use Hessian products
)
_PRODUCTS = _METHODS[5:]
_BOUNDED = ("L-BFGS-B", "TNC", "SLSQP", "trust-constr")
# `minimize` counts the iterations.
_UNLIMITED = {name: {"maxiter": 10**8} for name in _METHODS} | {
    "L-BFGS-B": {"maxiter": 10**8, "maxfun": 10**8},
    "TNC": {"maxfun": 10**8},
}

RootVector = NDArray[np.float64] | None  # the global vector on rank 0, None on other ranks


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SciPyState:
    """The state of `SciPy`, as far as SciPy makes it available.

    Attributes
    ----------
    gradient_norm
        The norm of the gradient. With bounds, the norm of the projected gradient: the longest
        step along the negative gradient, at most as long as the gradient, that stays within the
        bounds.
    step
        The two-norm of the step.
    ending
        0 during the run, 1 if SciPy has ended with success, 2 if it has ended without success.
    """

    x: Vector
    loss: float
    gradient_norm: float
    step: float
    ending: int

    stuck = False

    @property
    def ended(self) -> Result | None:
        return (None, Result.SUCCESSFUL, Result.SCIPY_FAILED)[self.ending]


@dataclasses.dataclass(frozen=True)
class SciPy(Method):
    """A gradient method of `scipy.optimize.minimize`, run on rank 0 with all unknowns.

    SciPy's own tolerances apply as well as those of `minimize`. The run ends at the first that is
    met. A restart continues from the last saved point with a new SciPy run, because SciPy does not
    give access to its memory.

    Attributes
    ----------
    name
        "L-BFGS-B", "CG", "BFGS", "TNC", "SLSQP", "Newton-CG", "trust-ncg", "trust-krylov" or
        "trust-constr".
    bounds
        None, or (lower, upper). Each is None, a float, or a pytree prefix of the unknowns with
        floats and arrays that broadcast to the leaves. Infinite values mean no bound. For
        L-BFGS-B, TNC, SLSQP and trust-constr. A start outside the bounds is moved onto them.
    options
        Options of SciPy's method, for example {"maxcor": 20}.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from mpigrad.optimize import SciPy, minimize
    >>> def loss(x):
    ...     return jnp.sum((x - 2.0) ** 2)
    >>> method = SciPy("L-BFGS-B", bounds=(0.0, 1.5))
    >>> print(minimize(loss, jnp.zeros(2), method, loss="replicated", replicated=True).value)
    [1.5 1.5]
    """

    name: str = "L-BFGS-B"
    bounds: tuple[Any, Any] | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name not in _METHODS:
            raise ValueError(
                f"SciPy: expected one of {', '.join(_METHODS)}, got {self.name!r}. Use root_driven "
                "for other methods."
            )
        if self.bounds is not None and self.name not in _BOUNDED:
            raise ValueError(
                f"SciPy: the method {self.name} does not support bounds. Use one of "
                f"{', '.join(_BOUNDED)}."
            )
        check_pair(self.bounds, "SciPy")

    @property
    def needs_f(self) -> bool:
        return self.name in _PRODUCTS

    def check(self, unknowns: Unknowns) -> None:
        check_bounds(unknowns, self.bounds, "SciPy")

    def start(self, objective: Objective, x: Vector) -> SciPyState:
        run = objective.method_data = _Run(self, objective)
        x = clip(x, run.limits)
        found = run.evaluate_first(x)
        return SciPyState(x, found.loss, found.norm, 0.0, 0)

    def step(self, objective: Objective, state: SciPyState) -> SciPyState:
        """Run SciPy for one iteration."""
        if not isinstance(objective.method_data, _Run):  # after a restart
            objective.method_data = _Run(self, objective)
        return objective.method_data.step(state)

    def layout(self, unknowns: Unknowns) -> Any:
        return SciPyState(unknowns.layout(), False, False, False, False)  # type: ignore[arg-type]


# ---- one run ----


class _Request(enum.IntEnum):
    """A request of rank 0 to all ranks."""

    PAUSE = 0
    EVALUATE = 1
    PRODUCT = 2


# Further messages of SciPy's thread.
_ITERATE, _ENDED, _FAILED = "an iteration is done", "it has ended", "it has failed"


class _RunEnded(BaseException):
    """Ends SciPy's thread after the run has ended."""


@dataclasses.dataclass(frozen=True)
class _Evaluation:
    """The loss, the norm of the projected gradient, and on rank 0 the global gradient."""

    loss: float
    norm: float
    gradient: RootVector


class _Run:
    """SciPy runs in a thread of rank 0. In `step` all ranks compute its requests.

    Only main threads send messages and evaluate the objective.
    """

    def __init__(self, method: SciPy, objective: Objective) -> None:
        self.method, self.objective = method, objective
        self.comm = objective.unknowns.comm
        self.limits = vectors_of_bounds(objective.unknowns, method.bounds, "SciPy")
        self.shapes = self.comm.mpi.allgather([np.shape(part) for part in self.limits[0]])
        lower, upper = (self.gather(limit) for limit in self.limits)
        self.bounds: RootVector = None
        if method.bounds is not None and lower is not None and upper is not None:
            self.bounds = np.stack([lower, upper], -1)
        self.begun = False
        self.requests: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        self.answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.pending: tuple[Any, Any] | None = None  # the first request of the next iteration
        self.seen: dict[bytes, _Evaluation] = {}  # in this iteration
        weakref.finalize(self, self.answers.put, None)  # ends SciPy's thread

    def step(self, state: SciPyState) -> SciPyState:
        """Compute requests until SciPy has done an iteration or has ended (collective)."""
        whole = self.gather(state.x)
        drive = self.drive(whole) if whole is not None else None
        answer, error, result = None, None, None
        while True:
            ask, operands = _Request.PAUSE, ()
            if drive is not None:
                try:
                    ask, operands = drive.send(answer)
                except StopIteration as end:
                    result = end.value
                except Exception as raised:  # an error of SciPy
                    error = raised
            ask = _Request(int(request(np.array([float(ask)]), 0, self.comm, first=True)[0]))
            if ask is _Request.PAUSE:
                break
            answer = self.compute(ask, operands, state.x)
        error = first_error(error, self.comm)
        if error is not None:
            raise error
        x = self.scatter(result[0] if result else None, state.x)
        return SciPyState(x, *self.comm.mpi.bcast(result[1:] if result else None))

    def drive(self, x: NDArray[np.float64]) -> Generator[Any, Any, Any]:
        """Run an iteration from x on rank 0: yield SciPy's requests, receive the answers.

        Returns the fields of a state, with the global x.
        """
        if not self.begun:
            self.start_thread(x)
        moved, ending = None, 0
        while True:
            kind, content = self.pending or self.requests.get()
            self.pending = None
            if kind is _FAILED:
                raise content
            if kind is _ENDED:
                moved, ending = content.x, 1 if content.success else 2
                break
            if kind is _ITERATE:
                moved = None if np.array_equal(content, x) else content  # unchanged if rejected
            elif moved is not None:  # the next iteration has begun
                self.pending = kind, content
                break
            elif kind is _Request.EVALUATE:
                found = yield from self.evaluation(content[0])
                self.answers.put((found.loss, found.gradient))
            else:
                self.answers.put((yield kind, content))
        found = yield from self.evaluation(moved)
        self.seen = {moved.tobytes(): found}
        return moved, found.loss, found.norm, float(np.linalg.norm(moved - x)), ending

    def evaluation(self, x: NDArray[np.float64]) -> Generator[Any, Any, _Evaluation]:
        """Return value and gradient at x, computed once in an iteration."""
        if x.tobytes() not in self.seen:
            self.seen[x.tobytes()] = yield _Request.EVALUATE, (x,)
        return self.seen[x.tobytes()]

    def start_thread(self, x: NDArray[np.float64]) -> None:
        self.begun = True
        threading.Thread(
            target=_minimise,
            args=(self.method, x, self.bounds, self.requests, self.answers),
            daemon=True,
            name=f"scipy-{self.method.name}",
        ).start()

    # ---- computed by all ranks ----

    def evaluate_first(self, x: Vector) -> _Evaluation:
        """Return value and gradient at the first point."""
        whole = self.gather(x)
        found = self.compute(_Request.EVALUATE, () if whole is None else (whole,), x)
        if whole is not None:
            self.seen = {whole.tobytes(): found}
        return found

    def compute(self, ask: _Request, operands: Sequence[NDArray[np.float64]], like: Vector) -> Any:
        """Compute rank 0's request. An error of one rank is raised on all ranks."""
        parts = [self.scatter(operand, like) for operand in operands or (None,) * ask]
        with shared_evaluation(self.comm):
            out = self.evaluate(*parts) if ask is _Request.EVALUATE else self.multiply(*parts)
        return out

    def evaluate(self, x: Vector) -> _Evaluation:
        point = self.objective.evaluate(x)
        norm = projected_norm(self.objective.unknowns, x, point.gradient, self.limits)
        return _Evaluation(point.loss, norm, self.gather(point.gradient))

    def multiply(self, x: Vector, v: Vector) -> RootVector:
        self.objective.products += 1
        return self.gather(self.objective.compiled(_product)(x, v, self.objective.batch))

    def gather(self, vector: Vector) -> RootVector:
        """Return the global vector on rank 0, and None on other ranks."""
        parts = self.comm.mpi.gather([np.asarray(part, np.float64).ravel() for part in vector])
        return None if parts is None else np.concatenate([part for rank in parts for part in rank])

    def scatter(self, whole: RootVector, like: Vector) -> Vector:
        """Return this rank's part of rank 0's vector."""
        pieces = None
        if whole is not None:
            sizes = [[math.prod(shape) for shape in rank] for rank in self.shapes]
            ends = np.cumsum([size for rank in sizes for size in rank])
            cuts = iter(np.split(whole, ends[:-1]))
            pieces = [[next(cuts) for _ in rank] for rank in sizes]
        return tuple(
            jnp.asarray(piece.reshape(part.shape), part.dtype)
            for piece, part in zip(self.comm.mpi.scatter(pieces), like, strict=True)
        )


def _product(objective: Objective, x: Vector, v: Vector, batch: Any) -> Vector:
    return objective.hessian_products(x, batch)(v)


def _minimise(
    method: SciPy,
    x0: NDArray[np.float64],
    bounds: RootVector,
    requests: queue.SimpleQueue[tuple[Any, Any]],
    answers: queue.SimpleQueue[Any],
) -> None:
    """Run SciPy in its thread."""

    def ask(kind: _Request, *operands: NDArray[np.float64]) -> Any:
        requests.put((kind, tuple(np.array(operand, np.float64) for operand in operands)))
        answer = answers.get()
        if answer is None:
            raise _RunEnded
        return answer

    try:
        from scipy.optimize import minimize

        result = minimize(
            lambda x: ask(_Request.EVALUATE, x),
            x0,
            jac=True,
            hessp=(lambda x, v: ask(_Request.PRODUCT, x, v)) if method.name in _PRODUCTS else None,
            bounds=bounds,
            method=method.name,
            options=_UNLIMITED[method.name] | dict(method.options),
            callback=lambda x, *_: requests.put((_ITERATE, np.array(x))),
        )
    except _RunEnded:
        return
    except BaseException as error:  # the main thread raises it on all ranks
        requests.put((_FAILED, error))
    else:
        requests.put((_ENDED, result))
