"""A daemon that does not end is ended, unless it serves another job."""

import os
import pathlib
import subprocess
import sys

import pytest

from mpigrad.guard import end_daemon

pytestmark = pytest.mark.launcher

# A daemon with one rank of each job.
DAEMON = """
import os, subprocess, sys, time
ranks = [
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"], env={"JOB": job})
    for job in sys.argv[1:]
]
print("ready", *(rank.pid for rank in ranks), flush=True)
time.sleep(100)
"""


@pytest.mark.parametrize("jobs", [["1"], ["1", "1"], ["1", "2"], []])
def test_only_the_daemon_of_this_job_is_ended(tmp_path, jobs):
    name = tmp_path / "prted"
    name.symlink_to(os.path.realpath(sys.executable))
    daemon = subprocess.Popen(
        [name, "-c", DAEMON, *jobs], stdout=subprocess.PIPE, text=True, env={"PATH": ""}
    )
    assert daemon.stdout is not None
    word, *pids = daemon.stdout.readline().split()
    assert word == "ready"
    try:
        script = pathlib.Path(end_daemon.__file__)
        words = [sys.executable, "-IS", script, str(daemon.pid), "prted", "JOB=1", "0.4"]
        subprocess.run(words, timeout=30, check=True)
        ended = daemon.poll() is not None or ("2" not in jobs and daemon.wait(timeout=10) < 0)
        assert ended == ("2" not in jobs)
    finally:
        daemon.kill()
        daemon.wait()
        for pid in map(int, pids):
            os.kill(pid, 9)
