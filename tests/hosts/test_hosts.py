"""Jobs on several hosts: the same numbers as on one, and an end when a host is lost."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from network import Network, children

from launching import command
from mpigrad.launcher import rank_environment
from mpigrad.mpi_installation import find_launcher, mpi_library

HERE = pathlib.Path(__file__).resolve().parent
LIMIT = 200.0  # seconds; the machine may be busy
TIMEOUT = 6.0  # MPIGRAD_TIMEOUT, of jobs that lose a host


@dataclasses.dataclass(frozen=True)
class Done:
    """How a job has ended."""

    code: int
    output: str
    errors: str
    seconds: float


class Job:
    """A program on a host, which starts others elsewhere."""

    def __init__(self, network: Network, host: str, words: list[str], **environment: str) -> None:
        self.process = network[host].start(
            words,
            _environment(network) | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.said = ""

    def until(self, words: str) -> None:
        """Wait for a line with these words."""
        assert self.process.stdout is not None
        while words not in (line := self.process.stdout.readline()):
            assert line, self.said + self.process.communicate()[1]
            self.said += line

    def send(self, number: signal.Signals) -> None:
        """A signal to the program itself."""
        (program,) = children(self.process.pid)
        os.kill(program, number)

    def end(self) -> Done:
        start = time.monotonic()
        try:
            output, errors = self.process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            for child in children(self.process.pid):
                os.kill(child, signal.SIGKILL)
            output, errors = self.process.communicate()
            raise AssertionError(f"it did not end:\n{output}{errors}") from None
        seconds = time.monotonic() - start
        return Done(self.process.returncode, self.said + output, errors, seconds)


def _environment(network: Network) -> dict[str, str]:
    """A user's environment on the host where a job is started."""
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
    """A file that names hosts."""
    name = "-".join(f"{host}.{n}" for host, n in slots.items())
    file = shared / f"hosts-{name}"
    file.write_text("".join(f"{host} slots={n}\n" for host, n in slots.items()))
    return file


@pytest.fixture(autouse=True)
def _nothing_left(network: Network) -> Iterator[None]:
    """No process of a job is left on any host, and all hosts are there for the next test."""
    yield
    left = []
    for host in network.hosts.values():
        limit = time.monotonic() + 10
        while (alive := host.processes()) and time.monotonic() < limit:
            time.sleep(0.2)
        if alive:
            left += [
                (host.name, pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()[:100])
                for pid in alive
            ]
            host.reboot()
    assert not left


@pytest.fixture(scope="module")
def alone(network: Network, shared: pathlib.Path) -> dict[str, Any]:
    """The gradients of four ranks on one host."""
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
    """Two ranks on each of two hosts, neither of which is the one where mpiexec runs; guarded."""
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
