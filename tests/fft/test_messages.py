"""The messages of transforms, counted by MPI, against the formula in docs/fft.md."""

import json
import math
import os
import pathlib
import sys

import pytest

from launching import PROGRAMS, mpigrad
from mpigrad.fft.layout import Division, Exchange, Transform, make_plan

BENCH = pathlib.Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))
import mpi_monitor  # noqa: E402

SLABS, PENCILS = ((3, 1, 1), (1, 1, 3)), ((2, 3, 1), (1, 2, 3), (6, 1, 1))


def formula(shape, dims, rank, *, back=False):
    """Return messages and bytes of `rfftn` on one rank, by docs/fft.md, or of its transpose.

    Of a block of n values the rank keeps its part, c of C, of the axis that is divided afterwards.
    """
    axes = tuple(range(len(shape)))
    by = tuple((a,) if n > 1 else () for a, n in enumerate(dims))
    plan = make_plan(Division(shape, dims, by), axes, (*["fft"] * (len(shape) - 1), "rfft"))
    messages, size, word = 0, 0, 8
    for step in plan.steps:
        if isinstance(step, Transform):
            word = 16  # spectra are complex
        if isinstance(step, Exchange):
            before, after = step.division, step.division.moved(step.gather, step.split)
            group = before.group(rank, step.gather)
            source, target, axis = before, after, step.split
            if back:
                source, target, axis = after, before, step.gather
            block, kept = source.local_shape(rank), target.local_shape(rank)[axis]
            n, whole = math.prod(block), block[axis]
            assert whole == sum(target.local_shape(r)[axis] for r in group)
            values = n * (whole - kept) // whole
            others = sum(r != rank and n * target.local_shape(r)[axis] > 0 for r in group)
            if not back:
                assert step.sent(rank) == (others, values)
            messages, size = messages + others, size + word * values
    return messages, size


@pytest.mark.launcher
@pytest.mark.parametrize(
    ("ranks", "shape", "layouts"),
    [
        (3, (7, 9, 5), SLABS),
        pytest.param(
            6, (7, 9, 5), PENCILS, marks=pytest.mark.full("three ranks run the same formula")
        ),
        pytest.param(4, (8, 3), ((4, 1), (2, 2)), marks=pytest.mark.full("some parts are empty")),
    ],
)
def test_ranks_send_what_the_formula_says(ranks, shape, layouts, tmp_path):
    words = [",".join(map(str, numbers)) for numbers in (shape, *layouts)]
    paths = os.pathsep.join([str(BENCH), os.environ.get("PYTHONPATH", "")])
    environment = mpi_monitor.environment(tmp_path) | {"PYTHONPATH": paths}
    program = PROGRAMS / "counted_transforms.py"
    done = mpigrad("launch", "-n", ranks, program, *words, **environment)
    if "only Open MPI counts" in done.stderr:
        pytest.skip("another MPI")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    rows = [json.loads(line[7:]) for line in lines]
    assert len(rows) == 3 * len(layouts)
    for dims, name, counts in rows:
        for rank, (messages, size, collectives, _) in enumerate(counts):
            once = formula(shape, tuple(dims), rank)
            back = formula(shape, tuple(dims), rank, back=True)
            expected = {
                "value": once,
                "two fields": (once[0], 2 * once[1]),
                "value and adjoint": (once[0] + back[0], once[1] + back[1]),
            }[name]
            assert (messages, size) == expected, (dims, name, rank)
            assert collectives == 0
