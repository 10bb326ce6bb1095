"""``benchmarks/slow_links.py``: the tokens that its sides read, the cells that it keeps, and its figures."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import slow_links
import slow_links_model as models
from slow_links_keys import INFINITE, Cell, Cells, append, figures, read
from slow_links_sides import FIXED, SIDES, Setting

TINY = models.SIZES["tiny"]
SETTINGS: dict[Any, dict[str, Any]] = {part: {"every": 30} for part in ("speed", "loss", "drop")}
RATES = (1000, 100, 10)


def cell(side: str, *values: float, rate: int = 10, islands: int = 2, **others: Any) -> Cell:
    """Return a cell of the table of speeds, unless it is another part's."""
    others = {"part": "speed", "settings": {"every": 30}} | others
    return Cell(side=side, rate=rate, islands=islands, values=values, **others)


def figures_of(*cells: Cell, cores: int = 2) -> dict[str, Any]:
    """Return the figures of cells."""
    return figures(Cells(cells, SETTINGS), RATES, (2, 4), 3, cores)


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_devices_read_the_same_number_of_tokens_and_together_the_batch(devices: int) -> None:
    whole = models.batch(TINY, 3, 5)
    parts = [models.part(whole, rank, devices) for rank in range(devices)]
    assert {len(inputs) for inputs, _ in parts} == {TINY.batch // devices}
    for place in range(2):
        assert torch.equal(torch.cat([part[place] for part in parts]), whole[place])


def test_a_batch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="16 sequences for 3 devices"):
        models.part(models.batch(TINY, 0, 0), 0, 3)


def test_batches_depend_on_seed_and_step_alone_and_targets_are_the_next_characters() -> None:
    inputs, targets = models.batch(TINY, 1, 2)
    again = models.batch(TINY, 1, 2)
    assert torch.equal(inputs, again[0]) and torch.equal(targets, again[1])
    assert not torch.equal(inputs, models.batch(TINY, 1, 3)[0])
    assert not torch.equal(inputs, models.batch(TINY, 2, 2)[0])
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert inputs.shape == (TINY.batch, TINY.context) and inputs.dtype == torch.uint8


def test_the_held_out_text_is_another_one_and_a_model_that_knows_nothing_has_the_loss_of_chance() -> None:
    training, held_out = models.text()
    assert len(training) > 8 * len(held_out) > 0
    model, _ = models.made(TINY, 0, torch.float64)
    with torch.no_grad():
        model.head.weight.zero_()
    assert models.held_out_loss(model, TINY) == pytest.approx(torch.tensor(float(models.CHARACTERS)).log().item())


def test_the_full_model_has_the_parameters_that_were_asked_for() -> None:
    count = sum(parameter.numel() for parameter in models.made(models.SIZES["full"], 0)[0].parameters())
    assert 5_000_000 <= count <= 10_000_000


def test_the_learning_rate_rises_and_falls_or_stays() -> None:
    factors = [models.rate_factor(step, 100) for step in range(100)]
    assert factors.index(max(factors)) == 9 and factors[0] < 0.11
    assert models.FLOOR < factors[-1] < models.FLOOR + 0.01
    assert {models.rate_factor(step, 0) for step in range(5)} == {1.0}


def test_cells_come_back_from_their_file_and_those_of_other_settings_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "cells.jsonl"
    one, other = cell("ddp", 1.0, 2.0, 4.0, note="a plan"), cell("sync", 3.0, settings={"every": 5})
    for each in (one, other):
        append(file, each)
    assert read([file, tmp_path / "nothing"]) == [one, other]
    cells = Cells(read([file]), SETTINGS)
    assert one.key in cells and other.key not in cells
    assert list(cells) == [one] and one.value == 2.0


def test_nothing_measured_gives_no_figure() -> None:
    found = figures_of()
    assert {f"seconds_per_token_over_infinite_{rate}" for rate in RATES} <= set(found)
    assert {f"faster_than_ddp_{rate}" for rate in RATES} | {"loss_penalty_2", "loss_penalty_4"} <= set(found)
    assert found.pop("bytes_saved") == {side: dict.fromkeys(("10", "100", "1000")) for side in ("gated", "islands")}
    assert {value for key, value in found.items() if not key.startswith("loss_seeds")} == {None}


