"""Checkpoint files: written as a whole or not at all, read back to the last bit, refused with what is wrong."""

from __future__ import annotations

import dataclasses
import json
import secrets
import shutil
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from onebox.engine.state import checkpoint_files as module
from onebox.engine.state.checkpoint_files import (
    VERSION,
    Checkpoint,
    GroupEntry,
    IslandsEntry,
    Manifest,
    NumberEntry,
    find_save,
    read,
    saves,
    write,
)
from onebox.engine.state.pieces import Key
from onebox.errors import CheckpointError, UsageError
from onebox.plan import Plan, Prediction, Stage
from onebox.trainer_options import Engine, Outer, Recovery, Staging, StaleGradients
from onebox.wire import DTYPES, PROGRAM_TYPES

STAGED = Plan(
    stages=(
        Stage(segments=("a", "b"), replicas=((0,), (1,)), shares=(0.5, 0.5)),
        Stage(segments=("c",), replicas=((2, 3),), shares=(1.0,)),
    ),
    micro_batch=4,
    schedule="auto",
    predicted=Prediction(
        batch=8, step_s=0.5, bubble=0.25, peak_bytes=(1, 2, 3, 4), stages_s=((0.1, 0.2, 0.3), (0.1, 0.2, 0.3))
    ),
)
"""A plan that uses every field of a plan file."""


def manifest(**changed: Any) -> Manifest:
    fields: dict[str, Any] = {
        "format": "onebox-checkpoint",
        "version": VERSION,
        "torch": "2.13.0",
        "step": 20,
        "seed": 7,
        "precision": "fp32",
        "clip_grad_norm": None,
        "loss_reduction": None,
        "stale": StaleGradients(correction="both", warm_up=3),
        "recovery": Recovery(snapshot_every=4),
        "staging": Staging(ahead=0, cache="1GiB"),
        "engine": Engine(in_flight=3, overlap=True, costs={"a": (0.1, 0.2, 0.3)}),
        "plan": STAGED,
        "optimizer": ("AdamW",),
        "groups": (GroupEntry(("model.w",), {"lr": 0.1, "betas": (0.9, 0.999), "fused": None, "amsgrad": False}),),
        "numbers": (NumberEntry("model.w", "count", 3),),
        "extra": {"epoch": 2, "nested": {"list": [1, 2.5, None, "x"]}},
        "identity": secrets.token_hex(16),
        "parent": None,
    }
    return Manifest(**{**fields, **changed})


def checkpoint(**changed: Any) -> Checkpoint:
    state = {
        "model.w": torch.arange(6, dtype=torch.float64).view(2, 3).t(),
        "model.a.b.c": torch.tensor([True, False]),
        "model.empty": torch.zeros(0, 3, dtype=torch.bfloat16),
        "loss.scale": torch.tensor(float("nan")),
    }
    optimizer = {("model.w", "exp_avg"): torch.ones(3, 2), ("model.w", "step"): torch.tensor(3.0)}
    return Checkpoint(manifest=manifest(**changed), state=state, optimizer=optimizer)


def same(one: Tensor, other: Tensor) -> bool:
    """Tell whether two tensors are alike to the last bit."""
    alike = (one.dtype, one.shape) == (other.dtype, other.shape)
    return alike and torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    written = checkpoint()
    place = write(tmp_path / "new" / "folder", written.contents(), keep=None)
    assert place == tmp_path / "new" / "folder" / "step-00000020"
    for path in (place, place.parent):
        found = read(path)
        assert msgspec.structs.replace(found.manifest, files=(), number=0) == written.manifest
        assert found.state.keys() == written.state.keys()
        assert found.optimizer.keys() == written.optimizer.keys()
        assert all(same(found.state[name], tensor) for name, tensor in written.state.items())
        assert all(same(found.optimizer[name], tensor) for name, tensor in written.optimizer.items())


