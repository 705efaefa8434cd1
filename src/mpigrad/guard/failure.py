"""How a job ends: a failing rank ends all ranks, and a rank that is done ends cleanly."""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import faulthandler
import functools
import os
import pathlib
import platform
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any, ClassVar, NoReturn

import jax
from mpi4py import MPI

from mpigrad.guard import board as b
from mpigrad.guard.board_reader import Reader
from mpigrad.guard.cross_host import LIMIT, RollCall, roll_call
from mpigrad.guard.settings import guarded, timeout_seconds
from mpigrad.guard.shutdown import await_ends
from mpigrad.guard.startup_barrier import await_all
from mpigrad.guard.unreceived import unreceived
from mpigrad.guard.wait_graph import disagreement
from mpigrad.guard.watchdog import Watchdog, where
from mpigrad.runtime.native import at_exit, library

__all__ = ["current_board", "end_all_on_errors", "end_job", "install", "when_all_have_ended"]

_LAST = 30.0  # seconds that MPI_Finalize has at least
_TURN = 1.0  # seconds between two ranks, so that one says it
_STUCK = (
    "mpigrad: rank %d has waited %g s in MPI_Finalize, though all ranks have come to their end. A "
    "process that a rank has started, and that imports mpi4py, is taken for the rank by MPI: start "
    "it without the variables of the launcher (PMIX_*, OMPI_*, PMI_*) in its environment.\n"
)
_GRACE = 2.0  # seconds for others to say where they are, before the job is ended
_UNREACHED = 5.0  # seconds in which MPI ends a rank that has called Abort
# What starts ranks on a host, as far as it may be ended by one.
_DAEMONS = ("mpiexec", "mpirun", "orterun", "orted", "prterun", "prted", "hydra_pmi_proxy")
_END_DAEMON = """
for second in 1 2 3 4 5 6 7 8; do
    sleep 1
    [ "$(cat /proc/$1/comm 2> /dev/null)" = "$2" ] || exit 0
done
kill -KILL "$1"
"""


class _Process:
    """What this process knows of itself."""

    board: b.Board | None = None
    others: RollCall | None = None
    world: MPI.Intracomm | None = None  # for the end, where there are other ranks
    hook: Callable[..., object] | None = None  # for errors that nobody catches
    forked = False
    guarded = False
    seconds = 0.0
    at_end: ClassVar[list[Callable[[], object]]] = []
    finished = False
    fails = False  # it leaves in a way for which mpi4py ends the job


def current_board() -> b.Board:
    """The board of this host."""
    assert _Process.board is not None
    return _Process.board


def end_job(text: str | Callable[[], str], code: int = 1, grace: float = 0.0) -> None:
    """End all ranks with exit code `code`, and say why, once: the first to fail has the word.

    It says `text`, or what that returns: "" where another host has the word.
    """
    _flush(sys.stdout)
    if _Process.board is None or _Process.board.claim():
        if said := text() if callable(text) else text:
            _say(said)
            time.sleep(grace)
        else:
            time.sleep(_GRACE + LIMIT)
    else:
        time.sleep(_GRACE + (LIMIT if _Process.others else 0.0))
    _flush(sys.stderr)
    _abort(code)


def _flush(stream: Any) -> None:
    """A full disk, or what a program has put in the place of a stream, must keep nobody waiting."""
    with contextlib.suppress(Exception):
        stream.flush()


def _abort(code: int) -> None:
    """End the job; on this host also where another has stopped, for which Abort would wait."""
    name = os.environ.get("MPIGRAD_STOP_FILE")
    if name:
        with contextlib.suppress(OSError):  # the launcher is on another host
            pathlib.Path(name).with_name("aborted").touch()
    if _Process.others:
        _end_daemon()
    nowhere = open(os.devnull, "w")  # noqa: SIM115 (until the end of the process)
    with contextlib.suppress(RuntimeError):  # without memory there are no threads
        faulthandler.dump_traceback_later(_UNREACHED, exit=True, file=nowhere)
    MPI.COMM_WORLD.Abort(code)
    os._exit(code)  # MPICH 5 goes on, and ends the job beside


def _end_daemon() -> None:
    """Let a process of its own end the daemon that has started this rank, if it does not end."""
    parent = os.getppid()
    with contextlib.suppress(OSError):
        daemon = pathlib.Path(f"/proc/{parent}/comm").read_text().strip()
        if daemon in _DAEMONS:
            words = ["sh", "-c", _END_DAEMON, "end", str(parent), daemon]
            subprocess.Popen(words, env={}, stdin=subprocess.DEVNULL, start_new_session=True)


