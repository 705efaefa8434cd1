"""A root-driven program that fails ends on all ranks, in seconds and with its cause."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from launching import PROGRAMS, mpigrad

pytestmark = [pytest.mark.launcher, pytest.mark.waits]


@dataclasses.dataclass(frozen=True)
class Ending:
    """The output and exit code of a program of tests/programs/served.py on 2 ranks."""

    says: tuple[str, ...]
    code: int = 1
    settings: dict[str, str] = dataclasses.field(default_factory=dict)
    full: str = ""  # why it runs in make test-full only


GUARDED = "the same program runs without the guard"
GUARD = {"MPIGRAD_GUARD": "1"}
SHORT = {"MPIGRAD_TIMEOUT": "2"}
BOTH_WAIT = (
    "rank 0: allreduce(op=SUM) of float32[2] at",
    "rank 1: the optimizer's next request at",
)
ENDINGS = {
    "a rank fails": Ending(("ArithmeticError: the mesh of rank 1 is empty", "rank 1 of 2 failed")),
    "a rank fails, guarded": Ending(
        ("ArithmeticError: the mesh of rank 1 is empty",), settings=GUARD, full=GUARDED
    ),
    "the root fails": Ending(
        ("ArithmeticError: a step of no length",),
        full="test_root_worker.py raises on the root, too",
    ),
    "the root leaves": Ending((), 5, full="a job that ends with sys.exit is tested in tests/guard"),
    "the root calls all ranks": Ending(BOTH_WAIT),
    "the root calls all ranks, guarded": Ending(BOTH_WAIT, settings=GUARD, full=GUARDED),
    "the root thinks": Ending(("result 36",), 0, SHORT),
    "the root thinks, guarded": Ending(("result 36",), 0, SHORT | GUARD, full=GUARDED),
}
CASES = [
    pytest.param(name, marks=pytest.mark.full(ending.full) if ending.full else ())
    for name, ending in ENDINGS.items()
]
Run = subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def runs() -> Iterator[dict[str, Future[Run]]]:
    """Run the programs concurrently: most of their time is waiting."""
    chosen = {
        name: ending
        for name, ending in ENDINGS.items()
        if not ending.full or os.environ.get("MPIGRAD_ALL_TESTS") == "1"
    }
    with ThreadPoolExecutor(3) as pool:
        yield {
            name: pool.submit(
                mpigrad, "launch", "-n", 2, PROGRAMS / "served.py", name.partition(",")[0],
                **ending.settings,
            )
            for name, ending in chosen.items()
        }  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_ending(name: str, runs: dict[str, Future[Run]]) -> None:
    ending, done = ENDINGS[name], runs[name].result()
    said = done.stdout + done.stderr
    assert done.returncode == ending.code, said
    for text in ending.says:
        assert text in said, said
    assert done.stdout.count("result 36") == (2 if ending.code == 0 else 0)