@given(
    st.sampled_from(PROGRAM_TYPES), st.lists(st.integers(0, 3), max_size=3), st.text("ab./_", min_size=1, max_size=6)
)
def test_any_type_shape_and_name(
    tmp_path_factory: pytest.TempPathFactory, dtype: str, shape: list[int], name: str
) -> None:
    folder = tmp_path_factory.mktemp("checkpoint")
    tensor = torch.ones(shape, dtype=DTYPES[dtype])
    written = Checkpoint(
        manifest=manifest(), state={f"model.{name}": tensor}, optimizer={(f"model.{name}", "k"): tensor}
    )
    write(folder, written.contents(), keep=None)
    found = read(folder)
    assert found.state.keys() == written.state.keys()
    assert found.optimizer.keys() == written.optimizer.keys()
    assert same(found.state[f"model.{name}"], tensor)


def test_it_is_safetensors_and_json_and_nothing_else(tmp_path: Path) -> None:
    place = write(tmp_path, checkpoint().contents(), keep=None)
    names = sorted(path.name for path in place.iterdir())
    assert names == ["loss.safetensors", "manifest.json", "model.safetensors", "optimizer.safetensors"]
    text = json.loads((place / "manifest.json").read_text())
    assert text["step"] == 20
    assert {entry["name"] for entry in text["files"]} == set(names) - {"manifest.json"}
    assert safetensors.torch.load_file(place / "model.safetensors")["w"].shape == (3, 2)


def test_a_save_before_the_first_step_has_no_plan(tmp_path: Path) -> None:
    write(tmp_path, checkpoint(plan=None).contents(), keep=None)
    assert read(tmp_path).manifest.plan is None


# ---- several saves


def steps(folder: Path) -> list[str]:
    return [path.name for path in saves(folder)]


