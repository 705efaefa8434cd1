"""The call of JAX's compiler: one rank of a host compiles a program, and the others read it.

JAX gives each program a key: the hash of its text with its constants, its options, the versions of
JAX and XLA, and XLA's flags. The first rank that asks for a key locks the key and compiles. Ranks
that ask for the same key meanwhile wait for the lock, and then read the program. Ranks with other
programs have other keys and do not wait. Nobody waits for a rank that has died (the kernel releases
its lock), that has not asked for the program (it has no lock), or that is stopped (it uses no
processor time).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pathlib
import time
import zlib
from collections.abc import Callable
from typing import Any

import jax

from mpigrad.compilation.program_store import ProgramStore, SharedPrograms, directory_of_programs
from mpigrad.guard.board import Board
from mpigrad.guard.failure import current_board
from mpigrad.guard.settings import timeout_seconds
from mpigrad.guard.watchdog import activity
from mpigrad.operations._jax_private import module_of, optional
from mpigrad.runtime.native import library

__all__ = ["EVENT", "Patience", "install", "store_programs"]

# Events of jax.monitoring: compiled, from_other_rank, from_store.
EVENT = "/mpigrad/programs/"

_PAGE = 4096
_MOST_RANKS = 64  # with more, reading many small files takes longer than compiling
_MOST_CONSTANTS = 8 * 1024**2
_LOW_EFFORT = 1  # of zlib: a quarter of the size, in little time for programs without constants
# Seconds of a wait: between two looks (first and last), and without progress of the other rank if
# its processor time is known or not.
_FIRST_PAUSE, _LAST_PAUSE, _LOOK = 5e-4, 0.02, 0.25
_STALLED, _BLIND = 3.0, 30.0
_LONGEST = 150.0
_OFF, _JOB = "off", "job"


class _Programs:
    """The programs that this process shares and stores."""

    board: Board | None = None
    shared: SharedPrograms | None = None
    store: ProgramStore | None = None
    process = 0
    jax_has_cache = False


class Patience:
    """Decides how long a rank waits for another rank that compiles.

    Parameters
    ----------
    longest
        The longest time in seconds.
    """

    def __init__(self, longest: float) -> None:
        self._start = self._since = self._next = time.monotonic()
        self._longest = longest
        self._last: tuple[int, int | None] = (0, None)

    def lasts(self, process: int) -> bool:
        """Return False if the process makes no progress, or after the longest time.

        Parameters
        ----------
        process
            The id of the process that compiles, or 0 if it is not known.
        """
        now = time.monotonic()
        if now - self._start > self._longest:
            return False
        if now < self._next:
            return True
        self._next = now + _LOOK
        used = _processor_time(process)
        if (process, used) != self._last:
            self._last, self._since = (process, used), now
        return now - self._since <= (_BLIND if used is None else _STALLED)


def _processor_time(process: int) -> int | None:
    """Return the processor time of a process in clock ticks, or None if it cannot be read."""
    if process == 0:
        return None
    try:
        status = pathlib.Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()
        return int(status[11]) + int(status[12])
    except (OSError, IndexError, ValueError):
        return None


def install() -> None:
    """Let the ranks of this host share compiled programs from now on.

    MPIGRAD_PROGRAMS=off: they do not. If it names a directory, programs are also stored there for
    later jobs.
    """
    choice = os.environ.get("MPIGRAD_PROGRAMS", "")
    if choice == _OFF:
        return
    board = current_board()
    if board.lock is not None:  # other ranks are on this host
        size = library().mpigrad_board_bytes(len(board.ranks))
        with contextlib.suppress(OSError):
            _Programs.shared = SharedPrograms(board.lock, -(-size // _PAGE) * _PAGE)
            _Programs.board = board
    if choice not in ("", _JOB):
        store_programs()
    if _Programs.shared is not None:
        _replace()


def store_programs() -> pathlib.Path | None:
    """Store the compiled programs of this process for later jobs, and use the stored programs.

    MPIGRAD_PROGRAMS names the directory, or is `off` or `job`: nothing is stored. Default:
    mpigrad/programs in the user's directory of caches. Nothing is stored if there are more than 64
    ranks, or if others may write to the directory. Programs for GPUs are not stored. If the user
    has chosen a cache of JAX, no programs are stored.

    Returns
    -------
    pathlib.Path | None
        The directory of this processor's programs, or None.

    Examples
    --------
    >>> import os
    >>> from mpigrad.compilation import store_programs
    >>> os.environ["MPIGRAD_PROGRAMS"] = "off"
    >>> store_programs()
    """
    from mpi4py import MPI

    choice = os.environ.get("MPIGRAD_PROGRAMS", "")
    if choice in (_OFF, _JOB) or MPI.COMM_WORLD.size > _MOST_RANKS:
        return None
    directory = directory_of_programs(choice)
    if directory is None or not _replace():
        return None
    _Programs.store = ProgramStore(directory)
    return directory


@functools.cache
def _replace() -> bool:
    """Replace JAX's call of the compiler. Returns False if this JAX has no such call."""
    name = "compiler.compile_or_get_cached"
    by_jax, get_key = optional(name), optional("compilation_cache.get_cache_key")
    if by_jax is None or get_key is None:
        return False

    @functools.wraps(by_jax)
    def compile_or_get_cached(*arguments: Any, **named: Any) -> Any:
        compile_here = functools.partial(by_jax, *arguments, **named)
        with contextlib.suppress(Exception):  # another signature, for example
            if (request := _request(get_key, *arguments, **named)) is not None:
                compile_here = functools.partial(request.compile, compile_here)
        return compile_here()

    module_of(name).compile_or_get_cached = compile_or_get_cached
    _Programs.process = os.getpid()
    return True


