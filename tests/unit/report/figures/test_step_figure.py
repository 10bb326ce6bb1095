"""Steps as figures: what is on them, and which files they become."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from PIL import Image

from onebox.engine.steps.step_chart import measured_chart
from onebox.errors import UsageError
from onebox.plan import Action, Plan, predict, simulated_chart
from onebox.report.figures.step_figure import draw_measured, draw_simulation
from tests.unit.report.steps import as_measured, foreseen, plan, problem


@pytest.mark.parametrize(
    ("suffix", "begin"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF"), (".PNG", b"\x89PNG")]
)
def test_the_suffix_says_the_format(tmp_path: Path, suffix: str, begin: bytes) -> None:
    path = tmp_path / f"plan{suffix}"
    draw_simulation(foreseen(plan())[1], path)
    assert path.read_bytes().startswith(begin)


@pytest.mark.parametrize("name", ["plan", "plan.jpg", "plan.json", "png"])
def test_another_suffix_is_refused_and_the_allowed_ones_are_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=r"allowed are \.png, \.svg, \.pdf"):
        draw_simulation(foreseen(plan())[1], tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be written: No such file"):
        draw_simulation(foreseen(plan())[1], tmp_path / "nowhere" / "plan.png")


def texts(path: Path) -> list[str]:
    """Return what a figure says; matplotlib writes each text as a comment above its glyphs."""
    lines = path.read_text().splitlines()
    return [line.strip()[5:-4] for line in lines if line.strip().startswith("<!-- ")]


def test_a_figure_names_devices_stages_micro_batches_and_kinds(tmp_path: Path) -> None:
    _, simulation = foreseen(plan("zb-h1"))
    draw_simulation(simulation, tmp_path / "plan.svg", title="three stages", emulated=[1])
    ElementTree.parse(tmp_path / "plan.svg")
    said = texts(tmp_path / "plan.svg")
    assert {"three stages", "device 0", "device 1*", "device 2", "stage 0", "stage 1", "stage 2"} <= set(said)
    assert {"forward", "input gradient", "weight gradient", "optimizer", "transfer", "time in ms"} <= set(said)
    assert "backward" not in said
    assert any(text.startswith("predicted: ") and "emulated" in text for text in said)
    for micro_batch in range(4):  # F, I and W of three stages
        assert said.count(str(micro_batch)) >= 9


def test_prediction_and_measurement_are_told_apart(tmp_path: Path) -> None:
    _, simulation = foreseen(plan("1f1b"))
    events = as_measured(simulation, 4, factor=2.0)
    draw_measured(events, tmp_path / "both.svg", 4, simulation=simulation)
    said = texts(tmp_path / "both.svg")
    assert sum(text.startswith("predicted: ") for text in said) == 1
    assert sum(text.startswith("measured, step 5: ") for text in said) == 1
    draw_measured(events, tmp_path / "one.svg", 4)
    assert not any(text.startswith("predicted") for text in texts(tmp_path / "one.svg"))
    assert not any("emulated" in text for text in texts(tmp_path / "one.svg"))


def test_what_is_drawn_of_a_measured_step_is_what_happened() -> None:
    _, simulation = foreseen(plan("zb-h1", replicas=2))
    expected, measured = simulated_chart(simulation), measured_chart(as_measured(simulation, 0), 0)
    assert measured.step_s == pytest.approx(expected.step_s)

    def rounded(bars: object) -> list[object]:
        return sorted(
            (bar.device, bar.kind, round(bar.start_s, 7), round(bar.end_s, 7), str(bar.stage), str(bar.micro_batch))
            for bar in bars  # type: ignore[attr-defined]
        )

    assert rounded(measured.bars) == rounded(expected.bars)
    assert {bar.kind for bar in expected.bars} == {"F", "I", "W", "optimizer", "transfer", "sum"}


def test_blocks_lie_where_they_should(tmp_path: Path) -> None:
    """The first block of the first row is forward's blue, and what is idle has the colour of the ground."""
    _, simulation = foreseen(plan("gpipe"))
    draw_simulation(simulation, tmp_path / "plan.png")
    with Image.open(tmp_path / "plan.png") as image:
        pixels = image.convert("RGB")
    blue, white = (0, 114, 178), (247, 248, 250)
    colours = {pixels.getpixel((x, y)) for x in range(0, pixels.width, 5) for y in range(0, pixels.height, 5)}
    assert blue in colours
    rows = [y for y in range(pixels.height) if any(pixels.getpixel((x, y)) == blue for x in range(200, 300))]
    middle = rows[len(rows) // 4]
    columns = [x for x in range(pixels.width) if pixels.getpixel((x, middle)) == blue]
    span = simulation.spans[3]
    assert span.action == Action("F", 0, 3)
    right = pixels.width - 15
    left = columns[0]
    end = left + span.end_s / (simulation.step_s * 1.01) * (right - left)
    assert columns[-1] == pytest.approx(end, abs=0.02 * pixels.width)
    assert pixels.getpixel((round(end + 0.03 * pixels.width), middle)) == white


@pytest.mark.parametrize("devices", [2, 16])
def test_figures_grow_with_the_devices(tmp_path: Path, devices: int) -> None:
    given = replace(problem(devices), batch=devices, micro_batches=(1,))
    _, simulation = predict(given, Plan.data_parallel(range(devices), [1.0] * devices, micro_batch=1))
    path = tmp_path / "plan.png"
    draw_simulation(simulation, path)
    with Image.open(path) as image:
        assert image.width == 1200
        assert image.height > 60 * devices


def test_a_simulation_without_details_and_a_step_without_events_are_refused() -> None:
    _, simulation = foreseen(plan())
    with pytest.raises(UsageError, match="detail"):
        simulated_chart(replace(simulation, spans=()))
    with pytest.raises(UsageError, match="no events of step 7"):
        measured_chart(as_measured(simulation, 0), 7)


def test_no_window_and_no_global_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)  # of other tests
    draw_simulation(foreseen(plan())[1], tmp_path / "plan.png")
    assert "matplotlib.pyplot" not in sys.modules


def test_the_same_step_is_the_same_file(tmp_path: Path) -> None:
    _, simulation = foreseen(plan())
    for suffix in ("pdf", "png", "svg"):
        first, second = tmp_path / f"a.{suffix}", tmp_path / f"b.{suffix}"
        draw_simulation(simulation, first)
        draw_simulation(simulation, second)
        assert first.read_bytes() == second.read_bytes()
