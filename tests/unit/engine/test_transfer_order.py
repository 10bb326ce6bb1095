"""Whole runs whose groups have no tags: training, evaluations and changes of plan post everything in one order."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import onebox
from onebox.engine.compile import compiler, lowering
from onebox.engine.compile.order_check import fault_text
from onebox.errors import PlanError
from onebox.graph import TracedModel
from onebox.plan import Plan, Stage
from onebox.wire.protocol.groups import FormGroup
from onebox.wire.protocol.instructions import Receive
from tests.kit.captures import capture
from tests.kit.trainer_arguments import grouped
from tests.transfer_order import PostedInstructions
from tests.unit.engine.conftest import Pools

STEPS = 3


class Skips(nn.Module):
    """A U-Net of layers of one size, with two skips past its middle: both pass the same two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.middle = nn.Linear(4, 4)
        self.up = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return values [B, 3]."""
        first = self.down[0](x).tanh()
        second = self.down[1](first).tanh()
        y = self.up[0](self.middle(second).tanh() + second).tanh()
        return self.head(self.up[1](y + first).tanh())


def built() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(3)
        return Skips().double()


def batch(size: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 4, generator=generator).double(), torch.randn(size, 3, generator=generator).double()


def plan_of(devices: Sequence[Sequence[int]], schedule: str) -> Plan:
    """Return a plan of about equal stages, each with its replicas."""
    names, count = TracedModel(capture(built(), functional.mse_loss, batch(2, 0)), backward=True).segments, len(devices)
    bounds = [len(names) * place // count for place in range(count + 1)]
    stages = tuple(
        Stage(
            segments=names[bounds[place] : bounds[place + 1]],
            replicas=tuple((device,) for device in own),
            shares=(1.0,) * len(own),
        )
        for place, own in enumerate(devices)
    )
    return Plan(stages=stages, micro_batch=2, schedule=schedule)


def trained(
    pool: onebox.Pool, plan: Plan, changes: Mapping[int, Plan], **options: int
) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses and the parameters of a run whose plan changes before some steps, with evaluations."""
    model = built()
    arguments = grouped(pool=pool, plan=plan, recover=False, **options)
    with onebox.Trainer(model, functional.mse_loss, torch.optim.Adam(model.parameters()), **arguments) as trainer:
        losses = []
        for step in range(STEPS * (1 + len(changes))):
            if step in changes:
                trainer._run.adopt(changes[step])
            losses.append(trainer.step(*batch(8, step)))
            if step % 2:
                trainer.evaluate([batch(6, 100 + step)])
        found = [float(loss) for loss in losses]
        trainer.pull()
    return found, dict(model.state_dict())


@pytest.fixture
def untagged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all groups count as those of GPUs, whose messages have no tags."""
    monkeypatch.setattr(
        compiler, "untagged_groups", lambda plan, groups, devices: {n: members for members, n in groups.items()}
    )


RUNS = {
    "skips": ([[0], [1], [0]], "1f1b", {STEPS: [[1], [0], [1]]}, {}),
    "zbv": ([[0], [1], [1], [0]], "zbv", {STEPS: [[1], [1], [0], [0]]}, {}),
    "late": ([[2], [1], [0], [2]], "async-1f1b", {STEPS: [[0], [1], [2], [1]]}, {"staleness": 1}),
    "replicas": ([[0, 1], [1, 2]], "1f1b", {STEPS: [[2], [0]], 2 * STEPS: [[1, 0], [2, 1]]}, {}),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_whole_run_posts_everything_in_one_order(
    name: str, pools: Pools, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Nothing that a run posts is a fault without tags; results are those of messages with tags, to the last bit."""
    devices, schedule, changes, options = RUNS[name]
    plan, others = plan_of(devices, schedule), {step: plan_of(own, schedule) for step, own in changes.items()}
    with monkeypatch.context() as patch:
        before = PostedInstructions(patch)
        tagged = trained(pools(3), plan, others, **options)
        assert bool(before.faults()) == (name != "replicas"), "without tags the others would be wrong"
    request.getfixturevalue("untagged")
    posted = PostedInstructions(monkeypatch)
    found = trained(pools(3), plan, others, **options)
    assert not posted.faults(), fault_text(posted.faults())
    assert posted.count(Receive), "state moves from worker to worker"
    assert found[0] == tagged[0]
    assert all(torch.equal(tensor, tagged[1][key]) for key, tensor in found[1].items())


@pytest.mark.usefixtures("untagged")
def test_a_plan_that_would_mix_up_messages_uses_tcp_and_cannot_take_over(
    pools: Pools, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where groups are not formed yet they are formed with tags; where they serve on, the plan before stays."""
    pool, model = pools(3), built()
    right, wrong = plan_of([[0], [1]], "gpipe"), plan_of([[0], [1], [1], [0]], "zbv")
    monkeypatch.setattr(lowering.Lowering, "_in_order", lambda self, routines: routines)
    posted = PostedInstructions(monkeypatch)
    tags = []
    begin = onebox.Pool.begin_group
    monkeypatch.setattr(
        onebox.Pool,
        "begin_group",
        lambda self, *args, tagged, **options: tags.append(tagged) or begin(self, *args, tagged=tagged, **options),
    )
    arguments = grouped(pool=pool, plan=wrong, recover=False)
    with (
        caplog.at_level(logging.WARNING, "onebox"),
        onebox.Trainer(model, functional.mse_loss, torch.optim.SGD(model.parameters(), 0.1), **arguments) as trainer,
    ):
        float(trainer.step(*batch(8, 0)))
    assert tags and all(tags) and posted.count(FormGroup)
    assert "use TCP" in caplog.text and "receive for" in caplog.text and "send of stage" in caplog.text
    arguments = grouped(pool=pool, plan=right, recover=False)
    with onebox.Trainer(model, functional.mse_loss, torch.optim.SGD(model.parameters(), 0.1), **arguments) as trainer:
        float(trainer.step(*batch(8, 0)))
        with pytest.raises(PlanError, match="another schedule"):
            trainer._run.adopt(wrong)
        assert trainer.plan == right
        float(trainer.step(*batch(8, 1)))
