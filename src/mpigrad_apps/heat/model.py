"""The discrete heat equation: finite volumes in space, the theta scheme in time."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from mpi4py import MPI

from mpigrad import allreduce, loops, require, sparse
from mpigrad.collective_errors import assert_same_on_all_ranks, raise_on_all_ranks
from mpigrad.grid import Grid, halo_exchange
from mpigrad_apps import diffusion

__all__ = ["Heat"]

Field = Float[Array, "lx ly"] | Float[np.ndarray, "lx ly"]
# A function of the time, constant values, or values at the times 0, dt, ..., steps dt.
Source = (
    Callable[[Any], Any] | float | Float[Array, "*time lx ly"] | Float[np.ndarray, "*time lx ly"]
)


@dataclasses.dataclass(frozen=True)
class Heat:
    """The discrete heat equation u_t = div(kappa grad u) + f on a grid (collective).

    In space, the scheme uses the faces and fluxes of `mpigrad_apps.diffusion` and is of second
    order in the spacing. In time, with L the operator in space, a step is

        u' - u = dt (theta L u' + (1 - theta) L u + theta f(t + dt) + (1 - theta) f(t)).

    theta = 0 is explicit (forward Euler, first order) and stable only for small dt. theta = 1/2
    (Crank and Nicolson, second order) and theta = 1 (backward Euler, first order) solve a linear
    system in each step and are stable for any dt. All ranks give equal arguments.

    Parameters
    ----------
    grid
        A grid with two axes.
    dt
        Time step, in the unit of spacing^2 / kappa.
    steps
        Number of time steps.
    theta
        Weight of the implicit part, from 0 to 1.
    boundary
        "zero": u = 0 on the boundary. "insulated": nothing flows through the boundary.
    checkpoints
        The states that a gradient stores, as for `loops.scan`. Solutions of linear systems are
        results of messages and are always stored: one u for each step if theta > 0.
    solver
        Solver of the linear systems; by default `sparse.default_solver(rtol=1e-10)`.

    Raises
    ------
    TypeError, ValueError
        On all ranks, if an argument is not valid, or differs between ranks.

    Examples
    --------
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import mpigrad as mg
    >>> from mpigrad_apps.heat import Heat
    >>> grid = mg.Grid((8, 8), (1 / 8, 1 / 8))
    >>> model = Heat(grid, dt=1e-3, steps=10)
    >>> kappa = jnp.ones(grid.local_shape)
    >>> print(f"{model.largest_time_step(kappa):.4f}")
    0.0039
    >>> u, _ = model.run(kappa, jnp.ones(grid.local_shape))
    >>> u.shape, bool(jnp.all(u < 1))
    ((8, 8), True)
    """

    grid: Grid
    dt: float
    steps: int
    theta: float = 0.0
    boundary: diffusion.Boundary = "zero"
    checkpoints: loops.Checkpoints = None
    solver: sparse.LinearSolver | None = None
    sides: tuple[diffusion.Side, ...] = dataclasses.field(init=False, repr=False, compare=False)
    pattern: sparse.Pattern | None = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        comm = self.grid.comm
        with raise_on_all_ranks(comm):
            if self.grid.ndim != 2:
                raise ValueError(f"Heat: the grid must have two axes, got {self.grid.ndim}.")
            if not (self.dt > 0 and math.isfinite(self.dt)):
                raise ValueError(f"Heat: dt must be positive and finite, got {self.dt}.")
            if self.steps < 0:
                raise ValueError(f"Heat: steps must be 0 or more, got {self.steps}.")
            if not 0 <= self.theta <= 1:
                raise ValueError(f"Heat: theta must be between 0 and 1, got {self.theta}.")
            if self.boundary not in ("zero", "insulated"):
                raise ValueError(
                    f'Heat: boundary must be "zero" or "insulated", got {self.boundary!r}.'
                )
        assert_same_on_all_ranks(
            comm,
            (self.dt, self.steps, self.theta, self.boundary),
            "Heat: dt, steps, theta, boundary",
        )
        sides, pattern, solver = diffusion.sides(self.grid, self.boundary), None, self.solver
        if self.theta > 0:
            pattern = sparse.Pattern.from_stencil(self.grid, [(0, 0), *(s.offset for s in sides)])
            solver = solver or sparse.default_solver(1e-10, pattern)
        for name, value in (("sides", sides), ("pattern", pattern), ("solver", solver)):
            object.__setattr__(self, name, value)  # the class is frozen from here on

    def history(
        self, kappa: Field, initial: Field, source: Source = 0.0, *, throw: bool = True
    ) -> Float[Array, "times lx ly"]:
        """Compute u at the times 0, dt, ..., steps dt: shape (steps + 1, lx, ly). See `run`."""
        return self.run(kappa, initial, source, lambda u: u, throw=throw)[1]

    def run(
        self,
        kappa: Field,
        initial: Field,
        source: Source = 0.0,
        measure: Callable[[Array], Any] = lambda u: None,
        *,
        start: Any = 0.0,
        throw: bool = True,
    ) -> tuple[Float[Array, "lx ly"], Any]:
        """Make all steps (collective). The result is differentiable in kappa, `initial` and source.

        Parameters
        ----------
        kappa, initial
            This rank's tiles, shape (lx, ly): the diffusivity, and u at the time `start`.
        source
            The source f: a number or a tile (lx, ly) that is constant in time, tiles for the times
            of all steps, shape (steps + 1, lx, ly), or a function that returns the tile of a time
            t.
        measure
            Function of a tile of u. Its results are stacked. By default nothing is stored.
        start
            Time of the first step.
        throw
            If True, raise an error if kappa, `initial` or the time step are not valid, or a linear
            solve fails. If False, u is NaN on all ranks in these cases, as line searches expect.

        Returns
        -------
        u, measured
            This rank's tile of the last u, and measure(u) at the steps + 1 times.

        Raises
        ------
        ValueError
            If an array does not have the shape of the tile.
        jax.errors.JaxRuntimeError
            On all ranks, before the first step, if kappa is not positive and finite in some cell,
            or the time step is not stable. The message names the largest stable time step.
        """
        kappa, u = (
            x.astype(jnp.result_type(x, float))  # integers would truncate the results
            for x in (self._tile("kappa", kappa), self._tile("initial", initial))
        )
        xs, forcing = self._forcing(source, kappa.dtype, start)
        flows = diffusion.conductances(kappa, self.grid, self.sides)
        u = u.astype(jnp.result_type(kappa, u))
        sound = self._check(kappa, u, flows, throw)
        if not throw:
            u = jnp.where(sound, u, jnp.nan)
        advance = self._scheme(flows, throw)

        def step(u: Array, x: Any) -> tuple[Array, Any]:
            u = advance(u, forcing(x))
            return u, measure(u)

        first = measure(u)
        u, measured = loops.scan(step, u, self.steps, xs, checkpoints=self.checkpoints)
        return u, jax.tree.map(lambda a, rest: jnp.concatenate([a[None], rest]), first, measured)

    def largest_time_step(self, kappa: Field) -> Float[Array, ""]:
        """Compute the largest stable dt, equal on all ranks (collective).

        |u' / u| <= 1 for all modes if (1 - 2 theta) dt lambda <= 2, with lambda the largest
        eigenvalue of -L, which Gershgorin's circles bound. For a constant kappa and theta = 0 this
        is 1 / (2 kappa (1 / hx^2 + 1 / hy^2)). It is infinite for theta >= 1/2.

        Parameters
        ----------
        kappa
            This rank's tile, shape (lx, ly).
        """
        kappa = self._tile("kappa", kappa)
        flows = diffusion.conductances(kappa, self.grid, self.sides)
        return self._largest_step(allreduce(self._steepest(flows), MPI.MAX, self.grid.comm))

    # --- a step ---

    @property
    def _area(self) -> float:
        return self.grid.spacing[0] * self.grid.spacing[1]

    def _scheme(self, flows: list[Array], throw: bool) -> Callable[[Array, Any], Array]:
        """Return the function (u, f) -> u' of a step."""

        def inflow(u: Array) -> Array:
            padded = halo_exchange(u, self.grid, width=1, boundary=0.0)
            return sum(
                c * (side.beyond(padded) - u) for c, side in zip(flows, self.sides, strict=True)
            )  # type: ignore[return-value]

        if self.pattern is None:
            return lambda u, f: u + self.dt * (inflow(u) / self._area + f)
        later = self.theta * self.dt
        matrix = sparse.Matrix.assemble(
            self.pattern, [self._area + later * sum(flows), *(-later * c for c in flows)]
        )

        def implicit(u: Array, f: Any) -> Array:
            right = self._area * (u + self.dt * f)
            if self.theta < 1:
                right = right + (self.dt - later) * inflow(u)
            solution = sparse.solve(matrix, right.ravel(), self.solver, u.ravel(), throw=throw)
            return jnp.where(solution.result == 0, solution.value, jnp.nan).reshape(u.shape)

        return implicit

    def _forcing(self, source: Any, dtype: Any, start: Any) -> tuple[Any, Callable[[Any], Any]]:
        """Return the scanned inputs of the steps, and a function from an input to f."""
        theta, shape = self.theta, self.grid.local_shape
        if callable(source):
            f: Callable[[Any], Any] = source

            def at_times(t: Any) -> Any:
                now = 0 if theta == 1 else (1 - theta) * f(t)
                return now if theta == 0 else now + theta * f(t + self.dt)

            return start + self.dt * jnp.arange(self.steps, dtype=dtype), at_times
        values = jnp.asarray(source, dtype)
        if values.shape == (self.steps + 1, *shape):
            return (1 - theta) * values[:-1] + theta * values[1:], lambda f: f
        if values.shape in ((), shape):
            return None, lambda _: values
        raise ValueError(
            f"Heat: the source must have shape (), {shape} or {(self.steps + 1, *shape)}, or be a "
            f"function, got shape {values.shape} on rank {self.grid.comm.rank}."
        )

    # --- checks ---

    def _tile(self, name: str, field: Field) -> Array:
        if np.shape(field) != self.grid.local_shape:
            raise ValueError(
                f"Heat: {name} must have the shape of this rank's tile, {self.grid.local_shape}, "
                f"got {np.shape(field)} on rank {self.grid.comm.rank}."
            )
        return jnp.asarray(field)

    def _steepest(self, flows: list[Array]) -> Array:
        """Compute half of Gershgorin's bound over this rank's cells, times the area of a cell."""
        inner = (c / np.maximum(side.factor, 1) for c, side in zip(flows, self.sides, strict=True))
        return jnp.max(sum(inner))  # type: ignore[arg-type]

    def _largest_step(self, steepest: Array) -> Array:
        if self.theta >= 0.5:
            return jnp.full_like(steepest, jnp.inf)
        return self._area / ((1 - 2 * self.theta) * steepest)

    def _check(self, kappa: Array, u: Array, flows: list[Array], throw: bool) -> Array:
        """Return whether kappa, u and dt are valid on all ranks, or raise if they are not."""
        comm = self.grid.comm
        bad = ~((kappa > 0) & jnp.isfinite(kappa))
        tame = [
            jnp.where(jnp.isfinite(c), c, 0) for c in flows
        ]  # MPI's maximum is not defined for NaN
        measures = jnp.stack([self._steepest(tame), jnp.any(bad), jnp.any(~jnp.isfinite(u))])
        steepest, bad, wild = allreduce(jax.lax.stop_gradient(measures), MPI.MAX, comm)
        largest = self._largest_step(steepest)
        # The largest stable time step itself must pass, in spite of rounding.
        stable = self.dt <= largest * (1 + 8 * jnp.finfo(measures.dtype).eps)
        if throw:
            require(bad == 0, "Heat: kappa must be positive and finite in every cell.", comm=comm)
            require(wild == 0, "Heat: the initial u must be finite in every cell.", comm=comm)
            require(
                stable,
                "Heat: dt = {} is unstable with this kappa: the largest stable time step is {}. "
                "Use more and smaller steps, or theta = 0.5 or more.",
                self.dt,
                largest,
                comm=comm,
            )
        return (bad == 0) & (wild == 0) & stable
