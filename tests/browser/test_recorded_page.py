"""The page of a run's folder, in a real browser: what is drawn, what changes, by keys, for everybody, on a phone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from onebox.pool import DeviceInfo
from onebox.report import RunStatus, compare, timeline_of
from onebox.report.page import PageServer, serve_page
from onebox.report.page.recorded_run import RecordedRun
from onebox.report.page.state import Island, PageState
from tests.browser.conftest import PHONE, WIDE, serious, until
from tests.unit.report.steps import as_measured, foreseen, plan

EVIL = '<img src=x onerror="window.evil = 1"><script>window.evil = 1</script>'
DEVICES = tuple(
    DeviceInfo(number=n, host=host, device=device, name=name, threads=4, memory_bytes=memory, emulated=n == 2)
    for n, (host, device, name, memory) in enumerate(
        [
            ("lab1", "cuda:0", "NVIDIA GeForce RTX 3090", 24 << 30),
            ("lab1", "cpu", "AMD Ryzen 9 5950X", 62 << 30),
            ("lab2", "cuda:0", EVIL, 11 << 30),
        ]
    )
)
NAMES = {n: f"worker {n} (cpu)" for n in range(3)}


def step(number: int, epoch: int = 1) -> dict[str, Any]:
    loss = 2.3 / (1 + number / 20)
    time_s = 1_790_000_000 + number / 8
    return {"event": "step", "step": number, "epoch": epoch, "loss": loss, "samples": 64, "time": time_s}


def append(run: Path, *records: dict[str, Any]) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run that goes on in this process, with a trace of its first step."""
    (tmp_path / "config.json").write_text(json.dumps({"model": "cnn", "data": "digits", "epochs": 2}))
    which, simulation = foreseen(plan())
    status = RunStatus.of_this_process("cnn on digits", total_steps=400, epochs=2, devices=DEVICES)
    msgspec.structs.replace(status, plan=which).write(tmp_path / "status.json")
    events = as_measured(simulation, 0, factor=1.1)
    timeline_of(events, NAMES).write(tmp_path / "timeline.json")
    comparison = compare(which, events, batch=8).to_data()
    devices = [
        {**msgspec.to_builtins(msgspec.structs.asdict(each)), "peak_bytes": (n + 1) << 30}
        for n, each in enumerate(status.devices)
    ]
    (tmp_path / "summary.json").write_text(json.dumps({"comparison": comparison, "devices": devices}))
    append(tmp_path, *map(step, range(1, 201)))
    append(tmp_path, {"event": "epoch", "step": 200, "epoch": 1, "test_loss": 0.25, "test_accuracy": 0.93})
    append(tmp_path, {"event": "recovery", "step": 120, "text": "worker 1 was lost and is replaced; 3 steps again"})
    append(tmp_path, {"event": "decision", "step": 150, "text": EVIL, "kept": True})
    return tmp_path


@pytest.fixture
def served(run: Path) -> Iterator[PageServer]:
    with serve_page(RecordedRun(run)) as server:
        yield server


@pytest.mark.feature("Monitoring: Look at a run's folder in a browser")
def test_a_run_is_drawn_and_followed(served: PageServer, run: Path, visitors: Any) -> None:
    """All of it at once, for the short tier: a browser takes seconds to start."""
    page = visitors().look(served.url)
    assert page.inner_text("#name") == "cnn on digits"
    assert page.inner_text("#state-word") == "running"
    assert page.inner_text("#tiles").splitlines()[:3] == ["Step", "200", "of 400, epoch 1 of 2"]
    assert len(page.get_attribute("#loss-chart .curve", "d").split("L")) == 200
    assert page.locator("#loss-chart .mark").count() == 1
    assert page.get_attribute("#gantt canvas", "data-step") == "1"
    assert page.inner_text("#legend").split("\n")[0] == "forward"
    assert (
        page.evaluate(
            "() => { const canvas = document.querySelector('#gantt canvas');"
            " return new Set(canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data).size }"
        )
        > 20
    )
    assert page.locator("#plan-table tbody tr").count() == 3
    assert "predicted" in page.inner_text("#plan-table")
    assert page.locator("#hosts tbody tr").count() == 3
    assert EVIL in page.inner_text("#hosts") and EVIL in page.inner_text("#events")
    assert page.evaluate("window.evil") is None
    append(run, step(201, 2), {"event": "recovery", "step": 201, "text": "worker 2 was lost"})
    until(page, "() => document.querySelector('#tiles dd').textContent === '201'")
    until(page, "() => document.querySelector('#events-list li').textContent.includes('worker 2 was lost')")


