"""The scaling model against what MPI counts, and the sense of its formula."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import mpi_monitor
import pytest
from scaling_model import INTERCONNECTS, PROBLEMS, Work, busiest, tiles, time_of

from launching import mpigrad

BENCH = pathlib.Path(__file__).resolve().parents[2] / "bench"
SIDES = {"transposition": 20, "acoustic": 24, "elastic": 24, "poisson": 24}


@pytest.mark.launcher
def test_ranks_send_what_the_formula_says(tmp_path: pathlib.Path) -> None:
    monitoring = mpi_monitor.environment(tmp_path)
    done = mpigrad(
        "launch", "-n", 4, BENCH / "scaling_programs.py", "count", "--problems", *SIDES,
        "--side", *SIDES.values(), "--steps", 3, **monitoring,
    )  # fmt: skip
    if "OMPI" not in done.stdout and "were not started with" in done.stderr:
        pytest.skip("only Open MPI counts messages")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    rows = {row["problem"]: row for row in (json.loads(line[7:]) for line in lines)}
    assert rows.keys() == SIDES.keys()
    for problem, row in rows.items():
        for what in ("forward", "gradient"):
            iterations = row[what]["iterations"]
            said = busiest(
                problem, 4, SIDES[problem], what == "gradient", steps=3, iterations=iterations
            )
            most = [max(of_rank) for of_rank in zip(*row[what]["sent"], strict=True)]
            assert most[0] == said.messages, (problem, what)
            assert most[2] == said.collectives, (problem, what)
            # hypre's coarse levels have a few cells more or less.
            exact = 0.03 if problem == "poisson" else 0
            assert most[1] == pytest.approx(said.bytes, rel=exact), (problem, what)
            loose = 0.15 if problem == "poisson" else 0
            assert most[3] == pytest.approx(said.collective_bytes, rel=loose), (problem, what)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("problem", PROBLEMS)
def test_the_bounds_stand_around_the_model(problem: str) -> None:
    alone = busiest(problem, 1, 100, True, steps=10, iterations=9)
    assert dataclasses.astuple(alone)[:4] == (0, 0, 0, 0)
    for ranks in (2, 9, 64, 4096):
        sent = busiest(problem, ranks, 100, True, steps=10, iterations=9)
        assert sent.rounds <= sent.messages
        for net in INTERCONNECTS:
            found = time_of(problem, ranks, sent, (0.9, 1.0, 1.1), net)
            assert found["fast"].total < found["model"].total < found["slow"].total
    # A rank in the middle has four neighbours, however many ranks there are.
    weak = [busiest(problem, ranks, 100, True, steps=10, iterations=9) for ranks in (9, 4096)]
    if problem != "poisson":
        assert weak[0].messages == weak[1].messages


@pytest.mark.ranks(1)
def test_work_between_sizes() -> None:
    work = Work(((100, 1, 1, 2, 0.5), (10_000, 10, 10, 20, 5)), (10, 10))
    assert work.at(100) == pytest.approx((1, 1, 2))
    assert work.at(1000)[1] == pytest.approx(10**0.5)
    assert work.at(100_000)[1] == pytest.approx(10**1.5)  # beyond what was measured
    assert work.at(10_000, iterations=20)[1] == pytest.approx(15)  # twice the iterations
    assert tiles(12) == (4, 3)
    assert tiles(7) == (7, 1)
