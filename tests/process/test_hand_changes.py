"""Weights and buffers changed by hand between steps: brought to the workers, or refused; never silently lost."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn

import onebox
from onebox.errors import UsageError
from onebox.plan import Plan, Stage
from tests.kit.models import CASES, OPTIMIZERS
from tests.kit.pools import Pools
from tests.kit.reference import Outcome, assert_same, backward, state_of
from tests.kit.stages import SEED, staged, tensors_of
from tests.kit.trainer_arguments import grouped

GUARDED = True

SIZES = (8, 8, 5, 8, 8, 8)
AT = (1, 3)
"""The changes are made after these steps."""

Change = Callable[[nn.Module], object]


def replicas(name: str) -> Plan:
    return Plan.data_parallel(range(2), [1.0, 1.0], micro_batch=3)


def pipeline(name: str) -> Plan:
    return staged(name, [0, 1])


def split(name: str) -> Plan:
    return Plan(stages=(Stage(segments=(), replicas=((0, 1),), shares=(1.0,)),), micro_batch=3)


LAYOUTS: dict[str, tuple[Callable[[str], Plan], dict[str, Any]]] = {
    "replicas": (replicas, {}),
    "replicas that share out the state": (lambda name: replace(replicas(name), optimizer="sharded"), {}),
    "sums at the client": (lambda name: replace(replicas(name), sync="client"), {}),
    "a pipeline": (pipeline, {}),
    "steps on the host": (lambda name: replace(pipeline(name), update="host"), {}),
    "steps that overlap": (pipeline, {"overlap": True}),
    "recovery": (replicas, {"recover": True, "snapshot_every": 2}),
    "split layers": (split, {}),
}


def load(model: nn.Module) -> None:
    model.load_state_dict({name: 0.9 * tensor for name, tensor in model.state_dict().items()})


@torch.no_grad()
def clamp(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.clamp_(-0.1, 0.1)


def scale_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(0.9)


def one_element(model: nn.Module) -> None:
    next(model.parameters()).data.view(-1)[-3] += 0.5


def other_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.9


@torch.no_grad()
def initialise(model: nn.Module) -> None:
    torch.manual_seed(3)
    nn.init.normal_([p for p in model.parameters() if p.dim() > 1][-1])


def reset_statistics(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.reset_running_stats()


def other_buffers(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert isinstance(module.running_mean, Tensor)
            module.running_mean = module.running_mean * 0.5


CHANGES: dict[str, Change] = {
    each.__name__: each for each in (load, clamp, scale_data, one_element, other_data, initialise)
}
BUFFERS: dict[str, Change] = {each.__name__: each for each in (reset_statistics, other_buffers)}


def plain(name: str, plan: Plan, change: Change, optimizer: str = "adamw") -> Outcome:
    case = CASES[name]
    model = case.model()
    stepped, losses = OPTIMIZERS[optimizer](model), []
    for step, batch in enumerate(case.batches(list(SIZES))):
        stepped.zero_grad()
        parts = [part.size for part in plan.micro_batches(SIZES[step])]
        losses.append(backward(model, case.loss, batch, lambda size, p=parts: p, lambda index: None))
        stepped.step()
        if step in AT:
            change(model)
    return Outcome(losses=losses, norms=[], tensors=state_of(model))


def trainer_on(pool: onebox.Pool, name: str, plan: Plan, **options: Any) -> onebox.Trainer:
    case = CASES[name]
    model = case.model()
    arguments: dict[str, Any] = {"seed": SEED, "check_every": 1, "plan": plan, **options}
    return onebox.Trainer(model, case.loss, OPTIMIZERS["adamw"](model), **grouped(pool=pool, **arguments))


def trained(trainer: onebox.Trainer, name: str, change: Change, sizes: Sequence[int] = SIZES) -> Outcome:
    losses = []
    for step, batch in enumerate(CASES[name].batches(list(sizes))):
        losses.append(trainer.step(*batch))
        if step in AT:
            trainer.pull()
            change(trainer.model)
    trainer.pull()
    return Outcome(losses=[float(loss) for loss in losses], norms=[], tensors=state_of(trainer.model))


@pytest.mark.feature("Trainer: Change weights by hand between steps")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_sees_a_change(layout: str, pools: Pools) -> None:
    make, options = LAYOUTS[layout]
    plan = make("mlp")
    with trainer_on(pools(2), "mlp", plan, **options) as trainer:
        found = trained(trainer, "mlp", clamp)
    assert_same(found, plain("mlp", plan, clamp))


@pytest.mark.parametrize("change", CHANGES)
def test_every_kind_of_change_is_seen(change: str, pools: Pools) -> None:
    plan = replicas("mlp")
    with trainer_on(pools(2), "mlp", plan) as trainer:
        found = trained(trainer, "mlp", CHANGES[change])
    assert_same(found, plain("mlp", plan, CHANGES[change]))


@pytest.mark.parametrize("layout", ["replicas", "a pipeline"])
@pytest.mark.parametrize("change", BUFFERS)
def test_statistics_may_be_changed(change: str, layout: str, pools: Pools) -> None:
    plan = LAYOUTS[layout][0]("cnn")
    with trainer_on(pools(2), "cnn", plan) as trainer:
        found = trained(trainer, "cnn", BUFFERS[change])
    assert_same(found, plain("cnn", plan, BUFFERS[change]))


@pytest.mark.parametrize("change", [clamp, scale_data, other_data, initialise])
def test_a_change_of_old_weights_is_refused(change: Change, pools: Pools, caplog: pytest.LogCaptureFixture) -> None:
    first, second = CASES["mlp"].batches([8, 8])
    with trainer_on(pools(2), "mlp", replicas("mlp")) as trainer:
        trainer.step(*first)
        trainer.step(*first)
        before = trainer.tensors()
        change(trainer.model)
        actions: list[Callable[[], object]] = [
            lambda: trainer.step(*second),
            lambda: trainer.evaluate([second]),
            trainer.tensors,
            lambda: trainer.save("nowhere"),
        ]
        for action in actions:
            with pytest.raises(UsageError, match=r"changed by hand.* 2 steps behind .*pull\(\).*push\(\)"):
                action()
        with caplog.at_level(logging.WARNING, logger="onebox"):
            trainer.pull()
        assert "pull() overwrites model." in caplog.text
        after = trainer.tensors()
        assert trainer.steps_done == 2
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.feature("Trainer: Change weights by hand between steps")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_push_sends_what_is_here(layout: str, pools: Pools, tmp_path: Path) -> None:
    make, options = LAYOUTS[layout]
    plan = make("cnn")
    batches = CASES["cnn"].batches([8, 8, 8])
    with trainer_on(pools(2), "cnn", plan, **options) as trainer:
        for batch in batches[:2]:
            trainer.step(*batch)
        load(trainer.model)
        trainer.push()
        found = tensors_of(trainer)
        assert all(torch.equal(found[name], tensor) for name, tensor in state_of(trainer.model).items())
        trainer.step(*batches[2])
        trainer.pull()
    model = CASES["cnn"].model()
    with onebox.Trainer(model, CASES["cnn"].loss, OPTIMIZERS["adamw"](model), pool=pools(2), plan=plan) as other:
        for batch in batches[:2]:
            other.step(*batch)
        other.pull()
        load(model)  # state_dict() of the first one has the workers' weights, too
        other.step(*batches[2])
        other.pull()
    assert_same(
        Outcome(losses=[0.0], norms=[], tensors=state_of(trainer.model)),
        Outcome(losses=[0.0], norms=[], tensors=state_of(model)),
    )


def test_evaluation_and_checkpoints_see_a_change(pools: Pools, tmp_path: Path) -> None:
    case, (batch,) = CASES["mlp"], CASES["mlp"].batches([8])
    with trainer_on(pools(2), "mlp", replicas("mlp")) as trainer:
        at_first = trainer.evaluate([batch]).loss
        scale_data(trainer.model)
        with torch.no_grad():
            expected = float(case.loss(trainer.model(batch[0]), batch[1]))
        assert trainer.evaluate([batch]).loss == pytest.approx(expected, abs=1e-12)
        assert abs(at_first - expected) > 1e-6
        trainer.step(*batch)
        trainer.pull()
        clamp(trainer.model)
        saved = trainer.save(tmp_path)
    model = case.model()
    with onebox.Trainer.resume(saved, model, case.loss, OPTIMIZERS["adamw"](model), pool=pools(2)):
        assert all(torch.equal(tensor, model.state_dict()[n]) for n, tensor in trainer.model.state_dict().items())


def test_weights_swapped_for_an_evaluation_come_back(pools: Pools) -> None:
    plan = replicas("mlp")
    batch = CASES["mlp"].batches([8])[0]

    def swap(model: nn.Module) -> None:
        kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        clamp(model)
        trainer.evaluate([batch])
        model.load_state_dict(kept)

    with trainer_on(pools(2), "mlp", plan) as trainer:
        found = trained(trainer, "mlp", swap)
    assert_same(found, plain("mlp", plan, lambda model: None))


def test_another_parameter_in_the_place_of_one_is_refused(pools: Pools) -> None:
    (batch,) = CASES["mlp"].batches([8])
    with trainer_on(pools(2), "mlp", replicas("mlp")) as trainer:
        trainer.step(*batch)
        layer = trainer.model.get_submodule("0")
        layer.weight = nn.Parameter(torch.zeros(16, 10, dtype=torch.float64))
        with pytest.raises(UsageError, match=r"model\.0\.weight, a parameter of .* is another one.*copy_\(\)"):
            trainer.step(*batch)


def test_late_steps_refuse_a_change(pools: Pools) -> None:
    (batch,) = CASES["mlp"].batches([8])
    with trainer_on(pools(2), "mlp", replicas("mlp"), staleness=1, warm_up=0, delay="none") as trainer:
        trainer.step(*batch)
        trainer.pull()
        clamp(trainer.model)
        with pytest.raises(UsageError, match="while gradients are stale: there are several versions"):
            trainer.step(*batch)
        with pytest.raises(UsageError, match="while gradients are stale"):
            trainer.push()


@pytest.mark.parametrize("after", [2, 4])
def test_a_loss_does_not_bring_the_old_weights_back(after: int) -> None:
    """A worker is killed so many steps after the start: before a snapshot has the change, and behind it."""
    plan = replicas("mlp")
    batches = CASES["mlp"].batches(list(SIZES))
    options: dict[str, Any] = {"recover": True, "snapshot_every": 100}
    with onebox.open("cpu*2", threads=1) as pool, trainer_on(pool, "mlp", plan, **options) as trainer:
        losses = []
        for step, batch in enumerate(batches):
            if step == after:
                kill(pool, 1)
            losses.append(trainer.step(*batch))
            if step in AT:
                trainer.pull()
                clamp(trainer.model)
        trainer.pull()
        assert len(trainer.recoveries) == 1
        found = Outcome(losses=[float(loss) for loss in losses], norms=[], tensors=state_of(trainer.model))
    assert_same(found, plain("mlp", plan, clamp))


def test_a_loss_before_the_next_step_keeps_a_change() -> None:
    (batch,) = CASES["mlp"].batches([8])
    options: dict[str, Any] = {"recover": True, "snapshot_every": 100}
    with onebox.open("cpu*2", threads=1) as pool, trainer_on(pool, "mlp", replicas("mlp"), **options) as trainer:
        trainer.step(*batch)
        trainer.pull()
        clamp(trainer.model)
        trainer.evaluate([batch])
        kill(pool, 1)
        found = tensors_of(trainer)
        trainer.evaluate([batch])
        assert len(trainer.recoveries) == 1
        again = tensors_of(trainer)
        expected = state_of(trainer.model)
    for tensors in (found, again):
        assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())


def kill(pool: onebox.Pool, worker: int) -> None:
    os.kill(pool.process_ids[worker], signal.SIGKILL)
