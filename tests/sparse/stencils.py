"""Random systems on grid stencils, and a counter of their set-ups and solves."""

from __future__ import annotations

import itertools

import jax.numpy as jnp
import numpy as np

from mpigrad.grid import Grid
from mpigrad.sparse import Matrix, Pattern, solver_seconds


def faces(axes):
    return [o for o in itertools.product((0, -1, 1), repeat=axes) if sum(map(abs, o)) <= 1]


def every(axes):
    return list(itertools.product((0, -1, 1), repeat=axes))


class System:
    """Random links between the cells of a grid: dominated by the diagonal, symmetric or not."""

    def __init__(self, comm, shape, offsets, skew=0.0, dims=None):
        self.grid = Grid(shape, (1.0,) * len(shape), comm, dims=dims)
        self.pattern = Pattern.from_stencil(self.grid, offsets)
        generator = np.random.default_rng(7)
        self.whole = np.zeros((len(offsets), *shape))
        links = {}
        for cell in np.ndindex(shape):
            for k, offset in enumerate(offsets):
                other = tuple(c + s for c, s in zip(cell, offset, strict=True))
                if not any(offset) or not all(
                    0 <= c < n for c, n in zip(other, shape, strict=True)
                ):
                    continue
                pair = tuple(sorted((cell, other)))
                links.setdefault(pair, generator.uniform(0.5, 2))
                self.whole[k][cell] = -links[pair] * (1 + skew * generator.uniform())
        self.whole[offsets.index((0,) * len(shape))] = 0.1 - self.whole.sum(0)
        self.values = self.pattern.assemble(self.tile(self.whole))
        self.all_b = generator.standard_normal(self.grid.size)
        rows = slice(self.grid.row_offset, self.grid.row_offset + self.grid.n_local)
        self.mine, self.b = rows, jnp.asarray(self.all_b[rows])

    def tile(self, whole):
        return jnp.asarray(whole[(slice(None), *self.grid.slices)])

    @property
    def matrix(self):
        return Matrix(self.pattern, self.values)

    def dense(self):
        whole = self.matrix.to_scipy()
        return self.grid.comm.mpi.bcast(None if whole is None else whole.toarray())

    def solution(self):
        return np.linalg.solve(self.dense(), self.all_b)[self.mine]


CASES = {
    "line": ((23,), faces(1)),
    "plane": ((11, 8), faces(2)),
    "box": ((5, 6, 7), faces(3)),
    "one axis": ((9, 7), [(0, 0), (0, -1), (0, 1)]),
    "nine points": ((9, 8), every(2)),
    "twenty-seven points": ((5, 4, 6), every(3)),
}


class Counter:
    """Set-ups and solves since it was made or asked."""

    def __init__(self):
        self.before = solver_seconds()

    def __call__(self):
        now, before = solver_seconds(), self.before
        self.before = now
        return now["setups"] - before["setups"], now["solves"] - before["solves"]
