"""Metrics as JSON lines."""

from __future__ import annotations

import json
import math
import resource
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebox.errors import UsageError
from onebox.report import MetricsLog, rewind_metrics
from onebox.report.run.json_files import to_json


def lines(path: Path) -> list[object]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_each_call_is_one_line_and_on_disk_at_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        log.write({"step": 1, "loss": 0.5})
        assert lines(path) == [{"step": 1, "loss": 0.5}]
        log.write({"epoch": 1, "note": "zwei\nZeilen, ü"})
        assert lines(path)[1] == {"epoch": 1, "note": "zwei\nZeilen, ü"}


def test_what_is_there_stays(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for step in (1, 2):
        with MetricsLog(path) as log:
            log.write({"step": step})
    assert lines(path) == [{"step": 1}, {"step": 2}]


@pytest.mark.parametrize("left", ['{"step": 2, "lo', '{"step": 2}'])
def test_an_unfinished_last_line_is_dropped(tmp_path: Path, left: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n' + left)
    with MetricsLog(path) as log:
        log.write({"step": 3})
    assert lines(path) == [{"step": 1}, {"step": 3}]


def test_a_loss_that_diverges_is_on_record_as_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        for loss in (1.0, math.nan, math.inf, -math.inf):
            log.write({"loss": loss})
    assert [line["loss"] for line in lines(path)] == [1.0, None, None, None]  # type: ignore[index, call-overload]


def test_a_record_that_is_no_json_is_refused_and_nothing_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        with pytest.raises(UsageError, match="object"):
            log.write({"step": 1, "model": object()})
        log.write({"step": 2})
    assert lines(path) == [{"step": 2}]


def test_a_closed_log_takes_nothing_and_closes_again(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.close()
    log.close()
    with pytest.raises(ValueError, match="closed"):
        log.write({})


@given(
    st.dictionaries(
        st.text(),
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.floats()),
    )
)
def test_any_record_is_one_line_of_strict_json(record: dict[str, object]) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(name)

    text = to_json(record)
    assert b"\n" not in text
    assert json.loads(text, parse_constant=refuse).keys() == record.keys()


def test_rewinding_drops_what_a_resumed_run_does_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"note": "ü"}\n{"step": 2, "epoch": 1}\n{"step": 3}\n{"step": 4, "lo')
    rewind_metrics(path, step=2)
    assert lines(path) == [{"step": 1}, {"note": "ü"}, {"step": 2, "epoch": 1}]
    rewind_metrics(path, step=0)
    assert lines(path) == [{"note": "ü"}]


def test_rewinding_drops_results_of_an_epoch_that_ends_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    step, feed, result = ({"event": event, "step": 2, "epoch": 1} for event in ("step", "feed", "epoch"))
    path.write_text("".join(json.dumps(each) + "\n" for each in (step, feed, result)))
    rewind_metrics(path, step=2, epochs=1)
    assert lines(path) == [step, feed, result]
    rewind_metrics(path, step=2, epochs=0)
    assert lines(path) == [step]


def test_rewinding_nothing(tmp_path: Path) -> None:
    rewind_metrics(tmp_path / "metrics.jsonl", step=3)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("line", ["junk", "[1]", '{"step": "x"}', '{"step": null}'])
def test_rewinding_a_damaged_file_says_so(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(UsageError, match=r"metrics\.jsonl is damaged"):
        rewind_metrics(path, step=3)
    assert path.read_text() == line + "\n"


def test_what_finds_no_room_is_written_when_there_is_some(tmp_path: Path) -> None:
    path, before = tmp_path / "metrics.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    with MetricsLog(path) as log:
        log.write({"step": 1})
        size = path.stat().st_size
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + 5, before[1]))  # the next line has room in part
            for step in (2, 3):
                with pytest.raises(OSError, match="too large"):
                    log.write({"step": step})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert path.stat().st_size == size + 5
        log.write({"step": 4})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 4]


def test_a_log_that_is_closed_without_room_loses_what_waits_and_no_more(tmp_path: Path) -> None:
    path, before = tmp_path / "metrics.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    log = MetricsLog(path)
    log.write({"step": 1})
    size = path.stat().st_size
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        with pytest.raises(OSError, match="too large"):
            log.write({"step": 2})
        log.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.stat().st_size == size
