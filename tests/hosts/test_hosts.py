"""Jobs on several hosts give the results of one host, and end if a host is lost."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import IO, Any

import numpy as np
import pytest
from network import Network, children

from launching import PROGRAMS, command
from mpigrad.launch.launcher import rank_environment
from mpigrad.launch.mpi_installation import find_launcher, mpi_library
from mpigrad.sparse.solvers.libraries import hypre_available

HERE = pathlib.Path(__file__).resolve().parent
LIMIT = 200.0  # seconds, for a busy machine
TIMEOUT = 6.0  # MPIGRAD_TIMEOUT, of jobs that lose a host


@dataclasses.dataclass(frozen=True)
class Done:
    """The end of a job."""

    code: int
    output: str
    errors: str
    seconds: float


class Job:
    """A program on a host, which starts programs on other hosts.

    It writes to files: a host that is frozen would hold a pipe open for ever.
    """

    def __init__(self, network: Network, host: str, words: list[str], **environment: str) -> None:
        self.directory = pathlib.Path(tempfile.mkdtemp(prefix="job-", dir=network.shared))
        with self._open("output") as output, self._open("errors") as errors:
            self.process = network[host].start(
                words, _environment(network) | environment, stdout=output, stderr=errors
            )

    def _open(self, name: str) -> IO[bytes]:
        return (self.directory / name).open("wb")

    def _text(self, name: str) -> str:
        return (self.directory / name).read_text()

    def until(self, words: str) -> None:
        """Wait until the program prints these words."""
        limit = time.monotonic() + LIMIT
        while words not in self._text("output"):
            assert self.process.poll() is None and time.monotonic() < limit, self._text("errors")
            time.sleep(0.01)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the program itself."""
        (program,) = children(self.process.pid)
        os.kill(program, number)

    def end(self) -> Done:
        """Wait until the program ends."""
        start = time.monotonic()
        try:
            self.process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            self.send(signal.SIGKILL)
            said = self._text("output") + self._text("errors")
            raise AssertionError(f"it did not end:\n{said}") from None
        seconds = time.monotonic() - start
        return Done(self.process.returncode, self._text("output"), self._text("errors"), seconds)


def _environment(network: Network) -> dict[str, str]:
    """Return a user's environment on the host that starts a job."""
    ours = {n: v for n, v in os.environ.items() if n not in ("MPIGRAD_GUARD", "MPIGRAD_TEST_HOSTS")}
    return ours | {
        "COLUMNS": "100",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # compiling dominates
        "TMPDIR": "/dev/shm",  # a node's own
        "OMPI_MCA_plm_rsh_agent": network.shell,
        "OMPI_MCA_mpi_yield_when_idle": "1",  # the hosts share this machine's cores
        "OMPI_MCA_hwloc_base_binding_policy": "none",
    }


def hosts_file(shared: pathlib.Path, **slots: int) -> pathlib.Path:
    """Write a hosts file."""
    name = "-".join(f"{host}.{n}" for host, n in slots.items())
    file = shared / f"hosts-{name}"
    file.write_text("".join(f"{host} slots={n}\n" for host, n in slots.items()))
    return file


def _ended(network: Network, name: str) -> None:
    limit = time.monotonic() + 30
    while network[name].processes():
        assert time.monotonic() < limit, f"processes are left on {name}"
        time.sleep(0.2)


@pytest.fixture(autouse=True)
def _nothing_left(network: Network) -> Iterator[None]:
    """Check that no process is left on any host, and that all hosts are ready."""
    yield
    for host in network.hosts.values():
        try:
            _ended(network, host.name)
        except AssertionError:
            host.reboot()
            raise


@pytest.fixture(scope="module")
def alone(network: Network, shared: pathlib.Path) -> dict[str, Any]:
    """Return the gradients of four ranks on one host."""
    file = shared / "alone.npz"
    done = Job(network, "node1", command("launch", "-n", 4, HERE / "gradients.py", file)).end()
    assert done.code == 0, done.errors
    return dict(np.load(file))


def _same(file: pathlib.Path, alone: dict[str, Any]) -> None:
    found = np.load(file)
    for name, gradient in alone.items():
        assert np.max(np.abs(gradient)) > 0
        assert np.max(np.abs(found[name] - gradient)) <= 1e-12 * np.max(np.abs(gradient)), name


def test_gradients_by_mpigrad_launch(
    network: Network, shared: pathlib.Path, alone: dict[str, Any]
) -> None:
    """One rank on each of four hosts."""
    file = shared / "launched.npz"
    hosts = hosts_file(shared, node1=1, node2=1, node3=1, node4=1)
    job = Job(network, "node1", command("launch", "--hosts", hosts, HERE / "gradients.py", file))
    done = job.end()
    assert done.code == 0, done.errors
    _same(file, alone)


def test_gradients_by_mpiexec(
    network: Network, shared: pathlib.Path, alone: dict[str, Any]
) -> None:
    """Run two ranks on each of two hosts with the guard. mpiexec runs on a third host."""
    file = shared / "mpiexec.npz"
    launcher = find_launcher(mpi_library())
    environment = rank_environment(launcher, 4) | {"MPIGRAD_GUARD": "1"}
    handed = [
        w for n in (*environment, "PYTHONPATH") if n in os.environ | environment for w in ("-x", n)
    ]
    words = [launcher.path, "-n", "4", "--host", "node3:2,node2:2", *handed]
    program = [sys.executable, "-m", "mpi4py", str(HERE / "gradients.py"), str(file)]
    done = Job(network, "node1", [*words, *program], **environment).end()
    assert done.code == 0, done.errors
    _same(file, alone)