@pytest.mark.feature("Monitoring: Read the page with assistive technology")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [WIDE, PHONE], ids=["wide", "phone"])
def test_everybody_can_read_it(served: PageServer, visitors: Any, viewport: dict[str, int], scheme: str) -> None:
    page = visitors(viewport, scheme).look(served.url)
    for details in page.locator("details").all():
        details.locator("summary").click()
    assert serious(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
    red, green, blue = page.evaluate("() => getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    assert (red + green + blue > 380) == (scheme == "light")
    tables = page.locator("details.data tbody tr").count()
    assert tables > 200 + 200


def test_the_schedule_is_zoomed_by_wheel_drag_keys_and_buttons(served: PageServer, run: Path, visitors: Any) -> None:
    page = visitors().look(served.url)
    canvas = page.locator("#gantt canvas")
    canvas.scroll_into_view_if_needed()
    view = "() => document.querySelector('#gantt canvas').dataset.view"

    def shown() -> tuple[float, float]:
        first, last = page.evaluate(view).split(" ")
        return float(first), float(last)

    whole, before = shown(), page.evaluate(view)
    assert whole[0] == 0
    box = canvas.bounding_box()
    middle = box["x"] + box["width"] / 2, box["y"] + 40
    page.mouse.move(*middle)
    page.mouse.wheel(0, -300)  # which scrolls the page, as the chart has no focus
    assert shown() == whole
    canvas.scroll_into_view_if_needed()
    canvas.focus()
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 40)
    page.mouse.wheel(0, -300)
    until(page, "whole => document.querySelector('#gantt canvas').dataset.view !== whole", before)
    wheeled = shown()
    assert wheeled[1] - wheeled[0] < whole[1]
    page.keyboard.press("ArrowRight")
    assert shown()[0] > wheeled[0]
    page.keyboard.press("0")
    assert shown() == whole
    page.keyboard.press("+")
    assert shown()[1] - shown()[0] < whole[1]
    page.keyboard.press("Escape")
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.7, box["y"] + 40, steps=4)
    page.mouse.up()
    dragged = shown()
    assert 0 < dragged[0] < dragged[1] < whole[1]
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.8, box["y"] + 40, steps=4)
    page.mouse.up()
    assert shown()[0] < dragged[0]
    page.click("#zoom-out")
    assert shown()[1] - shown()[0] > dragged[1] - dragged[0]
    # another step comes, and waits until the whole step is wanted again
    _, simulation = foreseen(plan())
    timeline_of(as_measured(simulation, 6), NAMES).write(run / "timeline.json")
    until(page, "() => document.querySelector('#zoom-all').textContent === 'Newest step'")
    assert canvas.get_attribute("data-step") == "1"
    page.click("#zoom-all")
    assert canvas.get_attribute("data-step") == "7" and page.inner_text("#zoom-all") == "Whole step"


def test_values_are_read_by_pointer_and_keys(served: PageServer, visitors: Any) -> None:
    page = visitors().look(served.url)
    page.focus("#loss-chart svg")
    page.keyboard.press("ArrowLeft")
    assert "step 199" in page.inner_text("#loss-chart .tip")
    page.hover("#rate-chart svg")
    assert "\n512" in page.inner_text("#rate-chart .tip")
    box = page.locator("#gantt canvas").bounding_box()
    found = set()
    for place in range(20):
        page.mouse.move(box["x"] + 160 + place * (box["width"] - 170) / 20, box["y"] + 30)
        found.add(page.inner_text("#gantt-read"))
    assert any("forward" in text for text in found)


