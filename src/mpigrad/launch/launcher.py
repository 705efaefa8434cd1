"""Start the ranks of a program, and end them: all of them, whatever happens.

The ranks run in a session of their own, so that Ctrl-C reaches this process alone. It first asks
the job to save and end (see `mpigrad.checkpoint.signals`), and ends it when asked again, when the
job does not come to its end, or when its time limit is over. No rank outlives the launcher.

Only the standard library is imported: ranks import JAX and MPI, their launcher needs neither.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import NoReturn

from mpigrad.launch.hostfile import Host, placed
from mpigrad.launch.mpi_installation import (
    Launcher,
    common_environment,
    find_launcher,
    forwarded_prefixes,
    mpi_library,
)
from mpigrad.launch.processes import marked, outliving
from mpigrad.runtime.world import MPIError

__all__ = ["cores", "launch"]

TIMED_OUT = 124  # as timeout(1) has it
_GRACE = 30.0  # seconds that a job which was asked to end may take for saving
_KILL_AFTER = 3.0  # seconds between SIGTERM and SIGKILL
_AFTER_ABORT = 5.0  # seconds in which mpiexec ends after a rank's MPI_Abort
_OUTLIVING = 5.0  # seconds between looks for a job without ranks
# What ends programs, and is seldom an exit code.
_ENDING_SIGNALS = {
    *(signal.SIGILL, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE),
    *(signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM),
}
_HANDED_ON = (-signal.SIGUSR1, 128 + signal.SIGUSR1)  # how ranks end that do not listen
_MARK = "MPIGRAD_JOB"  # in the environment of every process of a job, and so of every orphan


def cores() -> int:
    """Physical cores that this process may use (two hardware threads of a core are one)."""
    usable = os.sched_getaffinity(0)
    found: set[str] = set()
    for cpu in usable:
        file = pathlib.Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            found.add(file.read_text())
        except OSError:
            return len(usable)
    return len(found)


def rank_environment(
    launcher: Launcher | None, ranks: int, hosts: Sequence[Host] = ()
) -> dict[str, str]:
    """What the settings file adds to the environment, with what the user has set kept.

    Hosts are taken to have as many cores as this one.
    """
    family = launcher.family if launcher else None
    settings = common_environment()
    if family is not None:
        settings |= family.environment
        if os.geteuid() == 0:
            settings |= family.root
        if max(placed(hosts, ranks)) > cores():
            settings |= family.oversubscribed
    added: dict[str, str] = {}
    for name, value in settings.items():
        own = os.environ.get(name)
        separator = {"XLA_FLAGS": " ", "GLIBC_TUNABLES": ":"}.get(name)
        if own is None or (separator and not own.strip()):
            added[name] = value
        elif name == "XLA_FLAGS" and not own.lstrip().startswith("-"):
            pass  # the name of a file with flags
        elif separator:
            words = [w for w in value.split(separator) if w.split("=")[0] not in own]
            # XLA stops reading flags at the first word without dashes.
            last = [w for w in words if name == "XLA_FLAGS" and not w.startswith("-")]
            first = [w for w in words if w not in last]
            added[name] = separator.join([*first, own, *last])
    return added


def launch(
    program: Sequence[str],
    ranks: int,
    *,
    timeout: float = math.inf,
    grace: float = _GRACE,
    environment: Mapping[str, str] | None = None,
    hosts: Sequence[Host] = (),
) -> int:
    """Run a Python program on `ranks` ranks and wait for its end.

    Parameters
    ----------
    program
        What follows `python` on a command line: a file or `-m module`, and its arguments.
    ranks
        Number of ranks.
    timeout
        Seconds after which the job is ended.
    grace
        Seconds that the job may take to save and end after the first Ctrl-C or SIGTERM.
    environment
        Further variables for the ranks.
    hosts
        Where the ranks run; without hosts, here (or where a batch system has given nodes).

    Returns
    -------
    int
        The job's exit code: 0, or that of the rank which failed; 124 at the time limit.

    Raises
    ------
    MPIError
        There is no MPI, or no launcher that belongs to it; or it cannot be told the hosts.
    ValueError
        The hosts take fewer ranks.
    """
    launcher = find_launcher(mpi_library())
    where = _where(launcher, ranks, hosts)
    # Files through which ranks and launcher speak; on several hosts where all of them see it.
    common = os.getcwd() if hosts and os.access(os.getcwd(), os.W_OK) else None
    prefix = ".mpigrad-" if common else "mpigrad-"
    with tempfile.TemporaryDirectory(prefix=prefix, dir=common) as directory:
        stop_file = pathlib.Path(directory) / "stop"
        added = rank_environment(launcher, ranks, hosts) | {
            "MPIGRAD_EXPECTED_SIZE": str(ranks),
            "MPIGRAD_STOP_FILE": str(stop_file),
            "MPIGRAD_TERMINAL": "1" if sys.stdout.isatty() else "0",
            _MARK: uuid.uuid4().hex,
            **(environment or {}),
        }
        command = [launcher.path]
        if launcher.family is not None:
            command += [word.format(ranks=ranks) for word in launcher.family.count]
            command += where
            users = [name for name in os.environ if name.startswith(forwarded_prefixes())]
            for name in sorted({*added, *users}):
                command += [word.format(name=name) for word in launcher.family.forward]
        # mpi4py's runner turns an exception, or sys.exit(3), of one rank into the job's end.
        command += [sys.executable, "-m", "mpi4py", *program]
        family = launcher.family
        job = _Job(
            command,
            os.environ | added,
            stop_file,
            timeout,
            grace,
            spread=bool(hosts),
            # Those of srun, and of PBS, are below a daemon.
            descending=family is not None
            and family.key != "slurm"
            and "PBS_JOBID" not in os.environ,
            bare_signals=family is not None and family.key == "mpich",
        )
        return job.run()


def _where(launcher: Launcher, ranks: int, hosts: Sequence[Host]) -> list[str]:
    """The words that tell a launcher which hosts run how many of the ranks."""
    if not hosts:
        return []
    if launcher.family is None or not launcher.family.hosts:
        raise MPIError(
            f"mpigrad: {launcher} cannot be told the hosts; inside a batch job leave --hosts out: "
            "the nodes are those of the job"
        )
    counts = placed(hosts, ranks)
    text = ",".join(f"{h.name}:{n}" for h, n in zip(hosts, counts, strict=True) if n > 0)
    return [word.format(hosts=text) for word in launcher.family.hosts]


def become_rank(program: Sequence[str]) -> NoReturn:
    """Replace this process, which a launcher has started as a rank, by the program's rank."""
    added = rank_environment(None, 1) | {"MPIGRAD_TERMINAL": "1" if sys.stdout.isatty() else "0"}
    command = [sys.executable, "-m", "mpi4py", *program]
    os.execve(sys.executable, command, os.environ | added)


