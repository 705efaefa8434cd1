"""SciPy's optimizers as methods of `minimize`: they run on rank 0, on the whole vector."""

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

from mpigrad.collective_errors import raise_on_all_ranks
from mpigrad.optimize.method import Method
from mpigrad.optimize.objective import Objective
from mpigrad.optimize.root_protocol import agree, evaluation, request
from mpigrad.optimize.solution import Result
from mpigrad.optimize.unknowns import Unknowns, Vector

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

Whole = NDArray[np.float64] | None  # a vector on rank 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SciPyState:
    """Where SciPy is, as far as it tells.

    Attributes
    ----------
    gradient_norm
        With bounds, of the projected gradient: of the longest step along the negative gradient, no
        longer than the gradient, that stays between the bounds.
    step
        Its two-norm.
    ending
        0, or 1 where SciPy has ended by itself with success, or 2 without.
    """

    x: Vector
    loss: float
    gradient_norm: float
    step: float
    ending: int

    stuck = False

    @property
    def ended(self) -> Result | None:
        return (None, Result.OWN_TOLERANCES, Result.OWN_END)[self.ending]


@dataclasses.dataclass(frozen=True)
class SciPy(Method):
    """A gradient method of `scipy.optimize.minimize`, on rank 0, which gathers all unknowns.

    SciPy's own tolerances hold beside those of `minimize`: the run ends at whichever is met first.
    A restart goes on from the last point that was saved, without SciPy's memory: SciPy gives it to
    nobody.

    Attributes
    ----------
    name
        "L-BFGS-B", "CG", "BFGS", "TNC", "SLSQP", "Newton-CG", "trust-ncg", "trust-krylov" or
        "trust-constr".
    bounds
        None, or (lower, upper): each None, a number, or a pytree prefix of the unknowns with
        numbers and arrays that broadcast to the leaves; infinite where there is no bound. For
        L-BFGS-B, TNC, SLSQP and trust-constr. A start outside is moved onto the bound.
    options
        SciPy's own, such as {"maxcor": 20}.
    """

    name: str = "L-BFGS-B"
    bounds: tuple[Any, Any] | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name not in _METHODS:
            raise ValueError(
                f"SciPy: {self.name!r} is none of {', '.join(_METHODS)}; run other methods with "
                "root_driven"
            )
        if self.bounds is not None and self.name not in _BOUNDED:
            raise ValueError(
                f"SciPy: {self.name} knows no bounds; those that do: {', '.join(_BOUNDED)}"
            )
        if self.bounds is not None and len(self.bounds) != 2:
            raise ValueError("SciPy: bounds are a pair (lower, upper)")

    @property
    def needs_f(self) -> bool:
        return self.name in _PRODUCTS

    def check(self, unknowns: Unknowns) -> None:
        with raise_on_all_ranks(unknowns.comm):
            for lower, upper in zip(*self.limits(unknowns), strict=True):
                if not np.all(lower <= upper):  # NaN is no bound either
                    raise ValueError("SciPy: a lower bound is not at or below its upper bound")

    def start(self, objective: Objective, x: Vector) -> SciPyState:
        run = objective.companion = _Run(self, objective)
        x = tuple(jnp.clip(part, *ends) for part, *ends in zip(x, *run.limits, strict=True))
        found = run.first(x)
        return SciPyState(x, found.loss, found.norm, 0.0, 0)

    def step(self, objective: Objective, state: SciPyState) -> SciPyState:
        """One iteration of SciPy's."""
        if not isinstance(objective.companion, _Run):  # after a restart
            objective.companion = _Run(self, objective)
        return objective.companion.step(state)

    def layout(self, unknowns: Unknowns) -> Any:
        return SciPyState(unknowns.layout(), False, False, False, False)  # type: ignore[arg-type]

    def limits(self, unknowns: Unknowns) -> tuple[Vector, Vector]:
        """Lower and upper bounds of what this rank holds of the vector."""
        example = jax.tree.unflatten(unknowns.structure, unknowns.shapes)
        found = []
        for bound, none in zip(self.bounds or (None, None), (-np.inf, np.inf), strict=True):
            try:
                spread = jax.tree.broadcast(none if bound is None else bound, example)
                whole = jax.tree.map(
                    lambda b, leaf: jnp.broadcast_to(jnp.asarray(b, leaf.dtype), leaf.shape),
                    spread,
                    example,
                )
            except ValueError as error:
                raise ValueError(f"SciPy: bounds do not fit the unknowns: {error}") from error
            found.append(unknowns.vector(whole))
        return found[0], found[1]


