"""A rank communicates from one thread. A second thread is refused before it touches anything."""

from __future__ import annotations

import ctypes
import pathlib
import subprocess
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpigrad as mg
from launching import PROGRAMS
from mpigrad.communicator import BlockingCall, Communicator
from mpigrad.guard import board as b
from mpigrad.guard.failure import current_board
from mpigrad.runtime.call_sites import call_site
from mpigrad.runtime.native import library
from mpigrad.sparse import PCG, BoomerAMG, Pattern, hypre_available
from mpigrad.sparse.solvers import hypre


@pytest.mark.ranks(1)
def test_two_threads_are_never_in_an_operation_at_once(tmp_path: pathlib.Path) -> None:
    source, built = PROGRAMS / "two_threads.c", tmp_path / "two_threads.so"
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-pthread", "-o", built, source], check=True)
    board, lib = current_board(), library()
    mine = board.slots[board.own_index]
    before, turns = int(mine["serial"]), 300_000
    pointers = [ctypes.cast(f, ctypes.c_void_p) for f in (lib.mpigrad_begin, lib.mpigrad_end)]
    allowed = ctypes.CDLL(str(built)).two_threads(*pointers, turns)
    assert 0 < allowed <= 2 * turns
    # Each operation counts twice, and only its thread writes the slot.
    assert int(mine["serial"]) == before + 2 * allowed
    assert int(mine["state"]) == b.IN_PYTHON


@pytest.mark.ranks(1)
@pytest.mark.skipif(not hypre_available(), reason="no hypre")
def test_a_solve_by_hypre_is_an_operation_of_its_thread(comm: Communicator) -> None:
    pattern = Pattern.from_coo(np.arange(4), np.arange(4), 4, comm)
    method, none = PCG(preconditioner=BoomerAMG()), jnp.zeros((1, 0))

    @mg.jit
    def run(b: jax.Array) -> jax.Array:  # without the messages that `solve` sends before
        arguments = method, pattern, jnp.ones((1, 4)), b, none, none[0], jnp.zeros((1, 1, 0, 4))
        return hypre.run(*arguments, throw=True, site=call_site())[0]

    b = jnp.ones((1, 4))
    run(b).block_until_ready()
    errors: list[BaseException] = []

    def solve_again() -> None:
        try:
            run(2 * b).block_until_ready()
        except BaseException as error:
            errors.append(error)

    second = threading.Thread(target=solve_again)
    with BlockingCall("a call of the main thread"):
        second.start()
        second.join()
    assert "solve, " in str(errors[0])
    assert "another thread of this rank is in an operation" in str(errors[0])
    assert float(run(b)[0, 0]) == 1.0