def test_figures_are_the_worst_number_of_islands_or_rate() -> None:
    cells = [
        *(cell("islands", 2.0, rate=INFINITE, islands=islands) for islands in (2, 4)),
        cell("islands", 2.2, 2.4, 9.0),
        cell("islands", 3.0, islands=4),
        *(cell("ddp", 12.0, islands=islands) for islands in (2, 4)),
        cell("single", 4.0, rate=100),
        cell("default", 2.0, rate=100),
        cell("single", 4.0),
        cell("default", 5.0),
        cell("single", 1.0, islands=4),
        cell("default", 9.0, islands=4),
    ]
    found = figures_of(*cells)
    assert found["seconds_per_token_over_infinite_10"] == 1.5
    assert found["seconds_per_token_over_infinite_100"] is None
    assert found["faster_than_ddp_10"] == 4.0
    assert found["default_over_best_single"] == 0.8, "four hosts have more devices than there are cores"
    assert figures_of(*cells, cores=4)["default_over_best_single"] == pytest.approx(1 / 9, abs=1e-4)


def test_the_gate_is_compared_with_each_fixed_choice_or_not_at_all() -> None:
    choices = [cell(side, time) for side, time in zip(FIXED, (4.0, 2.0, 3.0, 5.0), strict=True)]
    assert figures_of(cell("gated", 2.1), *choices)["gate_regret"] == 0.05
    assert figures_of(cell("gated", 2.1), *choices[:-1])["gate_regret"] is None


def test_the_adaptive_side_is_compared_with_each_static_plan_after_each_drop() -> None:
    static = [side for side in SIDES if SIDES[side].static]
    cells = [
        *(cell(side, 2.0 + place, part="drop", rate=rate) for place, side in enumerate(static) for rate in (100, 10)),
        cell("adaptive", 2.1, part="drop", rate=100),
        cell("adaptive", 2.4, part="drop", rate=10),
    ]
    assert figures_of(*cells)["after_drop_over_best"] == 1.2


def test_penalties_are_means_over_seeds_that_both_sides_have() -> None:
    cells = [
        *(cell("sync", 2.0, part="loss", rate=INFINITE, seed=seed) for seed in range(3)),
        *(cell("islands", 2.0 + 0.02 * seed, part="loss", rate=INFINITE, islands=4, seed=seed) for seed in range(2)),
    ]
    found = figures_of(*cells)
    assert found["loss_penalty_4"] == 0.005 and found["loss_seeds_4"] == 2
    assert found["loss_penalty_2"] is None and found["loss_seeds_2"] == 0


def test_bytes_saved_are_those_that_the_synchronous_side_sends() -> None:
    sync = cell("sync", 1.0, bytes_per_token=1000.0)
    found = figures_of(sync, cell("islands", 1.0, bytes_per_token=50.0), cell("gated", 1.0, bytes_per_token=250.0))
    assert found["bytes_saved"]["islands"]["10"] == 0.95 and found["bytes_saved"]["gated"]["10"] == 0.75


def test_a_setting_comes_back_from_a_command_line() -> None:
    setting = Setting(size="tiny", addresses=("10.77.0.1", "10.77.0.2"), every=3)
    assert Setting.parsed(setting.text) == setting
    assert replace(setting, rank=2) != setting


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"tokens": 1000}, "take a multiple, such as 7680"),
        ({"islands": [3]}, "--islands 3"),
        ({"islands": [1]}, "--islands 1"),
        ({"rates": [0]}, "--rates 0"),
        ({}, ""),
    ],
)
def test_options_that_compare_nothing_are_refused(changed: dict[str, Any], says: str) -> None:
    given: dict[str, Any] = {"size": "tiny", "batch": 0, "every": 30, "tokens": 7680}
    given |= {"parts": ["loss"], "islands": [2, 4], "rates": [10]}
    said = slow_links.invalid(argparse.Namespace(**given | changed))
    assert (says in said) if says else not said


def test_kept_cells_are_shown_without_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cells.jsonl"
    outer = {"every": 30, "outer_rate": 0.7, "outer_momentum": 0.9, "fragments": 1, "overlap": 0, "compression": "none"}
    settings = {"size": "tiny", "step_tokens": TINY.tokens, **outer, "delay_ms": 20.0}
    for side, value in (("islands", 2.0), ("ddp", 8.0)):
        append(file, cell(side, value, settings=settings))
    given = ["--size", "tiny", "--tokens", "7680", "--only-read", "--json", "--keep", str(file)]
    monkeypatch.setattr(sys, "argv", ["slow_links.py", *given])
    slow_links.main()
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["faster_than_ddp_10"] == 4.0
