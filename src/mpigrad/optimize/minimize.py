"""The function `minimize`: one loop for all methods."""

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

import jax
import jax.numpy as jnp
from mpi4py import MPI

from mpigrad.autodiff import Loss
from mpigrad.checkpoint import Checkpoint, CheckpointSession, Decision, Stripes
from mpigrad.collective_errors import assert_same_on_all_ranks, raise_on_all_ranks
from mpigrad.communicator import Communicator, resolve
from mpigrad.optimize.lbfgs import LBFGS
from mpigrad.optimize.method import Method, Record, State, raise_failure, settings_fingerprint
from mpigrad.optimize.objective import Objective, Point
from mpigrad.optimize.unknowns import Vector
from mpigrad.profiling import Progress
from mpigrad.runtime import earlier_run_error, last_record, name_in_errors
from mpigrad.solution import Result, Solution

__all__ = ["communicator_of", "minimize"]


def minimize(
    f: Callable[..., Any] | Objective | None,
    x0: Any,
    method: Method = LBFGS(),  # noqa: B008 (frozen)
    *,
    sharded: Any = None,
    replicated: Any = None,
    loss: Loss = "share",
    value_and_grad: Callable[..., Any] | None = None,
    max_steps: int = 1000,
    rtol: float = 1e-6,
    atol: float = 0.0,
    ftol: float = 0.0,
    throw: bool = True,
    guesses: Any = None,
    batch: Callable[[int], Any] | None = None,
    callback: Callable[[Record, Any], Any] | None = None,
    checkpoint: Checkpoint | None = None,
    history: str | os.PathLike[str] | None = None,
    progress: bool = False,
    comm: Communicator | None = None,
) -> Solution:
    """Minimise a function of unknowns that are replicated or sharded over ranks (collective).

    Parameters
    ----------
    f
        f(x) -> real scalar. It may contain messages. For `GaussNewton` it returns residuals. An
        `Objective` is compiled once for several runs. It already has `sharded`, `replicated`,
        `loss`, `value_and_grad` and `comm`, so do not give them again.
    x0
        The first point: a pytree of floats and arrays of float32 or float64.
    method
        `LBFGS()`, `LBFGSB(...)`, `NonlinearCG()`, `NewtonCG()`, `GaussNewton()` or `Optax(...)`.
    sharded
        A wrong declaration gives wrong results without an error: tiles that are declared as copies
        of one array are averaged over the ranks. So on several ranks every array must be declared,
        by `sharded` or by `replicated`. `sharded` is a pytree prefix of x0. True: each rank has
        its own rows, in rank order along axis 0. A `Grid`: each rank has its tile, in the last
        axes. False: the leaf is replicated.
    replicated
        A pytree prefix of x0. True: the leaf is the same on all ranks, which is always checked,
        and its gradient is the sum over ranks. Scalars are replicated without a declaration.
    loss
        "share": the loss is the sum over ranks of the values that f returns. "replicated": f
        returns the loss on every rank. As in `mpigrad.value_and_grad`.
    value_and_grad
        x -> (global loss, gradient of the structure of x), used instead of differentiating f. It
        is called as it is, without compiling it, and f may be None.
    max_steps
        Largest count of iterations.
    rtol, atol
        Stop if |g| <= max(atol, rtol |g0|), in the two-norm over all unknowns of all ranks.
    ftol
        Stop if an iteration reduces the loss by no more than `ftol` times the loss.
    throw
        Raise an error if the run fails: `Result.NOT_FINITE`. All other results are ends that the
        caller asked for or must expect, and never raise. With False the caller reads
        `Solution.result`.
    guesses
        `sparse.Guesses` for the solves in f, or a pytree of them. Then f(x, guesses) returns (loss,
        guesses after its solves). Each evaluation starts its solves, and their adjoint solves, from
        those of the evaluations before. They are saved with the state.
    batch
        iteration -> second argument of f in this iteration, for `Optax`, whose steps
        may each use another batch. Each rank returns its own. It must depend on the index of the
        iteration only, so that a restarted run uses the same batches.
    callback
        (record, x) -> True to stop. It is called after each iteration on every rank. All ranks
        stop if it returns True on any of them.
    checkpoint
        A `mpigrad.checkpoint.Checkpoint`. The state is saved at its intervals and at the end. A
        run that finds a saved state continues from it with `Checkpoint(..., resume=True)`, and x0
        gives only the structure. With `overwrite=True` it replaces that state.
    history
        A file to which rank 0 adds a JSON line after each iteration. If a line cannot be written,
        rank 0 prints why, and the run continues. A file with records of an earlier run is replaced
        only if the checkpoint has `resume=True` (the records up to its state stay) or
        `overwrite=True`.
    progress
        Show a live line with the index of the iteration, the loss and the gradient norm.
    comm
        The ranks that share the unknowns. Default: the default communicator.

    Returns
    -------
    Solution
        `value` is the last point, a tree of the structure of x0 (of sharded leaves this rank's
        part). `state` is the state of the method. `result` is a `Result`:

        - `SUCCESSFUL`: the gradient is small enough.
        - `MAX_STEPS_REACHED`, `SMALL_DECREASE` (see `ftol`), `STOPPED` (by the callback) and
          `INTERRUPTED` (by a signal, with a checkpoint).
        - `NO_DECREASE`: the line search found no smaller loss, mostly because of rounding.
        - `NOT_FINITE`: the run failed.

        `stats` has `num_steps`, `evaluations` (values with gradients), `products` (of a Hessian
        with a vector), `loss`, `gradient_norm`, `history` (a tuple of `Record`) and
        `interrupted`: a signal asked for the end, whatever `result` is, so the program should
        start nothing else. All of them are the same on all ranks, except for times.

    Raises
    ------
    TypeError, ValueError
        On every rank, if arguments do not fit or differ between ranks.
    FileExistsError
        On every rank, if the checkpoint's directory or the history has an earlier run, and neither
        `resume` nor `overwrite` is given. It names the last step and its date.
    MinimizeError
        On every rank, with `throw=True`, if the run fails. Its `solution` attribute has the
        solution.
    NotFiniteError
        The `MinimizeError` for a loss or gradient norm that is NaN or infinite.

    Notes
    -----
    In a method's vectors every unknown lies on one rank (`Unknowns`), so inner products are sums
    over ranks, and a sharded run has the iterates of the serial run up to rounding. All decisions
    use numbers that are bitwise equal on all ranks.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from mpigrad.optimize import LBFGS, minimize
    >>> def loss(x):
    ...     return jnp.sum((x - 2.0) ** 2)
    >>> solution = minimize(loss, jnp.zeros(3), LBFGS(memory=5), loss="replicated", replicated=True)
    >>> print(solution.value, solution.result.name, solution.stats["num_steps"])
    [2. 2. 2.] SUCCESSFUL 2
    """
    comm = communicator_of(f, comm, "minimize")
    with raise_on_all_ranks(comm):
        _check(method, max_steps, (rtol, atol, ftol), batch)
        residuals = method.residuals
        if method.needs_f and (f.f if isinstance(f, Objective) else f) is None:
            raise TypeError(
                f"minimize: {type(method).__name__} needs products with the Hessian of f, but f is "
                "None. Give f, not only value_and_grad."
            )
        if isinstance(f, Objective):
            if f.residuals != residuals:
                raise ValueError(
                    f"minimize: {type(method).__name__} needs an Objective with "
                    f"residuals={residuals}, got residuals={f.residuals}. Make another Objective."
                )
            absent = guesses is None and value_and_grad is None
            if not absent or (sharded, replicated, loss) != (None, None, "share"):
                raise ValueError(
                    "minimize: got sharded, replicated, loss, value_and_grad or guesses with an "
                    "Objective, which is already made. Give them to the Objective."
                )
    settings = (settings_fingerprint(method), max_steps, rtol, atol, ftol, bool(throw))
    assert_same_on_all_ranks(
        comm, settings, "minimize: method, max_steps, rtol, atol, ftol and throw"
    )
    absent = tuple(option is None for option in (batch, callback, checkpoint))
    assert_same_on_all_ranks(
        comm, absent, "minimize: whether batch, callback and checkpoint are None"
    )
    objective = (
        f
        if isinstance(f, Objective)
        else Objective(
            f, x0, sharded=sharded, replicated=replicated, loss=loss, value_and_grad=value_and_grad,
            residuals=residuals, guesses=guesses, comm=comm,
        )
    )  # fmt: skip
    objective.evaluations = objective.products = 0
    objective.restart_guesses()
    objective.method_data = None
    method.check(objective.unknowns)
    run = _Run(method, objective, callback, batch)
    with contextlib.ExitStack() as stack:
        if progress:
            run.progress = Progress(max_steps, comm.rank)
            stack.callback(run.progress.close)
        if checkpoint is not None:
            run.session = stack.enter_context(checkpoint.start(comm))
        with raise_on_all_ranks(comm):
            if history is not None and comm.rank == 0:
                run.history = pathlib.Path(history)
                if checkpoint is None or not (checkpoint.resume or checkpoint.overwrite):
                    _forbid_earlier_history(run.history)
                with name_in_errors(run.history):
                    run.history.open("a").close()  # an earlier content stays for now
        stack.callback(run.close)
        result, state = run.run(x0, max_steps, (rtol, atol, ftol))
    stats = {
        "num_steps": run.records[-1].iteration,
        "evaluations": objective.evaluations,
        "products": objective.products,
        "loss": state.loss,
        "gradient_norm": state.gradient_norm,
        "history": tuple(run.records),
        "interrupted": run.interrupted,
    }
    solution = Solution(objective.tree(state.x), result, stats, state)
    if throw:
        raise_failure(solution)
    return solution


