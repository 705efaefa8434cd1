"""The ocean model veros as a differentiable function of its state, on many ranks.

veros is installed from the package index and is not changed. While these functions are used, they
replace its linear solver, its square root and the parts of a time step that write files.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import veros
from mpi4py import MPI

import mpigrad as mg
from mpigrad import sparse

__all__ = ["Model", "State", "configure", "time_step", "with_temperature"]

State = dict[str, Any]
Setup = Any  # a veros.VerosSetup

HALO = 2  # cells around each tile


def configure() -> None:
    """Choose JAX, float64 and a division of the domain, before a set-up of veros is imported."""
    settings = veros.runtime_settings
    settings.backend, settings.float_type = "jax", "float64"
    settings.linear_solver = "scipy_jax"
    settings.use_special_tdma = False  # a compiled routine without derivatives
    settings.diskless_mode = True
    settings.num_proc = tuple(MPI.Compute_dims(MPI.COMM_WORLD.size, 2))
    install_solver()


class SparseSolver:
    """The streamfunction or pressure equation, solved by `mpigrad.sparse.solve` on all ranks.

    The matrix is veros's. Its rows are multiplied by minus the area of their cells, and the columns
    of prescribed cells are eliminated, which makes it symmetric and positive definite.
    """

    def __init__(self, state: Any) -> None:
        from veros.core.external.poisson_matrix import assemble_poisson_matrix

        vs, self.cyclic = state.variables, state.settings.enable_cyclic_x
        diagonals, offsets, free = assemble_poisson_matrix(state)
        inner = (slice(HALO, -HALO),) * 2
        if state.settings.enable_streamfunction:
            area = vs.dxu[:, None] * (vs.dyu * vs.cosu)[None, :]
        else:
            area = vs.dxt[:, None] * (vs.dyt * vs.cost)[None, :]
        self.scale = -np.asarray(area)[inner]
        self.free = np.asarray(free, bool)
        # Also cells with the row of the identity: land, and cells outside of the domain.
        self.fixed = ~self.free | (np.asarray(diagonals[0]) > 0)
        shape = self.scale.shape

        # Cells are numbered rank by rank. A cell outside of the domain has no number.
        n = self.scale.size
        own = MPI.COMM_WORLD.rank * n + np.arange(n).reshape(shape)
        numbers = np.full(self.fixed.shape, -1)
        numbers[inner] = own
        numbers = np.asarray(self._with_halo(jnp.asarray(numbers)))
        rows, columns, values = [], [], []
        self.outside = []  # coefficients of cells outside, and their places
        for diagonal, (di, dj) in zip(diagonals, offsets, strict=True):
            place = tuple(
                slice(HALO + d, HALO + d + m) for d, m in zip((di, dj), shape, strict=True)
            )
            neighbor, value = numbers[place], self.scale * np.asarray(diagonal)[inner]
            inside = neighbor >= 0
            rows.append(own[inside])
            columns.append(neighbor[inside])
            values.append(value[inside])
            if not inside.all():
                self.outside.append((np.where(inside, 0.0, value), place))
        pattern = sparse.Pattern.from_coo(np.concatenate(rows), np.concatenate(columns), n)
        self.matrix = sparse.Matrix.assemble(pattern, jnp.asarray(np.concatenate(values)))
        self.inner = inner
        self.method = sparse.PCG(rtol=1e-12, max_steps=500)
        self._compiled = mg.jit(self._solve)

    def _with_halo(self, a: jax.Array) -> jax.Array:
        from veros.core.utilities import enforce_boundaries

        return enforce_boundaries(a, self.cyclic)

    def _solve(self, rhs: jax.Array, x0: jax.Array, boundary: jax.Array) -> jax.Array:
        known = jnp.where(self.free, rhs, boundary)
        b = self.scale * rhs[self.inner]
        for coefficients, place in self.outside:
            b = b - coefficients * known[place]
        fixed = self.fixed[self.inner].ravel()
        A, b = self.matrix.at_boundary(fixed, b.ravel(), known[self.inner].ravel())
        first = jax.lax.stop_gradient(x0[self.inner].ravel())
        x = sparse.solve(A, b, self.method, x0=first).value
        return self._with_halo(known.at[self.inner].set(x.reshape(self.scale.shape)))

    def solve(
        self, state: Any, rhs: jax.Array, x0: jax.Array, boundary_val: jax.Array | None = None
    ) -> jax.Array:
        boundary = x0 if boundary_val is None else boundary_val.astype(x0.dtype)
        return self._compiled(rhs, x0, boundary)


def install_solver() -> None:
    """Let veros solve with `SparseSolver`."""
    import veros.core.external.solvers.scipy_jax as module

    module.JAXSciPySolver = SparseSolver


def root(x: Any) -> jax.Array:
    """Return the square root, with the derivative 0 at 0.

    veros takes roots of zero on land. Their derivative is infinite, and zero times it is NaN.
    """
    zero = x == 0
    return jnp.where(zero, 0.0, jnp.sqrt(jnp.where(zero, 1.0, x)))


class _Numpy:
    """`jax.numpy` with `root` as its square root."""

    sqrt = staticmethod(root)

    def __getattr__(self, name: str) -> Any:
        return getattr(jnp, name)


@contextlib.contextmanager
def _pure() -> Iterator[None]:
    """Remove from veros what a compiled step cannot do: files, checks, infinite slopes."""
    from veros import diagnostics, restart
    from veros.core import eke, friction, idemix, numerics, tke

    def nothing(*_: Any, **__: Any) -> None:
        pass

    with contextlib.ExitStack() as stack:
        for module in (eke, friction, idemix, tke):
            stack.enter_context(mock.patch.object(module, "npx", _Numpy()))
        for module, name in (
            (restart, "write_restart"),
            (diagnostics, "diagnose"),
            (diagnostics, "output"),
        ):
            stack.enter_context(mock.patch.object(module, name, nothing))
        stack.enter_context(mock.patch.object(numerics, "sanity_check", lambda _: True))
        yield


def state_of(setup: Setup) -> State:
    """Return the arrays of a set-up's state, by their names."""
    return dict(setup.state.variables.items())


