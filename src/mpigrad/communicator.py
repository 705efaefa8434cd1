"""Communicators: groups of ranks with a message space of their own."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, Self, cast

import jax
import numpy as np
from mpi4py import MPI

from mpigrad.guard import board
from mpigrad.runtime.call_sites import call_site
from mpigrad.runtime.native import DERIVATIVE_SPACES, library

__all__ = ["Cartesian", "Communicator", "default_communicator"]


class BlockingCall:  # a class, not a generator: so the user's line stays in sight
    """Show the guard a blocking call that Python makes, as handlers show theirs.

    With `slot` it is a collective of that communicator, which the guard compares between ranks.
    `unlimited`: another rank may take as long as it likes; that it never comes must be proved.
    """

    def __init__(self, operation: str, slot: int = -1, *, unlimited: bool = False) -> None:
        self.operation, self.slot, self.unlimited = operation.encode(), slot, unlimited

    def __enter__(self) -> None:
        begin = library().mpigrad_begin
        refusal = begin(self.operation, self.slot, call_site(), self.unlimited)
        if refusal is not None:
            raise RuntimeError(refusal.decode())

    def __exit__(self, *error: object) -> None:
        library().mpigrad_end()


def _watched(name: str) -> Callable[..., Any]:
    plain = getattr(MPI.Intracomm, name)

    def method(self: WatchedComm, *args: Any, **kwargs: Any) -> Any:
        with BlockingCall(name, -1 if name in ("recv", "send", "sendrecv") else self.slot):
            return plain(self, *args, **kwargs)

    return functools.wraps(plain)(method)


class WatchedComm(MPI.Intracomm):
    """A communicator of mpi4py whose blocking calls the watchdog sees."""

    slot = -1  # of the Communicator that it belongs to

    def Free(self) -> None:
        """Not of a Communicator's own: compiled programs go on using it."""
        if self.slot >= 0:
            raise RuntimeError(
                f"rank {MPI.COMM_WORLD.rank}: comm.mpi is mpigrad's own, and compiled programs use "
                "it: MPI frees it at the end of the program (free the communicator that you gave "
                "to mpigrad.Communicator, if you like)"
            )
        super().Free()


for _name in (
    *("Allgather", "Allreduce", "Barrier", "Dup", "Split", "allgather", "allreduce", "alltoall"),
    *("barrier", "bcast", "gather", "recv", "reduce", "scan", "scatter", "send", "sendrecv"),
):
    setattr(WatchedComm, _name, _watched(_name))


# A message between two ranks has a *space*: the slot of its communicator, and in the upper bits
# which derivative it is, a word of a 1 and a digit for each differentiation: 0 for a tangent, 1
# for an adjoint. Programs' own slots are even.
_SLOT_BITS = 16


def slot_of(space: int) -> int:
    """The slot of the communicator on which messages of this space travel."""
    return space % (1 << _SLOT_BITS)


def derivative_slot(slot: int) -> int:
    """The slot of the communicator for derivatives."""
    return slot_of(slot) | 1


def tangent_space(space: int) -> int:
    """Where the tangent of a message in this space travels."""
    word = max(space >> _SLOT_BITS, 1)
    word = 2 * word if 2 * word < DERIVATIVE_SPACES else word
    return word << _SLOT_BITS | derivative_slot(space)


def adjoint_space(space: int) -> int:
    """Where the transpose of a message in this space travels: an adjoint, of a tangent."""
    word = space >> _SLOT_BITS
    return (word ^ 1 if word > 1 else 3) << _SLOT_BITS | derivative_slot(space)


# Tags on `Communicator.derivatives` that no derivative's message has (they would be of word 0), for
# what Python sends between two ranks: a receive from anyone, posted by the program, never takes it.
HANDSHAKE_TAG, SWAP_TAG, PICKLE_TAG = (number * DERIVATIVE_SPACES for number in (1, 2, 3))


