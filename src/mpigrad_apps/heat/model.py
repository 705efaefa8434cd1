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
# A function of the time, or values: constant, or at the times 0, dt, ..., steps dt.
Source = (
    Callable[[Any], Any] | float | Float[Array, "*time lx ly"] | Float[np.ndarray, "*time lx ly"]
)


@dataclasses.dataclass(frozen=True)
class Heat:
    """u_t = div(kappa grad u) + f on the grid's rectangle (collective: equal on all ranks).

    In space the faces and fluxes of `mpigrad_apps.diffusion`, second order in the spacing. In
    time, with L the operator in space,

        u' - u = dt (theta L u' + (1 - theta) L u + theta f(t + dt) + (1 - theta) f(t)):

    theta = 0 is explicit (forward Euler, first order) and stable for small dt alone; theta = 1/2
    (Crank and Nicolson, second order) and theta = 1 (backward Euler, first order) solve a linear
    system in each step and are stable for any dt.

    Parameters
    ----------
    grid
        The grid, with two axes.
    dt
        Time step, in the unit of spacing^2 / kappa.
    steps
        Number of time steps.
    theta
        From 0 to 1.
    boundary
        "zero": u = 0 on the boundary; "insulated": nothing flows through it.
    checkpoints
        What a gradient keeps of the steps, as for `loops.scan`. Solutions of linear systems are
        messages' results, and are always kept: one u for each step where theta > 0.
    solver
        Of the linear systems; default: `sparse.default_solver(rtol=1e-10)`.

    Raises
    ------
    TypeError, ValueError
        On all ranks: if an argument makes no sense, or the ranks disagree.
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
                raise ValueError(f"Heat: the grid has {self.grid.ndim} axes; it takes one of two")
            if not (self.dt > 0 and math.isfinite(self.dt)):
                raise ValueError(f"Heat: dt={self.dt}: a time step is positive")
            if self.steps < 0:
                raise ValueError(f"Heat: steps={self.steps}: a number of steps is not negative")
            if not 0 <= self.theta <= 1:
                raise ValueError(f"Heat: theta={self.theta} is not between 0 and 1")
            if self.boundary not in ("zero", "insulated"):
                raise ValueError(f'Heat: boundary={self.boundary!r}: "zero" or "insulated"')
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
        """u at the times 0, dt, ..., steps dt: shape (steps + 1, lx, ly); as `run`."""
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
        """Make all steps (collective); differentiable in kappa, `initial` and the source.

        Parameters
        ----------
        kappa, initial
            This rank's tiles, shape (lx, ly): the diffusivity, and u at the time `start`.
        source
            f: a number or a tile (lx, ly), constant in time; its tiles at the times of all steps,
            (steps + 1, lx, ly); or a function that gives the tile for a time t.
        measure
            What is kept of u: a function of a tile of u, whose results are stacked. By default
            nothing.
        throw
            Raise where kappa, `initial` or the time step make no sense, or a linear solve fails;
            with `throw=False` u is NaN there on all ranks, as line searches take it.

        Returns
        -------
        u, measured
            This rank's tile of the last u, and measure(u) at the steps + 1 times.

        Raises
        ------
        ValueError
            If shapes are not the tile's.
        jax.errors.JaxRuntimeError
            On all ranks, before the first step: if kappa is not positive and finite in some cell,
            or the time step is larger than the largest stable one, which the message names.
        """
        kappa, u = (
            x.astype(jnp.result_type(x, float))  # whole numbers would cut what they meet
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
        """The largest stable dt for this rank's tile of kappa, equal on all ranks (collective).

        |u' / u| <= 1 for all modes where (1 - 2 theta) dt lambda <= 2, with lambda the largest
        eigenvalue of -L, which Gershgorin's circles bound. For a constant kappa and theta = 0 this
        is 1 / (2 kappa (1 / hx^2 + 1 / hy^2)); infinite from theta = 1/2 on.
        """
        kappa = self._tile("kappa", kappa)
        flows = diffusion.conductances(kappa, self.grid, self.sides)
        return self._largest_step(allreduce(self._steepest(flows), MPI.MAX, self.grid.comm))

    # --- a step ---

    @property
    def _area(self) -> float:
        return self.grid.spacing[0] * self.grid.spacing[1]

    def _scheme(self, flows: list[Array], throw: bool) -> Callable[[Array, Any], Array]:
        """The function (u, f) -> u'."""

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
            found = sparse.solve(matrix, right.ravel(), self.solver, u.ravel(), throw=throw)
            return jnp.where(found.result == 0, found.value, jnp.nan).reshape(u.shape)

        return implicit

    def _forcing(self, source: Any, dtype: Any, start: Any) -> tuple[Any, Callable[[Any], Any]]:
        """What the steps take in turn, and the function that makes of it the f of a step."""
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
            f"Heat: the source has shape {values.shape} on a tile of {shape} cells (rank "
            f"{self.grid.comm.rank}); give (), {shape} or {(self.steps + 1, *shape)}, or a function"
        )

    # --- what is refused ---

    def _tile(self, name: str, field: Field) -> Array:
        if np.shape(field) != self.grid.local_shape:
            raise ValueError(
                f"Heat: {name} has shape {np.shape(field)} on a tile of {self.grid.local_shape} "
                f"cells (rank {self.grid.comm.rank})"
            )
        return jnp.asarray(field)

    def _steepest(self, flows: list[Array]) -> Array:
        """Half of Gershgorin's bound of this rank's cells, times the area of a cell."""
        inner = (c / np.maximum(side.factor, 1) for c, side in zip(flows, self.sides, strict=True))
        return jnp.max(sum(inner))  # type: ignore[arg-type]

    def _largest_step(self, steepest: Array) -> Array:
        if self.theta >= 0.5:
            return jnp.full_like(steepest, jnp.inf)
        return self._area / ((1 - 2 * self.theta) * steepest)

    def _check(self, kappa: Array, u: Array, flows: list[Array], throw: bool) -> Array:
        """Whether kappa, u and dt make sense on all ranks; if asked to, refuse them."""
        comm = self.grid.comm
        bad = ~((kappa > 0) & jnp.isfinite(kappa))
        tame = [
            jnp.where(jnp.isfinite(c), c, 0) for c in flows
        ]  # MPI's maximum of a NaN may be anything
        found = jnp.stack([self._steepest(tame), jnp.any(bad), jnp.any(~jnp.isfinite(u))])
        steepest, bad, wild = allreduce(jax.lax.stop_gradient(found), MPI.MAX, comm)
        largest = self._largest_step(steepest)
        # To rounding: the largest stable time step itself is stable.
        stable = self.dt <= largest * (1 + 8 * jnp.finfo(found.dtype).eps)
        if throw:
            require(bad == 0, "Heat: kappa must be positive and finite in every cell", comm=comm)
            require(wild == 0, "Heat: the initial u must be finite in every cell", comm=comm)
            require(
                stable,
                "Heat: dt = {} is unstable with this kappa: the largest stable time step is {}. "
                "Take more and smaller steps, or theta = 0.5 or more",
                self.dt,
                largest,
                comm=comm,
            )
        return (bad == 0) & (wild == 0) & stable
