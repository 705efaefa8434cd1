"""The end of a job: a failing rank ends all ranks, and a finished rank ends cleanly."""

from __future__ import annotations

import builtins
import contextlib
import ctypes
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
from mpigrad.guard.cross_host import LIMIT, HostQuery, open_host_query
from mpigrad.guard.lifecycle import await_all_ends, await_all_ranks, unreceived_report
from mpigrad.guard.settings import guard_enabled, timeout_seconds, unreceived_is_error
from mpigrad.guard.wait_graph import disagreement
from mpigrad.guard.watchdog import Watchdog, rank_states
from mpigrad.runtime.call_sites import utf8
from mpigrad.runtime.native import at_exit, library, record

__all__ = [
    "call_at_job_end",
    "current_board",
    "end_all_on_errors",
    "end_job",
    "end_with_error",
    "forget_import",
    "install",
]

_LAST = 30.0  # minimum time limit of MPI_Finalize, in seconds
_STAGGER = 1.0  # seconds between the limits of two ranks, so that one rank reports
_STUCK = (
    "mpigrad: rank %d has waited %g s in MPI_Finalize, although all ranks have ended. MPI takes a "
    "process that a rank starts and that imports mpi4py for that rank. Start such processes "
    "without the launcher's variables (PMIX_*, OMPI_*, PMI_*) in their environment.\n"
)
_GRACE = 2.0  # seconds for other ranks to report their state before the job is ended
_UNREACHED = 5.0  # seconds in which MPI must end a rank that has called Abort
# Daemons that start ranks on a host and that a rank may end.
_DAEMONS = ("mpiexec", "mpirun", "orterun", "orted", "prterun", "prted", "hydra_pmi_proxy")
# Variables that are the same for all ranks of a job, and differ between jobs.
_MARKS = ("PMIX_NAMESPACE", "MPIGRAD_JOB", "PMI_JOBID", "SLURM_STEP_ID")


class _Process:
    """State of this process."""

    board: b.Board | None = None
    host_query: HostQuery | None = None
    world: MPI.Intracomm | None = None  # for the end of the job, if there are other ranks
    hook: Callable[..., object] | None = None  # for uncaught errors
    forked = False
    unreceived_fails = True
    seconds = 0.0
    at_end: ClassVar[list[Callable[[], object]]] = []
    finished = False
    fails = False  # it exits in a way after which mpi4py ends the job


def current_board() -> b.Board:
    """Return the board of this host."""
    assert _Process.board is not None
    return _Process.board


def count_faults() -> int:
    """Return how many errors the guard has raised on several ranks of this host."""
    return int(current_board().header["faults"])


def end_job(text: str | Callable[[], str], code: int = 1, grace: float = 0.0) -> None:
    """End all ranks with exit code `code`. The first rank of a host to call this prints `text`.

    `text` may be a function that returns the text, or "" if another host reports.
    """
    _flush(sys.stdout)
    if _Process.board is None or _Process.board.claim():
        if message := text() if callable(text) else text:
            _say(message)
            time.sleep(grace)
        else:
            time.sleep(_GRACE + LIMIT)
    else:
        time.sleep(_GRACE + (LIMIT if _Process.host_query else 0.0))
    _flush(sys.stderr)
    _abort(code)


def _stop_wait(text: str | Callable[[], str]) -> None:
    """End the wait of a rank that is alone by an error, from the thread of the watchdog.

    A program can catch it, and a notebook keeps its variables. The job ends if the wait goes on: it
    is not one of mpigrad's own.
    """
    slot, now = current_board().slots[0], record()

    def operation() -> tuple[int, int, bool]:
        return int(slot["serial"]), now.calls, now.start_ns != 0

    message, waiting = text() if callable(text) else text, operation()
    library().mpigrad_stop_waits(message.removeprefix("mpigrad: ").encode())
    time.sleep(_GRACE)
    if operation() == waiting:
        end_job(message)


