"""When a run saves its state, and when it saves and ends."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mpi4py import MPI

from mpigrad.checkpoint import signals as interruption
from mpigrad.checkpoint.layout import Layout
from mpigrad.checkpoint.signals import Interruption
from mpigrad.checkpoint.store import Saved, Store
from mpigrad.communicator import Communicator, resolve

__all__ = ["Checkpoint", "Decision", "Saving"]


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """Where and how often a run saves its state.

    Parameters
    ----------
    directory
        See `Store`.
    every
        Iterations between saves; None: only time counts. A run that goes in larger steps
        (`LocalSGD`) saves at the first chance at or after each multiple.
    minutes
        Minutes between saves; None: only iterations count. With both, whatever comes first.
    keep
        Saves that are kept.
    signals
        Whether SIGTERM, SIGINT, SIGUSR1 and the launcher's Ctrl-C make the run save and end
        (`mpigrad.checkpoint.signals`).
    about
        What a run must have in common with the one that it goes on from, such as a digest of the
        data: names and what JSON can hold. It is saved, and compared when a save is read.

    Raises
    ------
    ValueError
        `every` or `minutes` is not positive.
    """

    directory: str | os.PathLike[str]
    every: int | None = None
    minutes: float | None = 5.0
    keep: int = 2
    signals: bool = True
    about: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in (("every", self.every), ("minutes", self.minutes)):
            if value is not None and not value > 0:
                raise ValueError(f"mpigrad.Checkpoint: {name}={value} must be positive, or None")

    @contextlib.contextmanager
    def start(self, comm: Communicator | None = None, iteration: int = 0) -> Iterator[Saving]:
        """Begin a run after an iteration (collective): its store, clock, and ears for signals."""
        comm = resolve(comm)
        with contextlib.ExitStack() as stack:
            stop = stack.enter_context(interruption.listen()) if self.signals else None
            yield Saving(self, Store(self.directory, comm, self.keep), stop, iteration)


@dataclasses.dataclass(frozen=True)
class Decision:
    """What to do after an iteration, the same on all ranks.

    `save`: write the state. `stop`: somebody asked the run to end; `save` is then true as well.
    """

    save: bool
    stop: bool


class Saving:
    """A run that saves its state, as `Checkpoint.start` makes it.

    >>> with checkpoint.start(comm) as saving:  # doctest: +SKIP
    ...     saved = saving.load(state, layout)
    ...     first, state = (0, state) if saved is None else (saved.step, saved.tree)
    ...     for i in range(first + 1, iterations + 1):
    ...         state = step(state)
    ...         decision = saving.decide(i)
    ...         if decision.save:
    ...             saving.save(i, state, layout)
    ...         if decision.stop:
    ...             break
    """

    def __init__(
        self, settings: Checkpoint, store: Store, stop: Interruption | None, iteration: int
    ) -> None:
        self.store = store
        self._settings = settings
        self._stop = stop
        self._saved_at = time.monotonic()
        self._iteration = iteration  # that was asked about last

    def load(
        self,
        like: Any,
        layout: Layout = False,
        check: Callable[[Any], object] | None = None,
        *,
        like_of: Callable[[Any], Any] | None = None,
    ) -> Saved | None:
        """See `Store.load`; rank 0 says on stderr what the run goes on from.

        Raises
        ------
        ValueError
            Also where the save is of a run about something else.
        """

        def both(extra: Any) -> None:
            self._check(extra)
            if check is not None:
                check(extra["extra"])

        inner = None if like_of is None else lambda extra: like_of(extra["extra"])
        saved = self.store.load(like, layout, both, like_of=inner)
        if saved is None:
            return None
        self._iteration = saved.step
        if self.store.comm.rank == 0:
            text = f"mpigrad: goes on from {self.store.directory}, step {saved.step}"
            print(text, file=sys.stderr, flush=True)
        return dataclasses.replace(saved, extra=saved.extra["extra"])

    def _check(self, extra: Any) -> None:
        """Raise unless this run is about the same as the one that has written `extra`."""
        if not (isinstance(extra, dict) and "about" in extra):
            raise ValueError(
                f"mpigrad.Checkpoint: {self.store.directory} was written by a Store of its own; "
                "read it with Store.load"
            )
        here, there = json.loads(json.dumps(dict(self._settings.about))), extra["about"]
        for name in {**there, **here}:
            if here.get(name) != there.get(name):
                raise ValueError(
                    f"mpigrad.Checkpoint: {self.store.directory} is of another run: {name} "
                    f"{there.get(name)}, here {here.get(name)}"
                )

    def save(self, step: int, tree: Any, layout: Layout = False, extra: Any = None) -> pathlib.Path:
        """See `Store.save`; the time to the next save counts from its end."""
        more = {"about": dict(self._settings.about), "extra": extra}
        path = self.store.save(step, tree, layout, more)
        self._saved_at = time.monotonic()
        return path

    def due(self, iteration: int) -> bool:
        """Whether the time has come for a save: rank 0's answer, False on the other ranks."""
        if self.store.comm.rank != 0:
            return False
        every, minutes = self._settings.every, self._settings.minutes
        before, self._iteration = self._iteration, iteration
        if every is not None and iteration // every > before // every:
            return True
        return minutes is not None and time.monotonic() - self._saved_at >= 60 * minutes

    def asked_to_stop(self) -> bool:
        """Whether this rank has been asked to end; any rank may be the only one."""
        return self._stop is not None and self._stop.requested()

    def decide(self, iteration: int) -> Decision:
        """What to do after this iteration (collective: one small reduction).

        A loop that sends numbers of its own after each iteration may send `due` and
        `asked_to_stop` along instead; what is true on any rank then holds for all.
        """
        mine = self.due(iteration) | self.asked_to_stop() << 1
        agreed = self.store.comm.mpi.allreduce(mine, op=MPI.BOR)
        return Decision(save=agreed > 0, stop=agreed > 1)
