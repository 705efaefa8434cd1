"""Start the ranks of a program, and end all of them whatever happens."""

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

from mpigrad.launch.hosts import Host, place_ranks
from mpigrad.launch.mpi_installation import (
    Launcher,
    common_environment,
    find_launcher,
    forwarded_prefixes,
    mpi_library,
)
from mpigrad.runtime.world import MPIError

__all__ = [
    "cores",
    "launch",
    "processes_with",
    "remaining_processes",
]

# ---- Find the processes of a job by a mark in their environment ----


# Processes between a launcher and its ranks.
_HELPERS = ("hydra", "prte", "orted", "mpiexec")


def processes_with(mark: bytes) -> list[int]:
    """Return the ids of other processes with `mark` in their environment (zombies do not)."""
    pids = []
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    pids.append(int(entry.name))
    return pids


def remaining_processes(mpiexec: int, mark: bytes) -> list[tuple[int, str]]:
    """Return (id, name) of the processes that outlive all ranks, which started them.

    Ranks are descendants of `mpiexec`, and orphans are not. Empty while a rank is running.
    """
    left = []
    for pid in processes_with(mark):
        name = _name(pid)
        if pid == mpiexec or not name or name.startswith(_HELPERS):  # or it has just ended
            continue
        if _descends(pid, mpiexec):
            return []
        left.append((pid, name))
    return left


def _descends(pid: int, ancestor: int) -> bool:
    while pid > 1:
        if pid == ancestor:
            return True
        pid = _parent(pid)
    return False


def _name(pid: int) -> str:
    with contextlib.suppress(OSError):
        return pathlib.Path(f"/proc/{pid}/comm").read_bytes().decode(errors="replace").strip()
    return ""


def _parent(pid: int) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        # The name in front may contain blanks and brackets.
        text = pathlib.Path(f"/proc/{pid}/stat").read_bytes()
        return int(text.rpartition(b")")[2].split()[1])
    return 0


# ---- Start the ranks of a program, and end all of them whatever happens ----
#
# The ranks run in their own session, so that Ctrl-C reaches only this process. The first Ctrl-C
# asks the job to save and end (see `mpigrad.checkpoint.schedule`). The launcher ends the job at
# the second Ctrl-C, if the job does not end in time, or at the time limit. No rank outlives the
# launcher.
#
# Only the standard library is imported: the launcher needs neither JAX nor MPI.


TIMED_OUT = 124  # the exit code of timeout(1)
_GRACE = 30.0  # seconds for a job to save after it was asked to end
_KILL_AFTER = 3.0  # seconds between SIGTERM and SIGKILL
_AFTER_ABORT = 5.0  # seconds in which mpiexec ends after a rank's MPI_Abort
_REMAINING = 5.0  # seconds between two searches for processes that outlive the ranks
# Signals that end programs and whose numbers are rarely exit codes.
_ENDING_SIGNALS = {
    *(signal.SIGILL, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE),
    *(signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM),
}
_ENDED_BY_REQUEST = (
    -signal.SIGUSR1,
    128 + signal.SIGUSR1,
)  # exit codes of ranks that do not listen
_MARK = "MPIGRAD_JOB"  # in the environment of every process of a job, orphans included


def cores() -> int:
    """Return the number of physical cores that this process may use."""
    usable = os.sched_getaffinity(0)
    siblings: set[str] = set()
    for cpu in usable:
        file = pathlib.Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            siblings.add(file.read_text())
        except OSError:
            return len(usable)
    return len(siblings)