# ---- one run ----


class _Ask(enum.IntEnum):
    """What rank 0 wants of all: the end of this iteration, or what SciPy asks for."""

    PAUSE = 0
    EVALUATE = 1
    PRODUCT = 2


# What SciPy's thread tells beside that.
_ITERATE, _ENDED, _FAILED = "an iteration is done", "it has ended", "it has failed"


class _Over(BaseException):
    """In SciPy's thread: nobody waits for it any more."""


@dataclasses.dataclass(frozen=True)
class _Evaluated:
    """A loss, the norm of the projected gradient, and on rank 0 the whole gradient."""

    loss: float
    norm: float
    gradient: Whole


class _Run:
    """SciPy in a thread of rank 0, and in `step` the ranks that compute what it asks for.

    All messages and all of the objective are the main thread's.
    """

    def __init__(self, method: SciPy, objective: Objective) -> None:
        self.method, self.objective = method, objective
        self.comm = objective.unknowns.comm
        self.limits = method.limits(objective.unknowns)
        self.shapes = self.comm.mpi.allgather([np.shape(part) for part in self.limits[0]])
        lower, upper = (self.gather(limit) for limit in self.limits)
        self.bounds: Whole = None
        if method.bounds is not None and lower is not None and upper is not None:
            self.bounds = np.stack([lower, upper], -1)
        self.begun = False
        self.asked: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        self.answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.held: tuple[Any, Any] | None = None  # asked for, when an iteration was done
        self.seen: dict[bytes, _Evaluated] = {}  # since then
        weakref.finalize(self, self.answers.put, None)  # SciPy's thread ends

    def step(self, state: SciPyState) -> SciPyState:
        """Until SciPy has done an iteration, or has ended (collective)."""
        whole = self.gather(state.x)
        drive = self.drive(whole) if whole is not None else None
        answer, error, news = None, None, None
        while True:
            ask, operands = _Ask.PAUSE, ()
            if drive is not None:
                try:
                    ask, operands = drive.send(answer)
                except StopIteration as end:
                    news = end.value
                except Exception as raised:  # SciPy's own
                    error = raised
            ask = _Ask(int(request(np.array([float(ask)]), 0, self.comm, first=True)[0]))
            if ask is _Ask.PAUSE:
                break
            answer = self.compute(ask, operands, state.x)
        error = agree(error, self.comm)
        if error is not None:
            raise error
        x = self.scatter(news[0] if news else None, state.x)
        return SciPyState(x, *self.comm.mpi.bcast(news[1:] if news else None))

    def drive(self, x: NDArray[np.float64]) -> Generator[Any, Any, Any]:
        """On rank 0, an iteration from x: yields what SciPy asks for, and is sent the answers.

        Returns a state's fields, with the whole x.
        """
        if not self.begun:
            self.begin(x)
        moved, ending = None, 0
        while True:
            kind, told = self.held or self.asked.get()
            self.held = None
            if kind is _FAILED:
                raise told
            if kind is _ENDED:
                moved, ending = told.x, 1 if told.success else 2
                break
            if kind is _ITERATE:
                moved = None if np.array_equal(told, x) else told  # a trial may be rejected
            elif moved is not None:  # it goes on
                self.held = kind, told
                break
            elif kind is _Ask.EVALUATE:
                found = yield from self.found(told[0])
                self.answers.put((found.loss, found.gradient))
            else:
                self.answers.put((yield kind, told))
        found = yield from self.found(moved)
        self.seen = {moved.tobytes(): found}
        return moved, found.loss, found.norm, float(np.linalg.norm(moved - x)), ending

    def found(self, x: NDArray[np.float64]) -> Generator[Any, Any, _Evaluated]:
        """Value and gradient at x, computed once in an iteration."""
        if x.tobytes() not in self.seen:
            self.seen[x.tobytes()] = yield _Ask.EVALUATE, (x,)
        return self.seen[x.tobytes()]

    def begin(self, x: NDArray[np.float64]) -> None:
        self.begun = True
        threading.Thread(
            target=_minimise,
            args=(self.method, x, self.bounds, self.asked, self.answers),
            daemon=True,
            name=f"scipy-{self.method.name}",
        ).start()

    # ---- computed by all ranks ----

    def first(self, x: Vector) -> _Evaluated:
        """Value and gradient at the first point."""
        whole = self.gather(x)
        found = self.compute(_Ask.EVALUATE, () if whole is None else (whole,), x)
        if whole is not None:
            self.seen = {whole.tobytes(): found}
        return found

    def compute(self, ask: _Ask, operands: Sequence[NDArray[np.float64]], like: Vector) -> Any:
        """What rank 0 asks for at its operands; an error of one rank is raised by all."""
        parts = [self.scatter(operand, like) for operand in operands or (None,) * ask]
        with evaluation(self.comm):
            out = self.evaluate(*parts) if ask is _Ask.EVALUATE else self.multiply(*parts)
        return out

    def evaluate(self, x: Vector) -> _Evaluated:
        point = self.objective.first(x)
        steps = [
            np.clip(-np.asarray(g, np.float64), low - np.asarray(a), high - np.asarray(a))
            for a, g, low, high in zip(x, point.gradient, *self.limits, strict=True)
        ]
        squares = self.comm.mpi.allgather(float(sum(np.vdot(s, s) for s in steps)))
        return _Evaluated(point.loss, math.sqrt(sum(squares)), self.gather(point.gradient))

    def multiply(self, x: Vector, v: Vector) -> Whole:
        self.objective.products += 1
        return self.gather(self.objective.compiled(_product)(x, v, self.objective.batch))

    def gather(self, vector: Vector) -> Whole:
        """The whole vector on rank 0, None elsewhere."""
        parts = self.comm.mpi.gather([np.asarray(part, np.float64).ravel() for part in vector])
        return None if parts is None else np.concatenate([part for rank in parts for part in rank])

    def scatter(self, whole: Whole, like: Vector) -> Vector:
        """This rank's part of rank 0's vector."""
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
    bounds: Whole,
    asked: queue.SimpleQueue[tuple[Any, Any]],
    answers: queue.SimpleQueue[Any],
) -> None:
    """SciPy's thread."""

    def ask(kind: _Ask, *operands: NDArray[np.float64]) -> Any:
        asked.put((kind, tuple(np.array(operand, np.float64) for operand in operands)))
        answer = answers.get()
        if answer is None:
            raise _Over
        return answer

    try:
        from scipy.optimize import minimize

        result = minimize(
            lambda x: ask(_Ask.EVALUATE, x),
            x0,
            jac=True,
            hessp=(lambda x, v: ask(_Ask.PRODUCT, x, v)) if method.name in _PRODUCTS else None,
            bounds=bounds,
            method=method.name,
            options=_UNLIMITED[method.name] | dict(method.options),
            callback=lambda x, *_: asked.put((_ITERATE, np.array(x))),
        )
    except _Over:
        return
    except BaseException as error:  # for the ranks that wait
        asked.put((_FAILED, error))
    else:
        asked.put((_ENDED, result))
