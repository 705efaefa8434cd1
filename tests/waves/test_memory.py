"""Memory that gradients of waves need in a process."""

import json
import sys

import pytest

from launching import PROGRAMS, run


@pytest.mark.full("its program takes long; the kernels that it measures are tested elsewhere")
@pytest.mark.launcher
def test_a_gradient_stays_within_its_memory():
    """Apart from a step's fields of 2 MiB each. All 3000 steps: 70 MB, elastic waves 240 MB."""
    mebibyte = 2**20
    done = run([sys.executable, str(PROGRAMS / "wave_memory.py"), str(16 * mebibyte)])
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [name for name, *_ in found] == ["pressure", "velocities"]
    for name, within, stored, equal in found:
        assert equal, name
        assert within < 36 * mebibyte, found
        assert stored > 50 * mebibyte, found
