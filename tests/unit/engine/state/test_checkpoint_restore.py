"""Restoring: a checkpoint goes back into the model and optimizer that it came from, and into no others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import onebox
from onebox.engine.state.checkpoint_files import Checkpoint, GroupEntry, read
from onebox.engine.state.checkpoint_restore import group_entries, restore, resumed_plan, resumed_reduction
from onebox.engine.workload.named_state import named_state
from onebox.errors import CheckpointError, UsageError
from onebox.plan import Plan, Stage
from onebox.trainer_options import DataParallel
from tests.kit.trainer_arguments import grouped
from tests.unit.engine.conftest import Pools
from tests.unit.engine.state.test_checkpoint_files import manifest

NUMERICS = onebox.Numerics(
    matmul="highest", tf32_convolutions=False, cudnn_benchmark=True, cudnn_deterministic=True, deterministic="warn"
)


class Scale(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.mse_loss(outputs * self.factor, targets)


def make(seed: int, loss: Any = None) -> tuple[nn.Module, Any, torch.optim.Optimizer]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
    loss = loss or Scale().double()
    groups = [
        {"params": model[0].parameters(), "lr": 0.01 * seed},
        {"params": [*model[2].parameters(), *loss.parameters()]},
    ]
    return model, loss, torch.optim.AdamW(groups, lr=0.02 * seed, betas=(0.8, 0.9))


def saved(seed: int) -> Checkpoint:
    model, loss, optimizer = make(seed)
    named = named_state(model, loss, lambda: 0)
    state = {name: tensor.detach().clone() for name, tensor in named.tensors.items()}
    return Checkpoint(
        manifest=manifest(groups=group_entries(optimizer, named), optimizer=("AdamW", "AdamW")),
        state=state,
        optimizer={},
    )


def test_weights_buffers_and_options_come_back() -> None:
    model, loss, optimizer = make(2)
    restore(saved(1), model, loss, optimizer)
    expected, expected_loss, expected_optimizer = make(1)
    for name, tensor in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)
    assert torch.equal(loss.factor, expected_loss.factor)
    for group, other in zip(optimizer.param_groups, expected_optimizer.param_groups, strict=True):
        assert {k: v for k, v in group.items() if k != "params"} == {k: v for k, v in other.items() if k != "params"}
    assert all(isinstance(group["betas"], tuple) for group in optimizer.param_groups)


def without(checkpoint: Checkpoint, name: str) -> Checkpoint:
    state = {key: tensor for key, tensor in checkpoint.state.items() if key != name}
    return Checkpoint(manifest=checkpoint.manifest, state=state, optimizer={})


def changed(checkpoint: Checkpoint, **state: Tensor) -> Checkpoint:
    named = {name.replace("__", "."): tensor for name, tensor in state.items()}
    return Checkpoint(manifest=checkpoint.manifest, state={**checkpoint.state, **named}, optimizer={})


def described(**other: Any) -> Checkpoint:
    original = saved(1)
    groups = other.get("groups", original.manifest.groups)
    return Checkpoint(
        manifest=manifest(**{"groups": groups, "optimizer": ("AdamW",) * len(groups), **other}),
        state=original.state,
        optimizer={},
    )


@pytest.mark.parametrize(
    ("foreign", "message"),
    [
        (without(saved(1), "model.0.bias"), r"it lacks model\.0\.bias"),
        (changed(saved(1), model__extra=torch.zeros(1)), r"it has model\.extra"),
        (
            changed(saved(1), model__0__bias=torch.zeros(6, dtype=torch.float64)),
            r"model\.0\.bias is float64\[6\] there",
        ),
        (changed(saved(1), model__0__bias=torch.zeros(5)), r"float32\[5\] there and float64\[5\] in the model"),
        (described(optimizer=("SGD", "SGD")), "written with SGD, but the optimizer is AdamW"),
        (described(groups=saved(1).manifest.groups[::-1]), "other parameter groups"),
        (described(groups=saved(1).manifest.groups[:1]), "other parameter groups"),
        (described(groups=(GroupEntry(("model.0.weight",), {}),)), "other parameter groups"),
    ],
)
def test_a_foreign_checkpoint_is_refused_and_nothing_is_touched(foreign: Checkpoint, message: str) -> None:
    model, loss, optimizer = make(2)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=message):
        restore(foreign, model, loss, optimizer)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert [group["lr"] for group in optimizer.param_groups] == [0.02, 0.04]


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(4)
    return [(torch.randn(6, 4, generator=generator).double(), torch.randn(6, 3, generator=generator).double())] * count


@pytest.mark.parametrize(("workers", "sync"), [(1, "workers"), (2, "client"), (3, "workers")])
def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path, workers: int, sync: Any, pools: Pools) -> None:
    options: dict[str, Any] = {"pool": pools(workers), "micro_batch": 2, "seed": 3, "sync": sync, "clip_grad_norm": 0.5}
    model, loss, optimizer = make(1)
    with onebox.Trainer(model, loss, optimizer, **grouped(**options)) as trainer:
        for batch in batches(3):
            trainer.step(*batch)
        trainer.save(tmp_path, extra={"epoch": 1})
        for batch in batches(2):
            trainer.step(*batch)
        expected = trainer.tensors()
        state = trainer.optimizer_state()
    model, loss, optimizer = make(2)
    with onebox.Trainer.resume(tmp_path, model, loss, optimizer, pool=pools(workers)) as again:
        assert (again.steps_done, again.extra, again.seed, again.clip_grad_norm) == (3, {"epoch": 1}, 3, 0.5)
        for batch in batches(2):
            again.step(*batch)
        found = again.tensors()
        for (n, k, one), (m, j, other) in zip(state, again.optimizer_state(), strict=True):
            assert (n, k) == (m, j)
            assert torch.equal(one, other) if isinstance(one, Tensor) else one == other  # type: ignore[arg-type]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_save_before_the_first_step_is_whole(tmp_path: Path, pools: Pools) -> None:
    model, loss, optimizer = make(1)
    with onebox.Trainer(model, loss, optimizer, pool=pools(1)) as trainer:
        trainer.save(tmp_path)
    assert read(tmp_path).manifest.step == 0
    model, loss, optimizer = make(2)
    with onebox.Trainer.resume(tmp_path, model, loss, optimizer, pool=pools(1)) as trainer:
        trainer.save(tmp_path)  # nor does one between resuming and the first step lose anything
        float(trainer.step(*batches(1)[0]))


def test_a_save_with_fewer_classes_than_groups_is_damaged(tmp_path: Path, pools: Pools) -> None:
    model, loss, optimizer = make(1)
    with onebox.Trainer(model, loss, optimizer, pool=pools(1)) as trainer:
        float(trainer.step(*batches(1)[0]))
        manifest_file = trainer.save(tmp_path) / "manifest.json"
    text = json.loads(manifest_file.read_text())
    assert text["optimizer"] == ["AdamW", "AdamW"]
    manifest_file.write_text(json.dumps({**text, "optimizer": ["AdamW"]}))
    with pytest.raises(CheckpointError, match="optimizers of 1 parameter groups, but 2 groups"):
        read(tmp_path)


def test_options_are_those_of_the_checkpoint_unless_given(tmp_path: Path, pools: Pools) -> None:
    model, loss, optimizer = make(1)
    options: dict[str, Any] = {
        "precision": "bf16",
        "clip_grad_norm": 0.5,
        "seed": 3,
        "loss_reduction": "mean",
        "stale": onebox.StaleGradients(correction="none", warm_up=2),
        "recovery": None,
        "staging": onebox.Staging(ahead=0),
        "engine": onebox.Engine(check_every=7, numerics=NUMERICS),
    }
    with onebox.Trainer(model, loss, optimizer, pool=pools(1), **options) as trainer:
        trainer.save(tmp_path)
    model, loss, optimizer = make(2)
    with onebox.Trainer.resume(tmp_path, model, loss, optimizer, pool=pools(1)) as trainer:
        assert {name: getattr(trainer, name) for name in options} == options
    given: dict[str, Any] = {
        "precision": "fp32",
        "clip_grad_norm": None,
        "seed": 4,
        "loss_reduction": None,
        "stale": None,
        "recovery": "auto",
        "staging": onebox.Staging(),
        "engine": onebox.Engine(fuse=True, numerics=NUMERICS),
    }
    with onebox.Trainer.resume(tmp_path, model, loss, optimizer, pool=pools(1), **given) as trainer:
        assert {name: getattr(trainer, name) for name in given} == given


WHOLE = Plan.data_parallel([0, 1], [3.0, 1.0], micro_batch=2, sync="client")
PARTS = Plan(
    stages=tuple(Stage(segments=(name,), replicas=((place,),), shares=(1.0,)) for place, name in enumerate("ab")),
    micro_batch=2,
)


@pytest.mark.parametrize(
    ("stored", "asked", "devices", "expected"),
    [
        (None, "stored", 2, None),
        (WHOLE, "stored", 2, DataParallel(micro_batch=2, sync="client", shares=[3, 1])),
        (WHOLE, "stored", 3, DataParallel(micro_batch=2, sync="client")),
        (WHOLE, DataParallel(micro_batch=2), 2, DataParallel(micro_batch=2, shares=[3, 1])),
        (WHOLE, DataParallel(micro_batch=2), 3, DataParallel(micro_batch=2)),
        (WHOLE, DataParallel(shares="equal"), 2, DataParallel(shares="equal")),
        (WHOLE, "auto", 2, "auto"),
        (WHOLE, PARTS, 2, PARTS),
        (PARTS, "stored", 3, PARTS),
        (PARTS, "stored", 1, DataParallel(micro_batch=2)),
        (PARTS, DataParallel(), 2, DataParallel()),
    ],
)
def test_the_plan_of_a_resumed_run(stored: Plan | None, asked: Any, devices: int, expected: Any) -> None:
    assert resumed_plan(stored, asked, devices) == expected


def test_over_several_hosts_a_resumed_run_leaves_those_devices_idle_that_its_plan_does() -> None:
    alone = Plan.data_parallel([1], [1.0], micro_batch=2)
    assert resumed_plan(alone, "stored", 2, spread=True) == alone
    assert resumed_plan(alone, "stored", 1, spread=True) == DataParallel(micro_batch=2)
    assert resumed_plan(WHOLE, "stored", 2, spread=True) == resumed_plan(WHOLE, "stored", 2)


def test_a_save_after_resuming_keeps_what_the_optimizer_remembers(tmp_path: Path, pools: Pools) -> None:
    model, loss, optimizer = make(1)
    with onebox.Trainer(model, loss, optimizer, pool=pools(1)) as trainer:
        float(trainer.step(*batches(1)[0]))
        trainer.save(tmp_path / "one")
    model, loss, optimizer = make(2)
    with onebox.Trainer.resume(tmp_path / "one", model, loss, optimizer, pool=pools(1)) as trainer:
        trainer.save(tmp_path / "other")
    one, other = read(tmp_path / "one"), read(tmp_path / "other")
    assert one.optimizer.keys() == other.optimizer.keys()
    assert all(torch.equal(one.optimizer[key], other.optimizer[key]) for key in one.optimizer)
    assert one.manifest.step == other.manifest.step


def test_an_optimizer_that_has_stepped_before_goes_on(pools: Pools) -> None:
    """A user may have trained a while without onebox."""
    model, loss, optimizer = make(1)
    expected, expected_loss, expected_optimizer = make(1)
    for m, criterion, o, count in ((model, loss, optimizer, 2), (expected, expected_loss, expected_optimizer, 4)):
        for x, y in batches(count):
            o.zero_grad()
            criterion(m(x), y).backward()
            o.step()
    with onebox.Trainer(model, loss, optimizer, pool=pools(1)) as trainer:
        for batch in batches(2):
            trainer.step(*batch)
        trainer.pull()
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], tensor, rtol=0, atol=1e-12)


def test_a_loss_reduction_that_is_a_function_must_be_given_again() -> None:
    function = onebox.Weighted(len)
    assert [resumed_reduction(None, "stored"), resumed_reduction("sum", "stored")] == [None, "sum"]
    assert [resumed_reduction("weighted", each) for each in (function, None, "mean")] == [function, None, "mean"]
    with pytest.raises(UsageError, match="give the same one"):
        resumed_reduction("weighted", "stored")
