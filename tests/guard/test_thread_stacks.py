"""The stack of the main thread, read from another thread."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tiers import ALL

pytestmark = pytest.mark.launcher

# Arrays are freed in the middle of returns, and JAX then lets the other thread run. If faulthandler
# reads the frames then, CPython 3.12 and 3.13 end by SIGSEGV within seconds.
PROGRAM = """
import threading, time, jax.numpy as jnp
from mpigrad.guard.watchdog import places_of_main
seen, end = [], time.time() + SECONDS

def look():
    while time.time() < end:
        seen.append(places_of_main()[0])
        time.sleep(0.0002)

def free(n):
    arrays = tuple(x + i for i in range(3))

x, looker = jnp.ones(1000), threading.Thread(target=look)
looker.start()
while time.time() < end - 1:
    list(map(free, range(20)))
time.sleep(0.5)  # line 18: inside native code
looker.join()
assert len(seen) > 100 and ("<string>", 18) in seen, seen[-5:]
"""


def test_stack_of_a_running_and_of_a_sleeping_thread() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("SECONDS", "4" if ALL else "2")],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