def _note_exits() -> None:
    """Tell `mpigrad launch` which rank has left by sys.exit(3), for which mpi4py ends the job."""
    main: Any = sys.modules.get("__main__")
    own = getattr(getattr(main, "__spec__", None), "name", "") == "mpi4py.run"
    runner: Any = main if own else sys.modules.get("mpi4py.run")
    name = os.environ.get("MPIGRAD_STOP_FILE")
    if runner is None:
        return
    ends, rank = runner.set_abort_status, MPI.COMM_WORLD.rank

    def noted(status: object) -> None:
        code = 1
        if isinstance(status, SystemExit) and not _Process.forked:
            code = int(status.code if isinstance(status.code, int) else status.code is not None)
            if code and not code & 0xFF:  # of which a system sees no more: 256 would be success
                code, status = 1, SystemExit(1)
            # Fails where another rank has left before, or where the launcher is on another host.
            with contextlib.suppress(OSError):
                if code and name:
                    with pathlib.Path(name).with_name("left").open("x") as file:
                        file.write(f"{code} {rank}")
        _Process.fails = bool(code) if isinstance(status, SystemExit) else True
        ends(status)

    runner.set_abort_status = noted


def _say(text: str) -> None:
    """Under `mpigrad launch` the launcher says it, last of all; else it is printed here."""
    name = os.environ.get("MPIGRAD_STOP_FILE")
    if name:
        # Fails where another rank has said it, or where the launcher is on another host.
        with contextlib.suppress(OSError), pathlib.Path(name).with_name("cause").open("xb") as file:
            file.write(text.encode(errors="backslashreplace") + b"\n")
            return
    try:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
    except Exception:  # as above: where Python began to write, and else nowhere
        with contextlib.suppress(OSError):
            os.write(2, (text + "\n").encode(errors="backslashreplace"))


@functools.cache
def end_all_on_errors() -> None:
    """An exception that nobody catches ends all ranks from now on."""
    if MPI.COMM_WORLD.size > 1:
        sys.excepthook = _Process.hook = functools.partial(_end_all_ranks, sys.excepthook)


@functools.cache
def install() -> None:
    """Watch this rank from now on (collective over all ranks)."""
    seconds, lib = timeout_seconds(), library()
    _Process.seconds = seconds
    await_all(seconds, end_job)
    board = _Process.board = b.share(lib)
    board.slots[board.mine]["since_ns"] = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    compare = _Process.guarded = MPI.COMM_WORLD.bcast(guarded())  # on all ranks or on none
    lib.mpigrad_set_guard(int(compare), _explain)
    at_exit(_finish)
    MPI.Finalize = functools.partial(_finalize, MPI.Finalize)
    os.register_at_fork(after_in_child=_forked)
    ctypes.pythonapi.Py_AtExit(lib.mpigrad_end_child)  # called before mpi4py's
    _note_exits()
    if MPI.COMM_WORLD.size > 1:
        _Process.world = MPI.COMM_WORLD.Dup()
    others = _Process.others = roll_call(board, functools.partial(where, board))
    end = functools.partial(end_job, grace=_GRACE)
    Watchdog(board, seconds, compare, end, others).start()


@ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_int)
def _explain(told: int, size: int, text: int, room: int) -> None:
    """For native code: puts into `text` how the contracts at `told` differ."""
    raw = disagreement(b.view(told, b.TOLD, size), _Process.board).encode()[: room - 1]
    ctypes.memmove(text, raw + bytes(1), len(raw) + 1)


def _end_all_ranks(
    previous: object,
    kind: type[BaseException],
    value: BaseException,
    trace: TracebackType | None,
) -> None:
    # At a prompt an error is no end; neither is it in a child that is no rank.
    # After MPI.Finalize() there are no ranks to end.
    alone = _Process.forked or MPI.Is_finalized()
    if alone or sys.flags.interactive or hasattr(sys, "ps1"):
        previous(kind, value, trace)  # type: ignore[operator]
        return
    board = _Process.board
    if board is not None:
        board.slots[board.mine]["state"] = b.FAILED
    text = "".join(traceback.format_exception(kind, value, trace))
    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    place = f" on {platform.node()}" if _Process.others else ""
    end_job(
        f"{text}mpigrad: rank {rank} of {size}{place} failed; ending all ranks",
        130 if kind is KeyboardInterrupt else 1,
    )


