"""Texts that do not fit into native memory are cut between characters."""

from __future__ import annotations

import ctypes

import pytest

from mpigrad.guard import board as b
from mpigrad.guard.failure import current_board
from mpigrad.runtime import call_sites
from mpigrad.runtime.call_sites import utf8, utf8_end
from mpigrad.runtime.native import library

pytestmark = pytest.mark.ranks(1)


@pytest.mark.parametrize("character", ["a", "ж", "算", "𝛁"])
def test_texts_are_cut_between_characters(character: str) -> None:
    for room in range(12):
        count = room // len(character.encode())
        assert utf8(character * 20, room).decode() == character * count
        assert utf8_end(character * 20, room).decode() == character * count
    assert utf8(character, 4).decode() == utf8_end(character, 4).decode() == character


@pytest.mark.parametrize("folder", ["ж" * 90, "算" * 60])
def test_the_line_is_kept_in_a_folder_with_a_long_name(folder: str) -> None:
    board = current_board()
    site = call_sites._add(call_sites._text(f"/{folder}/программа.py", 12), "")
    text = bytes(board.slots[board.own_index]["sites"][site]).split(b"\0")[0].decode()
    assert text.startswith(f"...{folder[0]}")
    assert text.endswith("/программа.py:12")


def test_native_code_cuts_between_characters() -> None:
    board = current_board()
    mine = board.slots[board.own_index]
    begun = ctypes.c_bool()
    library().mpigrad_begin(("ж" * b.NAME).encode(), -1, 0, True, begun)
    text = bytes(mine["operation"]).split(b"\0")[0]
    library().mpigrad_end()
    assert begun
    assert text.decode() == "ж" * ((b.NAME - 1) // 2)