def _run(network: Network, host: str, *words: object) -> Done:
    return Job(network, host, command(*words)).end()


def test_a_problem_runs_on_hosts(network: Network, shared: pathlib.Path) -> None:
    """`mpigrad run --hosts` writes what the same command on one host writes."""
    few = ("--cells", 14, 12, "--iterations", 3, "--kappa", "cells", "--tolerance", 1e-12)
    hosts = hosts_file(shared, node2=1, node3=1)
    for start, out in ((("-n", 2), "poisson-1"), (("--hosts", hosts), "poisson-2")):
        done = _run(network, "node1", "run", "poisson", *start, *few, "--out", shared / out)
        assert done.code == 0, done.errors
    one, two = (np.load(shared / out / "cells.npy") for out in ("poisson-1", "poisson-2"))
    assert np.ptp(one) > 0
    assert np.allclose(one, two, rtol=1e-10, atol=1e-12)


def test_the_doctor_looks_at_hosts(network: Network, shared: pathlib.Path) -> None:
    hosts = hosts_file(shared, node1=1, node4=1)
    done = _run(network, "node1", "doctor", "--hosts", hosts)
    assert done.code == 0, done.output + done.errors
    assert "self-test on 2 ranks of node1, node4" in done.output


def test_a_rank_that_fails_is_named_with_its_host(network: Network, shared: pathlib.Path) -> None:
    hosts = hosts_file(shared, node2=1, node3=2)  # rank 1 is the one that fails
    done = _run(network, "node1", "launch", "--hosts", hosts, HERE / "failing.py")
    assert done.code == 1
    assert "ValueError: rank 1 has had enough" in done.errors
    assert "mpigrad: rank 1 of 3 on node3 failed; ending all ranks" in done.errors


class Run:
    """Start programs/resumed.py with four ranks repeatedly, on different hosts."""

    def __init__(self, network: Network, shared: pathlib.Path, name: str) -> None:
        self.network, self.shared, self.directory = network, shared, shared / name

    def start(self, **slots: int) -> Job:
        program = (PROGRAMS / "resumed.py", "loop", self.directory, 120)
        where = ("--hosts", hosts_file(self.shared, **slots)) if slots else ("-n", 4)
        words = command("launch", *where, *program)
        # Through shared memory, the ranks of one host are added up in another order.
        settings = {"MPIGRAD_TIMEOUT": f"{TIMEOUT:g}", "MPIGRAD_SHARED_MEMORY": "0"}
        return Job(self.network, "node1", words, **settings)

    def finish(self, **slots: int) -> np.ndarray:
        done = self.start(**slots).end()
        assert done.code == 0, done.errors
        return np.load(self.directory / "result.npy")


@pytest.mark.timeout(900)
def test_a_run_goes_on_when_hosts_are_lost(network: Network, shared: pathlib.Path) -> None:
    """A cut link, a host that is frozen, one that is shut down: the job ends, and says which.

    Each time the run goes on on other hosts, to the same bits as if nothing had happened.
    """
    whole = Run(network, shared, "whole").finish()
    run = Run(network, shared, "lost")

    job = run.start(node2=2, node3=2)  # none of them the one where it is started
    job.until("step 10\n")
    job.send(signal.SIGINT)
    done = job.end()
    assert (done.code, "stopped" in done.output) == (0, True), done.errors
    assert "SIGINT: asked the job to save and end" in done.errors

    for lost, slots, how in (
        ("node2", {"node3": 2, "node2": 1, "node4": 1}, network["node2"].cut),
        ("node3", {"node1": 2, "node3": 1, "node4": 1}, network["node3"].freeze),
        ("node4", {"node1": 2, "node2": 1, "node4": 1}, network["node4"].shut_down),
    ):
        job = run.start(**slots)
        job.until("\nstep ")  # the first that it says, wherever it went on
        how()
        done = job.end()
        assert done.code not in (0, 124), done
        assert done.seconds < TIMEOUT + 30, done
        assert "step 120" not in done.output
        if lost == "node4":  # its connections are closed: mpiexec notices
            assert "on node node4" in done.errors, done
        else:
            assert f"on {lost}, which does not answer:\n  rank 2: unknown" in done.errors, done
            assert f"on {next(iter(slots))}:\n  rank" in done.errors
            assert f"Check {lost}: stopped, or cut off" in done.errors
        if lost == "node2":  # alone, its ranks and what has started them end by themselves
            _ended(network, "node2")
            network["node2"].mend()
        else:
            network[lost].reboot()
    assert np.array_equal(run.finish(node1=2, node3=2), whole)


@pytest.mark.skipif(not hypre_available(), reason="no hypre")
def test_a_host_that_is_lost_in_a_solve(network: Network, shared: pathlib.Path) -> None:
    """A solve by hypre may take any time, but not if the host of a rank is cut off."""
    hosts = hosts_file(shared, node1=1, node2=1)
    words = command("launch", "--hosts", hosts, PROGRAMS / "stopped_solve.py", "endless")
    job = Job(network, "node1", words, MPIGRAD_TIMEOUT=f"{TIMEOUT:g}")
    job.until("solves begin")
    time.sleep(2.0 * TIMEOUT)  # of solves while all hosts are there
    network["node2"].cut()
    done = job.end()
    assert done.code not in (0, 124), done
    assert done.seconds < 2 * TIMEOUT + 30, done
    assert "on node2, which does not answer:\n  rank 1: unknown" in done.errors, done
    assert re.search(r"rank 0: has waited \d+ s in solve at .*stopped_solve.py:\d+", done.errors)
    _ended(network, "node2")
    network["node2"].mend()
