"""Hosts files and batch scripts, and errors of the command line about them."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys

import pytest

from launching import LIMIT, PROGRAMS, mpigrad, no_orphans, outside
from mpigrad.launch import hosts as slurm
from mpigrad.launch.hosts import Host, place_ranks, read_hosts

pytestmark = pytest.mark.launcher


def test_hosts_are_read_and_filled_in_order(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# two nodes\nnode1 slots=2\n\nnode2:3  # more\n10.0.0.3\nnode1\n")
    hosts = read_hosts(file)
    assert hosts == (Host("node1", 3), Host("node2", 3), Host("10.0.0.3", 1))
    assert place_ranks(hosts, 5) == [3, 2, 0]
    assert place_ranks((), 5) == [5]
    with pytest.raises(ValueError, match="-n: got 8 ranks, but the hosts take 7"):
        place_ranks(hosts, 8)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("# nobody\n", "expected at least one host"),
        ("node1\nnode2 slots=many\n", "line 2: expected a host, got 'node2 slots=many'"),
        ("-x\n", "line 1: expected a host, got '-x'"),
        ("node1 slots=0\n", "line 1: node1 must take at least 1 rank, got 0"),
    ],
)
def test_rejects_invalid_hosts_files(text: str, said: str, tmp_path: pathlib.Path) -> None:
    file = tmp_path / "hosts"
    file.write_text(text)
    with pytest.raises(ValueError, match=said):
        read_hosts(file)


def test_rejects_invalid_host_options_before_a_launch(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("node1 slots=2\n")
    program = PROGRAMS / "say.py"
    for options, environment, said in (
        (("--hosts", tmp_path / "none"), {}, "--hosts: [Errno 2]"),
        (("--hosts", file, "-n", 3), {}, "--hosts: -n: got 3 ranks, but the hosts take 2."),
        (
            ("--hosts", file),
            {"PMI_SIZE": "2", "PMI_RANK": "0"},
            "has started the ranks",
        ),
        (("--hosts", file, "--print-script", "slurm"), {}, "the batch system places the ranks"),
    ):
        done = mpigrad("launch", *options, program, **environment)
        assert done.returncode == 2
        assert said in done.stderr
        assert done.stdout == ""


def test_script_of_an_application() -> None:
    done = mpigrad(
        *("run", "poisson", "-n", 64, "--timeout=90000", "--cells", 40, 30, "--print-script"),
        *("slurm", "--out", "my results"),
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "#!/bin/bash"
    for line in ("--job-name=poisson", "--ntasks=64", "--time=1-01:00:00", "--requeue"):
        assert f"#SBATCH {line}" in lines
    words = "run poisson --cells 40 30 --out 'my results' --resume &"
    assert f"    {sys.executable} -m mpigrad {words}" in lines
    assert subprocess.run(["bash", "-n"], input=done.stdout, text=True).returncode == 0


def test_an_application_without_saves_is_not_queued_again() -> None:
    script = slurm.slurm(["run", "acoustic"], "acoustic", 4, float("inf"), requeue=False)
    assert "requeue" not in script
    assert "--signal" not in script
    assert script.endswith("-m mpigrad run acoustic\n")
    assert "--time=01:00:00" in script


SRUN = """#!/bin/sh
while [ "${1#--}" != "$1" ]; do shift; done
exec "$@"
"""
SCONTROL = """#!/bin/sh
echo "scontrol $*"
"""
ASKED = """
import sys, time
from mpigrad import checkpoint
with checkpoint.listen() as stop:
    print("working", flush=True)
    while not stop.requested():
        time.sleep(0.05)
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize(("code", "again"), [(0, True), (3, False)])
def test_a_job_that_has_saved_is_queued_again(
    code: int, again: bool, tmp_path: pathlib.Path
) -> None:
    """Replace srun by a script that runs its command, and scontrol by one that records the call."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("asked.py", ASKED)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    words = ("launch", "--print-script", "slurm", "-n", 1, tmp_path / "asked.py", code)
    script = mpigrad(*words)
    assert script.returncode == 0, script.stderr
    slurm = {"SLURM_JOB_ID": "17", "SLURM_CPUS_PER_TASK": "1"}
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    with no_orphans() as mark:
        job = subprocess.Popen(
            ["bash", "-c", script.stdout],
            stdout=subprocess.PIPE,
            text=True,
            env=outside() | slurm | path | mark,
        )
        assert job.stdout is not None
        assert job.stdout.readline() == "working\n"
        job.send_signal(signal.SIGUSR1)
        said, _ = job.communicate(timeout=LIMIT)
    assert said == ("scontrol requeue 17\n" if again else "")
    assert job.returncode == code