class _Job:
    """One mpiexec and everything below it."""

    def __init__(
        self,
        command: list[str],
        environment: Mapping[str, str],
        stop_file: pathlib.Path,
        timeout: float,
        grace: float,
        spread: bool,
        descending: bool,
        bare_signals: bool,
    ) -> None:
        self.command = command
        self.environment = dict(environment)
        self.mark = f"{_MARK}={self.environment[_MARK]}".encode()
        self.stop_file = stop_file
        self.timeout = timeout
        self.grace = grace
        self.spread = spread  # over hosts that do not see the stop file
        self.descending = descending  # whether ranks are below mpiexec
        self.bare_signals = bare_signals  # mpiexec returns the number of a signal as it is
        self.requests: list[int] = []

    def run(self) -> int:
        with self._listening():
            sys.stdout.flush()
            sys.stderr.flush()
            try:
                process = subprocess.Popen(
                    self.command,
                    env=self.environment,
                    start_new_session=True,
                    preexec_fn=_end_with_parent,  # noqa: PLW1509 (one system call)
                )
            except OSError as error:
                raise MPIError(
                    f"mpigrad: cannot start {shlex.join(self.command)}: {error}"
                ) from None
            try:
                code = self._wait(process)
            finally:
                self._end(process)
            self._say_cause()
            return code

    def _say_cause(self) -> None:
        """Print, last of all, why a rank has ended the job (guard/ending.py)."""
        with contextlib.suppress(OSError):
            text = self.stop_file.with_name("cause").read_text(errors="replace")
            print(text.rstrip(), file=sys.stderr, flush=True)

    def _wait(self, process: subprocess.Popen[bytes]) -> int:
        """Wait for the job's end, or bring it about; returns its exit code."""
        start = time.monotonic()
        limit = start + self.timeout
        asked: float | None = None
        look = start + _OUTLIVING
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(0.1)
                handed_on = status in _HANDED_ON or (self.bare_signals and status == signal.SIGUSR1)
                if asked is not None and self.spread and handed_on:
                    return 128 + self.requests[0]  # nobody listened
                return _report(status, self.bare_signals, self._who_left())
            now = time.monotonic()
            if self._aborted_long_ago():
                _say("mpiexec waits for a host that does not answer; ending it")
                process.kill()  # told to end, it would wait on
                return 1
            if now > limit:
                _say(f"the time limit of {self.timeout:g} s is over; ending all ranks")
                return TIMED_OUT
            if now > look:
                look = math.inf if self._said_who_is_left(process.pid) else now + _OUTLIVING
            if not self.requests:
                continue
            name = signal.Signals(self.requests[0]).name
            if asked is None:
                if not (self.spread or self._somebody_listens()):
                    _say(f"{name}: ending all ranks")
                    return 128 + self.requests[0]
                asked = now
                self.stop_file.touch()
                if self.spread:  # handed on to all ranks; who does not listen ends by it
                    process.send_signal(signal.SIGUSR1)
                again = "Ctrl-C again" if name == "SIGINT" else "a second signal"
                _say(f"{name}: asked the job to save and end ({again} ends it at once)")
            elif len(self.requests) > 1:
                _say(f"{signal.Signals(self.requests[-1]).name} again: ending all ranks")
                return 128 + self.requests[-1]
            elif now > asked + self.grace:
                _say(f"the job did not end within {self.grace:g} s; ending all ranks")
                return 128 + self.requests[0]

    def _who_left(self) -> tuple[int, int] | None:
        """The exit code with which a rank has left first, and the rank (guard/ending.py)."""
        with contextlib.suppress(OSError, ValueError):
            code, rank = self.stop_file.with_name("left").read_text().split()
            return int(code) % 256, int(rank)
        return None

    def _said_who_is_left(self, mpiexec: int) -> bool:
        """Say for which processes mpiexec waits when its ranks have ended, if that is so."""
        left = [] if self.spread or not self.descending else outliving(mpiexec, self.mark)
        if left:
            time.sleep(0.2)  # ranks, or their children, that were about to end
            left = [one for one in outliving(mpiexec, self.mark) if one in left]
        if left:
            names = ", ".join(f"{pid} ({name})" for pid, name in left)
            _say(
                "all ranks have ended; mpiexec waits for processes that they have started and that "
                f"hold their output: {names}. Let a rank wait for them, or give them another output"
            )
        return bool(left)

    def _somebody_listens(self) -> bool:
        return self.stop_file.with_name("listening").exists()

    def _aborted_long_ago(self) -> bool:
        """Whether a rank has ended the job, and mpiexec has not."""
        try:
            aborted = self.stop_file.with_name("aborted").stat().st_mtime
        except OSError:
            return False
        return time.time() - aborted > _AFTER_ABORT

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        def note(number: int, frame: FrameType | None) -> None:
            self.requests.append(number)

        signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
        before = {number: signal.signal(number, note) for number in signals}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """End mpiexec, which ends its ranks here and elsewhere, and then whatever is left."""
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_KILL_AFTER)
        for wait in (0.0, 0.2, 0.5, 1.0):  # a rank that is being started escapes one look
            time.sleep(wait)
            left = marked(self.mark)
            if not left and process.poll() is not None:
                return
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        process.wait()