class Communicator:
    """A group of ranks with a private message space.

    As a context manager it is the default communicator of the operations inside:
    `with comm: mpigrad.allreduce(x)`. What is compiled for one default is not used for another.

    Parameters
    ----------
    mpi_comm
        A communicator of mpi4py. It is duplicated, so that no message of mpigrad is ever matched
        by a message of the program's own; making a `Communicator` is therefore collective: all
        ranks of `mpi_comm` make it, in the same order.
    """

    mpi: MPI.Intracomm
    derivatives: MPI.Intracomm
    own: tuple[MPI.Intracomm, ...]
    rank: int
    size: int
    slot: int
    _next_slot = 0

    def __init__(self, mpi_comm: MPI.Intracomm) -> None:
        if mpi_comm == MPI.COMM_NULL:
            raise ValueError(
                "mpigrad.Communicator: this rank is not a member (MPI.COMM_NULL); "
                "make the communicator on member ranks only"
            )
        if not isinstance(mpi_comm, MPI.Intracomm):
            raise TypeError(
                "mpigrad.Communicator takes an intra-communicator of mpi4py, "
                f"not {type(mpi_comm).__name__}"
            )
        lib = library()
        limit = lib.mpigrad_communicator_limit()
        if Communicator._next_slot + 1 >= limit:
            raise RuntimeError(
                f"mpigrad: more than {limit // 2} communicators in one process; "
                "make a communicator once and keep it"
            )
        given = WatchedComm(mpi_comm)
        given.slot = _slot_of(mpi_comm)
        self.mpi = WatchedComm(given.Dup())
        self.mpi.Set_errhandler(MPI.ERRORS_RETURN)  # errors come back with rank and source line
        self.rank, self.size = self.mpi.rank, self.mpi.size
        # The adjoint of a scan runs from the last rank to the first, as a scan on this one.
        self._reversed = self.mpi.Split(0, -self.rank)
        self._reversed.Set_errhandler(MPI.ERRORS_RETURN)
        self.slot = Communicator._next_slot
        Communicator._next_slot += 2
        # The messages between two ranks that derivatives send have a space of their own: a
        # wildcard receive of the program never takes one of them, nor one of Python's, below.
        self.derivatives = WatchedComm(mpi_comm).Dup()
        self.derivatives.Set_errhandler(MPI.ERRORS_RETURN)
        # Own operations have two more: what they send is never taken for a message of mpigrad's.
        self.own = tuple(WatchedComm(WatchedComm(mpi_comm).Dup()) for _ in range(2))
        for mpi in self.own:
            mpi.Set_errhandler(MPI.ERRORS_RETURN)
        # mpi4py duplicates a communicator in its first reduction of objects, and holds the
        # interpreter's lock meanwhile: where a rank never came, no watchdog could say so.
        for mpi in (mpi_comm, self.mpi, self.own[0]):
            MPI.Intracomm.allreduce(mpi, 0)
        for slot, mpi in ((self.slot, self.mpi), (derivative_slot(self.slot), self.derivatives)):
            lib.mpigrad_set_communicator(
                slot, mpi.handle, self._reversed.handle, self.rank, self.size
            )
            board.register(lib, slot, self.rank, self.mpi.allgather)
        self.mpi.slot = self.slot  # from here on its collectives are counted

    def __copy__(self) -> Self:
        return self  # as a copy of a program's settings has it; another one is made by `dup`

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Communicator can't be pickled: it means something on the ranks of this run alone. "
            "Leave it out, and make it again where the object is read"
        )

    def split(self, color: int | None, key: int = 0) -> Communicator:
        """The communicator of the ranks with the same `color`, ordered by `key` (collective).

        On ranks that give None (or MPI.UNDEFINED) the result is false (`if part: ...`), has size
        0, and is refused by every operation.
        """
        for name, value in (("color", color), ("key", key)):
            if not (hasattr(value, "__index__") or (name == "color" and value is None)):
                raise TypeError(f"split: {name} must be an integer, not {type(value).__name__}")
        if color is not None and color != MPI.UNDEFINED and color < 0:
            raise ValueError(
                f"split: color={color} on rank {self.rank}: colors are not negative; None leaves a "
                "rank out"
            )
        with self._part(None if color is None else int(color), int(key)) as part:
            return Communicator(part) if part else _LeftOut()

    def dup(self) -> Communicator:
        """A communicator of the same ranks with its own message space (collective)."""
        return Communicator(self.mpi)

    def cartesian(
        self, dims: Sequence[int], periods: bool | Sequence[bool] = False
    ) -> Cartesian | Communicator:
        """The ranks in a grid of shape `dims` (collective).

        Parameters
        ----------
        dims
            Ranks along each axis; where it is 0, MPI chooses. The last axis varies fastest.
        periods
            Whether each axis is a ring (one value: all of them).

        Returns
        -------
        A `Cartesian`; on ranks that find no place in the grid, what `split` gives ranks that are
        left out.
        """
        shape = [int(n) for n in dims]
        if not shape or min(shape) < 0:
            raise ValueError(f"cartesian: dims={tuple(dims)} must be positive, or 0 to choose")
        fixed = math.prod(n for n in shape if n)
        if 0 in shape and self.size % fixed:
            raise ValueError(
                f"cartesian: dims={tuple(dims)}: {self.size} ranks can't be divided by {fixed}"
            )
        if 0 in shape:
            shape = MPI.Compute_dims(self.size, shape)
        if math.prod(shape) > self.size:
            raise ValueError(
                f"cartesian: dims={tuple(dims)} need {math.prod(shape)} ranks, "
                f"and there are {self.size}"
            )
        rings = [bool(periods)] * len(shape) if isinstance(periods, int) else list(periods)
        if len(rings) != len(shape):
            raise ValueError(
                f"cartesian: {len(rings)} periods for {len(shape)} axes (dims={tuple(dims)})"
            )
        self._check_alike((tuple(shape), tuple(map(bool, rings))))
        with self._part(0 if self.rank < math.prod(shape) else None, 0) as part:
            return Cartesian(part, shape, rings) if part else _LeftOut()

    def _check_alike(self, grid: tuple[tuple[int, ...], tuple[bool, ...]]) -> None:
        """The same error on all ranks where they ask for other grids (collective)."""
        ranks: dict[Any, list[int]] = {}
        for rank, other in enumerate(self.mpi.allgather(grid)):
            ranks.setdefault(other, []).append(rank)
        if len(ranks) > 1:
            asked = "; ".join(
                f"{'ranks' if len(r) > 1 else 'rank'} {', '.join(map(str, r[:8]))}: dims={dims}, "
                f"periods={rings}"
                for (dims, rings), r in ranks.items()
            )
            raise ValueError(f"cartesian: the ranks ask for other grids ({asked}); give the same")

    @contextlib.contextmanager
    def _part(self, color: int | None, key: int) -> Iterator[MPI.Intracomm | None]:
        color = MPI.UNDEFINED if color is None else color
        part = cast(MPI.Intracomm, self.mpi.Split(color, key))
        if part == MPI.COMM_NULL:
            yield None
            return
        try:
            yield part
        finally:
            part.Free()

    def send_object(self, content: object, dest: int) -> None:
        """Send a pickle, out of reach of the program's receives from anyone; not differentiable."""
        self.derivatives.send(content, dest, PICKLE_TAG)

    def receive_object(self, source: int) -> Any:
        """What `send_object` sends."""
        return self.derivatives.recv(source=source, tag=PICKLE_TAG)

    def __enter__(self) -> Self:
        """Inside, it is the default of all operations, compiled ones included."""
        now = _defaults.value
        _members[self.slot] = self
        context = _defaults((*now, self.slot))
        context.__enter__()
        _entered.append(context)
        return self

    def __exit__(self, *exception: object) -> None:
        _entered.pop().__exit__(*exception)

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank={self.rank}, size={self.size})"