def rank_environment(
    launcher: Launcher | None, ranks: int, hosts: Sequence[Host] = ()
) -> dict[str, str]:
    """Return the variables that the settings file adds to the environment of ranks.

    Variables that the user has set are kept. All hosts are assumed to have as many cores as this.
    """
    family = launcher.family if launcher else None
    settings = common_environment()
    if family is not None:
        settings |= family.environment
        if os.geteuid() == 0:
            settings |= family.root
        if max(place_ranks(hosts, ranks)) > cores():
            settings |= family.oversubscribed
    added: dict[str, str] = {}
    for name, value in settings.items():
        user_value = os.environ.get(name)
        separator = {"XLA_FLAGS": " ", "GLIBC_TUNABLES": ":"}.get(name)
        if user_value is None or (separator and not user_value.strip()):
            added[name] = value
        elif name == "XLA_FLAGS" and not user_value.lstrip().startswith("-"):
            pass  # XLA_FLAGS is the name of a file with flags
        elif separator:
            words = [w for w in value.split(separator) if w.split("=")[0] not in user_value]
            # XLA stops reading flags at the first word that does not begin with a dash.
            last = [w for w in words if name == "XLA_FLAGS" and not w.startswith("-")]
            first = [w for w in words if w not in last]
            added[name] = separator.join([*first, user_value, *last])
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
    """Run a Python program on `ranks` ranks and wait until it ends.

    Parameters
    ----------
    program
        The arguments of `python`: a file or `-m module`, and the arguments of the program.
    ranks
        Number of ranks.
    timeout
        Seconds after which the job is ended.
    grace
        Seconds for the job to save and end after the first Ctrl-C or SIGTERM. They begin after a
        report that is under way (see `checkpoint.Interruption.hold_grace_time`).
    environment
        Additional variables for the ranks.
    hosts
        Hosts for the ranks. Default: this host, or the nodes of a batch job.

    Returns
    -------
    int
        The exit code of the job: 0, that of the failed rank, or 124 at the time limit.

    Raises
    ------
    MPIError
        If MPI or its launcher is missing, or the launcher lacks an option for hosts.
    ValueError
        If the hosts take fewer ranks.
    """
    launcher = _find_launcher(ranks, hosts)
    host_words = _host_words(launcher, ranks, hosts) if launcher else []
    # Ranks and launcher communicate through files, on several hosts in a directory that all see.
    common = os.getcwd() if hosts and os.access(os.getcwd(), os.W_OK) else None
    prefix = ".mpigrad-" if common else "mpigrad-"
    with tempfile.TemporaryDirectory(prefix=prefix, dir=common) as directory:
        stop_file = pathlib.Path(directory) / "stop"
        expected = {"MPIGRAD_EXPECTED_SIZE": str(ranks)} if launcher else {}
        added = rank_environment(launcher, ranks, hosts) | {
            **expected,
            "MPIGRAD_STOP_FILE": str(stop_file),
            "MPIGRAD_TERMINAL": "1" if sys.stdout.isatty() else "0",
            _MARK: uuid.uuid4().hex,
            **(environment or {}),
        }
        command = [launcher.path] if launcher else []
        family = launcher.family if launcher else None
        if family is not None:
            command += [word.format(ranks=ranks) for word in family.count]
            command += host_words
            users = [name for name in os.environ if name.startswith(forwarded_prefixes())]
            for name in sorted({*added, *users}):
                command += [word.format(name=name) for word in family.forward]
        # mpi4py's runner ends the job at an exception or sys.exit(n) of one rank.
        command += [sys.executable, "-m", "mpi4py", *program]
        job = _Job(
            command,
            os.environ | added,
            stop_file,
            timeout,
            grace,
            spread=bool(hosts),
            # With srun and PBS, a daemon is the parent of the ranks.
            descending=family is not None
            and family.key != "slurm"
            and "PBS_JOBID" not in os.environ,
            bare_signals=family is not None and family.key == "mpich",
        )
        return job.run()


def _find_launcher(ranks: int, hosts: Sequence[Host]) -> Launcher | None:
    """Return the launcher of mpi4py's MPI. One rank on this host needs none: None without one."""
    try:
        return find_launcher(mpi_library())
    except MPIError:
        if ranks > 1 or hosts or "MPIGRAD_MPIEXEC" in os.environ:
            raise
        return None


def _host_words(launcher: Launcher, ranks: int, hosts: Sequence[Host]) -> list[str]:
    """Return the launcher's options for the hosts and their numbers of ranks."""
    if not hosts:
        return []
    if launcher.family is None or not launcher.family.hosts:
        raise MPIError(
            f"mpigrad: --hosts: {launcher} does not accept hosts. Leave --hosts out: a batch job "
            "uses its own nodes."
        )
    counts = place_ranks(hosts, ranks)
    text = ",".join(f"{h.name}:{n}" for h, n in zip(hosts, counts, strict=True) if n > 0)
    return [word.format(hosts=text) for word in launcher.family.hosts]


def become_rank(program: Sequence[str]) -> NoReturn:
    """Replace this process, which a launcher started as a rank, by a rank of the program."""
    added = rank_environment(None, 1) | {"MPIGRAD_TERMINAL": "1" if sys.stdout.isatty() else "0"}
    command = [sys.executable, "-m", "mpi4py", *program]
    os.execve(sys.executable, command, os.environ | added)


