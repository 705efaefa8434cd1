"""Several minimisations: from many starts, and of one objective after the other."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from mpigrad.collective_errors import assert_same_on_all_ranks
from mpigrad.communicator import Communicator, resolve
from mpigrad.optimize.lbfgs import LBFGS
from mpigrad.optimize.method import Method
from mpigrad.optimize.minimize import minimize
from mpigrad.optimize.objective import Objective
from mpigrad.optimize.solution import NotFiniteError, Result, Solution

__all__ = ["MultiStart", "multi_start", "stages"]

_OBJECTIVE = ("sharded", "loss", "value_and_grad")  # settings of an `Objective`


@dataclasses.dataclass(frozen=True)
class MultiStart:
    """What `multi_start` returns.

    Attributes
    ----------
    best
        The solution with the smallest loss.
    solutions
        That of each start, in their order; None where the loss of the start is not a number.
    """

    best: Solution
    solutions: tuple[Solution | None, ...]


def multi_start(
    f: Callable[..., Any] | Objective | None,
    starts: Sequence[Any],
    method: Method = LBFGS(),  # noqa: B008 (frozen)
    *,
    comm: Communicator | None = None,
    **settings: Any,
) -> MultiStart:
    """Minimise from several starts, one after the other on all ranks (collective).

    Parameters
    ----------
    f, method
        As for `minimize`.
    starts
        The x0 of each minimisation.
    settings
        Those of `minimize`. Each start has its own `history` and `checkpoint`: of the file
        history.jsonl those are history-0.jsonl, history-1.jsonl, …, of the directory saved
        saved/0, saved/1, ….

    Returns
    -------
    A `MultiStart`. A start from which the run was asked to end is the last one.

    Raises
    ------
    RuntimeError
        On every rank, where the loss of no start is a number.
    """
    comm = f.unknowns.comm if isinstance(f, Objective) else resolve(comm)
    assert_same_on_all_ranks(comm, len(starts), "multi_start: the number of starts")
    if starts and not isinstance(f, Objective):  # compiled once for all of them
        about = {name: settings.pop(name) for name in _OBJECTIVE if name in settings}
        f = Objective(f, starts[0], residuals=method.residuals, comm=comm, **about)
    solutions: list[Solution | None] = []
    for number, x0 in enumerate(starts):
        own = _numbered(settings, number)
        try:
            solution = minimize(f, x0, method, comm=comm, **own)
        except NotFiniteError:
            solutions.append(None)
            continue
        solutions.append(solution)
        if solution.asked_to_end:
            break
    found = [solution for solution in solutions if solution is not None]
    if not found:
        raise RuntimeError(f"multi_start: the loss of none of {len(starts)} starts is a number")
    best = min(found, key=lambda s: s.loss if math.isfinite(s.loss) else math.inf)
    return MultiStart(best, tuple(solutions))


def stages(
    objectives: Sequence[Callable[..., Any] | Objective],
    x0: Any,
    method: Method | Sequence[Method] = LBFGS(),  # noqa: B008 (frozen)
    *,
    between: Callable[[int, Any], Any] | None = None,
    comm: Communicator | None = None,
    **settings: Any,
) -> tuple[Solution, ...]:
    """Minimise one objective after the other, each from the solution before it (collective).

    For continuation: from low frequencies to high ones, from strong to weak regularisation, from a
    coarse grid to a fine one.

    Parameters
    ----------
    objectives
        The f of each stage.
    x0
        Where the first one starts.
    method
        As for `minimize`: one for all stages, or one for each.
    between
        (number of a stage, solution before it) -> where it starts; for instance a field
        interpolated to its grid. By default the solution itself.
    settings
        Those of `minimize`, for each stage. The stages have `history` and `checkpoint` of their
        own, as in `multi_start`: a restarted run goes on in the stage that it was in.

    Returns
    -------
    The solution of each stage, fewer where the run was asked to end or the loss was no number; the
    last one is the answer.
    """
    comm = resolve(comm)
    methods = [method] * len(objectives) if isinstance(method, Method) else list(method)
    assert_same_on_all_ranks(comm, (len(objectives), len(methods)), "stages: the numbers of stages")
    if not objectives or len(methods) != len(objectives):
        raise ValueError(f"stages: {len(objectives)} objectives and {len(methods)} methods")
    done: list[Solution] = []
    for number, (f, each) in enumerate(zip(objectives, methods, strict=True)):
        x = done[-1].value if done else x0
        if done and between is not None:
            x = between(number, x)
        done.append(minimize(f, x, each, comm=comm, **_numbered(settings, number)))
        if done[-1].asked_to_end or done[-1].result in (Result.STOPPED, Result.NOT_FINITE):
            break
    return tuple(done)


def _numbered(settings: dict[str, Any], number: int) -> dict[str, Any]:
    """Settings of one minimisation among several: files of its own."""
    own = dict(settings)
    if own.get("history") is not None:
        path = pathlib.Path(own["history"])
        own["history"] = path.with_stem(f"{path.stem}-{number}")
    if own.get("checkpoint") is not None:
        directory = pathlib.Path(own["checkpoint"].directory) / str(number)
        own["checkpoint"] = dataclasses.replace(own["checkpoint"], directory=directory)
    return own
