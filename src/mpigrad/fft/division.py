"""How the axes of an array are divided among the ranks."""

from __future__ import annotations

import dataclasses
import functools
import math

from mpigrad.communicator import Communicator
from mpigrad.grid.grid import Grid

__all__ = ["Division"]


@dataclasses.dataclass(frozen=True)
class Division:
    """A division of an array into one block per rank.

    The ranks form a mesh, in C order. Each axis of the mesh divides one axis of the array. Several
    of them may divide the same axis: the first into parts, the next each part into smaller ones.

    Attributes
    ----------
    shape
        The shape of the whole array.
    mesh
        The number of ranks along each axis of the mesh.
    by
        For each axis of the array, the axes of the mesh that divide it.
    """

    shape: tuple[int, ...]
    mesh: tuple[int, ...]
    by: tuple[tuple[int, ...], ...]

    @staticmethod
    def of_tiles(grid: Grid) -> Division:
        """Return the division of a grid into its tiles."""
        by = tuple((axis,) if tiles > 1 else () for axis, tiles in enumerate(grid.dims))
        return Division(grid.shape, grid.dims, by)

    def coords_of(self, rank: int) -> tuple[int, ...]:
        """Return the place of a rank in the mesh."""
        place = []
        for n in reversed(self.mesh):
            rank, along = divmod(rank, n)
            place.append(along)
        return tuple(reversed(place))

    def bounds(self, axis: int, coords: tuple[int, ...]) -> tuple[int, int]:
        """Return the first index of a rank's block along `axis`, and the one after its last."""
        start, stop = 0, self.shape[axis]
        for m in self.by[axis]:
            parts, k, n = self.mesh[m], coords[m], stop - start
            first = start + k * (n // parts) + min(k, n % parts)
            start, stop = first, first + n // parts + (k < n % parts)
        return start, stop

    def slices_of(self, rank: int) -> tuple[slice, ...]:
        """Return a rank's block, as slices of the whole array."""
        coords = self.coords_of(rank)
        return tuple(slice(*self.bounds(axis, coords)) for axis in range(len(self.shape)))

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of a rank's block."""
        return tuple(s.stop - s.start for s in self.slices_of(rank))

    def with_shape(self, axis: int, n: int) -> Division:
        """Return the same division of an array with `n` entries along `axis`."""
        shape = tuple(n if i == axis else old for i, old in enumerate(self.shape))
        return dataclasses.replace(self, shape=shape)

    def moved(self, source: int, target: int) -> Division:
        """Return the division in which `target` is divided instead of `source`."""
        by = list(self.by)
        by[target], by[source] = (*by[target], *by[source]), ()
        return dataclasses.replace(self, by=tuple(by))

    def group(self, rank: int, axis: int) -> list[int]:
        """Return the ranks whose blocks differ from this rank's along `axis` only, in order."""
        mine, among = self.coords_of(rank), self.by[axis]
        others = [i for i in range(len(self.mesh)) if i not in among]
        return sorted(
            (
                r
                for r in range(math.prod(self.mesh))
                if all(self.coords_of(r)[i] == mine[i] for i in others)
            ),
            key=lambda r: tuple(self.coords_of(r)[i] for i in among),
        )

    def communicator(self, comm: Communicator, axis: int) -> Communicator:
        """Return the communicator of `group`, in its order. The first call is collective."""
        return _group_communicator(comm, self.mesh, self.by[axis])


@functools.cache
def _group_communicator(
    comm: Communicator, mesh: tuple[int, ...], among: tuple[int, ...]
) -> Communicator:
    division = Division((), mesh, (among,))
    ranks = division.group(comm.rank, 0)
    if ranks == list(range(comm.size)):
        return comm
    return comm.split(min(ranks), ranks.index(comm.rank))
