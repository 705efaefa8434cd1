"""The equation of an initial value problem as jaxprs: slopes, Jacobian and mass."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import eval_jaxpr

from mpigrad.communicator import Communicator
from mpigrad.extend import StateFolder, constants_as_operands, outer_carrier, set_carrier
from mpigrad.ode.methods import Method
from mpigrad.operations import allreduce, assert_replicated
from mpigrad.sparse import LinearSolver, Matrix, Operator, Pattern

__all__ = ["Problem", "Traced"]

_LINK = np.float32(0)


@dataclasses.dataclass(frozen=True, eq=False)
class Traced:
    """A function as a jaxpr of (constants..., link, arguments...). `link` carries its messages."""

    jaxpr: Any
    n_constants: int

    @classmethod
    def of(cls, f: Callable[..., Any], *arguments: Any) -> tuple[Traced, list[Any]]:
        """Trace f(*arguments), and return it and its constants."""
        return cls.with_shape(f, *arguments)[:2]

    @classmethod
    def with_shape(cls, f: Callable[..., Any], *arguments: Any) -> tuple[Traced, list[Any], Any]:
        """Trace f(*arguments), and return it, its constants, and the shape of its result."""

        def linked(link: Any, *arguments: Any) -> Any:
            with set_carrier(link):
                return f(*arguments)

        closed, shape = jax.make_jaxpr(linked, return_shape=True)(_LINK, *arguments)
        jaxpr, constants = constants_as_operands(closed)
        return cls(jaxpr, len(constants)), list(constants), shape

    def __call__(self, link: Any, constants: Sequence[Any], *arguments: Any) -> Any:
        """Return the function's result."""
        return eval_jaxpr(self.jaxpr, (), *constants, link, *arguments)[0]


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """M dy/dt = f(t, y) + g(t, y) with its Jacobian df/dy, and how it is integrated.

    The operands of its functions are the constants of f, g, the Jacobian and the event, the values
    of M, and the leaves of the user's arguments, in this order.
    """

    f: Traced
    g: Traced | None
    J: Traced | None
    end: Traced | None  # the event
    mass: Pattern | str  # "identity", "diagonal", or the pattern of a matrix
    pattern: Pattern | None
    comm: Communicator
    method: Method
    solver: LinearSolver
    adaptive: bool
    rtol: float
    atol: float
    linear_rtol: float
    max_steps: int
    folder: StateFolder | None  # of the stages for the derivative, None: in memory

    def _split(self, operands: Sequence[Any]) -> tuple[list[Any], ...]:
        ends = [self.f.n_constants]
        for part in (self.g, self.J, self.end):
            ends.append(ends[-1] + (part.n_constants if part else 0))
        ends.append(ends[-1] + (self.mass != "identity"))
        return tuple(list(operands[a:b]) for a, b in zip([0, *ends], [*ends, None], strict=True))

    def slope(self, t: Any, y: Any, operands: Sequence[Any], link: Any = None) -> Any:
        """Return f(t, y)."""
        constants, *_, leaves = self._split(operands)
        return self.f(outer_carrier() if link is None else link, constants, t, y, *leaves)

    def explicit_slope(self, t: Any, y: Any, operands: Sequence[Any]) -> Any:
        """Return g(t, y)."""
        assert self.g is not None
        _, constants, *_, leaves = self._split(operands)
        return self.g(outer_carrier(), constants, t, y, *leaves)

    def jacobian(self, t: Any, y: Any, operands: Sequence[Any]) -> Any:
        """Return the values of df/dy on the pattern."""
        assert self.J is not None
        _, _, constants, *_, leaves = self._split(operands)
        return self.J(outer_carrier(), constants, t, y, *leaves)

    def _own_event(self, t: Any, y: Any, operands: Sequence[Any]) -> Any:
        assert self.end is not None
        *_, constants, _, leaves = self._split(operands)
        return self.end(outer_carrier(), constants, t, y, *leaves)

    def event(self, t: Any, y: Any, operands: Sequence[Any]) -> Any:
        """Return the value of the event: the mean over ranks, so that all decide the same."""
        return allreduce(self._own_event(t, y, operands), comm=self.comm) / self.comm.size

    def require_common_event(self, t: Any, y: Any, operands: Sequence[Any], head: str) -> None:
        """Raise on every rank if the value of the event differs between ranks."""
        if self.end is not None:
            assert_replicated(
                self._own_event(t, y, operands),
                self.comm,
                what=f"{head}the value of the event",
                remedy="Compute it by mpigrad.allreduce, max_norm or rms_norm of all ranks' parts.",
            )

    def along(self, t: Any, y: Any, operands: Sequence[Any]) -> Callable[[Any], Any]:
        """Return v -> df/dy v. Every message has its derivative, even if f ignores y here."""

        def product(v: Any) -> Any:
            def at(link: Any, y: Any) -> Any:
                return self.slope(t, y, operands, link)

            return jax.jvp(at, (outer_carrier(), y), (_LINK, v))[1]

        return product

    def mass_times(self, y: Any, operands: Sequence[Any]) -> Any:
        """Return M y."""
        if self.mass == "identity":
            return y
        (values,) = self._split(operands)[4]
        return values * y if self.mass == "diagonal" else Matrix(self._matrix, values) @ y

    def consistent(self, slope: Any, operands: Sequence[Any]) -> Any:
        """Return the slope with zeros in algebraic equations, which a solution satisfies."""
        if self.mass == "identity":
            return slope
        (values,) = self._split(operands)[4]
        if self.mass != "diagonal":
            values = Matrix(self._matrix, jnp.abs(values)) @ jnp.ones_like(slope)
        return jnp.where(values == 0, 0, slope)

    @property
    def _matrix(self) -> Pattern:
        assert isinstance(self.mass, Pattern)
        return self.mass

    def system(self, J: Any, scale: Any, operands: Sequence[Any]) -> Matrix:
        """Return M - scale df/dy for the values J of df/dy."""
        assert self.pattern is not None
        if isinstance(self.mass, Pattern):
            (values,) = self._split(operands)[4]
            return Matrix(self.mass, values) - scale * Matrix(self.pattern, J)
        ones = jnp.ones(self.pattern.n_local, J.dtype)
        diagonal = ones if self.mass == "identity" else self._split(operands)[4][0]
        return Matrix(self.pattern, (-scale * J).at[self.pattern.diagonal_index].add(diagonal))

    def operator(self, t: Any, y: Any, scale: Any, operands: Sequence[Any]) -> Operator:
        """Return v -> (M - scale df/dy) v."""
        along = self.along(t, y, operands)
        return Operator(lambda v: self.mass_times(v, operands) - scale * along(v), comm=self.comm)
