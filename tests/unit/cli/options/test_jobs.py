"""The options of the commands: what is refused, what is filled in."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from onebox.cli.models import MODEL_NAMES
from onebox.cli.options.common import BUILT_IN_MODELS
from onebox.cli.options.jobs import PlanConfig, SaveInterval, TrainConfig, parse_save_interval
from onebox.cli.options.pools import DevicesConfig, RunConfig
from onebox.errors import UsageError
from onebox.sizes import Budgets


def test_the_models_on_the_command_line_are_those_that_exist() -> None:
    assert BUILT_IN_MODELS == MODEL_NAMES


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"epochs": 0}, "--epochs 0"),
        ({"batch": 0}, "--batch 0"),
        ({"islands": "0,1/x"}, "--islands 0,1/x: allowed are auto, and the devices of each island, such as 0,1/2,3"),
        ({"islands": "0/"}, "--islands 0/: allowed are auto"),
        ({"outer_every": 10}, "--outer-every 10 is for islands; it needs --islands"),
        ({"outer_grace_s": 2.0}, "--outer-grace-s 2.0 is for islands; it needs --islands"),
        ({"islands": "0/1", "outer_lr": 0.0}, "--outer-lr 0.0: allowed are numbers above 0"),
        ({"islands": "0/1", "outer_every": 2, "outer_fragments": 3}, "--outer-fragments 3 and --outer-every 2"),
        ({"islands": "0/1", "outer_every": 2, "outer_overlap": 2}, "--outer-overlap 2 and --outer-every 2"),
        ({"islands": "0/1", "outer_shares": "a,b"}, "--outer-shares"),
        ({"outer_compression": "int8"}, "--outer-compression int8 is for islands; it needs --islands"),
        ({"islands": "0/1", "outer_compression": "zip"}, "--outer-compression 'zip': allowed are 'none', 'bf16'"),
        ({"islands": "0/1", "outer_state": "disk"}, "--outer-state 'disk': allowed are 'device', 'host'"),
        ({"islands": "0/1", "outer_quorum": 0}, "--outer-quorum 0: allowed are 1 and more"),
        ({"islands": "0/1", "outer_quorum": 1, "outer_grace_s": -1.0}, "--outer-grace-s -1.0: allowed are seconds"),
        (
            {"islands": "0/1", "outer_grace_s": 2.0},
            "--outer-grace-s 2.0: it is the time for islands beyond",
        ),
        ({"islands": "0/1", "staleness": 1}, "--islands and --staleness 1: these do not go together"),
        ({"islands": "0/1", "overlap": True}, "--islands and --overlap: these do not go together"),
        ({"islands": "0/1", "snapshot_every": 2}, "--islands and --snapshot-every 2: these do not go together"),
        ({"islands": "0/1", "update": "host"}, "--islands and --update host: these do not go together"),
        ({"islands": "0/1", "plan": "plan.json"}, "--islands and --plan plan.json: these do not go together"),
        ({"micro_batch": -1}, "--micro-batch -1"),
        ({"threads": 0}, "--threads 0"),
        ({"save_every": "0"}, "--save-every 0"),
        ({"save_every": "10 parsecs"}, "--save-every 10 parsecs"),
        ({"every": 0}, "--every 0"),
        ({"snapshot_every": 0}, "--snapshot-every 0"),
        ({"snapshot_every": 3, "recover": "off"}, "--snapshot-every 3 is for runs that recover"),
        ({"lr": 0.0}, "--lr 0.0"),
        ({"lr": float("nan")}, "--lr nan"),
        ({"clip_grad_norm": float("inf")}, "--clip-grad-norm inf"),
        ({"weight_decay": -0.1}, "--weight-decay -0.1"),
        ({"optimizer": "sgd", "momentum": 1.0}, "--momentum 1.0"),
        ({"momentum": 0.9}, "--momentum is for --optimizer sgd"),
        ({"seed": -1}, "--seed -1"),
        ({"memory": "lots"}, "--memory lots"),
        ({"shares": "1,x"}, "--shares 1,x"),
        ({"shares": "0,0"}, "--shares 0,0"),
        ({"shares": "inf,1"}, "--shares inf,1"),
        ({"plan": "p.json", "micro_batch": 8}, "--plan p.json and --micro-batch 8"),
        ({"plan": "auto", "sync": "client"}, "--plan auto and --sync client"),
        ({"plan": "auto", "update": "host"}, "--plan auto and --update host"),
        ({"plan": "auto", "shares": "3,1"}, "--plan auto and --shares 3,1"),
        ({"plan": ""}, "--plan"),
        ({"read": "0"}, "--read 0: allowed are auto, and 1 and more"),
        ({"process": "many"}, "--process many"),
        ({"image_size": 0}, "--image-size 0"),
        ({"run": Path("a"), "resume": Path("b")}, "--run is for a new run"),
    ],
    ids=str,
)
def test_a_value_that_makes_no_sense_is_refused_with_its_flag(options: dict[str, Any], flag: str) -> None:
    with pytest.raises(UsageError) as caught:
        TrainConfig(**options)
    assert str(caught.value).startswith(flag)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"batch": 0}, "--batch 0"),
        ({"momentum": 0.9}, "--momentum is for --optimizer sgd"),
        ({"memory": "lots"}, "--memory lots"),
        ({"micro_batches": "0,4"}, "--micro-batches 0,4"),
        ({"micro_batches": "4,,8"}, "--micro-batches 4,,8"),
        ({"micro_batches": "65"}, "--micro-batches 65"),
        ({"micro_batches": "²"}, "--micro-batches ²"),
        ({"schedules": "1f1b,"}, "--schedules 1f1b,"),
        ({"schedules": "table"}, "--schedules table"),
        ({"budget": -1.0}, "--budget -1.0"),
        ({"check": Path("p"), "micro_batches": "4"}, "--check p and --micro-batches 4"),
        ({"check": Path("p"), "schedules": "1f1b"}, "--check p and --schedules 1f1b"),
    ],
    ids=str,
)
def test_the_plan_command_checks_too(options: dict[str, Any], flag: str) -> None:
    with pytest.raises(UsageError) as caught:
        PlanConfig(**options)
    assert str(caught.value).startswith(flag)


def test_micro_batches_and_schedules_as_the_planner_takes_them() -> None:
    assert PlanConfig(micro_batches="4, 8,16").micro_batch_sizes == (4, 8, 16)
    assert PlanConfig(schedules="1f1b, zb-h1").schedule_names == ("1f1b", "zb-h1")
    assert PlanConfig().micro_batch_sizes is None
    assert PlanConfig().schedule_names is None


@pytest.mark.parametrize(("options", "flag"), [({"threads": 0}, "--threads 0"), ({"memory": "0"}, "--memory 0")])
def test_the_devices_command_checks_too(options: dict[str, Any], flag: str) -> None:
    with pytest.raises(UsageError, match=f"^{flag}"):
        DevicesConfig(**options)


def test_shares_and_memory_as_the_engine_takes_them() -> None:
    assert TrainConfig(shares="measured").data_parallel.shares == "measured"
    assert TrainConfig(shares="3,1.5").data_parallel.shares == (3.0, 1.5)
    assert TrainConfig().budgets == Budgets()
    assert DevicesConfig(memory="1KiB").budgets.of(2) == (1024, 1024)
    assert PlanConfig(memory="1KiB,2KiB").budgets.of(2) == (1024, 2048)
    assert RunConfig(memory="1:1KiB").budgets.of(2) == (0, 1024)


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd", "muon"])
def test_resolving_fills_in_what_the_optimizer_needs(optimizer: Any) -> None:
    config = TrainConfig(optimizer=optimizer).resolved()
    assert config.lr is not None and config.weight_decay is not None
    assert (config.momentum is not None) == (optimizer == "sgd")
    assert config.resolved() == config


def test_resolving_keeps_what_was_given() -> None:
    given_options = TrainConfig(optimizer="sgd", lr=0.5, weight_decay=0.0, momentum=0.0)
    assert given_options.resolved() == given_options


def test_a_data_folder_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert TrainConfig(data="mnist:here").resolved().data == f"mnist:{tmp_path / 'here'}"
    assert TrainConfig(data="digits").resolved().data == "digits"
    several = TrainConfig(data="tar:a-{0,1}.tar,b.tar").resolved().data
    assert several == f"tar:{tmp_path}/a-{{0,1}}.tar,{tmp_path}/b.tar"


def test_options_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        TrainConfig().epochs = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"islands": "0,1/x"}, "--islands 0,1/x: allowed are auto, and the devices of each island"),
        ({"outer_every": 10}, "--outer-every 10 is for islands; it needs --islands"),
        ({"islands": "0/1", "outer_every": 2, "outer_overlap": 2}, "--outer-overlap 2 and --outer-every 2"),
        ({"islands": "0/1", "staleness": 1}, "--islands and --staleness 1: these do not go together"),
        ({"islands": "0/1", "check": Path("plan.json")}, "--check plan.json and --islands 0/1"),
        ({"lossy": "gradient"}, "--lossy gradient: allowed are gradients, activations"),
        ({"probe": 10}, "--probe 10 compares ways to train that change the result; it needs --islands or --lossy"),
        ({"islands": "0/1", "probe": 1001}, "--probe 1001: allowed are 1 to 1000 steps"),
        ({"islands": "0/1", "probe": 0}, "--probe 0: allowed are 1 to 1000 steps"),
    ],
)
def test_plans_of_islands_refuse_what_training_refuses(options: dict[str, Any], flag: str) -> None:
    with pytest.raises(UsageError) as caught:
        PlanConfig(**options)
    assert flag in str(caught.value)


def test_islands_as_the_trainer_takes_them() -> None:
    assert TrainConfig(islands="0,1/2").island_devices == ((0, 1), (2,))
    assert TrainConfig(islands="auto", plan="auto").island_devices == "auto"
    assert TrainConfig().island_devices is None
    assert TrainConfig().outer is None
    found = TrainConfig(islands="0/1", outer_every=7, outer_shares="3,1").outer
    assert found is not None
    assert (found.every, found.lr, found.momentum, found.shares) == (7, 0.7, 0.9, (3.0, 1.0))


@pytest.mark.parametrize(
    ("text", "steps", "seconds"),
    [("500", 500, 0.0), ("500 steps", 500, 0.0), ("90s", 0, 90.0), ("10min", 0, 600.0), ("1.5 h", 0, 5400.0)],
)
def test_checkpoints_are_steps_or_time_apart(text: str, steps: int, seconds: float) -> None:
    assert parse_save_interval(text) == SaveInterval(steps=steps, seconds=seconds)


@pytest.mark.feature("Checkpoints: Save every so many steps, or so often")
def test_a_checkpoint_is_due_after_steps_or_time() -> None:
    assert [SaveInterval(steps=3).due(step, 1e9) for step in (2, 3, 4)] == [False, True, False]
    assert [SaveInterval(seconds=60.0).due(3, since_s) for since_s in (59.0, 60.0)] == [False, True]