def _request(
    get_key: Callable[..., str],
    backend: Any,
    computation: Any,
    devices: Any,
    compile_options: Any,
    host_callbacks: Any,
    executable_devices: Any,
    *_: Any,
) -> _Request | None:
    """Return the request for a program, or None if this process must compile it."""
    settings: Any = jax.config
    if (
        backend.platform != "cpu"
        # A program with callbacks holds functions of this process. Programs for several devices may
        # hold the functions that divide their arrays.
        or host_callbacks
        or devices.size != 1
        or _Programs.process != os.getpid()  # a child of a rank
        or not settings.jax_enable_compilation_cache
        or "xla_dump" in os.environ.get("XLA_FLAGS", "")  # each rank writes its files
        or getattr(settings, "jax_dump_ir_to", "")
    ):
        return None
    # XLA loses the code of a program that it has loaded and writes again, and JAX's cache loads
    # programs. JAX keeps its first cache after the setting has changed.
    _Programs.jax_has_cache |= bool(settings.jax_compilation_cache_dir)
    shared, store = _Programs.shared, _Programs.store
    if shared is not None and shared.closed:
        shared = None
    if _Programs.jax_has_cache or (shared is None and store is None):
        return None
    if _bytes_of_constants(computation) > _MOST_CONSTANTS:  # hashing and copying take longer
        return None
    key = get_key(computation, devices, compile_options, backend)
    # XLA divides loops by the number of threads, which is that of the processors of this process.
    processors = ",".join([str(len(os.sched_getaffinity(0))), os.environ.get("NPROC", "")])

    def load(content: bytes) -> Any:
        try:
            program = zlib.decompress(content)
            return backend.deserialize_executable(program, executable_devices, compile_options)
        except Exception:  # damaged, or not readable in this process
            return None

    def save(program: Any) -> bytes:
        try:
            serialize = getattr(program, "serialize", None)
            text = serialize() if serialize else backend.serialize_executable(program)
            return zlib.compress(text, _LOW_EFFORT)
        except Exception:  # XLA cannot write this program
            return b""

    name = str(computation.operation.attributes["sym_name"]).strip('"')
    digest = hashlib.sha256(f"mpigrad 1 {processors} {key}".encode()).digest()
    return _Request(digest, name, shared, store, load, save)