_prctl = ctypes.CDLL(None).prctl  # looked up here: after the fork only the call is left


def _end_with_parent() -> None:
    """Let mpiexec be told to end when the launcher itself is killed (PR_SET_PDEATHSIG)."""
    _prctl(1, int(signal.SIGTERM), 0, 0, 0)


def _report(status: int, bare_signals: bool, left: tuple[int, int] | None) -> int:
    """Say how a job ended by itself, unless well; returns the exit code of its status.

    `left` are the exit code and the rank of the first that has left with one.
    """
    code = status if status >= 0 else 128 - status
    if left is not None and code == left[0] != 0:
        _say(f"the job failed with exit code {code}: rank {left[1]} was the first to leave with it")
        return code
    bare = bare_signals and code in _ENDING_SIGNALS
    number = code if bare else code - 128
    if number in {s.value for s in signal.Signals}:
        name = signal.Signals(number).name
        hint = " (often the kernel's, when memory is full)" if number == signal.SIGKILL else ""
        _say(
            f"the job was ended by signal {name}{hint}"
            + (f", or a rank has exited with {code}: mpiexec does not say which" if bare else "")
        )
    elif code:
        _say(f"the job failed with exit code {code}")
    return code


def _say(text: str) -> None:
    start = "\n" if sys.stderr.isatty() else ""  # the cursor may be within a progress line
    print(f"{start}mpigrad: {text}", file=sys.stderr, flush=True)