def communicator_of(f: Any, comm: Communicator | None, function: str) -> Communicator:
    """Return the communicator of a run, that of f if it is an Objective."""
    if not isinstance(f, Objective):
        return resolve(comm)
    communicator = f.unknowns.comm
    if comm is not None and comm.slot != communicator.slot:
        raise ValueError(
            f"{function}: comm has no effect with an Objective, which has its own communicator. "
            "Leave comm out."
        )
    return communicator


class _Unevaluated:
    """An objective without evaluations, to make the template that a saved state is read into."""

    def __init__(self, objective: Objective) -> None:
        self.unknowns, self.tree = objective.unknowns, objective.tree

    def evaluate(self, x: Vector) -> Point:
        return Point(x, x, 0.0, 0.0, 0.0)


def _forbid_earlier_history(history: pathlib.Path) -> None:
    if history.is_file() and (run := last_record(history)) is not None:
        raise earlier_run_error(
            "minimize(history=...)", history, run, resume="", other="another file",
            overwrite="checkpoint=Checkpoint(..., overwrite=True) or delete it",
        )  # fmt: skip


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
        self.session: CheckpointSession | None = None
        self.saved_at = -1  # iteration
        self.history: pathlib.Path | None = None
        self.log: TextIO | None = None
        self.lost_history = False
        self.interrupted = False
        self.progress: Progress | None = None
        self.records: list[Record] = []
        self.begun = time.monotonic()

    def run(
        self, x0: Any, max_steps: int, tolerances: tuple[float, float, float]
    ) -> tuple[Result, State]:
        rtol, atol, ftol = tolerances
        x = self.objective.unknowns.initial_vector(x0)
        state = self.load(x)
        decision = Decision(save=False, stop=False)
        stopped = False
        if state is None:
            self.take_batch(0)
            state = self.method.start(self.objective, x)
            self.objective.check_scale(state, atol)
            if not (math.isfinite(state.loss) and math.isfinite(state.gradient_norm)):
                self.records.append(self.record(0, state))  # files of an earlier run stay
                return Result.NOT_FINITE, state
            self.open_log()
            decision, stopped = self.note(0, state)
        else:
            self.open_log()
        enough = max(atol, rtol * self.records[0].gradient_norm)
        while True:
            iteration = self.records[-1].iteration
            before = self.records[-2].loss if iteration > 0 else math.nan
            result = None
            if not math.isfinite(state.loss):
                result = Result.NOT_FINITE
            elif stopped:
                result = Result.STOPPED
            elif state.gradient_norm <= enough:
                result = Result.SUCCESSFUL
            elif state.stuck:
                result = Result.NO_DECREASE
            elif 0 <= before - state.loss <= ftol * abs(before) and ftol > 0:
                result = Result.SMALL_DECREASE
            elif decision.stop:
                result = Result.INTERRUPTED
            elif iteration >= max_steps:
                result = Result.MAX_STEPS_REACHED
            # A restart from values that are not finite would end at once.
            if (decision.save or result is not None) and result is not Result.NOT_FINITE:
                self.save(state)
            if result is not None:
                self.interrupted = decision.stop
                return result, state
            self.take_batch(iteration + 1)
            state = self.method.step(self.objective, state)
            decision, stopped = self.note(iteration + 1, state)

    def take_batch(self, iteration: int) -> None:
        if self.batch is not None:
            with raise_on_all_ranks(self.comm):
                self.objective.batch = (self.batch(iteration),)

    def record(self, iteration: int, state: State) -> Record:
        return Record(
            iteration,
            state.loss,
            state.gradient_norm,
            state.step,
            self.objective.evaluations,
            time.monotonic() - self.begun,
        )

    def note(self, iteration: int, state: State) -> tuple[Decision, bool]:
        """Add a record and show it. Return the decision, and whether the callback stops the run."""
        record = self.record(iteration, state)
        self.add(record)
        if self.progress is not None:
            self.progress.update(iteration, loss=record.loss, gradient=record.gradient_norm)
        stop = save = end = False
        if self.callback is not None:
            x = self.objective.tree(state.x)
            with raise_on_all_ranks(self.comm):
                stop = bool(self.callback(record, x))
        if self.session is not None:
            save, end = self.session.due(iteration), self.session.stop_requested()
        if self.callback is None and self.session is None:
            return Decision(save=False, stop=False), False
        # If one rank wants it, all ranks do it.
        bits = self.comm.mpi.allreduce(stop | save << 1 | end << 2, op=MPI.BOR)
        return Decision(save=bits & 6 > 0, stop=bits & 4 > 0), bits & 1 > 0

    def add(self, record: Record) -> None:
        self.records.append(record)
        if self.log is not None:
            try:
                self.log.write(_line(record))
                self.log.flush()
            except OSError as error:  # of rank 0 alone. The next flush writes the line as well
                self.say_lost_history(error)

    def open_log(self) -> None:
        """Replace the history file, in one step, by one with the records so far."""
        with raise_on_all_ranks(self.comm):
            if self.history is not None:
                begun = self.history.with_name(self.history.name + ".new")
                with name_in_errors(begun):
                    begun.write_text("".join(map(_line, self.records)), encoding="utf-8")
                begun.replace(self.history)
                self.log = self.history.open("a", encoding="utf-8")

    def close(self) -> None:
        if self.log is not None:
            try:
                self.log.close()
            except OSError as error:
                self.say_lost_history(error)

    def say_lost_history(self, error: OSError) -> None:
        """Print once that records are missing in the history file, which must not end the run."""
        if not self.lost_history:
            print(
                f"mpigrad: minimize: records could not be written into {self.history}, and the run "
                f"continues: {error}",
                file=sys.stderr,
                flush=True,
            )
        self.lost_history = True

    # ---- restart files ----

    def layout(self) -> Any:
        layout = self.method.layout(self.objective.unknowns)
        # Guesses for one number of ranks are of little use for another, but they do no harm.
        return layout if self.objective.guesses is None else (layout, Stripes(axis=1))

    def saved(self, state: State) -> Any:
        """Return all that is saved. The layout is that of `layout`."""
        guesses = self.objective.guesses
        if guesses is None:
            return state
        return state, jax.tree.map(lambda vectors: vectors.reshape(len(vectors), -1), guesses)

    def save(self, state: State) -> None:
        iteration = self.records[-1].iteration
        if self.session is None or self.saved_at == iteration:
            return
        extra = {
            "method": type(self.method).__name__,
            "records": [dataclasses.astuple(record) for record in self.records],
            "products": self.objective.products,
        }
        try:
            self.session.save(iteration, self.saved(state), self.layout(), extra)
        except OSError as error:  # on all ranks, but a failed save must not end the run
            if self.comm.rank == 0:
                print(
                    f"mpigrad: minimize: iteration {iteration} was not saved in "
                    f"{self.session.store.directory}, and the run continues: {error}",
                    file=sys.stderr,
                    flush=True,
                )
            return
        self.saved_at = iteration

    def load(self, x: Vector) -> State | None:
        """Return the state saved last with its records added, or None."""
        if self.session is None:
            return None
        like = self.method.start(_Unevaluated(self.objective), x)  # type: ignore[arg-type]
        directory, name = self.session.store.directory, type(self.method).__name__

        def check(extra: Any) -> None:
            method = extra.get("method") if isinstance(extra, dict) else None
            if method != name:
                raise ValueError(
                    f"minimize: {directory} has a state of {method or 'another program'}, but the "
                    f"method is {name}. Use another directory, or that method."
                )

        saved = self.session.load(self.saved(like), self.layout(), check)
        if saved is None:
            return None
        for numbers in saved.extra["records"]:
            self.add(Record(*numbers))
        self.saved_at = self.records[-1].iteration
        self.objective.evaluations = self.records[-1].evaluations
        self.objective.products = saved.extra["products"]
        self.begun -= self.records[-1].seconds
        if self.objective.guesses is None:
            return saved.tree  # type: ignore[no-any-return]
        state, guesses = saved.tree
        self.objective.guesses = jax.tree.map(
            lambda vectors, like: jnp.asarray(vectors).reshape(like.shape),
            guesses,
            self.objective.guesses,
        )
        return state  # type: ignore[no-any-return]


def _line(record: Record) -> str:
    """Return a line of JSON, with null for NaN, which JSON does not have."""
    values = dataclasses.asdict(record)
    return json.dumps({k: v if math.isfinite(v) else None for k, v in values.items()}) + "\n"


def _check(method: Any, max_steps: Any, tolerances: tuple[float, ...], batch: Any) -> None:
    if not isinstance(method, Method):
        hint = "Write its settings in parentheses: " if isinstance(method, type) else "For example "
        raise TypeError(
            f"minimize: expected a method such as LBFGS(), got {method!r}. {hint}"
            f"{method.__name__ if isinstance(method, type) else 'LBFGS'}()."
        )
    if batch is not None and not method.stochastic:
        raise ValueError(
            f"minimize: got batch with {type(method).__name__}, which compares the losses of "
            "several iterations, so all of them must be losses of one function. Use Optax "
            "with batches."
        )
    if not (isinstance(max_steps, int) and max_steps >= 0):
        raise ValueError(f"minimize: max_steps must be an integer of at least 0, got {max_steps!r}")
    if not all(0 <= tolerance < math.inf for tolerance in tolerances):
        raise ValueError(
            f"minimize: rtol, atol and ftol must not be negative and must be finite, got "
            f"{tolerances}"
        )
