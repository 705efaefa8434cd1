"""Minimisation of one objective after the other, each from the solution of the one before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mpigrad.collective_errors import assert_same_on_all_ranks
from mpigrad.communicator import Communicator, resolve
from mpigrad.optimize.lbfgs import LBFGS
from mpigrad.optimize.method import Method
from mpigrad.optimize.minimize import minimize
from mpigrad.optimize.multi_start import numbered_settings
from mpigrad.optimize.objective import Objective
from mpigrad.optimize.record import MinimizeError
from mpigrad.solution import Result, Solution

__all__ = ["continuation"]


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
        own = None if isinstance(f, Objective) else comm  # an Objective has its own
        try:
            solution = minimize(f, x, each, comm=own, **numbered_settings(settings, index))
        except MinimizeError as error:
            error.earlier = tuple(solutions)
            raise
        solutions.append(solution)
        ends = Result.STOPPED, Result.NOT_FINITE
        if solution.stats["interrupted"] or solution.result in ends:
            break
    return tuple(solutions)