def end_with_error(text: str) -> bool:
    """Give `mpigrad launch` the error of all ranks, so that the job may end without MPI_Abort.

    MPI_Abort prints lines of its own. The launcher prints the text and exits with code 1, after all
    ranks have ended as usual.

    Returns
    -------
    bool
        False if another rank has no error, or if there is no launcher to tell: call `end_job`.
    """
    world = MPI.COMM_WORLD
    everybody, start = world.Ibarrier(), time.monotonic()
    # Other ranks wait longer than rank 0, which decides.
    while not everybody.Test():
        if time.monotonic() - start > (_GRACE if world.rank == 0 else 3 * _GRACE):
            return False
        time.sleep(0.01)
    return bool(world.bcast(world.rank == 0 and _tell_launcher(text)))


def _tell_launcher(text: str) -> bool:
    """Write the text that the launcher prints at the end. Fails if another rank has written one."""
    name = os.environ.get("MPIGRAD_STOP_FILE")
    if name:
        # Fails, too, if the launcher is on another host.
        with contextlib.suppress(OSError), pathlib.Path(name).with_name("cause").open("xb") as file:
            file.write(text.encode(errors="backslashreplace") + b"\n")
            return True
    return False


def _flush(stream: Any) -> None:
    """Flush a stream. A full disk, or a program's own stream object, must not stop the end."""
    with contextlib.suppress(Exception):
        stream.flush()


def _abort(code: int) -> None:
    """End the job. Do not wait for a host that does not answer, as MPI_Abort would."""
    name = os.environ.get("MPIGRAD_STOP_FILE")
    if name:
        with contextlib.suppress(OSError):  # the launcher is on another host
            pathlib.Path(name).with_name("aborted").touch()
    if _Process.host_query:
        _end_daemon()
    # Not by faulthandler.dump_traceback_later: it first reads the frames of threads that run, such
    # as the watchdog, without Python's lock. On a busy machine that sometimes crashes by SIGSEGV.
    library().mpigrad_start_time_limit(ctypes.c_double(_UNREACHED), b"")
    MPI.COMM_WORLD.Abort(code)
    os._exit(code)  # Abort of MPICH 5 returns, and ends the job later


def _end_daemon() -> None:
    """Start a process that ends the daemon which started this rank, if the daemon does not end."""
    parent = os.getppid()
    mark = next((f"{k}={os.environ[k]}" for k in _MARKS if os.environ.get(k)), "")
    # PRRTE calls the jobs of a daemon that outlives them prte-..., and those of mpirun prterun-...
    if not mark or mark.startswith("PMIX_NAMESPACE=prte-"):
        return
    with contextlib.suppress(OSError):
        daemon = pathlib.Path(f"/proc/{parent}/comm").read_text().strip()
        if daemon in _DAEMONS:
            script = pathlib.Path(__file__).with_name("end_daemon.py")
            words = [sys.executable, "-IS", str(script), str(parent), daemon, mark, "8"]
            subprocess.Popen(words, env={}, stdin=subprocess.DEVNULL, start_new_session=True)


def _note_exits() -> None:
    """Report to `mpigrad launch` which rank called sys.exit(n), after which mpi4py ends the job."""
    main: Any = sys.modules.get("__main__")
    is_runner = getattr(getattr(main, "__spec__", None), "name", "") == "mpi4py.run"
    runner: Any = main if is_runner else sys.modules.get("mpi4py.run")
    name = os.environ.get("MPIGRAD_STOP_FILE")
    if runner is None:
        return
    ends, rank = runner.set_abort_status, MPI.COMM_WORLD.rank

    def set_abort_status(status: object) -> None:
        code = 1
        if isinstance(status, SystemExit) and not _Process.forked:
            code = int(status.code if isinstance(status.code, int) else status.code is not None)
            if code and not code & 0xFF:  # the system keeps 8 bits: 256 would be success
                code, status = 1, SystemExit(1)
            # Fails if another rank exited first, or if the launcher is on another host.
            with contextlib.suppress(OSError):
                if code and name:
                    with pathlib.Path(name).with_name("left").open("x") as file:
                        file.write(f"{code} {rank}")
        _Process.fails = bool(code) if isinstance(status, SystemExit) else True
        ends(status)

    runner.set_abort_status = set_abort_status


