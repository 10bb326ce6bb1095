"""Checkpoints that are written while training goes on."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import onebox
from onebox.errors import CheckpointError, UsageError
from onebox.pool import Pool

INPUTS, TARGETS = torch.linspace(-1, 1, 24 * 8).reshape(24, 8), torch.arange(24) % 3


@pytest.fixture(scope="module")
def pool() -> Any:
    with onebox.open("cpu*2", threads=1) as made:
        yield made


def trainer(pool: Pool, **options: Any) -> onebox.Trainer:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return onebox.Trainer(model, nn.functional.cross_entropy, optimizer, pool=pool, **options)


def hashes(save: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in save.glob("*.safetensors")}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"plan": onebox.DataParallel(shard_optimizer=True)},
        {"plan": onebox.DataParallel(update="host"), "recovery": onebox.Recovery(snapshot_every=2)},
        {"stale": onebox.StaleGradients(warm_up=1), "plan": onebox.DataParallel(micro_batch=6)},
    ],
    ids=str,
)
def test_it_has_the_state_of_its_beginning(pool: Pool, options: dict[str, Any], tmp_path: Path) -> None:
    with trainer(pool, **options) as training:
        for _ in range(2):
            training.step(INPUTS, TARGETS)
        save = training.begin_save(tmp_path / "aside", extra={"epoch": 1})
        for _ in range(4):
            training.step(INPUTS, TARGETS)
        found = save.result()
        second = training.begin_save(tmp_path / "aside")
    assert second.done  # closing waits for it
    with trainer(pool, **options) as training:
        for _ in range(2):
            training.step(INPUTS, TARGETS)
        expected = training.save(tmp_path / "now", extra={"epoch": 1})
        for _ in range(4):
            training.step(INPUTS, TARGETS)
        last = training.save(tmp_path / "now")
    assert (found.name, second.result().name) == (expected.name, last.name) == ("step-00000002", "step-00000006")
    assert hashes(found) == hashes(expected)
    assert hashes(second.result()) == hashes(last)


@pytest.mark.feature("Checkpoints: Save while training goes on")
def test_a_run_that_is_resumed_from_it_has_the_same_bits(pool: Pool, tmp_path: Path) -> None:
    with trainer(pool) as training:
        training.step(INPUTS, TARGETS)
        training.begin_save(tmp_path, extra={"epoch": 7})
        expected = [training.step(INPUTS, TARGETS).item() for _ in range(3)]
    model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    with onebox.Trainer.resume(tmp_path, model, nn.functional.cross_entropy, optimizer, pool=pool) as training:
        assert training.extra == {"epoch": 7}
        assert [training.step(INPUTS, TARGETS).item() for _ in range(3)] == expected


def test_the_next_call_raises_its_error_once(pool: Pool, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    with trainer(pool) as training:
        training.step(INPUTS, TARGETS)
        training.begin_save(blocked)
        training.step(INPUTS, TARGETS)
        with pytest.raises(CheckpointError, match="could not be written to"):
            training.begin_save(tmp_path / "checkpoint")
        assert training.begin_save(tmp_path / "checkpoint").result().name == "step-00000002"
        failed = training.begin_save(blocked)
        with pytest.raises(CheckpointError, match="could not be written to"):
            failed.result()
        training.step(INPUTS, TARGETS)
        training.save(tmp_path / "checkpoint")  # the error has been told


def test_closing_raises_an_error_that_nobody_has_seen(pool: Pool, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    training = trainer(pool)
    training.step(INPUTS, TARGETS)
    training.begin_save(blocked)
    with pytest.raises(CheckpointError, match="could not be written to"):
        training.close()
    training.close()
    with pytest.raises(UsageError, match="closed"):
        training.begin_save(tmp_path)


def test_neither_a_thread_nor_a_copy_is_left(pool: Pool, tmp_path: Path) -> None:
    with trainer(pool, recovery=None) as training:
        training.step(INPUTS, TARGETS)
        training.begin_save(tmp_path).result()
        training.begin_save(tmp_path)
        training.save(tmp_path)
        assert [each.kept_bytes for each in training.memory()] == [0, 0]
    assert "onebox-save" not in {thread.name for thread in threading.enumerate()}
