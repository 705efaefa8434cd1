"""Minimisation from several starts, and of one objective after the other."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from mpigrad.collective_errors import assert_same_on_all_ranks
from mpigrad.communicator import Communicator, resolve
from mpigrad.optimize.lbfgs import LBFGS
from mpigrad.optimize.method import Method, MinimizeError
from mpigrad.optimize.minimize import communicator_of, minimize
from mpigrad.optimize.objective import Objective
from mpigrad.solution import Result, Solution

__all__ = [
    "MultiStart",
    "continuation",
    "multi_start",
    "numbered_settings",
]

# ---- Minimisation from several starts ----


# Settings of an `Objective`.
_OBJECTIVE = ("sharded", "replicated", "loss", "value_and_grad", "guesses")


@dataclasses.dataclass(frozen=True)
class MultiStart:
    """The result of `multi_start`.

    Attributes
    ----------
    best
        The solution with the smallest loss.
    solutions
        The solution of each start, in their order. None for a start whose loss is not finite.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from mpigrad.optimize import multi_start
    >>> runs = multi_start(lambda x: jnp.sum(x**2), [1.0, jnp.nan])
    >>> print(runs.best.value, runs.solutions[1])
    0.0 None
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
        As in `minimize`.
    starts
        The x0 of each minimisation.
    comm
        The ranks that share the unknowns. Default: the default communicator.
    settings
        Other settings of `minimize`, except `throw`: a run that fails does not raise, and its
        solution says so. Each start has its own `history` and `checkpoint`: a file history.jsonl
        becomes history-0.jsonl, history-1.jsonl, …, and a directory saved becomes saved/0,
        saved/1, ….

    Returns
    -------
    MultiStart
        If a signal interrupts a run, it is the last one.

    Raises
    ------
    RuntimeError
        On every rank, if no start has a finite loss.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from mpigrad.optimize import multi_start
    >>> def two_wells(x):
    ...     return (x**2 - 1) ** 2 + 0.3 * x
    >>> runs = multi_start(two_wells, [1.0, -1.0], loss="replicated")
    >>> [round(solution.stats["loss"], 2) for solution in runs.solutions]
    [0.29, -0.31]
    >>> runs.best is runs.solutions[1]
    True
    """
    comm = communicator_of(f, comm, "multi_start")
    assert_same_on_all_ranks(comm, len(starts), "multi_start: the count of starts")
    if starts and not isinstance(f, Objective):  # compiled once for all of them
        about = {name: settings.pop(name) for name in _OBJECTIVE if name in settings}
        f = Objective(f, starts[0], residuals=method.residuals, comm=comm, **about)
    solutions: list[Solution | None] = []
    for index, x0 in enumerate(starts):
        start_settings = numbered_settings(settings, index)
        solution = minimize(f, x0, method, comm=comm, throw=False, **start_settings)
        no_start = solution.result is Result.NOT_FINITE and solution.stats["num_steps"] == 0
        solutions.append(None if no_start else solution)
        if solution.stats["interrupted"]:
            break
    finite = [solution for solution in solutions if solution is not None]
    if not finite:
        raise RuntimeError(
            f"multi_start: none of {len(starts)} starts has a finite loss. Give other starts."
        )
    return MultiStart(min(finite, key=_loss), tuple(solutions))


def _loss(solution: Solution) -> float:
    loss = solution.stats["loss"]
    return loss if math.isfinite(loss) else math.inf


def numbered_settings(settings: dict[str, Any], index: int) -> dict[str, Any]:
    """Return the settings of one of several minimisations, with files of its own."""
    run_settings = dict(settings)
    if run_settings.get("history") is not None:
        path = pathlib.Path(run_settings["history"])
        run_settings["history"] = path.with_stem(f"{path.stem}-{index}")
    if run_settings.get("checkpoint") is not None:
        directory = pathlib.Path(run_settings["checkpoint"].directory) / str(index)
        run_settings["checkpoint"] = dataclasses.replace(
            run_settings["checkpoint"], directory=directory
        )
    return run_settings


# ---- Minimisation of one objective after the other, each from the solution of the one before


def continuation(
    objectives: Sequence[Callable[..., Any] | Objective],
    x0: Any,
    method: Method | Sequence[Method] = LBFGS(),  # noqa: B008 (frozen)
    *,
    transfer: Callable[[int, Any], Any] | None = None,
    comm: Communicator | None = None,
    **settings: Any,
) -> tuple[Solution, ...]:
    """Minimise one objective after the other, each from the solution before it (collective).

    For example from low frequencies to high ones, from strong to weak regularisation, or from a
    coarse grid to a fine one.

    Parameters
    ----------
    objectives
        The f of each stage.
    x0
        The first point of the first stage.
    method
        As in `minimize`: one method for all stages, or one for each.
    transfer
        (index of a stage, solution of the stage before) -> first point of the stage, for example
        a field interpolated to another grid. Default: the solution itself.
    comm
        The ranks that share the unknowns. Default: the default communicator.
    settings
        Other settings of `minimize`, for each stage. Each stage has its own `history` and
        `checkpoint`, as in `multi_start`, so a restarted run continues in the stage that it was
        in.

    Returns
    -------
    tuple of Solution
        The solution of each stage. The last one is the answer. There are fewer than objectives if
        a stage was stopped or interrupted or, with `throw=False`, its loss was not finite.

    Raises
    ------
    MinimizeError
        On every rank, with `throw=True`, if a stage fails. Its `earlier` attribute has the
        solutions of the stages before.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from mpigrad.optimize import continuation
    >>> def wavy(height):
    ...     return lambda x: jnp.sum((x - 1) ** 2 + height * (1 - jnp.cos(9 * (x - 1))))
    >>> stages, start = [wavy(0.0), wavy(0.3)], jnp.full(2, 3.0)
    >>> smooth, last = continuation(stages, start, loss="replicated", replicated=True)
    >>> print(last.value.round(3))
    [1. 1.]
    """
    comm = resolve(comm)
    methods = [method] * len(objectives) if isinstance(method, Method) else list(method)
    counts = len(objectives), len(methods)
    assert_same_on_all_ranks(comm, counts, "continuation: the counts of objectives and methods")
    if not objectives or len(methods) != len(objectives):
        raise ValueError(
            f"continuation: expected one method, or one for each objective, got {len(objectives)} "
            f"objectives and {len(methods)} methods"
        )
    solutions: list[Solution] = []
    for index, (f, each) in enumerate(zip(objectives, methods, strict=True)):
        x = solutions[-1].value if solutions else x0
        if solutions and transfer is not None:
            x = transfer(index, x)
        stage_comm = None if isinstance(f, Objective) else comm  # an Objective has its own
        try:
            solution = minimize(f, x, each, comm=stage_comm, **numbered_settings(settings, index))
        except MinimizeError as error:
            error.earlier = tuple(solutions)
            raise
        solutions.append(solution)
        ends = Result.STOPPED, Result.NOT_FINITE
        if solution.stats["interrupted"] or solution.result in ends:
            break
    return tuple(solutions)
