"""The folder of a run."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from onebox.errors import UsageError
from onebox.report import RunFolder


def test_the_default_name_is_a_utc_timestamp_and_the_name(tmp_path: Path) -> None:
    folder = RunFolder.create("cnn-digits", root=tmp_path / "runs")
    assert folder.path.is_dir()
    assert folder.path.parent == tmp_path / "runs"
    stamp, name = folder.path.name.split("-", 1)
    assert name.startswith("cnn-digits")
    assert len(stamp) == len("20260102T030405Z")


def test_runs_that_start_in_the_same_second_get_folders_of_their_own(tmp_path: Path) -> None:
    folders = [RunFolder.create("cnn", root=tmp_path) for _ in range(5)]
    assert len({folder.path for folder in folders}) == 5


def test_a_given_path_is_used_as_it_is(tmp_path: Path) -> None:
    folder = RunFolder.create("cnn", path=tmp_path / "deep" / "here")
    assert folder.path == tmp_path / "deep" / "here"
    assert folder.path.is_dir()


def test_an_empty_folder_may_be_given(tmp_path: Path) -> None:
    assert RunFolder.create("cnn", path=tmp_path).path == tmp_path


def test_a_folder_with_something_in_it_is_refused_for_a_new_run(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(UsageError, match=r"not empty.*resume"):
        RunFolder.create("cnn", path=tmp_path)


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is a file"):
        RunFolder.create("cnn", path=tmp_path / "file")


@pytest.mark.parametrize("name", ["", "a/b", "..", "../up", "with space", "ü", ".hidden", "a\n"])
def test_a_name_that_would_be_no_good_folder_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="cannot be the name of a run"):
        RunFolder.create(name, root=tmp_path)
    assert not list(tmp_path.iterdir())


def test_resuming_keeps_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    assert RunFolder.resume(tmp_path).metrics.read_text() == "{}\n"


def test_resuming_needs_a_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no run to resume"):
        RunFolder.resume(tmp_path / "nowhere")


def test_where_everything_lies(tmp_path: Path) -> None:
    folder = RunFolder.create("cnn", path=tmp_path)
    paths = [folder.metrics, folder.config, folder.checkpoint, folder.timeline, folder.summary]
    names = ["metrics.jsonl", "config.json", "checkpoint", "timeline.json", "summary.json"]
    assert paths == [tmp_path / name for name in names]
    assert not list(tmp_path.iterdir())


def test_config_and_summary_are_json_for_people(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Options:
        rate: float
        data: Path

    folder = RunFolder.create("cnn", path=tmp_path)
    folder.write_config({"options": Options(rate=0.1, data=Path("a/b")), "shape": (1, 8)})
    folder.write_summary({"loss": np.float32(0.5), "steps": np.int64(3), "last": torch.tensor(2.0)})
    assert json.loads(folder.config.read_text()) == {
        "options": {"rate": 0.1, "data": "a/b"},
        "shape": [1, 8],
    }
    assert json.loads(folder.summary.read_text()) == {"loss": 0.5, "steps": 3, "last": 2.0}
    assert folder.summary.read_text().startswith('{\n  "loss"')


def test_numbers_that_are_not_finite_become_null(tmp_path: Path) -> None:
    folder = RunFolder.create("cnn", path=tmp_path)
    folder.write_summary({"losses": [math.nan, math.inf, -math.inf, np.float64("nan"), 1.0]})
    assert json.loads(folder.summary.read_text()) == {"losses": [None, None, None, None, 1.0]}


@pytest.mark.parametrize("value", [object(), np.zeros(2), lambda: None, {1j}])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, value: object) -> None:
    folder = RunFolder.create("cnn", path=tmp_path)
    folder.write_summary({"loss": 1})
    with pytest.raises(UsageError, match="cannot write this as JSON"):
        folder.write_summary({"loss": value})
    assert json.loads(folder.summary.read_text()) == {"loss": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_a_crash_before_the_rename_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder.create("cnn", path=tmp_path)
    folder.write_summary({"loss": 1})

    def full(_: int) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        folder.write_summary({"loss": 2})
    assert json.loads(folder.summary.read_text()) == {"loss": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]
