"""The predicted work of a plan's devices, as a figure and as a notebook shows it."""

from __future__ import annotations

import math
import sys
from xml.etree import ElementTree

import pytest

from onebox.errors import MissingExtra
from onebox.plan.model.load_chart import load_chart
from tests.unit.report.steps import foreseen, plan


def test_work_is_as_long_as_in_the_simulated_step() -> None:
    for schedule, replicas in (("zb-h1", 1), ("1f1b", 2)):
        found, simulation = foreseen(plan(schedule, replicas=replicas))
        chart = found._load()
        for device in found.devices:
            for kind in "FIWB":
                drawn = math.fsum(
                    bar.end_s - bar.start_s for bar in chart.bars if (bar.device, bar.kind) == (device, kind)
                )
                spans = (one for one in simulation.spans if (one.device, one.action.kind) == (device, kind))
                assert drawn == pytest.approx(math.fsum(one.end_s - one.start_s for one in spans))
        assert chart.step_s == simulation.step_s


def test_bars_of_a_device_follow_each_other() -> None:
    chart = load_chart(
        [[(1.0, 2.0, 3.0)], [(1.0, 1.0, 1.0), (2.0, 2.0, 2.0)]],
        [[(0,)], [(0,), (1,)]],
        (((0,),) * 3, ((0,), (1,), (0,))),
        [1.0, 1.0, 0.5],
        halves=False,
        step_s=20.0,
    )
    assert [(bar.device, bar.kind, bar.start_s, bar.end_s, bar.stage) for bar in chart.bars] == [
        (0, "F", 0.0, 2.5, 0),
        (0, "B", 2.5, 15.0, 0),
        (0, "F", 15.0, 16.5, 1),
        (0, "B", 16.5, 19.5, 1),
        (1, "F", 0.0, 2.0, 1),
        (1, "B", 2.0, 6.0, 1),
    ]


def test_without_matplotlib_a_figure_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtra, match=r"A figure needs matplotlib, .* pip install 'onebox\[plot\]'"):
        foreseen(plan())[0].figure()
    assert "<svg" in foreseen(plan())[0]._repr_html_(), "a card needs none"


def test_a_notebook_shows_stages_and_work() -> None:
    text = " ".join(ElementTree.fromstring(foreseen(plan())[0]._repr_html_()).itertext())
    assert plan().describe() in text and "model.0 … model.1" in text and "predicted work" in text
    assert "predicted" not in " ".join(ElementTree.fromstring(plan()._repr_html_()).itertext())
