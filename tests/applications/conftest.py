"""Fixtures of the tests of applications."""

from collections.abc import Callable

import pytest
import segy_files


@pytest.fixture(scope="session")
def write_segy() -> Callable[..., None]:
    """Return the function that writes traces to a file. Skip the test without segyio."""
    pytest.importorskip("segyio")
    return segy_files.write_segy