def _assign(setup: Setup, arrays: State) -> None:
    variables = setup.state.variables
    with variables.unlock():
        for name, value in arrays.items():
            setattr(variables, name, value)


def _call(setup: Setup, arrays: State, function: Callable[[], None]) -> State:
    before = state_of(setup)
    try:
        _assign(setup, arrays)
        with _pure():
            function()
        return state_of(setup)
    finally:
        _assign(setup, before)


def time_step(setup: Setup, arrays: State) -> State:
    """Return the state after one step of veros, as a pure function of the state before."""
    return _call(setup, arrays, lambda: setup.step(setup.state))


def with_temperature(setup: Setup, arrays: State, temperature: jax.Array) -> State:
    """Return the state with this temperature at the present and the last time, and its density.

    `temperature` has the shape of the tile with its halo, which is filled from the neighbours.
    """
    from veros.core.numerics import calc_initial_conditions_kernel

    def replace() -> None:
        state = setup.state
        vs = state.variables
        with vs.unlock():
            for time in (vs.tau, vs.taum1):
                vs.temp = vs.temp.at[..., time].set(temperature)
            vs.update(calc_initial_conditions_kernel(state))

    return _call(setup, arrays, replace)


class Model:
    """The time steps of a set-up of veros, and their adjoints, each compiled once.

    The state before each step is kept for the adjoint. `parameters` are arrays that veros's steps
    read and do not change, such as the wind stress.
    """

    def __init__(self, setup: Setup, parameters: tuple[str, ...] = ("surface_taux",)) -> None:
        self.setup = setup
        arrays = state_of(setup)
        changed: list[str] = []

        def find_changes(arrays: State) -> State:
            after = time_step(setup, arrays)
            changed.extend(name for name in arrays if after[name] is not arrays[name])
            return after

        jax.eval_shape(find_changes, arrays)
        self.initial = {name: arrays[name] for name in changed}
        self.parameters = {name: arrays[name] for name in parameters}
        self.constants = {k: v for k, v in arrays.items() if k not in self.initial}
        self.step = mg.jit(self._step)
        self.step_adjoint = mg.jit(self._step_adjoint)
        self.start = mg.jit(self._start)
        self.start_adjoint = mg.jit(
            lambda state, temperature, cotangent: mg.vjp(
                lambda temperature: _real(self._start(state, temperature)), temperature
            )[1](cotangent)[0]
        )

    def _step(self, state: State, parameters: State) -> State:
        after = time_step(self.setup, self.constants | parameters | state)
        return {name: after[name] for name in state}

    def _step_adjoint(
        self, state: State, parameters: State, cotangent: State
    ) -> tuple[State, State]:
        def step(real: State, parameters: State) -> State:
            return _real(self._step(state | real, parameters))

        return mg.vjp(step, _real(state), parameters)[1](cotangent)

    def _start(self, state: State, temperature: jax.Array) -> State:
        after = with_temperature(self.setup, self.constants | state, temperature)
        return {name: after[name] for name in state}

    def run(self, state: State, parameters: State, n: int) -> State:
        """Return the state after n steps."""
        for _ in range(n):
            state = self.step(state, parameters)
        return state

    def value_and_gradient(
        self,
        objective: Callable[[State], jax.Array],
        state: State,
        temperature: jax.Array,
        parameters: State,
        n: int,
    ) -> tuple[jax.Array, tuple[jax.Array, State]]:
        """Return an objective of the state after n steps, and its gradient.

        `objective` returns this rank's share of a sum over all ranks. The gradient is with respect
        to the initial temperature and to the parameters.
        """
        states = [self.start(state, temperature)]
        for _ in range(n):
            states.append(self.step(states[-1], parameters))
        last = states.pop()
        share = mg.jit(mg.value_and_grad(lambda real: objective(self.constants | last | real)))
        value, cotangent = share(_real(last))
        total = jax.tree.map(jnp.zeros_like, parameters)
        while states:
            cotangent, by_parameters = self.step_adjoint(states.pop(), parameters, cotangent)
            total = jax.tree.map(jnp.add, total, by_parameters)
        return value, (self.start_adjoint(state, temperature, cotangent), total)


def _real(state: State) -> State:
    return {k: v for k, v in state.items() if jnp.issubdtype(v.dtype, jnp.floating)}