def _say(text: str) -> None:
    """Pass a text to `mpigrad launch`, which prints it at the end, or print it here."""
    if _tell_launcher(text):
        return
    try:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
    except Exception:  # a broken stream: write to the original standard error, if it is open
        with contextlib.suppress(OSError):
            os.write(2, (text + "\n").encode(errors="backslashreplace"))


@functools.cache
def end_all_on_errors() -> None:
    """End all ranks at an uncaught exception from now on."""
    if MPI.COMM_WORLD.size > 1:
        sys.excepthook = _Process.hook = functools.partial(_end_all_ranks, sys.excepthook)


@functools.cache
def install() -> None:
    """Start the guard of this rank (collective over all ranks)."""
    seconds, lib = timeout_seconds(), library()
    _Process.seconds = seconds
    await_all_ranks(seconds, end_job)
    board = _Process.board = b.share(lib)
    board.slots[board.own_index]["since_ns"] = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    # The same on all ranks.
    compare, fails = MPI.COMM_WORLD.bcast((guard_enabled(), unreceived_is_error()))
    _Process.unreceived_fails = fails
    lib.mpigrad_set_guard(int(compare), _explain)
    at_exit(_finish)
    MPI.Finalize = functools.partial(_finalize, MPI.Finalize)
    os.register_at_fork(after_in_child=_forked)
    ctypes.pythonapi.Py_AtExit(lib.mpigrad_end_child)  # called before mpi4py's
    _note_exits()
    if MPI.COMM_WORLD.size > 1:
        _Process.world = MPI.COMM_WORLD.Dup()
    own_states = functools.partial(rank_states, board)
    query = _Process.host_query = open_host_query(board, own_states)
    end = functools.partial(end_job, grace=_GRACE)
    if MPI.COMM_WORLD.size == 1:
        lib.mpigrad_stop_waits.argtypes = [ctypes.c_char_p]
        end = _stop_wait
    Watchdog(board, seconds, compare, end, query).start()


def forget_import() -> None:
    """Forget the operations of the import, which are not the program's last ones."""
    library().mpigrad_forget_operation()


@ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_int)
def _explain(reports: int, size: int, text: int, room: int) -> None:
    """Write the error about differing contracts to `text`, for native code."""
    raw = utf8(disagreement(b.view(reports, b.REPORT, size), _Process.board), room - 1)
    ctypes.memmove(text, raw + bytes(1), len(raw) + 1)


def _end_all_ranks(
    previous: object,
    kind: type[BaseException],
    value: BaseException,
    trace: TracebackType | None,
) -> None:
    # An error at a prompt or in a forked child does not end the job. After MPI.Finalize() this rank
    # cannot end the others.
    alone = _Process.forked or MPI.Is_finalized()
    if alone or sys.flags.interactive or hasattr(sys, "ps1"):
        previous(kind, value, trace)  # type: ignore[operator]
        return
    board = _Process.board
    if board is not None:
        board.slots[board.own_index]["state"] = b.FAILED
    text = "".join(traceback.format_exception(kind, value, trace))
    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    place = f" on {platform.node()}" if _Process.host_query else ""
    end_job(
        f"{text}mpigrad: rank {rank} of {size}{place} failed; ending all ranks",
        130 if kind is KeyboardInterrupt else 1,
    )


def _end_all_after(error: BaseException | None) -> None:
    """End all ranks if an error ended this one and another excepthook than ours printed it."""
    interactive = sys.flags.interactive or hasattr(sys, "ps1")
    if error is None or _Process.hook in (None, sys.excepthook) or interactive:
        return
    # pytest and others leave caught errors in sys.last_value too. They do not begin in __main__.
    frame = error.__traceback__ and error.__traceback__.tb_frame
    main = frame and (frame.f_globals.get("__name__"), frame.f_code.co_name)
    if not frame or (
        main != ("__main__", "<module>") and frame.f_code.co_filename != "<frozen runpy>"
    ):
        return
    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    text = "".join(traceback.format_exception_only(error)).rstrip()
    message = f"{text}\nmpigrad: rank {rank} of {size} failed; ending all ranks"
    end_job(message, 130 if isinstance(error, KeyboardInterrupt) else 1)


