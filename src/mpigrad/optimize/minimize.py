"""The verb `minimize`: one loop over all methods."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from mpi4py import MPI

from mpigrad.autodiff.transforms import Loss
from mpigrad.checkpoint import Checkpoint, Decision, Saving
from mpigrad.collective_errors import assert_same_on_all_ranks, raise_on_all_ranks
from mpigrad.communicator import Communicator, resolve
from mpigrad.optimize.lbfgs import LBFGS
from mpigrad.optimize.method import Method, State, told
from mpigrad.optimize.objective import Objective, Point
from mpigrad.optimize.solution import NotFiniteError, Record, Result, Solution
from mpigrad.optimize.unknowns import Vector
from mpigrad.profiling.progress_bar import Progress

__all__ = ["minimize"]


def minimize(
    f: Callable[..., Any] | Objective | None,
    x0: Any,
    method: Method = LBFGS(),  # noqa: B008 (frozen)
    *,
    sharded: Any = False,
    loss: Loss = "share",
    value_and_grad: Callable[..., Any] | None = None,
    iterations: int = 1000,
    rtol: float = 1e-6,
    atol: float = 0.0,
    ftol: float = 0.0,
    batch: Callable[[int], Any] | None = None,
    callback: Callable[[Record, Any], Any] | None = None,
    checkpoint: Checkpoint | None = None,
    history: str | os.PathLike[str] | None = None,
    progress: bool = False,
    comm: Communicator | None = None,
) -> Solution:
    """Minimise a function of unknowns that every rank holds, or holds a part of (collective).

    Parameters
    ----------
    f
        f(x) -> real scalar, with messages inside where it likes; for `GaussNewton` its residuals.
        Or an `Objective`, which is compiled once for several runs; `sharded`, `loss`,
        `value_and_grad` and `comm` are then its own.
    x0
        Where to start: a pytree of floats and arrays, float32 or float64.
    method
        `LBFGS()`, `NonlinearCG()`, `Adam()`, `Optax(...)`, `GaussNewton()`, `NewtonCG()` or
        `SciPy(...)`.
    sharded
        A pytree prefix of x0. False: equal on all ranks (checked), one set of unknowns, whose
        gradient is the sum over ranks. True: each rank's own rows, in rank order along axis 0. A
        `Grid`: each rank's tile, in the last axes.
    loss
        "share": the loss is the sum over ranks of what f returns; "replicated": f returns it on
        every rank. As in `mpigrad.value_and_grad`.
    value_and_grad
        x -> (global loss, its gradient, a tree such as x), to be used instead of differentiating
        f, which may then be None. It is called as it is, not compiled.
    iterations
        Most iterations.
    rtol, atol
        Stop where |g| <= max(atol, rtol |g0|), in the two-norm over all unknowns of all ranks.
    ftol
        Stop where an iteration makes the loss smaller by no more than this part of it.
    batch
        iteration -> what f gets as its second argument in this iteration (each rank its own), for
        methods whose steps may each see another batch: `Adam` and `Optax`. It depends on the number
        of the iteration alone, so that a run that was restarted sees the same batches.
    callback
        (record, x) -> whether to stop, called after each iteration on every rank. All stop where
        one rank's says so.
    checkpoint
        A `mpigrad.checkpoint.Checkpoint`: the state is saved as it says and at the end, and a run
        that finds one goes on from there, x0 giving the structure alone.
    history
        A file that gets a JSON line for each iteration when it is done, written by rank 0.
    progress
        Show a line that says how far it has come.
    comm
        The ranks; all of them if not given.

    Returns
    -------
    A `Solution`, the same on every rank but for sharded leaves.

    Raises
    ------
    TypeError, ValueError
        On every rank: arguments that do not fit, or differ between ranks.
    NotFiniteError
        On every rank: the loss of x0, or a product of its gradient, is not finite.

    Notes
    -----
    In the methods' vectors every unknown lies on one rank (`Unknowns`), so that inner products are
    sums over ranks, and a sharded run follows the serial run's iterates to rounding. Decisions are
    made of numbers that are equal on all ranks bit for bit.
    """
    comm = f.unknowns.comm if isinstance(f, Objective) else resolve(comm)
    with raise_on_all_ranks(comm):
        _check(method, iterations, (rtol, atol, ftol), batch)
        residuals = method.residuals
        if method.needs_f and (f.f if isinstance(f, Objective) else f) is None:
            raise TypeError(
                f"minimize: {type(method).__name__} takes products with the Hessian of f; "
                "value_and_grad alone will not do"
            )
        if isinstance(f, Objective):
            if f.residuals != residuals:
                raise ValueError(
                    f"minimize: {type(method).__name__} needs an Objective with "
                    f"residuals={residuals}"
                )
            if (sharded, loss, value_and_grad) != (False, "share", None):
                raise ValueError(
                    "minimize: give sharded, loss and value_and_grad to the Objective, which is "
                    "already made"
                )
    agreed = (told(method), iterations, rtol, atol, ftol)
    assert_same_on_all_ranks(comm, agreed, "minimize: method, iterations, rtol, atol and ftol")
    absent = tuple(option is None for option in (batch, callback, checkpoint))
    assert_same_on_all_ranks(
        comm, absent, "minimize: whether batch, callback and checkpoint are None"
    )
    objective = (
        f
        if isinstance(f, Objective)
        else Objective(
            f, x0, sharded=sharded, loss=loss, value_and_grad=value_and_grad,
            residuals=residuals, comm=comm,
        )
    )  # fmt: skip
    objective.evaluations = objective.products = 0
    objective.companion = None
    method.check(objective.unknowns)
    run = _Run(method, objective, callback, batch)
    with contextlib.ExitStack() as stack:
        if progress:
            run.progress = Progress(iterations, comm.rank)
            stack.callback(run.progress.close)
        if checkpoint is not None:
            run.saving = stack.enter_context(checkpoint.start(comm))
        with raise_on_all_ranks(comm):
            if history is not None and comm.rank == 0:
                run.history = pathlib.Path(history)
                run.history.open("a").close()  # what was written before is kept for now
        stack.callback(run.close)
        result, state = run.to_the_end(x0, iterations, (rtol, atol, ftol))
    return Solution(
        objective.tree(state.x),
        state.loss,
        state.gradient_norm,
        result,
        tuple(run.records),
        {
            "iterations": run.records[-1].iteration,
            "evaluations": objective.evaluations,
            "products": objective.products,
        },
        state,
        run.asked_to_end,
    )


class _Unevaluated:
    """An objective for the state that a saved one is read into."""

    def __init__(self, objective: Objective) -> None:
        self.unknowns, self.tree = objective.unknowns, objective.tree

    def first(self, x: Vector) -> Point:
        return Point(x, x, 0.0, 0.0, 0.0)


class _Run:
    """One run of the loop."""

    def __init__(
        self,
        method: Method,
        objective: Objective,
        callback: Callable[[Record, Any], Any] | None,
        batch: Callable[[int], Any] | None,
    ) -> None:
        self.method, self.objective = method, objective
        self.callback, self.batch = callback, batch
        self.comm = objective.unknowns.comm
        self.saving: Saving | None = None
        self.saved_at = -1  # iteration
        self.history: pathlib.Path | None = None
        self.log: TextIO | None = None
        self.asked_to_end = False
        self.progress: Progress | None = None
        self.records: list[Record] = []
        self.begun = time.monotonic()

    def to_the_end(
        self, x0: Any, iterations: int, tolerances: tuple[float, float, float]
    ) -> tuple[Result, State]:
        rtol, atol, ftol = tolerances
        x = self.objective.unknowns.first(x0)
        state = self.restored(x)
        decision = Decision(save=False, stop=False)
        stopped = False
        if state is None:
            self.see_batch(0)
            state = self.method.start(self.objective, x)
            if not (math.isfinite(state.loss) and math.isfinite(state.gradient_norm)):
                raise NotFiniteError(
                    f"minimize: the loss of x0 is {state.loss}, the norm of its gradient "
                    f"{state.gradient_norm}; start from other values"
                )
            self.open_log()
            decision, stopped = self.note(0, state)
        else:
            self.open_log()
        enough = max(atol, rtol * self.records[0].gradient_norm)
        while True:
            iteration = self.records[-1].iteration
            before = self.records[-2].loss if iteration > 0 else math.nan
            ended: Result | None = getattr(state, "ended", None)
            result = None
            if not math.isfinite(state.loss):
                result = Result.NOT_FINITE
            elif stopped:
                result = Result.STOPPED
            elif state.gradient_norm <= enough:
                result = Result.CONVERGED
            elif ended is not None:  # a method that ends by itself
                result = ended
            elif state.stuck:
                result = Result.NO_DECREASE
            elif 0 <= before - state.loss <= ftol * abs(before) and ftol > 0:
                result = Result.SMALL_DECREASE
            elif decision.stop:
                result = Result.INTERRUPTED
            elif iteration >= iterations:
                result = Result.ITERATIONS
            # A restart from numbers that are none would end at once.
            if (decision.save or result is not None) and result is not Result.NOT_FINITE:
                self.save(state)
            if result is not None:
                self.asked_to_end = decision.stop
                return result, state
            self.see_batch(iteration + 1)
            state = self.method.step(self.objective, state)
            decision, stopped = self.note(iteration + 1, state)

    def see_batch(self, iteration: int) -> None:
        if self.batch is not None:
            with raise_on_all_ranks(self.comm):
                self.objective.batch = (self.batch(iteration),)

    def note(self, iteration: int, state: State) -> tuple[Decision, bool]:
        """Keep a record and show it; whether to save, or to end, and whether the callback ends."""
        record = Record(
            iteration,
            state.loss,
            state.gradient_norm,
            state.step,
            self.objective.evaluations,
            time.monotonic() - self.begun,
        )
        self.keep(record)
        if self.progress is not None:
            self.progress.update(iteration, loss=record.loss, gradient=record.gradient_norm)
        stop = save = end = False
        if self.callback is not None:
            x = self.objective.tree(state.x)
            with raise_on_all_ranks(self.comm):
                stop = bool(self.callback(record, x))
        if self.saving is not None:
            save, end = self.saving.due(iteration), self.saving.asked_to_stop()
        if self.callback is None and self.saving is None:
            return Decision(save=False, stop=False), False
        # What is true on any rank holds for all.
        bits = self.comm.mpi.allreduce(stop | save << 1 | end << 2, op=MPI.BOR)
        return Decision(save=bits & 6 > 0, stop=bits & 4 > 0), bits & 1 > 0

    def keep(self, record: Record) -> None:
        self.records.append(record)
        if self.log is not None:
            self.log.write(_line(record))
            self.log.flush()

    def open_log(self) -> None:
        """The history's file with the records so far, in place of an earlier one all at once."""
        with raise_on_all_ranks(self.comm):
            if self.history is not None:
                begun = self.history.with_name(self.history.name + ".new")
                begun.write_text("".join(map(_line, self.records)), encoding="utf-8")
                begun.replace(self.history)
                self.log = self.history.open("a", encoding="utf-8")

    def close(self) -> None:
        if self.log is not None:
            self.log.close()

    # ---- restart files ----

    def layout(self) -> Any:
        return self.method.layout(self.objective.unknowns)

    def save(self, state: State) -> None:
        iteration = self.records[-1].iteration
        if self.saving is None or self.saved_at == iteration:
            return
        extra = {
            "method": type(self.method).__name__,
            "records": [dataclasses.astuple(record) for record in self.records],
            "products": self.objective.products,
        }
        try:
            self.saving.save(iteration, state, self.layout(), extra)
        except OSError as error:  # on all ranks; what was computed is worth more than its copy
            if self.comm.rank == 0:
                print(
                    f"mpigrad: minimize: iteration {iteration} is not saved in "
                    f"{self.saving.store.directory}, and the run goes on: {error}",
                    file=sys.stderr,
                    flush=True,
                )
            return
        self.saved_at = iteration

    def restored(self, x: Vector) -> State | None:
        """The state that was saved last, if there is one; with it come its records."""
        if self.saving is None:
            return None
        like = self.method.start(_Unevaluated(self.objective), x)  # type: ignore[arg-type]
        directory, name = self.saving.store.directory, type(self.method).__name__

        def check(extra: Any) -> None:
            if extra["method"] != name:
                raise ValueError(
                    f"minimize: {directory} holds a state of {extra['method']}, not of {name}; "
                    "give another directory"
                )

        saved = self.saving.load(like, self.layout(), check)
        if saved is None:
            return None
        for numbers in saved.extra["records"]:
            self.keep(Record(*numbers))
        self.saved_at = self.records[-1].iteration
        self.objective.evaluations = self.records[-1].evaluations
        self.objective.products = saved.extra["products"]
        self.begun -= self.records[-1].seconds
        return saved.tree  # type: ignore[no-any-return]


def _line(record: Record) -> str:
    """A line of JSON, which knows no NaN."""
    values = dataclasses.asdict(record)
    return json.dumps({k: v if math.isfinite(v) else None for k, v in values.items()}) + "\n"


def _check(method: Any, iterations: Any, tolerances: tuple[float, ...], batch: Any) -> None:
    if not isinstance(method, Method):
        hint = "; write its settings in parentheses" if isinstance(method, type) else ""
        raise TypeError(f"minimize: the method must be one such as LBFGS(), not {method!r}{hint}")
    if batch is not None and not method.stochastic:
        raise ValueError(
            f"minimize: {type(method).__name__} compares losses of several iterations, which must "
            "be losses of one function; with batches use Adam or Optax"
        )
    if not (isinstance(iterations, int) and iterations >= 0):
        raise ValueError(
            f"minimize: iterations={iterations!r} must be a number that is not negative"
        )
    if not all(0 <= tolerance < math.inf for tolerance in tolerances):
        raise ValueError(f"minimize: rtol, atol and ftol {tolerances} must not be negative")