class Cartesian(Communicator):
    """Ranks in a grid, as `Communicator.cartesian` makes it.

    Attributes
    ----------
    dims
        Ranks along each axis.
    periods
        Whether each axis is a ring.
    coords
        This rank's place, (0, ..., 0) for rank 0; the last axis varies fastest.
    """

    dims: tuple[int, ...]
    periods: tuple[bool, ...]
    coords: tuple[int, ...]

    def __init__(
        self, mpi_comm: MPI.Intracomm, dims: Sequence[int], periods: Sequence[bool]
    ) -> None:
        super().__init__(mpi_comm)
        self.dims, self.periods = tuple(dims), tuple(periods)
        self.coords = tuple(int(c) for c in np.unravel_index(self.rank, self.dims))

    def rank_at(self, coords: Sequence[int]) -> int:
        """The rank at a place; MPI.PROC_NULL beyond an open end."""
        place = []
        for c, n, ring in zip(coords, self.dims, self.periods, strict=True):
            if not ring and not 0 <= c < n:
                return MPI.PROC_NULL
            place.append(c % n)
        return int(np.ravel_multi_index(tuple(place), self.dims))

    def shift(self, axis: int, displacement: int = 1) -> tuple[int, int]:
        """(source, dest) of a `sendrecv` that moves data along `axis`, as MPI's Cart_shift.

        `dest` is `displacement` further along the axis, `source` as far behind; MPI.PROC_NULL
        beyond an open end, where what is received is zero.
        """
        if not -len(self.dims) <= axis < len(self.dims):
            raise ValueError(f"shift: axis={axis} of a grid with {len(self.dims)} axes")

        def moved(by: int) -> int:
            place = list(self.coords)
            place[axis] += by
            return self.rank_at(place)

        return moved(-displacement), moved(displacement)

    @property
    def neighbors(self) -> tuple[int, ...]:
        """The other ranks one step away along the axes, each once: for `neighbor_alltoallv`."""
        found = [rank for axis in range(len(self.dims)) for rank in self.shift(axis)]
        return tuple(dict.fromkeys(r for r in found if r not in (MPI.PROC_NULL, self.rank)))


