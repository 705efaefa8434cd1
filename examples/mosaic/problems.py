"""The two finite element problems of the benchmark Mosaic (arXiv:2606.27895), by `mpigrad.fem`.

Arrays are those of this rank: one value for each of its cells, or for each of its own nodes. All
functions are collective. A function that returns a share returns this rank's part of a sum.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import mpigrad as mg
from mpigrad import fem, sparse

__all__ = ["Elastic", "Groups", "Heat", "Problem"]

MIN_RATIO = 1e-3  # of the coefficient of a void to that of the solid


@dataclass(frozen=True)
class Groups:
    """Groups of nodes with a condition.

    Attributes
    ----------
    mask
        The group of each own node, 0 for none, shape (n_local,).
    values
        The value of each group, shape (groups, components).
    """

    mask: np.ndarray
    values: np.ndarray


class Problem:
    """A mesh with conditions, and the programs for values and derivatives.

    Parameters
    ----------
    mesh
        Hexahedra.
    fixed
        Nodes with a given value.
    load
        Nodes of loaded facets: a facet is loaded if all of its nodes are in the same group. The
        value is a flux or a traction.
    components
        1, or 3 for displacements.
    solver
        The linear solver.
    """

    inputs = ("rho",)  # the arguments with a derivative

    def __init__(
        self,
        mesh: fem.Mesh,
        fixed: Groups,
        load: Groups,
        components: int,
        solver: sparse.PCG,
    ) -> None:
        self.mesh, self.solver = mesh, solver
        self.space = space = fem.Space(mesh, components=components)
        nodes = fixed.mask > 0
        self.fixed = nodes if components == 1 else np.repeat(nodes[:, None], components, axis=1)
        padded = np.concatenate([np.zeros((1, components)), fixed.values])
        self.values = padded[fixed.mask].reshape(space.shape)
        self.loads = [
            fem.Energy(space, lambda p, q: jnp.vdot(q, p.u), on=mesh.facets(load.mask == g))(
                jnp.asarray(q if components > 1 else q[0], float)
            )
            for g, q in enumerate(load.values, 1)
        ]

    def field(self, equation: fem.Equation) -> jax.Array:
        """Return the field that solves the equation with this problem's loads."""
        for load in self.loads:
            equation = equation - load
        values = jnp.asarray(self.values)
        return fem.solve(equation, self.fixed, values, solver=self.solver).value

    def work(self, field: jax.Array) -> jax.Array:
        """Return the share of the work of the loads."""
        return sum((load.integral(field) for load in self.loads), jnp.zeros(()))

    def shares(self, *arguments: jax.Array) -> jax.Array:
        """Return the shares of all outputs."""
        raise NotImplementedError

    @functools.cached_property
    def outputs(self) -> Any:
        """The outputs, the same on all ranks, of the arguments of `shares`."""
        return mg.jit(lambda *given: mg.allreduce(self.shares(*given), comm=self.mesh.comm))

    @functools.cached_property
    def pullback(self) -> Any:
        """The gradients in `inputs` of the sum of outputs times their weights, the first argument.

        It returns the pair of that sum over all ranks and the gradients at this rank's cells.
        """

        def loss(weights: jax.Array, *given: jax.Array) -> jax.Array:
            return weights @ self.shares(*given)

        count = tuple(range(1, 1 + len(self.inputs)))
        return mg.jit(mg.value_and_grad(loss, argnums=count, comm=self.mesh.comm))

    @functools.cached_property
    def pushforward(self) -> Any:
        """The derivative of the outputs along directions, one for each of `inputs`."""

        def forward(directions: tuple[jax.Array, ...], *given: jax.Array) -> jax.Array:
            count = len(self.inputs)
            moved = jax.jvp(lambda *x: self.shares(*x, *given[count:]), given[:count], directions)
            return mg.allreduce(moved[1], comm=self.mesh.comm)

        return mg.jit(forward)


class Heat(Problem):
    """-∇·(k ∇T) = f. The arguments are density and source of cells, and target and counted nodes.

    The outputs are the work of the flux, ∫ q T, and the sum of (T - target)² at counted nodes.
    """

    inputs = ("rho", "source")

    def __init__(
        self,
        mesh: fem.Mesh,
        fixed: Groups,
        load: Groups,
        *,
        k_max: float = 1.0,
        p_exp: float = 3.0,
        solver: sparse.PCG | None = None,
    ) -> None:
        super().__init__(mesh, fixed, load, 1, solver or heat_solver())
        self.k_max, self.p_exp = k_max, p_exp
        self.conduction = fem.Energy(
            self.space, lambda p, k, f: 0.5 * k * (p.grad @ p.grad) - f * p.u
        )

    def temperature(self, rho: jax.Array, source: jax.Array) -> jax.Array:
        k = self.k_max * stiffness_ratio(rho, self.p_exp)
        return self.field(self.conduction(fem.PerCell(k), fem.PerCell(source)))

    def shares(self, *arguments: jax.Array) -> jax.Array:
        rho, source, target, counted = arguments
        T = self.temperature(rho, source)
        return jnp.stack([self.work(T), jnp.sum(jnp.where(counted, T - target, 0.0) ** 2)])


class Elastic(Problem):
    """Linear elasticity. The argument is the density of cells, the output the work of the loads."""

    def __init__(
        self,
        mesh: fem.Mesh,
        fixed: Groups,
        load: Groups,
        *,
        E_max: float = 70_000.0,
        nu: float = 0.3,
        p_exp: float = 3.0,
        solver: sparse.PCG | None = None,
    ) -> None:
        super().__init__(mesh, fixed, load, 3, solver or elastic_solver())
        self.E_max, self.p_exp = E_max, p_exp

        def energy(p: fem.Point, E: jax.Array) -> jax.Array:
            strain = 0.5 * (p.grad + p.grad.T)
            lame, shear = E * nu / ((1 + nu) * (1 - 2 * nu)), E / (2 * (1 + nu))
            return 0.5 * lame * jnp.trace(strain) ** 2 + shear * jnp.sum(strain**2)

        self.body = fem.Energy(self.space, energy)

    def displacement(self, rho: jax.Array) -> jax.Array:
        return self.field(self.body(fem.PerCell(self.E_max * stiffness_ratio(rho, self.p_exp))))

    def shares(self, *arguments: jax.Array) -> jax.Array:
        return self.work(self.displacement(arguments[0]))[None]


def stiffness_ratio(rho: jax.Array, p_exp: float) -> jax.Array:
    """Return the coefficient of a cell by that of the solid. Densities are limited to [0, 1].

    At the limits the derivative is that from inside, so that a descent can leave them.
    """
    inside = (rho >= 0) & (rho <= 1)
    limited = jnp.where(inside, rho, jax.lax.stop_gradient(jnp.clip(rho, 0.0, 1.0)))
    power = int(p_exp) if float(p_exp).is_integer() else p_exp
    return MIN_RATIO + (1 - MIN_RATIO) * limited**power


def heat_solver(rtol: float = 1e-8) -> sparse.PCG:
    return sparse.PCG(rtol=rtol, preconditioner=sparse.BoomerAMG())


def elastic_solver(rtol: float = 1e-8) -> sparse.PCG:
    amg = sparse.BoomerAMG(unknowns_per_cell=3, near_null=True)
    return sparse.PCG(rtol=rtol, preconditioner=amg)
