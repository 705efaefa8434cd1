"""Since when a rank waits, of operations that read no clock."""

from __future__ import annotations

import numpy as np
import pytest

from mpigrad import board as b
from mpigrad.guard import watchdog
from mpigrad.native import UNTIMED, Record


def test_looks_find_when_an_operation_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = np.zeros(1, b.SLOT)
    board = b.Board(np.zeros((), b.HEADER), slots, 0, (0,))
    dog = watchdog.Watchdog(board, 300.0, False, lambda text: None, None)
    record = Record()

    def look(time: int) -> int:
        monkeypatch.setattr(watchdog, "_now", lambda: time)
        return dog._start(record)

    assert look(100) == 0  # in Python
    assert look(200) == 0
    record.start_ns = UNTIMED  # its serial number is not on the board yet
    assert look(5000) == 5000
    slots[0]["serial"] += 1
    assert look(5100) == 5100
    assert look(9000) == 5100
    assert int(slots[0]["since_ns"]) == 5100
    record.calls += 1  # another one, with no look between
    assert look(9500) == 9500
    record.start_ns = 7  # one that says itself since when
    assert look(9900) == 7
    record.start_ns = 0
    assert look(9950) == 0
    assert int(slots[0]["since_ns"]) == 9950
