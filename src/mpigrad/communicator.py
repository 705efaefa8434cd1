"""Communicators: groups of ranks with their own message space."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, Self, cast

import jax
import numpy as np
from mpi4py import MPI

from mpigrad.guard import board
from mpigrad.runtime.call_sites import call_site, describe
from mpigrad.runtime.native import DERIVATIVE_SPACES, library

__all__ = [
    "HANDSHAKE_TAG",
    "SWAP_TAG",
    "BlockingCall",
    "Cartesian",
    "Communicator",
    "check_rank",
    "default_communicator",
    "derivative_slot",
    "resolve",
    "tangent_space",
    "world",
]


class BlockingCall:
    """Show the guard a blocking call in Python, as handlers show their own calls.

    It is a class, not a generator, so the user's line stays visible.

    Parameters
    ----------
    operation
        The text that the guard shows.
    slot
        The slot of a communicator, if the call is a collective of it. The guard compares such calls
        between ranks.
    unlimited
        True if another rank may take any time. The watchdog then ends the job only if it can prove
        that the rank will never come.
    """

    def __init__(self, operation: str, slot: int = -1, *, unlimited: bool = False) -> None:
        self.operation, self.slot, self.unlimited = operation.encode(), slot, unlimited

    def __enter__(self) -> None:
        begin, site, begun = library().mpigrad_begin, call_site(), ctypes.c_bool()
        try:
            error = begin(self.operation, self.slot, site, self.unlimited, begun)
        except BaseException:  # Ctrl-C while it waited for other ranks: __exit__ is not called
            if begun:
                library().mpigrad_end()
            raise
        if error is not None:
            raise RuntimeError(error.decode())

    def __exit__(self, *error: object) -> None:
        library().mpigrad_end()


def _watched(name: str) -> Callable[..., Any]:
    plain = getattr(MPI.Intracomm, name)
    shown = "barrier" if name == "Barrier" else name  # the same operation, also as mg.barrier

    def method(self: WatchedComm, *args: Any, **kwargs: Any) -> Any:
        with BlockingCall(shown, -1 if name in ("recv", "send", "sendrecv") else self.slot):
            return plain(self, *args, **kwargs)

    return functools.wraps(plain)(method)


class WatchedComm(MPI.Intracomm):
    """A communicator of mpi4py whose blocking calls the watchdog sees."""

    slot = -1  # of the Communicator that it belongs to

    def Free(self) -> None:
        """Free the communicator, unless it belongs to a Communicator of mpigrad."""
        if self.slot >= 0:
            raise RuntimeError(
                "comm.mpi.Free: comm.mpi belongs to an mpigrad.Communicator, and compiled programs "
                f"on rank {MPI.COMM_WORLD.rank} still use it. Call comm.free() instead."
            )
        super().Free()


for _name in (
    *("Allgather", "Allreduce", "Barrier", "Dup", "Split", "allgather", "allreduce", "alltoall"),
    *("barrier", "bcast", "gather", "recv", "reduce", "scan", "scatter", "send", "sendrecv"),
):
    setattr(WatchedComm, _name, _watched(_name))


# A message between two ranks has a *space*: the slot of its communicator, and in bits 16 to 31
# the kind of derivative, a binary word of a 1 and a digit for each differentiation: 0 for a
# tangent, 1 for an adjoint. A slot is the index of an entry in native tables, even for programs,
# and from bit 32 on how many communicators with this index were freed before: a program that was
# compiled for one of them does not use its successor.
_INDEX_BITS, _FREED_SHIFT = 16, 32
_WORD = 0xFFFF << _INDEX_BITS


def slot_of(space: int) -> int:
    """Return the slot of the communicator on which messages of this space travel."""
    return space & ~_WORD


def derivative_slot(slot: int) -> int:
    """Return the slot of the communicator for derivatives."""
    return slot_of(slot) | 1


def tangent_space(space: int) -> int:
    """Return the space of the tangent of a message in this space."""
    word = max((space & _WORD) >> _INDEX_BITS, 1)
    word = 2 * word if 2 * word < DERIVATIVE_SPACES else word
    return word << _INDEX_BITS | derivative_slot(space)


def adjoint_space(space: int) -> int:
    """Return the space of the transpose of a message in this space: the adjoint of a tangent."""
    word = (space & _WORD) >> _INDEX_BITS
    return (word ^ 1 if word > 1 else 3) << _INDEX_BITS | derivative_slot(space)


# Tags on `Communicator.derivatives` for messages that Python sends between two ranks. Derivatives
# do not use them (they would have the word 0), and a wildcard receive never takes them.
HANDSHAKE_TAG, SWAP_TAG, PICKLE_TAG = (number * DERIVATIVE_SPACES for number in (1, 2, 3))


class Communicator:
    """A group of ranks with a private message space.

    As a context manager it is the default communicator of the operations inside:
    `with comm: mpigrad.allreduce(x)`. A program that was compiled for one default is not used for
    another.

    Parameters
    ----------
    mpi_comm
        An intra-communicator of mpi4py. It is duplicated, so a message of mpigrad never matches a
        message of the program's own. Therefore all ranks of `mpi_comm` must make the
        `Communicator`, in the same order.

    Attributes
    ----------
    rank
        The rank of this process.
    size
        The number of ranks.
    mpi
        The duplicate, a communicator of mpi4py, for other messages of the program.

    Raises
    ------
    TypeError, ValueError
        If `mpi_comm` is not an intra-communicator, or this rank is not a member of it.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import mpigrad as mg
    >>> from mpi4py import MPI
    >>> comm = mg.Communicator(MPI.COMM_WORLD)
    >>> comm.rank, comm.size
    (0, 1)
    >>> mg.allreduce(jnp.ones(2), comm=comm)
    Array([1., 1.], dtype=float32)
    >>> with comm:
    ...     total = mg.allreduce(jnp.ones(2))
    """

    mpi: MPI.Intracomm
    derivatives: MPI.Intracomm
    custom_comms: tuple[MPI.Intracomm, ...]
    rank: int
    size: int
    slot: int

    def __init__(self, mpi_comm: MPI.Intracomm) -> None:
        if mpi_comm == MPI.COMM_NULL:
            raise ValueError(
                "Communicator: expected a communicator that this rank is a member of, got "
                f"MPI.COMM_NULL on rank {MPI.COMM_WORLD.rank} of MPI.COMM_WORLD. Make the "
                "Communicator on member ranks only."
            )
        if not isinstance(mpi_comm, MPI.Intracomm):
            raise TypeError(
                "Communicator: expected an intra-communicator of mpi4py, got "
                f"{type(mpi_comm).__name__}. Pass MPI.COMM_WORLD, for example."
            )
        lib = library()
        self.slot = _take_slot(lib.mpigrad_communicator_limit())
        try:
            self._make(mpi_comm, lib)
        except MPI.Exception as error:
            _free_slots.append(self.slot)
            for mpi in [v for v in vars(self).values() if isinstance(v, MPI.Intracomm)]:
                MPI.Intracomm.Free(mpi)
            raise RuntimeError(
                f"Communicator: MPI on rank {MPI.COMM_WORLD.rank} could not make another one: "
                f"{error}. Free those that are not needed any more with comm.free()."
            ) from error

    def _make(self, mpi_comm: MPI.Intracomm, lib: Any) -> None:
        parent = WatchedComm(mpi_comm)
        parent.slot = _slot_of(mpi_comm)
        self.mpi = WatchedComm(parent.Dup())
        # mpigrad raises MPI's errors with rank and source line.
        self.mpi.Set_errhandler(MPI.ERRORS_RETURN)
        self.rank, self.size = self.mpi.rank, self.mpi.size
        # The adjoint of a scan runs from the last rank to the first: a scan on this communicator.
        self._reversed = self.mpi.Split(0, -self.rank)
        self._reversed.Set_errhandler(MPI.ERRORS_RETURN)
        # The messages of derivatives between two ranks travel on another communicator, and so do
        # those of Python (see the tags above): a wildcard receive of the program never takes them.
        self.derivatives = WatchedComm(mpi_comm).Dup()
        self.derivatives.Set_errhandler(MPI.ERRORS_RETURN)
        # Custom operations and their derivatives have a communicator each: their messages never
        # meet messages of mpigrad.
        self.custom_comms = tuple(WatchedComm(WatchedComm(mpi_comm).Dup()) for _ in range(2))
        for mpi in self.custom_comms:
            mpi.Set_errhandler(MPI.ERRORS_RETURN)
        # mpi4py duplicates a communicator in its first reduction of objects, and holds the
        # interpreter's lock meanwhile. The watchdog could not report a rank that never comes. So
        # these reductions are made here.
        for mpi in (mpi_comm, self.mpi, self.custom_comms[0]):
            MPI.Intracomm.allreduce(mpi, 0)
        for slot, mpi in ((self.slot, self.mpi), (derivative_slot(self.slot), self.derivatives)):
            index = slot % (1 << _INDEX_BITS)
            lib.mpigrad_set_communicator(
                index, mpi.handle, self._reversed.handle, self.rank, self.size
            )
            board.register(lib, index, self.rank, self.mpi.allgather)
        self.mpi.slot = self.slot  # from here on its collectives are counted

    def __copy__(self) -> Self:
        return self  # copies of a program's settings share it: `dup` makes another communicator

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "Communicator: a communicator cannot be pickled, because it is valid only on the ranks "
            "of this run. Leave it out, and make it again when the object is loaded."
        )

    def split(self, color: int | None, key: int = 0) -> Communicator:
        """Split the ranks into communicators, one for each `color` (collective).

        On ranks that give None (or MPI.UNDEFINED) the result is false (`if part: ...`) and has size
        0. Operations on it raise an error.

        Parameters
        ----------
        color
            Ranks with the same integer form a communicator. None or MPI.UNDEFINED leaves a rank
            out.
        key
            Ranks of a communicator are ordered by this integer, then by their rank here.

        Examples
        --------
        >>> import mpigrad as mg
        >>> comm = mg.default_communicator()
        >>> comm.split(comm.rank // 2)
        Communicator(rank=0, size=1)
        """
        for name, value in (("color", color), ("key", key)):
            if not (hasattr(value, "__index__") or (name == "color" and value is None)):
                raise TypeError(
                    f"split: {name} must be an integer, got {type(value).__name__} on rank "
                    f"{self.rank}. Convert it by int()."
                )
        if color is not None and color != MPI.UNDEFINED and color < 0:
            raise ValueError(
                f"split: color must not be negative, got {color} on rank {self.rank}. Give None to "
                "leave a rank out."
            )
        with self._part(None if color is None else int(color), int(key)) as part:
            return Communicator(part) if part else _LeftOut()

    def dup(self) -> Communicator:
        """Make a communicator of the same ranks with its own message space (collective)."""
        return Communicator(self.mpi)

    def cartesian(
        self, dims: Sequence[int], periods: bool | Sequence[bool] = False
    ) -> Cartesian | Communicator:
        """Arrange the ranks in a grid of shape `dims` (collective).

        Parameters
        ----------
        dims
            The number of ranks along each axis. MPI chooses numbers that are given as 0. The last
            axis varies fastest.
        periods
            True for each axis that is a ring. A single value holds for all axes.

        Returns
        -------
        Cartesian or Communicator
            The communicator of the grid. On ranks without a place in the grid the result is false
            and has size 0, as in `split`.

        Examples
        --------
        >>> import mpigrad as mg
        >>> ring = mg.default_communicator().cartesian((0,), periods=True)
        >>> ring.dims, ring.coords, ring.shift(axis=0)
        ((1,), (0,), (0, 0))
        """
        shape = [int(n) for n in dims]
        if not shape or min(shape) < 0:
            raise ValueError(
                f"cartesian: dims must be positive, got {tuple(dims)} on rank {self.rank}. Give 0 "
                "to let MPI choose."
            )
        fixed = math.prod(n for n in shape if n)
        if 0 in shape and self.size % fixed:
            raise ValueError(
                f"cartesian: dims={tuple(dims)} need a number of ranks that is divisible by "
                f"{fixed}, got {self.size} ranks. Change dims."
            )
        if 0 in shape:
            shape = MPI.Compute_dims(self.size, shape)
        if math.prod(shape) > self.size:
            raise ValueError(
                f"cartesian: dims={tuple(dims)} need {math.prod(shape)} ranks, got {self.size}. "
                "Start more ranks or change dims."
            )
        rings = [bool(periods)] * len(shape) if isinstance(periods, int) else list(periods)
        if len(rings) != len(shape):
            raise ValueError(
                f"cartesian: periods must have one value for each axis, got {len(rings)} periods "
                f"for {len(shape)} axes (dims={tuple(dims)}). Give {len(shape)} values."
            )
        self._check_same_grid((tuple(shape), tuple(map(bool, rings))))
        with self._part(0 if self.rank < math.prod(shape) else None, 0) as part:
            return Cartesian(part, shape, rings) if part else _LeftOut()

    def _check_same_grid(self, grid: tuple[tuple[int, ...], tuple[bool, ...]]) -> None:
        """Raise an error on all ranks if they ask for different grids (collective)."""
        ranks: dict[Any, list[int]] = {}
        for rank, other in enumerate(self.mpi.allgather(grid)):
            ranks.setdefault(other, []).append(rank)
        if len(ranks) > 1:
            listing = ", ".join(
                f"dims={dims} and periods={rings} on "
                f"{'ranks' if len(r) > 1 else 'rank'} {', '.join(map(str, r[:8]))}"
                for (dims, rings), r in ranks.items()
            )
            raise ValueError(
                f"cartesian: dims and periods must be the same on all ranks, got {listing}. Give "
                "the same arguments on every rank."
            )

    def free(self) -> None:
        """Free the communicator, which is not needed any more (collective).

        MPI has few communicators: free those that a loop makes. Later operations on it are an error
        on each rank, also in compiled programs. Grids, matrices and meshes on it cannot be used any
        more. On ranks that `split` has left out, nothing happens.

        Raises
        ------
        RuntimeError
            For the communicator of all ranks, one of an enclosing `with`, or one that was freed
            before.

        Examples
        --------
        >>> import mpigrad as mg
        >>> comm = mg.default_communicator()
        >>> for color in range(600):
        ...     comm.split(color).free()
        """
        slot = self.slot  # an error if it was freed before
        ours = world.cache_info().currsize and self is world()
        if ours or slot in _defaults.value:
            which = "that of all ranks" if ours else "the default of an enclosing `with`"
            raise RuntimeError(
                f"free: the communicator on rank {self.rank} of {self.size} is {which}, which is "
                "still needed. Free one that you made, after its `with`."
            )
        jax.effects_barrier()  # its last operations
        self.mpi.Barrier()  # a rank that has left it does not read the memory of others any more
        site, lib = call_site(), library()
        for space in (slot, derivative_slot(slot)):
            lib.mpigrad_free_communicator(space, site, MPI.COMM_NULL.handle)
        for mpi in (self.mpi, self._reversed, self.derivatives, *self.custom_comms):
            MPI.Intracomm.Free(cast(MPI.Intracomm, mpi))
        _free_slots.append(slot + (1 << _FREED_SHIFT))
        _members.pop(slot, None)
        vars(self).clear()
        cast(Any, self).__class__ = _Freed
        cast(Any, self)._place = describe(site)

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
        """Send a pickled object, which wildcard receives never take; not differentiable."""
        self.derivatives.send(content, dest, PICKLE_TAG)

    def receive_object(self, source: int) -> Any:
        """Receive an object from `send_object`."""
        return self.derivatives.recv(source=source, tag=PICKLE_TAG)

    def __enter__(self) -> Self:
        """Make it the default communicator of the operations inside, also of compiled ones."""
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
        The number of ranks along each axis.
    periods
        True for each axis that is a ring.
    coords
        The position of this rank, (0, ..., 0) for rank 0. The last axis varies fastest.
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
        """Return the rank at a position, or MPI.PROC_NULL beyond an open end."""
        place = []
        for c, n, ring in zip(coords, self.dims, self.periods, strict=True):
            if not ring and not 0 <= c < n:
                return MPI.PROC_NULL
            place.append(c % n)
        return int(np.ravel_multi_index(tuple(place), self.dims))

    def shift(self, axis: int, displacement: int = 1) -> tuple[int, int]:
        """Return (source, dest) of a `sendrecv` along `axis`, as MPI's Cart_shift.

        `dest` is `displacement` steps further along the axis, and `source` as many steps behind.
        Beyond an open end they are MPI.PROC_NULL, and the received values are zero.
        """
        if not -len(self.dims) <= axis < len(self.dims):
            raise ValueError(
                f"shift: axis must be one of the {len(self.dims)} axes of the grid, got {axis}. "
                f"Give a number from {-len(self.dims)} to {len(self.dims) - 1}."
            )

        def moved(by: int) -> int:
            place = list(self.coords)
            place[axis] += by
            return self.rank_at(place)

        return moved(-displacement), moved(displacement)

    @property
    def neighbors(self) -> tuple[int, ...]:
        """The other ranks one step away along the axes, without repetition."""
        ranks = [rank for axis in range(len(self.dims)) for rank in self.shift(axis)]
        return tuple(dict.fromkeys(r for r in ranks if r not in (MPI.PROC_NULL, self.rank)))


class _LeftOut(Communicator):
    """The result of `split` and `cartesian` on a rank that is left out."""

    size = 0

    def __init__(self) -> None:
        pass

    def __bool__(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        if name in Communicator.__annotations__:
            raise ValueError(
                f"comm: only members may call operations on a communicator, but rank "
                f"{world().rank} of {world().size} was left out of this one (by split with color "
                "None, or by a grid with fewer places than ranks). Write `if comm: ...`."
            )
        raise AttributeError(name)

    def free(self) -> None:
        pass

    def __repr__(self) -> str:
        return "Communicator(left out)"


class _Freed(Communicator):
    """A communicator after `free`."""

    _place: str

    def __getattr__(self, name: str) -> Any:
        if name in Communicator.__annotations__ or name in Cartesian.__annotations__:
            raise RuntimeError(
                f"comm: this communicator was freed at {self._place} (rank {world().rank} of "
                f"{world().size}). Free it after its last operation, or make another one."
            )
        raise AttributeError(name)

    def __repr__(self) -> str:
        return f"Communicator(freed at {self._place})"


def _slot_of(mpi_comm: MPI.Intracomm) -> int:
    """Return the slot by which the guard sees calls on a communicator of mpi4py, or -1."""
    if isinstance(mpi_comm, WatchedComm):
        return mpi_comm.slot
    ours = world.cache_info().currsize and mpi_comm == MPI.COMM_WORLD
    return world().slot if ours else -1


# The slots of the communicators entered by `with`: part of JAX's cache keys, since a program that
# was traced under one default must not be used under another.
_defaults = jax.make_user_context(())
_members: dict[int, Communicator] = {}
_entered: list[Any] = []

_free_slots: list[int] = []  # of communicators that were freed
_new_slots = itertools.count(0, 2)


def _take_slot(limit: int) -> int:
    """Return a slot for a new communicator."""
    if _free_slots:
        return _free_slots.pop()
    slot = next(_new_slots)
    if slot + 1 >= limit:
        raise RuntimeError(
            f"Communicator: at most {limit // 2} communicators can be in use, got one more on rank "
            f"{MPI.COMM_WORLD.rank}. Free those that are not needed any more with comm.free()."
        )
    return slot


@functools.cache
def world() -> Communicator:
    """Return the communicator of all ranks."""
    return Communicator(MPI.COMM_WORLD)


def default_communicator() -> Communicator:
    """Return the communicator of operations without `comm=`.

    It is the communicator of the enclosing `with`, or of all ranks.

    Examples
    --------
    >>> import mpigrad as mg
    >>> comm = mg.default_communicator()
    >>> comm.rank, comm.size
    (0, 1)
    """
    slots = _defaults.value
    return _members[slots[-1]] if slots else world()


_forked = False


def _note_fork() -> None:
    global _forked
    _forked = True
    library().mpigrad_forked()  # for programs that JAX dispatches without Python


os.register_at_fork(after_in_child=_note_fork)


def check_process() -> None:
    """Raise an error in a child that was forked from a rank, and after the end of MPI."""
    if MPI.Is_finalized():
        raise RuntimeError(
            "mpigrad: expected a running MPI, but MPI.Finalize() has been called, so messages "
            "cannot be sent any more. Remove the call: MPI ends by itself with the program."
        )
    if _forked:
        raise RuntimeError(
            "mpigrad: messages can be sent only by a rank, but this process was forked from a "
            "rank, and MPI knows only the parent. Send messages from the rank, or start workers by "
            "subprocess, from a file that imports neither mpigrad nor mpi4py."
        )


def resolve(comm: Communicator | None) -> Communicator:
    """Return the communicator that an operation's argument `comm` names."""
    check_process()
    if comm is None:
        return default_communicator()
    if isinstance(comm, Communicator):
        comm.slot  # noqa: B018  an error if this rank was left out
        return comm
    if isinstance(comm, MPI.Comm):
        raise TypeError(
            "comm: expected an mpigrad.Communicator, got a communicator of mpi4py. Wrap it once, "
            "on all of its ranks: comm = mpigrad.Communicator(comm)."
        )
    raise TypeError(
        f"comm: expected an mpigrad.Communicator, got {type(comm).__name__}. Leave comm out for "
        "all ranks."
    )


def check_rank(value: int, comm: Communicator, what: str, *, null: bool = False) -> int:
    """Return `value` as a rank of `comm` (or MPI.PROC_NULL), or raise an error."""
    try:
        rank = int(value.__index__())
    except (AttributeError, TypeError):
        raise TypeError(
            f"{what} must be a Python integer, known before the program runs, got "
            f"{type(value).__name__}. Compute it outside of traced code."
        ) from None
    if null and rank == MPI.PROC_NULL:
        return rank
    if not 0 <= rank < comm.size:
        raise ValueError(
            f"{what} must be a rank of this communicator of {comm.size} (0 to {comm.size - 1}), "
            f"got {rank} on rank {comm.rank}. Choose one of its ranks."
        )
    return rank
