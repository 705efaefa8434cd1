"""Time steps of finite elements: adaptive ones, the theta scheme, and Newmark's method."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mpigrad import ode
from mpigrad.extend import Array, Float
from mpigrad.fem.equation import Equation
from mpigrad.fem.solving import equation_solver, fixed_mask, solve
from mpigrad.solution import Solution
from mpigrad.sparse import LinearSolver, Matrix

__all__ = ["Motion", "integrate", "newmark_step", "start_motion", "theta_step"]


class Motion(NamedTuple):
    """The state of `newmark_step`: fields at one time.

    Attributes
    ----------
    displacement, velocity, acceleration
        Fields of one space.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from mpigrad import fem
    >>> zero = jnp.zeros(9)
    >>> fem.Motion(zero, zero, zero).velocity.shape
    (9,)
    """

    displacement: Float[Array, ...]
    velocity: Float[Array, ...]
    acceleration: Float[Array, ...]


def integrate(
    mass: Equation,
    equation: Equation | Callable[..., Equation],
    u0: Any,
    ts: Any,
    args: tuple[Any, ...] | list[Any] = (),
    fixed: Any = None,
    values: Any = 0.0,
    *,
    solver: LinearSolver | None = None,
    **options: Any,
) -> Solution:
    """Integrate M du/dt + r(u, t) = 0 by `ode.integrate`, with adaptive steps (collective).

    Differentiable in u0, ts, args, values and all that the equations close over, to any order.

    Parameters
    ----------
    mass
        A linear equation whose residual is M u, for example the energy c u²/2.
    equation
        The equation whose residual is r, or a function equation(t, *args) that returns it.
    u0
        The first field. Fixed unknowns take their values.
    ts
        The output times, as in `ode.integrate`.
    args
        The parameters of `equation`, if it is a function.
    fixed, values
        As in `fem.solve`. The values do not depend on the time.
    solver
        The `LinearSolver` of the systems with M + h a dr/du. Default: that of `fem.solve`.
    options
        More arguments of `ode.integrate`: `method`, `rtol`, `atol`, `max_steps` and others.

    Returns
    -------
    The `Solution` of `ode.integrate`: `value` has the fields at `ts`.

    Raises
    ------
    ValueError, TypeError, jax.errors.JaxRuntimeError
        As `ode.integrate`, and if `mass` is not linear.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from mpigrad import fem
    >>> space = fem.Space(fem.box((8, 8), (1.0, 1.0)))
    >>> mass = fem.Energy(space, lambda p: 0.5 * p.u**2)()
    >>> heat = fem.Energy(space, lambda p, k: 0.5 * k * p.grad @ p.grad - p.u)
    >>> u0, ts = jnp.zeros(space.shape), jnp.array([0.0, 0.3])
    >>> solution = fem.integrate(
    ...     mass, lambda t, k: heat(k), u0, ts, (1.0,), space.fixed("xmin"), atol=1e-4
    ... )
    >>> 0.2 < float(solution.value[-1].max()) < 0.5  # 1/2 at last
    True
    """
    space = mass.one_field("fem.integrate")
    if not mass.is_linear:
        raise ValueError(
            "fem.integrate: mass must be linear, got an equation that is not. Take a linear law."
        )
    mask = fixed_mask(space, fixed, "fem.integrate")
    given = jnp.broadcast_to(jnp.asarray(values), space.shape)

    def at(t: Any, *args: Any) -> Equation:
        return equation(t, *args) if callable(equation) else equation

    def insert(u: Any) -> Any:
        return jnp.where(mask, given.astype(u.dtype), u)

    def slope(t: Any, u: Any, *args: Any) -> Any:
        r = at(t, *args).residual(insert(u))
        return jnp.where(mask, given - u, -r).astype(u.dtype)

    def eliminated(A: Matrix) -> Matrix:
        zeros = jnp.zeros(A.pattern.n_local, A.dtype)
        return A.at_boundary(mask.reshape(-1), zeros, 0.0)[0]

    def jacobian(t: Any, u: Any, *args: Any) -> Matrix:
        return -1.0 * eliminated(at(t, *args).jacobian(insert(u)))

    # Fixed unknowns are algebraic: their rows and columns of M are zero.
    M = eliminated(mass.jacobian())
    M = Matrix(M.pattern, M.values.at[M.pattern.diagonal_index].multiply(~mask.reshape(-1)))
    u0 = insert(jnp.asarray(u0) * 1.0)
    if solver is None:
        first = at(jnp.asarray(ts)[0], *args)
        solver = equation_solver(first, u0.dtype, 1e-8 if u0.dtype == jnp.float64 else 1e-5)
    return ode.integrate(slope, u0, ts, args, jacobian=jacobian, mass=M, solver=solver, **options)


def theta_step(
    mass: Equation,
    equation: Equation,
    u: Any,
    dt: Any,
    fixed: Any = None,
    values: Any = 0.0,
    *,
    theta: float = 0.5,
    before: Equation | None = None,
    **options: Any,
) -> Solution:
    """Do one step of M du/dt + r(u, t) = 0 by the theta scheme (collective).

    M (u' - u) / dt + θ r(u', t') + (1 - θ) r(u, t) = 0. For θ = 1/2 (Crank–Nicolson) it has order
    two, for θ = 1 (backward Euler) order one. Both are stable for any step. Differentiable as
    `fem.solve`, and in u.

    Parameters
    ----------
    mass
        An equation whose residual is M u, for example the energy c u²/2.
    equation
        The equation whose residual is r, at the end of the step.
    u
        The field at the start of the step.
    dt
        The length of the step.
    fixed, values
        As in `fem.solve`, at the end of the step.
    theta
        From 0 to 1. For θ = 0 use `mass.lumped()` and no solve.
    before
        The equation at the start of the step, if it depends on the time. Default: `equation`.
    options
        More arguments of `fem.solve`, such as `rtol` and `solver`.

    Returns
    -------
    A `Solution` whose `value` is the field at the end of the step.

    Raises
    ------
    ValueError
        If theta is not between 0 and 1.
    jax.errors.JaxRuntimeError
        On all ranks: as `fem.solve`.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from mpigrad import fem
    >>> space = fem.Space(fem.box((8, 8), (1.0, 1.0)))
    >>> mass = fem.Energy(space, lambda p: 0.5 * p.u**2)()
    >>> heat = fem.Energy(space, lambda p, k: 0.5 * k * p.grad @ p.grad - p.u)
    >>> cold = space.fixed("xmin")
    >>> u = jnp.zeros(space.shape)
    >>> for _ in range(3):
    ...     u = fem.theta_step(mass, heat(1.0), u, 0.1, cold).value
    >>> 0.2 < float(u.max()) < 0.5  # 1/2 at last
    True
    """
    if not 0 <= theta <= 1:
        raise ValueError(
            f"fem.theta_step: theta must be from 0 to 1, got {theta}. Give 0.5 for Crank–Nicolson, "
            "or 1 for backward Euler."
        )
    mass.one_field("fem.theta_step")
    u = jnp.asarray(u)
    rate = 1.0 / dt
    load = -rate * mass.residual(u)
    if theta < 1:
        load = load + (1 - theta) * (before or equation).residual(u)
    return solve(rate * mass + theta * equation + load, fixed, values, u, **options)


def start_motion(
    mass: Equation,
    equation: Equation,
    displacement: Any,
    velocity: Any = 0.0,
    fixed: Any = None,
    *,
    damping: Equation | None = None,
    **options: Any,
) -> Motion:
    """Return the state with the acceleration of M a + C v + r(u) = 0 (collective).

    Parameters
    ----------
    mass, equation, damping
        As in `newmark_step`.
    displacement, velocity
        Fields, or a number for all unknowns.
    fixed
        True where the acceleration is zero, as in `fem.solve`.
    options
        More arguments of `fem.solve`.

    Examples
    --------
    >>> from mpigrad import fem
    >>> space = fem.Space(fem.box((8, 2), (1.0, 0.1)))
    >>> mass = fem.Energy(space, lambda p: 0.5 * 2.0 * p.u**2)()
    >>> weight = fem.Energy(space, lambda p: 2.0 * 9.81 * p.u)()
    >>> round(float(fem.start_motion(mass, weight, 0.0).acceleration[0]), 3)
    -9.81
    """
    shape = mass.one_field("fem.start_motion").shape
    u, v = (jnp.broadcast_to(jnp.asarray(x) * 1.0, shape) for x in (displacement, velocity))
    forces = equation.residual(u)
    if damping is not None:
        forces = forces + damping.residual(v)
    a = solve(mass + forces, fixed, 0.0, **options).value
    return Motion(u, v, a)


def newmark_step(
    mass: Equation,
    equation: Equation,
    state: Motion,
    dt: Any,
    fixed: Any = None,
    values: Any = 0.0,
    *,
    beta: float = 0.25,
    gamma: float = 0.5,
    damping: Equation | None = None,
    **options: Any,
) -> Motion:
    """Do one step of M d²u/dt² + C du/dt + r(u, t) = 0 by Newmark's method (collective).

    With β = 1/4 and γ = 1/2 the acceleration is constant in a step. Then it has order two, is
    stable for any step and, without C, conserves the energy of a linear equation (Newmark, "A
    method of computation for structural dynamics", 1959). Differentiable as `fem.solve`, and in the
    state.

    Parameters
    ----------
    mass
        An equation whose residual is M u, for example the energy ρ |u|²/2.
    equation
        The equation whose residual is r, at the end of the step.
    state
        The state at the start of the step. `start_motion` makes the first one.
    dt
        The length of the step.
    fixed, values
        As in `fem.solve`: displacements at the end of the step.
    beta, gamma
        Newmark's β > 0 and γ. For β = 0 use `mass.lumped()` and no solve.
    damping
        A linear equation, for instance C u. Its residual at the velocity is the force of damping.
        Default: none.
    options
        More arguments of `fem.solve`, such as `rtol` and `solver`.

    Returns
    -------
    The state at the end of the step.

    Raises
    ------
    ValueError
        If beta is not positive, or `damping` is not linear.
    jax.errors.JaxRuntimeError
        On all ranks: as `fem.solve`.

    Examples
    --------
    >>> from mpigrad import fem
    >>> space = fem.Space(fem.box((8, 2), (1.0, 0.1)))
    >>> mass = fem.Energy(space, lambda p: 0.5 * p.u**2)()
    >>> string = fem.Energy(space, lambda p: 0.5 * p.grad @ p.grad)()
    >>> ends = space.fixed("xmin") | space.fixed("xmax")
    >>> u = space.interpolate(lambda x: x[:, 0] * (1 - x[:, 0]))
    >>> state = fem.start_motion(mass, string, u, fixed=ends)
    >>> state = fem.newmark_step(mass, string, state, 0.05, ends)
    >>> float(state.velocity.min()) < 0
    True
    """
    if beta <= 0:
        raise ValueError(
            f"fem.newmark_step: beta must be positive, got {beta}. For explicit steps divide "
            "-equation.residual(u) by mass.lumped()."
        )
    mass.one_field("fem.newmark_step")
    u, v, a = state
    guess = u + dt * v + dt**2 * (0.5 - beta) * a  # the part that is known at the start
    speed = v + dt * (1 - gamma) * a
    rate = 1.0 / (beta * dt**2)
    step = rate * mass + equation - rate * mass.residual(guess)
    if damping is not None:
        if not damping.is_linear:
            raise ValueError(
                "fem.newmark_step: damping must be linear, got an equation that is not. Take a "
                "linear law."
            )
        change = gamma / (beta * dt)
        constant = damping.residual(jnp.zeros_like(u))
        known = damping.residual(speed - change * guess) - change * constant
        step = step + change * damping + known
    displacement: jax.Array = solve(step, fixed, values, guess, **options).value
    a = rate * (displacement - guess)
    return Motion(displacement, speed + gamma * dt * a, a)
