"""Several fields in one equation, each in a space of its own: velocities and a pressure."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.core import Tracer
from numpy.typing import NDArray

from mpigrad.collective_errors import assert_same_settings, raise_on_all_ranks
from mpigrad.fem.mesh import Mesh
from mpigrad.fem.space import Space
from mpigrad.sparse import Pattern

__all__ = ["Mixed"]


class Mixed:
    """The fields of one equation, by name (collective).

    Forms on it see each field at a point by its name: `p.velocity.u` and `p.velocity.grad`, next to
    `p.x` and `p.normal`. An unknown is a named tuple of fields, as in `u.velocity`, and the
    Jacobian consists of `sparse.Blocks`.

    Parameters
    ----------
    **spaces
        A `Space` for each field, all on one mesh. Taylor-Hood elements have degree 2 for velocities
        and degree 1 for the pressure (Taylor & Hood, Computers & Fluids 1, 1973).

    Attributes
    ----------
    mesh, degree
        The mesh, and the highest degree of the spaces.
    names, fields
        The names, and the spaces.

    Raises
    ------
    TypeError, ValueError
        On all ranks: if an argument is not valid.

    Examples
    --------
    >>> from mpigrad import fem
    >>> mesh = fem.box((4, 4), (1.0, 1.0), cell_type="triangle")
    >>> flow = fem.Mixed(velocity=fem.Space(mesh, 2, components=2), pressure=fem.Space(mesh))
    >>> flow.zeros().velocity.shape, flow.zeros().pressure.shape
    ((81, 2), (25,))
    """

    def __init__(self, **spaces: Space) -> None:
        names = tuple(spaces)
        wrong = [name for name, space in spaces.items() if not isinstance(space, Space)]
        if wrong or len(names) < 2:
            raise TypeError(
                "fem.Mixed: expected at least two spaces by name, got "
                + ", ".join(f"{n}={type(s).__name__}" for n, s in spaces.items())
                + ". Write fem.Mixed(velocity=fem.Space(...), pressure=fem.Space(...))."
            )
        mesh = spaces[names[0]].mesh
        with raise_on_all_ranks(mesh.comm):
            reserved = {"x", "normal"} & set(names)
            private = [name for name in names if name.startswith("_")]
            if reserved or private:
                raise ValueError(
                    f"fem.Mixed: a field cannot be called {(*reserved, *private)[0]!r}. Choose "
                    "another name."
                )
            if any(space.mesh is not mesh for space in spaces.values()):
                raise ValueError(
                    "fem.Mixed: the spaces must be on one mesh, got several. Make them with the "
                    "same Mesh object."
                )
        assert_same_settings(mesh.comm, {"names": ", ".join(names)}, "fem.Mixed")
        self.mesh: Mesh = mesh
        self.names, self.fields = names, tuple(spaces.values())
        self.degree = max(space.degree for space in self.fields)
        self._patterns: dict[tuple[int, int], Pattern] = {}

    @property
    def shape(self) -> Any:
        """The shapes of the fields on this rank."""
        return self.wrapped([space.shape for space in self.fields])

    @property
    def point(self) -> Callable[..., Any]:
        """The type of a point, as integrands see it."""
        return _named("Point", (*self.names, "x", "normal"))

    def wrapped(self, fields: Sequence[Any]) -> Any:
        """Return fields as a named tuple."""
        return _named("Fields", self.names)(*fields)

    def unwrapped(self, u: Any) -> tuple[Any, ...]:
        """Return the fields of an unknown, a tuple with one entry for each of them."""
        if not isinstance(u, tuple) or len(u) != len(self.fields):
            raise TypeError(
                f"fem.Mixed: expected a field for each of {', '.join(self.names)}, got "
                f"{type(u).__name__}. Give a named tuple, as `zeros` and `fem.solve` return it."
            )
        return tuple(u)

    def by_name(self, given: Any, otherwise: Any, what: str) -> tuple[Any, ...]:
        """Return one entry for each field of a dictionary or a tuple, `otherwise` if it lacks one.

        Parameters
        ----------
        given
            A dictionary by names, a tuple with an entry for each field, or None.
        what
            What is given, for errors.
        """
        if given is None:
            return (otherwise,) * len(self.fields)
        if isinstance(given, tuple) and len(given) == len(self.fields):
            return given
        if not isinstance(given, Mapping) or set(given) - set(self.names):
            raise TypeError(
                f"{what} must be a dictionary with the names {', '.join(self.names)}, got "
                f"{given!r}. Leave out fields that have none."
            )
        return tuple(given.get(name, otherwise) for name in self.names)

    def masks(self, fixed: Any) -> tuple[NDArray[np.bool_], ...]:
        """Return the argument `fixed` of `fem.solve` as a mask for each field."""
        masks = []
        with raise_on_all_ranks(self.mesh.comm):
            given = self.by_name(fixed, None, "fem.solve: fixed")
            for name, space, each in zip(self.names, self.fields, given, strict=True):
                if isinstance(each, Tracer):
                    raise TypeError(
                        f"fem.solve: fixed of {name} must be known before tracing, got a traced "
                        "array. Make it by space.fixed(...) outside of the function."
                    )
                mask = np.zeros(space.shape, bool) if each is None else np.asarray(each)
                if mask.dtype != bool or mask.shape != space.shape:
                    raise TypeError(
                        f"fem.solve: fixed of {name} must be bools of shape {space.shape} on rank "
                        f"{self.mesh.comm.rank}, got dtype {mask.dtype} and shape {mask.shape}. "
                        "Make it by space.fixed(...)."
                    )
                masks.append(mask)
        return tuple(masks)

    def zeros(self) -> Any:
        """Return fields of zeros."""
        return self.wrapped([np.zeros(space.shape) for space in self.fields])

    def pattern(self, i: int, j: int) -> Pattern:
        """Return the entries of the block of fields i and j (collective at its first use)."""
        if i == j:
            return self.fields[i].pattern
        if (i, j) not in self._patterns:
            rows, columns = (self.fields[k].cell_unknowns for k in (i, j))
            n, m = rows.shape[1], columns.shape[1]
            sizes = [self.fields[k].nodes.n_local * self.fields[k].components for k in (i, j)]
            self._patterns[i, j] = Pattern.from_coo(
                np.repeat(rows, m, axis=1).ravel(),
                np.tile(columns, (1, n)).ravel(),
                sizes[0],
                self.mesh.comm,
                n_local_columns=sizes[1],
            )
        return self._patterns[i, j]

    def __repr__(self) -> str:
        listed = ", ".join(f"{n}={s!r}" for n, s in zip(self.names, self.fields, strict=True))
        return f"Mixed({listed})"


@functools.cache
def _named(name: str, fields: tuple[str, ...]) -> Any:
    """Return the named tuple of these fields: one class, since JAX compares classes."""
    return collections.namedtuple(name, fields)