class _Job:
    """One mpiexec and all its processes."""

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
        self.spread = spread  # on hosts that do not see the stop file
        self.descending = descending  # ranks are descendants of mpiexec
        self.bare_signals = bare_signals  # mpiexec returns the number of a signal unchanged
        self.requests: list[int] = []
        self.seen_aborted: float | None = None  # when this process has seen the file first

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
                    f"mpigrad: cannot start {shlex.join(self.command)}: {error}. "
                    "Run `mpigrad doctor`."
                ) from None
            try:
                code = self._wait(process)
            finally:
                self._end(process)
            failed = self._say_cause()
            # Ranks that all have the same error end without MPI_Abort, and with code 0.
            return code or int(failed)

    def _say_cause(self) -> bool:
        """Print, as the last text, why a rank ended the job, if one did (see guard/failure.py)."""
        with contextlib.suppress(OSError):
            text = self.stop_file.with_name("cause").read_text(errors="replace")
            print(text.rstrip(), file=sys.stderr, flush=True)
            return True
        return False

    def _wait(self, process: subprocess.Popen[bytes]) -> int:
        """Wait until the job ends, or end it, and return its exit code."""
        start = time.monotonic()
        limit = start + self.timeout
        asked: float | None = None
        look = start + _REMAINING
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(0.1)
                by_request = status in _ENDED_BY_REQUEST or (
                    self.bare_signals and status == signal.SIGUSR1
                )
                if asked is not None and self.spread and by_request:
                    return 128 + self.requests[0]  # no rank listened
                return _report(status, self.bare_signals, self._who_left())
            now = time.monotonic()
            if self._aborted_long_ago():
                _say("mpiexec waits for a host that does not answer; ending mpiexec")
                process.kill()  # SIGTERM would not end it
                return 1
            if now > limit:
                _say(f"the time limit of {self.timeout:g} s is over; ending all ranks")
                return TIMED_OUT
            if now > look:
                look = math.inf if self._report_remaining(process.pid) else now + _REMAINING
            if not self.requests:
                continue
            name = signal.Signals(self.requests[0]).name
            if asked is None:
                if not (self.spread or self._has_listener()):
                    _say(f"{name}: ending all ranks, none of which was ready to save")
                    return 128 + self.requests[0]
                asked = now
                self.stop_file.touch()
                if self.spread:  # mpiexec passes it to all ranks, which end by it or save
                    process.send_signal(signal.SIGUSR1)
                again = "Ctrl-C again" if name == "SIGINT" else "a second signal"
                _say(f"{name}: asked the job to save and end ({again} ends it at once)")
            elif len(self.requests) > 1:
                _say(f"{signal.Signals(self.requests[-1]).name} again: ending all ranks")
                return 128 + self.requests[-1]
            elif self.stop_file.with_name("held").exists():
                asked = now  # a report is under way
            elif now > asked + self.grace:
                _say(f"the job did not end within {self.grace:g} s; ending all ranks")
                return 128 + self.requests[0]

    def _who_left(self) -> tuple[int, int] | None:
        """Return the exit code and rank of the first rank that exited (see guard/failure.py)."""
        with contextlib.suppress(OSError, ValueError):
            code, rank = self.stop_file.with_name("left").read_text().split()
            return int(code) % 256, int(rank)
        return None

    def _report_remaining(self, mpiexec: int) -> bool:
        """Name the processes for which mpiexec waits after its ranks have ended, if any."""
        left = [] if self.spread or not self.descending else remaining_processes(mpiexec, self.mark)
        if left:
            time.sleep(0.2)  # for ranks or children that were about to end
            left = [one for one in remaining_processes(mpiexec, self.mark) if one in left]
        if left:
            names = ", ".join(f"{pid} ({name})" for pid, name in left)
            _say(
                "all ranks have ended, but mpiexec waits for processes that they started and that "
                f"hold their output open: {names}. Wait for them in a rank, or redirect their "
                "output."
            )
        return bool(left)

    def _has_listener(self) -> bool:
        return self.stop_file.with_name("listening").exists()

    def _aborted_long_ago(self) -> bool:
        """Return True if a rank called Abort, but mpiexec has not ended since."""
        with contextlib.suppress(OSError):
            if self.seen_aborted is None and self.stop_file.with_name("aborted").exists():
                # Not the time of the file, which may come from the clock of another host.
                self.seen_aborted = time.monotonic()
        return self.seen_aborted is not None and time.monotonic() - self.seen_aborted > _AFTER_ABORT

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
        """End mpiexec, which ends its ranks on all hosts, and then all remaining processes."""
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_KILL_AFTER)
        for wait in (0.0, 0.2, 0.5, 1.0):  # one search may miss a rank that is just starting
            time.sleep(wait)
            left = processes_with(self.mark)
            if not left and process.poll() is not None:
                return
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        process.wait()


_prctl = getattr(
    ctypes.CDLL(None), "prctl", None
)  # looked up before the fork, after which only the call is safe


def _end_with_parent() -> None:
    """Send SIGTERM to mpiexec if the launcher itself is killed (PR_SET_PDEATHSIG)."""
    if _prctl is not None:
        _prctl(1, int(signal.SIGTERM), 0, 0, 0)


def _report(status: int, bare_signals: bool, left: tuple[int, int] | None) -> int:
    """Print how a job failed, if it did, and return its exit code.

    `left` is the exit code and rank of the first rank that exited with one.
    """
    code = status if status >= 0 else 128 - status
    if left is not None and code == left[0] != 0:
        _say(f"the job failed with exit code {code}: rank {left[1]} was the first to exit with it")
        return code
    bare = bare_signals and code in _ENDING_SIGNALS
    number = code if bare else code - 128
    if number in {s.value for s in signal.Signals}:
        name = signal.Signals(number).name
        hint = " (often sent by the kernel if memory is full)" if number == signal.SIGKILL else ""
        _say(
            f"the job was ended by signal {name}{hint}"
            + (f", or a rank exited with {code}: mpiexec does not report which" if bare else "")
        )
    elif code:
        _say(f"the job failed with exit code {code}")
    return code


def _say(text: str) -> None:
    start = "\n" if sys.stderr.isatty() else ""  # the cursor may be in a progress line
    print(f"{start}mpigrad: {text}", file=sys.stderr, flush=True)
