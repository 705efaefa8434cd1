"""Programs that the guard must accept, and its settings."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from launching import PROGRAMS, command, mpigrad, outside
from mpigrad.guard import timeout_seconds

pytestmark = pytest.mark.launcher


@pytest.mark.full("three ranks; test_a_rank_may_go_on_after_others_have_ended has two")
def test_a_rank_without_messages_does_not_delay_others() -> None:
    done = mpigrad("launch", "-n", 3, PROGRAMS / "bystander.py", MPIGRAD_TIMEOUT="20")
    assert done.returncode == 0, done.stderr
    # Lines of two ranks may meet in the launcher's pipe.
    assert sorted(re.findall(r"rank \d: \d\.\d", done.stdout)) == ["rank 0: 2.0", "rank 2: 2.0"]


OTHERS = pytest.mark.full("most other tests run with these settings")


@pytest.mark.long("nine programs, each with its own operations; without a board")
@pytest.mark.parametrize(
    ("guard", "board"),
    [("1", "0"), *(pytest.param(*c, marks=OTHERS) for c in [("0", "1"), ("1", "1")])],
)
def test_correct_programs_are_accepted(guard: str, board: str) -> None:
    """Without a board messages carry labels, as between hosts."""
    settings = {"MPIGRAD_GUARD": guard, "MPIGRAD_BOARD": board, "MPIGRAD_TIMEOUT": "30"}
    done = mpigrad("launch", "-n", 2, PROGRAMS / "correct.py", **settings)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "all let go\n"
    assert "mpigrad" not in done.stderr


def test_import_in_a_child_of_a_rank_is_an_error(tmp_path: pathlib.Path) -> None:
    """MPI would treat it as the rank that started it, and the job would never end."""
    program = tmp_path / "starts.py"
    program.write_text(
        "import subprocess, sys, mpigrad as mg\n"
        "for words in (['-c', 'import mpigrad'], ['-m', 'mpigrad', 'launch', 'x.py']):\n"
        "    words = [sys.executable, *words]\n"
        "    done = subprocess.run(words, capture_output=True, text=True)\n"
        "    assert 'imported in a child of MPI process' in done.stderr, done.stderr\n"
        "print(f'sum {float(mg.allreduce(float(done.returncode)))}\\n', end='', flush=True)\n"
    )
    done = mpigrad("launch", program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sum 1.0") == 1


def test_a_rank_may_go_on_after_others_have_ended(tmp_path: pathlib.Path) -> None:
    """It computes, and then a thread waits for a disk or a network, which counts as working."""
    program = tmp_path / "goes_on.py"
    program.write_text(
        "import threading, time, mpigrad as mg\n"
        "rank = mg.default_communicator().rank\n"
        "end = time.monotonic() + 4.5 * rank\n"
        "while time.monotonic() < end:\n"
        "    time.sleep(0.001)\n"
        "print(f'rank {rank} is done\\n', end='', flush=True)\n"
        "def write():\n"
        "    time.sleep(5.5 * rank)\n"
        "    print(f'rank {rank} has written\\n', end='', flush=True)\n"
        "threading.Thread(target=write).start()\n"
    )
    done = mpigrad("launch", "-n", 2, program, MPIGRAD_TIMEOUT="3")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("is done") == done.stdout.count("has written") == 2
    assert "The job goes on" in done.stderr
    assert re.search(r"rank 1: has not called any operation yet.* \(now at .*:[45]\)", done.stderr)


def test_a_rank_with_two_devices(tmp_path: pathlib.Path) -> None:
    """An array on both devices, and a program on each."""
    program = tmp_path / "devices.py"
    program.write_text(
        "import jax, jax.numpy as jnp, numpy as np, mpigrad as mg\n"
        "jax.config.update('jax_num_cpu_devices', 2)\n"
        "f, x, (one, two) = mg.jit(lambda x: mg.allreduce(x)), jnp.arange(4.0), jax.devices()\n"
        "mesh = jax.sharding.Mesh(np.array([one, two]), ('i',))\n"
        "both = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('i'))\n"
        "f(jax.device_put(x, one))\n"
        "try:\n"
        "    f(jax.device_put(x, both))\n"
        "except Exception as error:\n"
        "    print(error, end='', flush=True)\n"
        "f(jax.device_put(x, two))\n"
    )
    done = mpigrad("launch", "-n", 2, "--timeout", 60, program)
    assert done.returncode == 1, done.stderr
    for said in (done.stdout, done.stderr):
        assert "all arrays of a rank must be on one device" in said
        assert "Start a rank for each device" in said


@pytest.mark.cases("2", reason="the name of an exchange does not depend on the number of ranks")
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_halo_exchange_has_its_name_in_reports(ranks: int) -> None:
    done = mpigrad("launch", "-n", ranks, PROGRAMS / "halos.py", "leave", MPIGRAD_TIMEOUT="60")
    assert done.returncode == 1, done.stderr
    waits = f"rank {ranks - 2}: in halo_exchange(width=1) of float32["
    assert done.stderr.count(waits) == 1, done.stderr
    assert f" from rank {ranks - 1} at " in done.stderr  # without a tag
    assert "neighbor_alltoallv" not in done.stderr


@pytest.mark.full("a line of its own for a rank that is gone, as in test_broken.py")
def test_a_rank_that_only_imports_mpigrad(tmp_path: pathlib.Path) -> None:
    program = tmp_path / "leaves.py"
    program.write_text(
        "import mpigrad as mg\nif mg.default_communicator().rank == 0: mg.Grid((8,), (1.0,))\n"
    )
    done = mpigrad("launch", "-n", 2, program)
    assert done.returncode == 1
    assert "rank 0: in allgather at " in done.stderr  # the import's last operation, too
    assert "rank 1: has ended, after importing mpigrad\n" in done.stderr


def test_suspended_time_does_not_count(tmp_path: pathlib.Path) -> None:
    program = tmp_path / "waits.py"
    program.write_text(
        "import os, time, jax.numpy as jnp, mpigrad as mg\n"
        "rank = mg.default_communicator().rank\n"
        "print(f'process {os.getpid()}\\n', end='', flush=True)\n"
        "time.sleep(8 * rank)\n"
        "print(f'{mg.allreduce(jnp.ones(2))[0]:g} ranks\\n', end='', flush=True)\n"
    )
    words = command("launch", "-n", 2, program)
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, text=True, env={**outside(), "MPIGRAD_TIMEOUT": "5"}
    ) as job:
        assert job.stdout is not None
        lines = [job.stdout.readline(), job.stdout.readline()]
        processes = [int(re.findall(r"process (\d+)", line)[0]) for line in lines]
        time.sleep(1)  # rank 0 waits
        for process in processes:
            os.kill(process, signal.SIGSTOP)
        time.sleep(5)
        for process in processes:
            os.kill(process, signal.SIGCONT)
        output, _ = job.communicate(timeout=60)
    assert job.returncode == 0
    assert output.count("2 ranks") == 2


@pytest.mark.full("waits for seconds, and depends on how MPI ends such a program")
def test_different_counts_do_not_hang_without_the_guard() -> None:
    """MPI may accept the shorter message without an error. The guard rejects it."""
    program = PROGRAMS / "broken.py"
    done = mpigrad("launch", "-n", 2, program, "fewer_rows_than_others_count", MPIGRAD_TIMEOUT="10")
    assert done.returncode == 0, done.stderr
    assert "has waited" not in done.stderr


def test_timeout_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MPIGRAD_TIMEOUT", raising=False)
    assert timeout_seconds() == 300
    monkeypatch.setenv("MPIGRAD_TIMEOUT", "2.5")
    assert timeout_seconds() == 2.5
    for wrong in ("soon", "-1", "nan"):
        monkeypatch.setenv("MPIGRAD_TIMEOUT", wrong)
        with pytest.raises(ImportError, match="MPIGRAD_TIMEOUT"):
            timeout_seconds()


def test_import_after_jax_has_computed_on_one_rank() -> None:
    """On several ranks it is an error, which test_startup_barrier.py has."""
    code = "import jax.numpy as jnp; jnp.ones(2).sum(); import mpigrad; print('imported')"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    alone = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment
    )
    assert alone.stdout == "imported\n", alone.stderr
