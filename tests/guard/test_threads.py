"""A rank communicates from one thread. A second thread is refused before it touches anything."""

from __future__ import annotations

import ctypes
import pathlib
import subprocess

import pytest

from launching import PROGRAMS
from mpigrad.guard import board as b
from mpigrad.guard.failure import current_board
from mpigrad.runtime.native import library


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