def _finish() -> None:
    """Wait for queued operations and mark this rank as ended, before MPI is finalised.

    It is registered after JAX's own clean-up and so runs before it. MPI is finalised after both.
    """
    board = _Process.board
    if board is None or _Process.finished or MPI.Is_finalized():
        return
    _Process.finished = True
    _end_all_after(getattr(sys, "last_value", None))
    with contextlib.suppress(Exception):  # of a computation that failed earlier
        jax.effects_barrier()
    if text := _thread_in_operation(board):
        end_job(text)
    own_slot = board.slots[board.own_index]
    own_slot["since_ns"] = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    with board.locked():  # so that exactly one rank is the last
        own_slot["state"] = b.ENDED
        last = bool((board.slots["state"] == b.ENDED).all())
    unreceived = unreceived_report(board.slots) if last else ""
    if _Process.world is not None and not _Process.fails:  # otherwise MPI ends the job
        await_all_ends(board, _Process.world, _Process.seconds, end_job)
        if _Process.seconds:  # Python soon ends, and with it the watchdog
            rank = MPI.COMM_WORLD.rank
            limit = max(_Process.seconds, _LAST) + _STAGGER * min(rank, 15)
            library().mpigrad_set_finalize_limit(
                ctypes.c_double(limit), (_STUCK % (rank, limit)).encode()
            )
    for end in _Process.at_end:
        end()
    if unreceived and _Process.unreceived_fails and not _Process.fails:
        end_job(unreceived)
    elif unreceived:
        print(unreceived, file=sys.stderr, flush=True)


def _finalize(plain: Callable[[], None]) -> None:
    """Replace MPI.Finalize: this rank has ended for the others, and may continue alone."""
    if not _Process.forked:
        _finish()
    plain()
    library().mpigrad_set_finalize_limit(ctypes.c_double(0), b"")


def call_at_job_end(end: Callable[[], object]) -> None:
    """Call `end` on every rank when all ranks have ended, before MPI_Finalize (collective)."""
    _Process.at_end.append(end)


def _thread_in_operation(board: b.Board) -> str:
    """Return the error if another thread is in an operation, which would crash at Python's end."""
    own_slot, limit = board.slots[board.own_index], time.monotonic() + 0.1
    others = {t.name for t in threading.enumerate() if t is not threading.current_thread()}
    while others - {Watchdog.NAME} and time.monotonic() < limit:
        if int(own_slot["state"]) == b.IN_OPERATION:
            operation = Reader(board.slots).operation(board.own_index)
            return (
                f"mpigrad: rank {MPI.COMM_WORLD.rank} ends while another of its threads is in "
                f"{operation}. Join the thread before the program ends."
            )
        time.sleep(0.001)
    return ""


def _forked() -> None:
    """Prepare a forked child to end without MPI, which belongs to the parent."""
    _Process.forked = True
    frame = sys._getframe()
    while frame := frame.f_back:
        if frame.f_globals.get("__name__", "").startswith("multiprocessing."):
            return  # its children exit with os._exit
    set_code, print_error = library().mpigrad_set_exit_code, sys.excepthook

    class Exit(SystemExit):
        """A SystemExit that passes its exit code to the native library."""

        def __init__(self, *status: object) -> None:
            super().__init__(*status)
            code = status[0] if len(status) == 1 else len(status)
            set_code(code & 0xFF if isinstance(code, int) else int(code is not None))

    def leave(status: object = None) -> NoReturn:
        raise Exit(status)

    def failed(*error: Any) -> None:
        set_code(1)
        print_error(*error)

    builtins.SystemExit, sys.exit, sys.excepthook = Exit, leave, failed
