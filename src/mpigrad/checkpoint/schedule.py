"""The schedule of a run's restart files, and requests to save and end."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

from mpi4py import MPI

from mpigrad.checkpoint.layout import Layout
from mpigrad.checkpoint.store import Snapshot, Store
from mpigrad.communicator import Communicator, resolve

__all__ = [
    "Checkpoint",
    "CheckpointSession",
    "Decision",
    "Interruption",
    "listen",
]

# ---- Requests to a long computation to save and end, by a signal or by a file ----
#
# `mpigrad run` and `mpigrad launch` create the file at the first Ctrl-C. A batch system sends
# SIGTERM or SIGUSR1 some time before the job's end.


_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_outermost: Interruption | None = None


class Interruption:
    """The state of a rank that listens for requests to end. `listen` makes it.

    Examples
    --------
    >>> import os, signal
    >>> from mpigrad.checkpoint import listen
    >>> with listen() as interruption:
    ...     os.kill(os.getpid(), signal.SIGUSR1)
    ...     print(interruption.requested())
    True
    """

    def __init__(self, stop_file: pathlib.Path | None) -> None:
        self._stop_file = stop_file
        self._signalled = False

    def requested(self) -> bool:
        """Return whether this rank was asked to end.

        Ranks may answer differently: call it on one rank and broadcast the answer.
        """
        if not self._signalled and self._stop_file is not None:
            self._signalled = self._stop_file.exists()
        return self._signalled

    @contextlib.contextmanager
    def hold_grace_time(self) -> Iterator[None]:
        """Let the launcher wait while the block runs. Its grace time begins after that.

        Use it on rank 0, in a `with` statement, for work that cannot hear a request and must not be
        lost: the report of a run, or the compilation of its first iteration. A second Ctrl-C and
        the time limit still end the job.

        Examples
        --------
        >>> from mpigrad.checkpoint import listen
        >>> with listen() as interruption:
        ...     with interruption.hold_grace_time():
        ...         report = "what there is"
        """
        if self._stop_file is None:
            yield
            return
        held = self._stop_file.with_name("held")
        with contextlib.suppress(OSError):
            held.touch()
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                held.unlink()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._signalled and number == signal.SIGINT:
            raise KeyboardInterrupt  # the second Ctrl-C ends the program now
        self._signalled = True


@contextlib.contextmanager
def listen() -> Iterator[Interruption]:
    """Record SIGTERM, SIGINT, SIGUSR1 and the launcher's request instead of ending at once.

    Use it in a `with` statement. The former signal handlers return at its end. Inside of another
    `listen`, for example in `minimize` with a checkpoint, both give the same object. So a request
    ends the whole program and not only the part that was running. In a thread other than the main
    thread only the launcher's file is read, because Python allows signal handlers only in the main
    thread.

    Examples
    --------
    >>> import mpigrad as mg
    >>> from mpigrad.checkpoint import listen
    >>> comm = mg.default_communicator()
    >>> with listen() as interruption:
    ...     for i in range(3):
    ...         if comm.mpi.bcast(interruption.requested()):  # rank 0 decides
    ...             break
    >>> i
    2
    """
    global _outermost
    if _outermost is not None:
        yield _outermost
        return
    name = os.environ.get("MPIGRAD_STOP_FILE")
    stop_file = pathlib.Path(name) if name else None
    stop = Interruption(stop_file)
    if stop_file is not None:
        # The launcher waits only for jobs that listen. The directory does not exist on other hosts
        # than the launcher's.
        with contextlib.suppress(OSError):
            stop_file.with_name("listening").touch()
    signals = _SIGNALS if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, stop._note) for number in signals}
    _outermost = stop
    try:
        yield stop
    finally:
        _outermost = None
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


# ---- The schedule of a run's restart files, and its end on a signal ----


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """The directory of a run's restart files, and how often the run saves its state.

    Parameters
    ----------
    directory
        The directory of the `Store`.
    every
        Count of iterations between saves. None: only time counts. A run that advances by several
        iterations at once (`LocalSGD`) saves at its first iteration at or after each multiple.
    minutes
        Minutes between saves. None: only iterations count. With both, the first of the two counts.
    keep
        Count of saves that are kept.
    signals
        True: SIGTERM, SIGINT, SIGUSR1 and Ctrl-C of the launcher make the run save and end (see
        `listen`).
    fingerprint
        Properties of the run that must be the same when it continues, for example a digest of its
        data: a mapping from names to JSON values. It is saved, and compared when a save is read.
    resume
        True: a run whose directory has saves of an earlier run continues from them. A run whose
        directory has none begins. So the same program can be started again and again.
    overwrite
        True: a run whose directory has saves begins, and its first save replaces them. Without
        `resume` and `overwrite`, such a run is an error that names the last step and its date.

    Raises
    ------
    ValueError
        If `every` or `minutes` is not positive, or if both `resume` and `overwrite` are given.

    Examples
    --------
    >>> import numpy as np
    >>> from mpigrad.checkpoint import Checkpoint
    >>> checkpoint = Checkpoint("run", every=2, fingerprint={"model": 1})
    >>> with checkpoint.start() as session:
    ...     for i in range(1, 5):
    ...         if session.decide(i).save:
    ...             print(session.save(i, {"x": np.full(3, i)}).name)
    save-000001
    save-000002
    """

    directory: str | os.PathLike[str]
    every: int | None = None
    minutes: float | None = 5.0
    keep: int = 2
    signals: bool = True
    fingerprint: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    resume: bool = False
    overwrite: bool = False

    def __post_init__(self) -> None:
        for name, value in (("every", self.every), ("minutes", self.minutes)):
            if value is not None and not value > 0:
                raise ValueError(f"Checkpoint: {name} must be positive or None, got {value}")
        if self.resume and self.overwrite:
            raise ValueError(
                "Checkpoint: expected resume or overwrite, got both. Give one of them."
            )

    @contextlib.contextmanager
    def start(
        self, comm: Communicator | None = None, iteration: int = 0
    ) -> Iterator[CheckpointSession]:
        """Begin a run after an iteration: open its store, start the clock, listen for signals.

        Collective. Use it in a `with` statement.

        Raises
        ------
        FileExistsError
            On every rank, if the directory has an earlier run, and neither `resume` nor `overwrite`
            is given. It names the last step and its date.
        """
        comm = resolve(comm)
        store = Store(
            self.directory, comm, keep=self.keep, resume=self.resume, overwrite=self.overwrite
        )
        store.forbid_earlier_run("Checkpoint")
        with contextlib.ExitStack() as stack:
            stop = stack.enter_context(listen()) if self.signals else None
            yield CheckpointSession(self, store, stop, iteration)


@dataclasses.dataclass(frozen=True)
class Decision:
    """The decision after an iteration, the same on all ranks.

    Attributes
    ----------
    save
        Write the state.
    stop
        A signal asked the run to end. Then `save` is true as well.
    """

    save: bool
    stop: bool


class CheckpointSession:
    """One run that saves its state. `Checkpoint.start` makes it.

    Attributes
    ----------
    store
        The `Store`.

    Examples
    --------
    >>> import numpy as np
    >>> from mpigrad.checkpoint import Checkpoint
    >>> def run(last):
    ...     state = {"x": np.zeros(2)}
    ...     with Checkpoint("run", every=1, resume=True).start() as session:
    ...         snapshot = session.load(state)
    ...         first = 0
    ...         if snapshot is not None:
    ...             first, state = snapshot.step, snapshot.tree
    ...         for i in range(first + 1, last + 1):
    ...             state = {"x": state["x"] + 1}
    ...             decision = session.decide(i)
    ...             if decision.save:
    ...                 session.save(i, state)
    ...             if decision.stop:
    ...                 break
    ...     return first, state["x"]
    >>> print(*run(3))
    0 [3. 3.]
    >>> print(*run(5))  # the run is started again
    3 [5. 5.]
    """

    def __init__(
        self, settings: Checkpoint, store: Store, stop: Interruption | None, iteration: int
    ) -> None:
        self.store = store
        self._settings = settings
        self._stop = stop
        self._saved_at = time.monotonic()
        self._iteration = iteration  # of the last decision

    def load(
        self,
        like: Any,
        layout: Layout = False,
        check: Callable[[Any], object] | None = None,
        *,
        make_like: Callable[[Any], Any] | None = None,
    ) -> Snapshot | None:
        """Read the newest save (collective). Rank 0 prints on stderr which one.

        Parameters and results are those of `Store.load`. It reads the saves of an earlier run only
        with `resume`.

        Raises
        ------
        ValueError
            Also if the save has another fingerprint.
        """

        def both(extra: Any) -> None:
            self._check(extra)
            if check is not None:
                check(extra["extra"])

        inner = None if make_like is None else lambda extra: make_like(extra["extra"])
        snapshot = self.store.load(like, layout, both, make_like=inner)
        if snapshot is None:
            return None
        self._iteration = snapshot.step
        if self.store.comm.rank == 0:
            text = f"mpigrad: continuing from {self.store.directory}, step {snapshot.step}"
            print(text, file=sys.stderr, flush=True)
        return dataclasses.replace(snapshot, extra=snapshot.extra["extra"])

    def _check(self, extra: Any) -> None:
        """Raise unless this run has the fingerprint of the run that wrote `extra`."""
        if not (
            isinstance(extra, dict) and isinstance(extra.get("about"), dict) and "extra" in extra
        ):
            raise ValueError(
                f"Checkpoint: the saves in {self.store.directory} were written by Store.save, not "
                "by a Checkpoint. Read them with Store.load."
            )
        here, there = json.loads(json.dumps(dict(self._settings.fingerprint))), extra["about"]
        for name in {**there, **here}:
            if here.get(name) != there.get(name):
                raise ValueError(
                    f"Checkpoint: {self.store.directory} is of another run: {name} is "
                    f"{there.get(name)} in its fingerprint and {here.get(name)} in this run. Use "
                    "overwrite=True to replace it, or another directory."
                )

    def save(self, step: int, tree: Any, layout: Layout = False, extra: Any = None) -> pathlib.Path:
        """Write a state as `Store.save` does. The time to the next save starts at its end."""
        more = {"about": dict(self._settings.fingerprint), "extra": extra}
        path = self.store.save(step, tree, layout, more)
        self._saved_at = time.monotonic()
        return path

    def due(self, iteration: int) -> bool:
        """Return on rank 0 whether a save is due after this iteration, on others False."""
        if self.store.comm.rank != 0:
            return False
        every, minutes = self._settings.every, self._settings.minutes
        before, self._iteration = self._iteration, iteration
        if every is not None and iteration // every > before // every:
            return True
        return minutes is not None and time.monotonic() - self._saved_at >= 60 * minutes

    def stop_requested(self) -> bool:
        """Return whether a signal asked this rank to end. Other ranks may answer differently."""
        return self._stop is not None and self._stop.requested()

    def decide(self, iteration: int) -> Decision:
        """Decide whether to save and whether to stop after this iteration (collective).

        It sends one small reduction. A loop that has a reduction after each iteration anyway may
        include `due` and `stop_requested` in it instead. A True of one rank then counts for all.
        """
        here = self.due(iteration) | self.stop_requested() << 1
        bits = self.store.comm.mpi.allreduce(here, op=MPI.BOR)
        return Decision(save=bits > 0, stop=bits > 1)
