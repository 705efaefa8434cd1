"""A disk that is full: all ranks raise, the last whole save is found, and saves go on with room."""

import pathlib
import shlex
import subprocess

import pytest

from launching import PROGRAMS, command, idling, run

pytestmark = [pytest.mark.launcher, pytest.mark.waits]


def test_saves_on_a_full_disk(tmp_path: pathlib.Path) -> None:
    mount = f"mount -t tmpfs -o size=16m tmpfs {shlex.quote(str(tmp_path))}"
    alone = ["unshare", "--mount", "--map-root-user", "sh", "-c"]
    if subprocess.run([*alone, mount], capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a file system in a namespace of their own")
    ballast = f"head -c 4194304 /dev/zero > {shlex.quote(str(tmp_path / 'ballast'))}"
    words = shlex.join(command("launch", "-n", 2, PROGRAMS / "full_disk.py", tmp_path))
    done = run([*alone, f"{mount} && {ballast} && exec {words}"], **idling())
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    (failed,) = {line.partition("step ")[2] for line in lines if "names the directory" in line}
    assert failed.endswith("True")
    step = int(failed.split()[0])
    assert step > 5
    for rank in range(2):
        assert f"rank {rank}: step {failed}" in lines
        assert f"rank {rank}: saved {step} after {step - 1}" in lines