class Line:
    """A run that saves: each save follows the one before, or the one that it goes back to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.parent: str | None = None

    def save(self, *steps: int, keep: int | None = None) -> list[str]:
        """Save after each of these steps, and return what is in the folder."""
        for step in steps:
            made = checkpoint(step=step, parent=self.parent)
            write(self.folder, made.contents(), keep=keep)
            self.parent = made.manifest.identity
        return [path.name for path in saves(self.folder)]

    def resume(self, name: str = "") -> int:
        """Go on from a save, or from the newest, and return its step."""
        found = read(find_save(self.folder / name)).manifest
        self.parent = found.identity
        return found.step


def test_the_newest_are_kept_and_read(tmp_path: Path) -> None:
    line = Line(tmp_path)
    line.save(2, 10, 100_000_000)
    assert steps(tmp_path) == ["step-100000000", "step-00000010", "step-00000002"]
    assert read(tmp_path).manifest.step == 100_000_000
    assert line.save(100_000_001, keep=2) == ["step-100000001", "step-100000000"]


@pytest.mark.parametrize(
    ("keep", "left"), [(1, [15]), (2, [15, 10]), (3, [15, 30, 10]), (4, [15, 30, 20, 10]), (None, [15, 30, 20, 10])]
)
def test_a_run_that_goes_back_begins_a_branch_and_abandons_another(
    tmp_path: Path, keep: int | None, left: list[int]
) -> None:
    line = Line(tmp_path)
    line.save(10, 20, 30)
    assert line.resume("step-00000010") == 10
    assert line.save(15, keep=keep) == [f"step-{step:08d}" for step in left]
    assert line.resume() == 15
    assert line.save(16, keep=2) == ["step-00000016", "step-00000015"]


def test_a_branch_is_kept_before_newer_saves_of_another(tmp_path: Path) -> None:
    """Two runs in one folder, by turns: each keeps its own."""
    one, other = Line(tmp_path), Line(tmp_path)
    one.save(1)
    other.save(2)
    one.save(3)
    other.save(4)
    assert one.save(5, keep=2) == ["step-00000005", "step-00000003"]


def test_what_cannot_be_read_is_an_error_only_where_it_may_be_the_newest(tmp_path: Path) -> None:
    line = Line(tmp_path)
    line.save(10, 20)
    (tmp_path / "step-00000010" / "manifest.json").write_text("damaged")
    assert line.resume() == 20
    line.save(15)
    (tmp_path / "step-00000015" / "manifest.json").write_text("damaged")
    with pytest.raises(CheckpointError, match=r"step-00000015/manifest\.json is damaged"):
        line.resume()  # by the time of its folder, though not by its name
    rewritten = json.loads((tmp_path / "step-00000020" / "manifest.json").read_text())
    (tmp_path / "step-00000015" / "manifest.json").write_text(json.dumps({**rewritten, "version": VERSION - 1}))
    assert line.resume() == 20


def test_a_removal_that_is_killed_leaves_nothing_that_looks_like_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = Line(tmp_path)
    line.save(1)

    def killed(path: Path, **options: Any) -> None:
        if path.name.startswith(".removing-"):
            (path / "manifest.json").unlink()
            raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        line.save(2, keep=1)
    monkeypatch.undo()
    assert steps(tmp_path) == ["step-00000002"]
    assert line.resume() == 2
    line.save(3, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


def test_the_same_step_again_is_newer(tmp_path: Path) -> None:
    for epoch in range(12):
        write(tmp_path, checkpoint(extra={"epoch": epoch}).contents(), keep=None)
    assert read(tmp_path).manifest.extra == {"epoch": 11}
    assert steps(tmp_path)[:2] == ["step-00000020.11", "step-00000020.10"]


def test_the_same_step_again_is_newer_also_where_older_ones_are_removed(tmp_path: Path) -> None:
    for epoch in range(8):
        write(tmp_path, checkpoint(extra={"epoch": epoch}).contents(), keep=2)
        assert read(tmp_path).manifest.extra == {"epoch": epoch}
    assert steps(tmp_path) == ["step-00000020.7", "step-00000020.6"]


def test_what_was_just_written_is_never_what_is_removed(tmp_path: Path) -> None:
    """A run that starts again in the folder of a longer one must not lose its own saves."""
    for step in (90, 100):
        write(tmp_path, checkpoint(step=step).contents(), keep=None)
    place = write(tmp_path, checkpoint(step=10).contents(), keep=2)
    assert place.exists()
    assert read(place).manifest.step == 10
    assert len(steps(tmp_path)) == 2


def test_other_things_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    for name in ("step-12", "step-00000001x", "notes.txt", "metrics"):
        (tmp_path / name).mkdir()
    write(tmp_path, checkpoint().contents(), keep=1)
    assert steps(tmp_path) == ["step-00000020"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "metrics", "notes.txt", "step-00000001x", "step-00000020", "step-12",
    ]  # fmt: skip


@pytest.mark.parametrize("keep", [0, -1])
def test_keeping_nothing_is_refused(tmp_path: Path, keep: int) -> None:
    with pytest.raises(UsageError, match=f"keep={keep}"):
        write(tmp_path, checkpoint().contents(), keep=keep)
    assert list(tmp_path.iterdir()) == []


# ---- interruptions


@pytest.mark.parametrize("at", range(7))
def test_a_write_that_ends_anywhere_leaves_the_earlier_ones_whole(
    tmp_path: Path, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before each sync in turn: KeyboardInterrupt stands in, and the clean-up that it would run is left out."""
    write(tmp_path, checkpoint(step=1).contents(), keep=None)
    count = 0
    original = module.sync

    def sync(path: Path) -> None:
        nonlocal count
        if count == at:
            raise KeyboardInterrupt
        count += 1
        original(path)

    monkeypatch.setattr(module, "sync", sync)
    monkeypatch.setattr(shutil, "rmtree", lambda *args, **kwargs: None)
    try:
        write(tmp_path, checkpoint(step=2).contents(), keep=None)
        ended = True
    except KeyboardInterrupt:
        ended = False
    monkeypatch.undo()
    found = read(tmp_path)
    assert found.manifest.step in ((1, 2) if at >= 5 else (1,))
    assert ended == (at >= 6)
    write(tmp_path, checkpoint(step=3).contents(), keep=None)
    assert read(tmp_path).manifest.step == 3
    assert not list(tmp_path.glob(".writing-*")), "what was half written is gone"


