"""A root-driven program that fails ends on all ranks, in seconds and with its cause."""

from __future__ import annotations

import dataclasses

import pytest

from launching import PROGRAMS, mpigrad

pytestmark = pytest.mark.launcher


@dataclasses.dataclass(frozen=True)
class Ending:
    """What a program of tests/programs/served.py on 2 ranks says."""

    says: tuple[str, ...]
    code: int = 1
    settings: dict[str, str] = dataclasses.field(default_factory=dict)
    in_every_run: bool = True


GUARD = {"MPIGRAD_GUARD": "1"}
ENDINGS = {
    "a rank fails": Ending(("ArithmeticError: the mesh of rank 1 is empty", "rank 1 of 2 failed")),
    "a rank fails, guarded": Ending(
        ("ArithmeticError: the mesh of rank 1 is empty",), settings=GUARD, in_every_run=False
    ),
    "the root fails": Ending(("ArithmeticError: a step of no length",)),
    "the root leaves": Ending((), 5, in_every_run=False),
    "the root calls all ranks": Ending(
        ("rank 0: allreduce(op=SUM) of float32[2] at", "rank 1: the optimizer's next request at")
    ),
    "the root calls all ranks, guarded": Ending(
        ("rank 0: allreduce(op=SUM) of float32[2] at", "rank 1: the optimizer's next request at"),
        settings=GUARD,
        in_every_run=False,
    ),
    "the root thinks": Ending((), 0, {"MPIGRAD_TIMEOUT": "2"}),
    "the root thinks, guarded": Ending((), 0, {"MPIGRAD_TIMEOUT": "2"} | GUARD, False),
}
CASES = [
    pytest.param(name, marks=() if ending.in_every_run else pytest.mark.full)
    for name, ending in ENDINGS.items()
]


@pytest.mark.parametrize("name", CASES)
def test_ending(name: str) -> None:
    ending = ENDINGS[name]
    program = PROGRAMS / "served.py"
    done = mpigrad("launch", "-n", 2, program, name.partition(",")[0], **ending.settings)
    said = done.stdout + done.stderr
    assert done.returncode == ending.code, said
    for text in ending.says:
        assert text in said, said
    assert done.stdout.count("result 18") == (2 if ending.code == 0 else 0)
