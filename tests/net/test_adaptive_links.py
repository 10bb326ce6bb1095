"""Links of real hosts that become slow in mid-run, and quick again: found by what connections carry, and acted on."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Iterator

import msgspec
import pytest
import torch
from torch import Tensor

import onebox
from onebox.engine.steps.link_use import use_since
from onebox.plan import Plan
from onebox.pool.backends.agents.agent_connection import AgentConnection
from tests.kit import reference
from tests.kit.reference import assert_same
from tests.net.fleet import GRACE_S, Fleet
from tests.net.hosts import Network
from tests.net.training import WIDTH, outcome, parts, plans

SIZE, MICRO_BATCH = 96, 32
USUAL = 12
"""Steps before the link is limited, with which the run learns what is usual."""

SETTLED = 10
"""Steps after a change within which a decision has been made."""

MOST = 400
"""Steps within which something has to be decided on."""

SPEED = 0.02
"""Of the workers: computing takes long in comparison with what this machine's few cores and the network add."""


@pytest.fixture(scope="module")
def slow_pool(fleet: Fleet) -> Iterator[onebox.Pool]:
    """A pool of workers of the three agents that compute slowly."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AgentConnection, "lease", functools.partialmethod(AgentConnection.lease, speed=SPEED))
        with fleet.client(), onebox.open(fleet.spec(), threads=1, grace_s=GRACE_S) as pool:
            yield pool


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return inputs [B, 8] and targets [B] of a step, the same each time."""
    drawn = torch.Generator().manual_seed(step)
    return torch.randn(SIZE, 8, generator=drawn, dtype=torch.float64), torch.randint(0, 4, (SIZE,), generator=drawn)


def plan_of(kind: str) -> Plan:
    """Return a plan for three devices: of replicas, of stages, or of a stage and two replicas of another one."""
    if kind == "replicas of a share each":
        return Plan.data_parallel([0, 1, 2], [1.0, 1.0, 1.0])
    known = plans()
    if kind != "hybrid":
        return msgspec.structs.replace(known[kind], micro_batch=MICRO_BATCH)
    first, *others = known["pipelined"].stages
    names = tuple(name for stage in others for name in stage.segments)
    second = msgspec.structs.replace(others[0], segments=names, replicas=((1,), (2,)), shares=(0.5, 0.5))
    return Plan(stages=(first, second), micro_batch=MICRO_BATCH, schedule="1f1b")


class Run:
    """Steps of a trainer, one after the other, with what is decided."""

    def __init__(self, trainer: onebox.Trainer) -> None:
        self.trainer = trainer
        self.losses: list[onebox.StepLoss] = []

    def step(self) -> None:
        """Do a step and wait for its end."""
        self.losses.append(self.trainer.step(*batch(len(self.losses))))
        self.trainer.wait()

    def until(self, true: Callable[[], bool]) -> None:
        """Do steps until something is true."""
        begin = len(self.losses)
        while not true():
            assert len(self.losses) < begin + MOST, [made.line for made in self.trainer.decisions]
            self.step()

    def uses(self, device: int) -> bool:
        """Return whether the present plan uses a device."""
        return self.trainer.plan is not None and device in self.trainer.plan.devices


def expected(plan: Plan, steps: int) -> reference.Outcome:
    """Return the result of one process."""
    cut = [part.size for part in plan.micro_batches(SIZE)]
    return reference.train(*parts(), [batch(step) for step in range(steps)], lambda size: cut)


@pytest.mark.feature("Adaptive plans: Leave out a device behind a slow link")
@pytest.mark.parametrize(
    "kind",
    [
        "data-parallel",
        "replicas of a share each",
        "pipelined",
        "hybrid",
    ],
)
def test_a_device_behind_a_link_that_drops_is_left_out_and_taken_back(
    kind: str, slow_pool: onebox.Pool, network: Network, caplog: pytest.LogCaptureFixture
) -> None:
    plan, blue = plan_of(kind), network["blue"]
    with (
        caplog.at_level(logging.WARNING, logger="onebox"),
        onebox.Trainer(*parts(), pool=slow_pool, plan=plan, adaptive=True) as trainer,
    ):
        run = Run(trainer)
        run.until(lambda: len(run.losses) == USUAL)
        made = len(trainer.decisions)
        try:
            blue.limit(2_000_000 if kind == "pipelined" else 10_000_000)
        except RuntimeError as error:
            pytest.skip(f"no links of a limited rate here: {error}")
        try:
            run.until(lambda: not run.uses(2))
        finally:
            blue.unlimit()
        run.until(lambda: run.uses(2))
        found = outcome(trainer, run.losses)
        lines = [each.line for each in trainer.decisions[made:]]
        blue_bytes = sum(each.size_bytes for each in trainer.links if blue.address in (each.source, each.target))
    named = rf"link 10\.77\.0\.\d–{re.escape(blue.address)} carries [\d.]+ Mbit/s since step"
    assert re.search(named, lines[0]), lines
    assert trainer.decisions[made].decision.step < USUAL + SETTLED, lines
    assert blue_bytes > USUAL * MICRO_BATCH * WIDTH * 8, "gradients, or the values of a micro-batch at least"
    assert_same(found, expected(plan, len(run.losses)))


def test_a_link_of_100_megabits_is_measured_as_that_whatever_is_decided(
    slow_pool: onebox.Pool, network: Network
) -> None:
    plan, blue, rate = plan_of("data-parallel"), network["blue"], 100_000_000
    with onebox.Trainer(*parts(), pool=slow_pool, plan=plan, adaptive=True) as trainer:
        run = Run(trainer)
        run.until(lambda: len(run.losses) == USUAL)
        before = trainer.links
        try:
            blue.limit(rate)
        except RuntimeError as error:
            pytest.skip(f"no links of a limited rate here: {error}")
        try:
            run.until(lambda: len(run.losses) == 2 * USUAL)
        finally:
            blue.unlimit()
        used = [each for each in use_since(before, trainer.links) if blue.address in (each.source, each.target)]
        most = max(used, key=lambda each: each.size_bytes)
        found = outcome(trainer, run.losses)
        lines = [each.line for each in trainer.decisions]
    assert rate / 8 / 5 < most.size_bytes / most.busy_s < 2 * rate / 8, lines
    assert_same(found, expected(plan, len(run.losses)))
