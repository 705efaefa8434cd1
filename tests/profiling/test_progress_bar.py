"""The progress line: live on a terminal, plain elsewhere, silent off rank 0."""

import io

import pytest

from mpigrad.profiling.progress_bar import Progress, duration


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def without_launcher(monkeypatch):
    for name in ("MPIGRAD_TERMINAL", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMIX_RANK"):
        monkeypatch.delenv(name, raising=False)


def test_plain_lines_are_rare_and_the_last_one_is_always_written():
    stream = io.StringIO()
    progress = Progress(1000, stream=stream, interval=3600)
    for i in range(1001):
        progress.update(i, loss=0.5)
    progress.close("done")
    lines = stream.getvalue().splitlines()
    assert lines[0] == "iteration 0/1000  loss 5.000e-01"
    assert lines[1].startswith("iteration 1000/1000  loss 5.000e-01")
    assert lines[2:] == ["done"]
    assert "\r" not in stream.getvalue()


def test_live_line_is_overwritten_and_ended():
    stream = Terminal()
    progress = Progress(3, stream=stream)
    progress.update(0, loss=1.0)
    progress.update(3, loss=0.5)
    progress.close()
    assert stream.getvalue().count("\r") == 2
    assert stream.getvalue().endswith("\n")


def test_time_left_is_shown_from_the_second_iteration_on():
    stream = io.StringIO()
    progress = Progress(3, stream=stream, interval=0)
    for i in range(4):
        progress.update(i)
    first, second, third, fourth = stream.getvalue().splitlines()
    assert "left" not in first + second
    assert third.endswith("0 s left")
    assert fourth.endswith("0 s left")


def test_the_time_left_is_right_within_a_factor_of_two_after_a_tenth(monkeypatch):
    """Also if the first iterations cost forty times as much, as those of a sampler."""
    total, now = 400, [0.0]
    monkeypatch.setattr("mpigrad.profiling.progress_bar.time.monotonic", lambda: now[0])
    for costly in (1, 8, 15):
        stream, now[0] = io.StringIO(), 0.0
        seconds = [40.0] * costly + [1.0] * (total - costly)
        progress = Progress(total, stream=stream, interval=0)
        for i, cost in enumerate(seconds):
            now[0] += cost
            progress.update(i + 1)
        for line in stream.getvalue().splitlines()[total // 10 :]:
            done = int(line.split()[1].partition("/")[0])
            text = line.rpartition("  ")[2].removesuffix(" left")
            minutes, _, rest = text.rpartition(" min ")
            found = 60 * int(minutes or 0) + int(rest.removesuffix(" s"))
            true = sum(seconds[done:])
            assert true / 2 <= found <= 2 * true, (costly, line, true)


def test_the_time_left_is_that_of_all_stages(monkeypatch):
    """Each stage compiles, and the second one ends early."""
    now = [0.0]
    monkeypatch.setattr("mpigrad.profiling.progress_bar.time.monotonic", lambda: now[0])
    stream = io.StringIO()
    progress = Progress(40, stream=stream, interval=0, stages=3)
    ends = []
    for stage, iterations in enumerate((40, 25, 40)):
        if stage > 0:
            progress.next_stage()
        now[0] += 5.0
        for i in range(iterations + 1):
            progress.update(i, loss=0.5)
            ends.append(now[0])
            now[0] += 1.0
    lines = stream.getvalue().splitlines()
    assert len(lines) == len(ends)
    for line, end in list(zip(lines, ends, strict=True))[12:-1]:
        text = line.rpartition("  ")[2].removesuffix(" left")
        minutes, _, rest = text.rpartition(" min ")
        left = 60 * int(minutes or 0) + int(rest.removesuffix(" s"))
        assert (ends[-1] - end) / 2 <= left <= 2 * (ends[-1] - end), line
    assert lines[-1].endswith("iteration 40/40  loss 5.000e-01  0 s left")


def test_other_ranks_are_silent():
    stream = io.StringIO()
    progress = Progress(3, rank=1, stream=stream)
    progress.update(3, loss=1.0)
    progress.close("done")
    assert stream.getvalue() == ""


@pytest.mark.parametrize(
    ("stream", "variables", "live"),
    [
        (Terminal(), {}, True),
        (io.StringIO(), {}, False),
        (io.StringIO(), {"MPIGRAD_TERMINAL": "1"}, True),
        (Terminal(), {"MPIGRAD_TERMINAL": "0"}, False),
        (Terminal(), {"OMPI_COMM_WORLD_SIZE": "2"}, False),
    ],
)
def test_what_counts_as_a_terminal(monkeypatch, stream, variables, live):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    progress = Progress(3, stream=stream)
    progress.update(3)
    assert stream.getvalue().startswith("\r") == live


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59, "59 s"), (200, "3 min 20 s"), (7500, "2 h 05 min")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text
