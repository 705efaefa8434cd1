"""Pictures have titled colour bars, axes in the right units, and texts of a readable size."""

import numpy as np
import pytest
from matplotlib.text import Text

from mpigrad_apps import report
from mpigrad_apps.report import Panel, curve, drawing, maps
from mpigrad_apps.sgd.outputs import _summary
from mpigrad_apps.sgd.pictures import draw_staleness
from mpigrad_apps.sgd.run_log import EpochRecord, RunLog, StepRecord
from mpigrad_apps.sgd.settings import Settings
from mpigrad_apps.sgd.task import Task
from mpigrad_apps.shots import acoustic_command
from mpigrad_apps.shots.acoustic_settings import Settings as Acoustic
from mpigrad_apps.shots.pictures import gather_panel, section

pytestmark = pytest.mark.ranks(1)


@pytest.fixture
def figures(monkeypatch):
    """Keep the figures of the pictures that are made."""
    kept = []
    encode = report._png
    monkeypatch.setattr(report, "_png", lambda figure: kept.append(figure) or encode(figure))
    return kept


def check(figure) -> None:
    """Texts have at least 9 points, and the page shows 100 pixels for an inch."""
    assert figure.get_figwidth() <= 10.8
    shown = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text()]
    assert min(text.get_fontsize() for text in shown) >= 8.3  # the size of legends and ticks
    for axes in figure.axes:
        if axes.get_label() == "<colorbar>":
            assert axes.get_ylabel()


@pytest.mark.cases("1", "4", reason="the least and the most panels of a picture")
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_colour_bars_are_titled_and_masks_have_none(figures, count):
    values = np.arange(12.0).reshape(4, 3)
    picture = maps("m", "", [Panel("title", values, quantity="vp (m/s)")] * count)
    maps("m", "", [Panel("places", values > 5, mask=True)])
    bars = [axes.get_ylabel() for axes in figures[0].axes if axes.get_label() == "<colorbar>"]
    assert bars == ["vp (m/s)"] * count
    assert len(figures[1].axes) == 1
    check(figures[0])
    assert report._shown_width(picture.png) == round(100 * figures[0].get_figwidth())


def test_a_curve_may_be_linear(figures):
    curve("c", "", {"heat": ([0, 1], [0.0, 1.0])}, "time", "heat", linear=True)
    curve("c", "", {"loss": ([0, 1], [0.1, 1.0])})
    assert [figure.axes[0].get_yscale() for figure in figures] == ["linear", "log"]
    assert figures[0].axes[0].get_ylabel() == "heat"


def test_the_losses_of_all_trainings_are_within_the_axes(figures):
    logs = [
        RunLog(
            str(loss),
            (StepRecord(1, loss, 8.0, 0.1, staleness=(0,)),),
            (EpochRecord(0, 0.0, 0.0),),
            "",
            bound=4,
        )
        for loss in (0.5, 0.53)
    ]
    draw_staleness(logs)
    effect = figures[0].axes[1]
    assert effect.get_ylim() == pytest.approx((0, 1.2 * 0.53))


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([0.3, 0.8], ["0.4", "0.6", "0.8"]),
        ([0.19, 2.1], ["0.2", "0.5", "1", "2"]),
        ([0.001, 10.0], None),
    ],
)
def test_axes_of_less_than_two_decades_have_plain_numbers(figures, values, labels):
    curve("c", "", {"loss": ([0, 1], values)})
    (axes,) = figures[0].axes
    low, high = axes.get_ylim()
    shown = [label.get_text() for label in axes.get_yticklabels(which="both")]
    if labels:
        assert [text for text in shown if low <= float(text) <= high] == labels
    else:
        assert any("10^{-1}" in text for text in shown)
    assert all(float(tick) == int(tick) for tick in axes.get_xticks())


def test_gathers_are_drawn_over_metres():
    gather = np.arange(8.0).reshape(4, 2)
    x = np.array([10.0, 20.0, 40.0, 30.0])
    panel = gather_panel("p", gather, 0.5, np.stack([x, 0 * x], 1), "pressure (Pa)", 10.0)
    assert panel.extent == (5.0, 45.0, 0.0, 1.0)
    np.testing.assert_array_equal(panel.values, gather[[0, 1, 3, 2]])
    assert panel.labels == ("x of the receiver (m)", "time (s)")
    down = gather_panel("p", gather, 0.5, np.stack([0 * x, x], 1), "pressure (Pa)", 10.0)
    assert down.labels[0] == "depth of the receiver (m)"
    alone = gather_panel("p", gather[:1], 0.5, np.array([[7.0, 2.0]]), "pressure (Pa)", 10.0)
    assert alone.extent[:2] == (6.5, 7.5)
    assert section("true vp", np.ones((2, 2)), (9.0, 9.0)).quantity == "vp (m/s)"


def test_wavefields_have_quantity_and_unit(figures, comm, directory):
    options = {"cells": (12, 10), "steps": 8, "frames": 4, "shots": 1, "pml": 2}
    acoustic_command.run(Acoustic(**options, out=directory / "shots"), comm)
    labels = [
        {axes.get_ylabel() for axes in figure.axes if axes.get_label() == "<colorbar>"}
        for figure in figures
    ]
    assert sorted(map(sorted, labels)) == [["pressure (Pa)"], ["pressure (Pa)"], ["vp (m/s)"]]
    for figure in figures:
        check(figure)


def test_drawings_fit_the_page():
    with pytest.raises(ValueError, match=r"drawing: expected a width of at most 10.8 inches"):
        drawing("d", "", (12.0, 4.0), lambda figure: None)


@pytest.mark.parametrize(
    ("scores", "text"),
    [
        ([0.936, 0.9361], " The networks read 93.6% of the held-out digits."),
        ([0.91, 0.95], " The networks read 91.0% to 95.0% of the held-out digits."),
        ([0.91], " The network reads 91.0% of the held-out digits."),
    ],
)
def test_equal_scores_are_given_once(scores, text):
    logs = [RunLog("a", (), (EpochRecord(1, 1.0, 1.0, 0.1, score),), "done") for score in scores]
    task = Task({}, lambda model, x: x, (np.ones(3),))
    assert _summary(Settings(), task, logs, 2).endswith(text)