class _LeftOut(Communicator):
    """What `split` gives a rank that is in no part."""

    size = 0

    def __init__(self) -> None:
        pass

    def __bool__(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        if name in Communicator.__annotations__:
            raise ValueError(
                f"rank {world().rank} of {world().size} was left out of this communicator "
                " (split with color None, or a grid with fewer places than ranks): "
                "only its members call operations on it; write `if comm: ...`"
            )
        raise AttributeError(name)

    def __repr__(self) -> str:
        return "Communicator(left out)"


def _slot_of(mpi_comm: MPI.Intracomm) -> int:
    """By which the guard sees a call on a communicator of mpi4py, or -1."""
    if isinstance(mpi_comm, WatchedComm):
        return mpi_comm.slot
    ours = world.cache_info().currsize and mpi_comm == MPI.COMM_WORLD
    return world().slot if ours else -1


# The slots of the communicators entered by `with`: part of JAX's cache keys, since a program that
# was traced under one default must not be used under another.
_defaults = jax.make_user_context(())
_members: dict[int, Communicator] = {}
_entered: list[Any] = []


@functools.cache
def world() -> Communicator:
    """The communicator of all ranks."""
    return Communicator(MPI.COMM_WORLD)


def default_communicator() -> Communicator:
    """The communicator of operations that are given none: of the enclosing `with`, or all ranks."""
    slots = _defaults.value
    return _members[slots[-1]] if slots else world()


_forked = False


def _note_fork() -> None:
    global _forked
    _forked = True
    library().mpigrad_forked()  # for programs that are dispatched by JAX itself


os.register_at_fork(after_in_child=_note_fork)


def check_process() -> None:
    """Refuse messages in a child that was forked from a rank, and after the end of MPI."""
    if MPI.Is_finalized():
        raise RuntimeError(
            "mpigrad: MPI has been finalized (MPI.Finalize() was called), so that there are no "
            "messages any more. Leave the call out: MPI ends by itself when the program does."
        )
    if _forked:
        raise RuntimeError(
            "mpigrad: this process was forked from a rank, and is none itself: MPI knows the "
            "parent only. Send messages from the rank, or start workers by subprocess, from a file "
            "that imports neither mpigrad nor mpi4py."
        )


def resolve(comm: Communicator | None) -> Communicator:
    """The communicator that an operation's `comm` argument means."""
    check_process()
    if comm is None:
        return default_communicator()
    if isinstance(comm, Communicator):
        comm.slot  # noqa: B018  an error where this rank was left out
        return comm
    if isinstance(comm, MPI.Comm):
        raise TypeError(
            "comm is a communicator of mpi4py; wrap it once, on all of its ranks: "
            "comm = mpigrad.Communicator(comm)"
        )
    raise TypeError(f"comm must be an mpigrad.Communicator, not {type(comm).__name__}")


def check_rank(value: int, comm: Communicator, what: str, *, null: bool = False) -> int:
    """`value` as a rank of `comm` (or MPI.PROC_NULL), or an error that names the argument."""
    try:
        rank = int(value.__index__())
    except (AttributeError, TypeError):
        raise TypeError(
            f"{what} must be a Python integer, known before the program runs, "
            f"not {type(value).__name__}"
        ) from None
    if null and rank == MPI.PROC_NULL:
        return rank
    if not 0 <= rank < comm.size:
        raise ValueError(
            f"{what}={rank} is not a rank of this communicator of {comm.size} "
            f"(0 to {comm.size - 1}); called on rank {comm.rank}"
        )
    return rank


def __getattr__(name: str) -> Any:
    if name == "default":  # the name of one release before
        warnings.warn(
            "mpigrad.communicator.default is now mpigrad.default_communicator",
            FutureWarning,
            stacklevel=2,
        )
        return default_communicator
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