def _bytes_of_constants(computation: Any) -> int:
    """Return about how many bytes the arrays take that a lowered program closes over."""
    total = 0
    for function in computation.body.operations:
        for block in function.regions[0]:
            for operation in block:
                if operation.name == "stablehlo.constant":
                    value = operation.attributes["value"]
                    total += 0 if value.is_splat else 8 * len(value)
    return total


class _Request:
    """The request of this rank for one program.

    Parameters
    ----------
    key
        32 bytes.
    name
        For reports, such as jit_step.
    shared, store
        The programs of this job and of earlier jobs, or None.
    load, save
        Functions between a program and its bytes. None or b"": impossible.
    """

    def __init__(
        self,
        key: bytes,
        name: str,
        shared: SharedPrograms | None,
        store: ProgramStore | None,
        load: Callable[[bytes], Any],
        save: Callable[[Any], bytes],
    ) -> None:
        self.key, self.name, self.shared, self.store = key, name, shared, store
        self.load, self.save = load, save
        self._is_locked = False  # by this request

    def compile(self, compile_here: Callable[[], Any]) -> Any:
        """Return the program, by the function if no other rank has compiled it."""
        try:
            content = self._await_other_rank()
            if content and (program := self.load(content)) is not None:
                jax.monitoring.record_event(f"{EVENT}from_other_rank")
                return program
            is_missing = content is None
            if is_missing and (program := self._stored()) is not None:
                jax.monitoring.record_event(f"{EVENT}from_store")
                return program
            with activity(f"compiling {self.name}"):
                program = compile_here()
            jax.monitoring.record_event(f"{EVENT}compiled")
            if is_missing:
                content = self.save(program)
                self._publish(content)
        except BaseException:
            if self._is_locked:
                self._publish(b"")  # nobody waits for the same error
            raise
        finally:
            if self._is_locked and self.shared is not None:
                self.shared.unlock(self.key)
        if is_missing and content and self.store is not None:
            self.store.put(self.key.hex(), content)
        return program

    def _publish(self, content: bytes) -> None:
        if self.shared is not None and self.shared.read(self.key) is None:
            self.shared.publish(self.key, content)

    def _stored(self) -> Any:
        """Return the program of an earlier job, and show it to the other ranks, or None."""
        content = self.store.get(self.key.hex()) if self.store is not None else None
        program = self.load(content) if content else None
        if content and program is not None:
            self._publish(content)
        return program

    def _await_other_rank(self) -> bytes | None:
        """Wait for the rank that compiles this program.

        Returns
        -------
        bytes | None
            The program. b"": it cannot be shared. None: this rank compiles it. The other ranks wait
            if this rank has the lock.
        """
        shared = self.shared
        if shared is None:
            return None
        content, is_done = self._look(shared)
        if is_done:
            return content
        if shared.is_held_here(self.key):  # by another thread of this rank
            return b""
        patience, pause = Patience(timeout_seconds() / 2 or _LONGEST), _FIRST_PAUSE
        with activity(lambda: _waiting_for(shared.holder(self.key), self.name)):
            while not is_done and not shared.closed and patience.lasts(shared.holder(self.key)):
                time.sleep(pause)
                pause = min(1.25 * pause, _LAST_PAUSE)
                content, is_done = self._look(shared)
        return content

    def _look(self, shared: SharedPrograms) -> tuple[bytes | None, bool]:
        """Return the program, and whether the wait is over: it is there, or this rank's to do."""
        if (content := shared.read(self.key)) is None and shared.try_lock(self.key):
            self._is_locked = True
            if (content := shared.read(self.key)) is None:
                return None, True
            self._is_locked = False
            shared.unlock(self.key)
        return content, content is not None


def _waiting_for(process: int, name: str) -> str:
    board = _Programs.board
    ranks = (
        []
        if board is None
        else [
            rank
            for rank, slot in zip(board.ranks, board.slots, strict=True)
            if int(slot["pid"]) == process
        ]
    )
    who = f"rank {ranks[0]}" if ranks else "another rank"
    return f"waiting for {who} to compile {name}"