def test_the_trace_is_saved(served: PageServer, run: Path, visitors: Any) -> None:
    page = visitors(accept_downloads=True).look(served.url)
    with page.expect_download() as waiting:
        page.click("#trace")
    assert waiting.value.suggested_filename == "onebox-trace.json"
    assert Path(waiting.value.path()).read_bytes() == (run / "timeline.json").read_bytes()


def test_two_look_one_reloads_and_the_run_ends(served: PageServer, run: Path, visitors: Any) -> None:
    one, other = visitors().look(served.url), visitors(PHONE).look(served.url)
    append(run, step(201, 2))
    for page in (one, other):
        until(page, "() => document.querySelector('#tiles dd').textContent === '201'")
    one.reload()
    until(one, "() => document.querySelector('#tiles dd')?.textContent === '201'")
    append(run, step(202, 2))
    for page in (one, other):
        until(page, "() => document.querySelector('#tiles dd').textContent === '202'")
    status = RunStatus.read(run / "status.json")
    assert status is not None
    ended = msgspec.structs.replace(status, state="failed", text="worker 1 was lost")
    ended.write(run / "status.json")
    for page in (one, other):
        until(page, "() => document.querySelector('#state-word').textContent === 'failed'")
        assert "Worker 1 was lost." in page.inner_text("#banner")


def test_a_server_that_has_ended_is_said_and_what_was_seen_stays(run: Path, visitors: Any) -> None:
    with serve_page(RecordedRun(run)) as served:
        page = visitors().look(served.url)
    until(page, "() => document.querySelector('#banner').textContent.includes('onebox watch')")
    assert "The page has ended; what it shows is from before." in page.inner_text("#banner"), "not the run"
    assert page.inner_text("#state-word") == "closed"
    assert page.inner_text("#tiles dd") == "200"


def test_a_run_that_has_ended_keeps_its_end_when_the_page_ends(run: Path, visitors: Any) -> None:
    status = RunStatus.read(run / "status.json")
    assert status is not None
    msgspec.structs.replace(status, state="failed", text="worker 1 was lost").write(run / "status.json")
    with serve_page(RecordedRun(run)) as served:
        page = visitors().look(served.url)
    until(page, "() => document.querySelector('#banner').textContent.includes('onebox watch')")
    assert "Worker 1 was lost. The page has ended, too." in page.inner_text("#banner")
    assert page.inner_text("#state-word") == "failed"


def test_a_change_is_shown_while_the_page_is_kept_quiet(served: PageServer, run: Path, visitors: Any) -> None:
    """Rows stay the same elements, so that who reads or selects is not disturbed."""
    page = visitors().look(served.url)
    page.evaluate("() => { window.row = document.querySelector('#hosts tbody tr') }")
    append(run, step(201, 2))
    until(page, "() => document.querySelector('#tiles dd').textContent === '201'")
    assert page.evaluate("() => window.row.isConnected && window.row === document.querySelector('#hosts tbody tr')")


class OfIslands(RecordedRun):
    """A run whose plan and schedule are those of its first island."""

    def state(self) -> PageState:
        found = super().state()
        assert found.run is not None
        islands = tuple(
            Island(number=number, devices=str(number), state="present", age_steps=1, every_steps=3)
            for number in range(2)
        )
        return msgspec.structs.replace(found, run=msgspec.structs.replace(found.run, islands=islands))


def test_of_islands_it_is_said_which_is_drawn(run: Path, visitors: Any) -> None:
    with serve_page(OfIslands(run)) as served:
        page = visitors().look(served.url)
        until(page, "() => document.querySelector('#schedule-note').textContent.startsWith('step 1 of island 0, ')")
        assert page.inner_text("#plan-note") == "schedule zb-h1 of island 0"
