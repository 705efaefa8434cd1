"""Broken programs end in seconds, with a message that names rank, operation and source line."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from launching import PROGRAMS, mpigrad, no_orphans, run
from mpigrad.guard import timeout_seconds
from mpigrad.mpi_installation import find_launcher, mpi_library

pytestmark = pytest.mark.launcher

# name of the program in tests/programs/broken.py -> what its error says
BROKEN = {
    "one_rank_raises": ["ArithmeticError: the mesh of rank 1 is empty", "rank 1 of 2 failed"],
    "one_rank_raises_inside_jit": ["check at ", "broken.py:", "x is 2, not negative", "rank 1"],
    "longer_message_than_expected": ["rank 1 of 2: recv at ", "give the receiver the shape"],
    "shorter_message_than_expected": ["rank 1 of 2: recv at ", "8 bytes where 12", "give the"],
    "one_rank_leaves_out_an_allreduce": ["rank 0 of 2 has waited", "allreduce at ", "sendrecv at "],
    "both_receive_first": ["rank 0 of 2 has waited", "rank 1 of 2 has waited", "recv at "],
    "wrong_tag": ["rank 1 of 2 has waited", "recv at ", "barrier at "],
    "plain_jax_grad_with_a_constant_on_one_rank": ["in allreduce at the adjoint of "],
    "one_rank_makes_no_communicator": ["rank 0 of 2 has waited", "in Split at ", "barrier at "],
    "pull_back_on_one_rank_only": ["in allreduce at the adjoint of ", "barrier at "],
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_programs_end(name: str) -> None:
    with no_orphans() as mark:
        start = time.monotonic()
        done = mpigrad("launch", "-n", 2, PROGRAMS / "broken.py", name, MPIGRAD_TIMEOUT="4", **mark)
        seconds = time.monotonic() - start
    assert done.returncode != 0
    for text in BROKEN[name]:
        assert text in done.stderr, done.stderr
    assert "broken.py" in done.stderr
    assert seconds < 60  # the import of JAX on a busy machine included


def mpiexec(*words: object) -> subprocess.CompletedProcess[str]:
    """Two ranks under the bare launcher of this MPI, as a user's own script would start them."""
    launcher = str(find_launcher(mpi_library()).path)
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return run([launcher, "-n", "2", sys.executable, *map(str, words)], **root)


def test_a_failing_rank_ends_all_under_plain_mpiexec() -> None:
    done = mpiexec(PROGRAMS / "broken.py", "one_rank_raises")
    assert done.returncode != 0
    assert "ArithmeticError: the mesh of rank 1 is empty" in done.stderr


def test_a_rank_without_messages_keeps_nobody_waiting() -> None:
    done = mpigrad("launch", "-n", 3, PROGRAMS / "bystander.py", MPIGRAD_TIMEOUT="20")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0: 2.0", "rank 2: 2.0"]


def test_timeout_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MPIGRAD_TIMEOUT", raising=False)
    assert timeout_seconds() == 300
    monkeypatch.setenv("MPIGRAD_TIMEOUT", "2.5")
    assert timeout_seconds() == 2.5
    for wrong in ("soon", "-1", "nan"):
        monkeypatch.setenv("MPIGRAD_TIMEOUT", wrong)
        with pytest.raises(ImportError, match="MPIGRAD_TIMEOUT"):
            timeout_seconds()


def test_import_after_jax_has_computed() -> None:
    """With several ranks, messages could overtake each other: refused at import."""
    code = "import jax.numpy as jnp; jnp.ones(2).sum(); import mpigrad; print('imported')"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    alone = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment
    )
    assert alone.stdout == "imported\n", alone.stderr
    done = mpiexec(PROGRAMS / "late_import.py")
    assert done.returncode != 0
    assert "Import mpigrad before the first JAX computation" in done.stderr