def _end_all_after(error: BaseException | None) -> None:
    """End all ranks where an error has ended this one, and another hook than ours has shown it."""
    interactive = sys.flags.interactive or hasattr(sys, "ps1")
    if error is None or _Process.hook in (None, sys.excepthook) or interactive:
        return
    # pytest and others leave what they have caught in the same place: it does not begin there.
    frame = error.__traceback__ and error.__traceback__.tb_frame
    main = frame and (frame.f_globals.get("__name__"), frame.f_code.co_name)
    if not frame or (
        main != ("__main__", "<module>") and frame.f_code.co_filename != "<frozen runpy>"
    ):
        return
    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    text = "".join(traceback.format_exception_only(error)).rstrip()
    said = f"{text}\nmpigrad: rank {rank} of {size} failed; ending all ranks"
    end_job(said, 130 if isinstance(error, KeyboardInterrupt) else 1)


def _finish() -> None:
    """Before MPI is finalised: let queued operations end, and show that this rank is done.

    Registered after JAX's own clean-up, this runs before it; MPI is finalised after both.
    """
    board = _Process.board
    if board is None or _Process.finished or MPI.Is_finalized():
        return
    _Process.finished = True
    _end_all_after(getattr(sys, "last_value", None))
    with contextlib.suppress(Exception):  # of a computation that has failed already
        jax.effects_barrier()
    if text := _thread_in_operation(board):
        end_job(text)
    mine = board.slots[board.mine]
    mine["since_ns"] = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    with board.locked():  # one rank is the last
        mine["state"] = b.ENDED
        last = bool((board.slots["state"] == b.ENDED).all())
    if last and (text := unreceived(board.slots)):
        if _Process.guarded:
            end_job(text)
        sys.stderr.write(text + "\n")
    if _Process.world is not None and not _Process.fails:  # else MPI ends the job
        await_ends(board, _Process.world, _Process.seconds, end_job)
        if _Process.seconds:  # soon nothing of Python is left that could look
            rank = MPI.COMM_WORLD.rank
            limit = max(_Process.seconds, _LAST) + _TURN * min(rank, 15)
            library().mpigrad_limit_end(ctypes.c_double(limit), (_STUCK % (rank, limit)).encode())
    for end in _Process.at_end:
        end()


def _finalize(plain: Callable[[], None]) -> None:
    """MPI.Finalize, called by the program: this rank has come to its end, and may go on alone."""
    if not _Process.forked:
        _finish()
    plain()
    library().mpigrad_limit_end(ctypes.c_double(0), b"")


def when_all_have_ended(end: Callable[[], object]) -> None:
    """Call `end` on every rank when all have come to their end, while MPI is there (collective)."""
    _Process.at_end.append(end)


def _thread_in_operation(board: b.Board) -> str:
    """Why the program must not end yet: Python would end a thread amid JAX's work, by a crash."""
    mine, limit = board.slots[board.mine], time.monotonic() + 0.1
    others = {t.name for t in threading.enumerate() if t is not threading.current_thread()}
    while others - {Watchdog.NAME} and time.monotonic() < limit:
        if int(mine["state"]) == b.IN_OPERATION:
            what = Reader(board.slots).operation(board.mine)
            return (
                f"mpigrad: rank {MPI.COMM_WORLD.rank} ends while another of its threads is in "
                f"{what}. Join the thread before the program ends."
            )
        time.sleep(0.001)
    return ""


def _forked() -> None:
    """In a child that is no rank: it ends without MPI, which is the parent's."""
    _Process.forked = True
    frame = sys._getframe()
    while frame := frame.f_back:
        if frame.f_globals.get("__name__", "").startswith("multiprocessing."):
            return  # its children leave by os._exit
    set_code, said = library().mpigrad_set_exit_code, sys.excepthook

    class Exit(SystemExit):
        """Python tells nobody the exit code that it has been given: it is noted here."""

        def __init__(self, *status: object) -> None:
            super().__init__(*status)
            code = status[0] if len(status) == 1 else len(status)
            set_code(code & 0xFF if isinstance(code, int) else int(code is not None))

    def leave(status: object = None) -> NoReturn:
        raise Exit(status)

    def failed(*error: Any) -> None:
        set_code(1)
        said(*error)

    builtins.SystemExit, sys.exit, sys.excepthook = Exit, leave, failed