def test_everything_is_on_disk_before_the_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    sync, rename = module.sync, Path.rename
    monkeypatch.setattr(module, "sync", lambda path: (events.append(path.name), sync(path))[1])
    monkeypatch.setattr(Path, "rename", lambda self, to: (events.append("rename"), rename(self, to))[1])
    write(tmp_path, checkpoint().contents(), keep=None)
    place = events.index("rename")
    before = {"model.safetensors", "loss.safetensors", "optimizer.safetensors", "manifest.json"}
    assert before <= set(events[:place])
    assert events[place - 1].startswith(".writing"), "the folder's own entries last"
    assert events[place + 1 :] == [tmp_path.name], "then the name"


def test_a_full_disk_is_a_checkpoint_error(tmp_path: Path) -> None:
    write(tmp_path, checkpoint(step=1).contents(), keep=None)

    def full(keys: Sequence[Key]) -> Iterator[Tensor]:
        raise OSError(28, "No space left on device")
        yield

    with pytest.raises(CheckpointError, match="could not be written"):
        write(tmp_path, dataclasses.replace(checkpoint(step=2).contents(), elements=full), keep=None)
    assert read(tmp_path).manifest.step == 1
    assert steps(tmp_path) == ["step-00000001"]
    assert len(list(tmp_path.iterdir())) == 1


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="could not be written"):
        write(tmp_path / "file", checkpoint().contents(), keep=None)


@pytest.mark.parametrize(
    "extra",
    [{"x": object()}, {"x": {1}}, {"x": b"a"}, {"best": float("inf")}, {"x": float("nan")}, {"x": {(1, 2): 3}}],
    ids=["object", "set", "bytes", "infinite", "nan", "tuple key"],
)
def test_extra_that_is_no_json(tmp_path: Path, extra: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="extra"):
        write(tmp_path, checkpoint(extra=extra).contents(), keep=None)
    assert list(tmp_path.iterdir()) == []


# ---- damage


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return write(tmp_path, checkpoint().contents(), keep=None)


def rewrite(place: Path, **changed: Any) -> None:
    text = json.loads((place / "manifest.json").read_text())
    (place / "manifest.json").write_text(json.dumps({**text, **changed}))


@pytest.mark.parametrize("name", ["model.safetensors", "loss.safetensors", "optimizer.safetensors"])
@pytest.mark.parametrize(("how", "message"), [("missing", "is missing"), ("short", "bytes"), ("bit", "checksum")])
def test_a_damaged_file_names_itself(place: Path, name: str, how: str, message: str) -> None:
    file = place / name
    data = bytearray(file.read_bytes())
    if how == "missing":
        file.unlink()
    elif how == "short":
        file.write_bytes(data[:-1])
    else:
        data[-1] ^= 1
        file.write_bytes(data)
    with pytest.raises(CheckpointError, match=message) as caught:
        read(place)
    assert name in str(caught.value)
    assert caught.value.path == file


ISLANDS = IslandsEntry(
    devices=((0, 1), (2,)),
    outer=Outer(every=4, fragments=2),
    shares=(0.5, 0.5),
    plans=(STAGED, STAGED),
    samples=((6.0, 3.0), (0.0, 0.0)),
    due=(0, 6),
)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"devices": ((0, 1), (1,))}, "its islands have the devices"),
        ({"devices": ((0, 1), ())}, "its islands have the devices"),
        ({"shares": (1.0,)}, "1 shares for 2 islands"),
        ({"plans": (STAGED,)}, "1 plans for 2 islands"),
        ({"samples": ((6.0, 3.0),)}, "for 2 fragments and 2 islands"),
        ({"samples": ((6.0, 3.0), (0.0,))}, "for 2 fragments and 2 islands"),
        ({"samples": ((6.0, -3.0), (0.0, 0.0))}, "samples"),
        ({"shares": (-1.0, 1.0)}, "shares"),
        ({"due": (0,)}, r"outer steps due after steps \(0,\) for 2 fragments"),
        ({"due": (0, -1)}, "outer steps due"),
    ],
)
def test_islands_that_contradict_themselves_are_refused(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    place = write(tmp_path, checkpoint(islands=ISLANDS).contents(), keep=None)
    assert read(place).manifest.islands == ISLANDS
    rewrite(place, islands={**msgspec.to_builtins(ISLANDS), **msgspec.to_builtins(changed)})
    with pytest.raises(CheckpointError, match=message):
        read(place)


@given(st.integers(0, 10_000), st.integers(0, 7))
def test_no_flipped_bit_goes_unnoticed(tmp_path_factory: pytest.TempPathFactory, position: int, bit: int) -> None:
    folder = tmp_path_factory.getbasetemp() / "flipped"
    if not folder.exists():
        write(folder, checkpoint().contents(), keep=None)
    (place,) = saves(folder)
    file = place / "model.safetensors"
    whole = file.read_bytes()
    data = bytearray(whole)
    data[position % len(data)] ^= 1 << bit
    file.write_bytes(data)
    try:
        with pytest.raises(CheckpointError):
            read(folder)
    finally:
        file.write_bytes(whole)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"format": "\xff"}',
        b"\x80\x04K\x01.",
        b"[" * 100_000,
        b'{"a":' * 50_000,
    ],
    ids=["empty", "cut", "list", "null", "binary", "no text", "pickle", "deep lists", "deep objects"],
)
def test_a_manifest_that_is_none(place: Path, data: bytes) -> None:
    (place / "manifest.json").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        read(place)


@pytest.mark.parametrize(
    "changed",
    [
        {"format": "torch"},
        {"version": VERSION - 1},
        {"version": VERSION + 1},
        {"version": str(VERSION)},
        {"unknown": 1},
        {"step": "20"},
        {"precision": "fp8"},
        {"plan": {"stages": []}},
        {"plan": {"stages": [{"replicas": [[0]], "shares": [1.0], "unknown": 1}]}},
        {"files": []},
        {"files": [{"name": "../../etc/passwd", "size_bytes": 1, "sha256": ""}] * 3},
        {"groups": [{"parameters": ["a"], "options": {"lr": {"a": 1}}}]},
        {"extra": {"deep": json.loads("[" * 900 + "]" * 900)}},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_a_manifest_that_says_something_else(place: Path, changed: dict[str, Any]) -> None:
    if "extra" in changed:
        rewrite(place, **changed)
        read(place)  # deep, but JSON
    else:
        rewrite(place, **changed)
        with pytest.raises(CheckpointError, match=r"manifest\.json"):
            read(place)


def test_a_manifest_without_end(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MANIFEST_BYTES", 10)
    with pytest.raises(CheckpointError, match="is larger than 10 bytes"):
        read(place)


def test_a_tensor_file_that_is_something_else(place: Path) -> None:
    """With a manifest that fits it: the checksum is right, the content is not."""
    for content in (b"not safetensors", struct.pack("<Q", 2**60) + b"{}", b"\x80\x04K\x01."):
        (place / "model.safetensors").write_bytes(content)
        entries = [module._entry(place / name) for name in module._FILES]
        rewrite(place, files=msgspec.to_builtins(entries))
        with pytest.raises(CheckpointError, match="no safetensors file"):
            read(place)


@pytest.mark.parametrize("content", ["nothing", "empty folder", "foreign folder"])
def test_a_folder_without_a_checkpoint(tmp_path: Path, content: str) -> None:
    folder = tmp_path / "folder"
    if content != "nothing":
        folder.mkdir()
    if content == "foreign folder":
        (folder / "model.pt").write_bytes(b"\x80\x04K\x01.")
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        read(folder)
