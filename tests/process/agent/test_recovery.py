"""Runs over two agents, whose workers exchange tensors over TCP, that go on after losses; and clients that do not."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import onebox
from onebox.engine.recovery.policy import RecoveryRecord
from onebox.plan import Plan
from onebox.pool import Pool, open_pool
from onebox.pool.backends.agents.agent_source import connect_agent
from tests.kit.models import CASES, OPTIMIZERS
from tests.kit.stages import staged
from tests.kit.waiting import until
from tests.process.agent.hosts import Host

pytestmark = pytest.mark.usefixtures("folder")

STEPS = 10
BEFORE = 4
"""Steps until something happens."""

SHORT_S, GONE_S, LONG_S = 3.0, 6.0, 30.0
"""Grace times: of an agent that stays away, of a client that does, and of an agent that is started again."""

SAMPLES = 8
MICRO_BATCH = 2

Story = tuple[dict[str, Tensor], tuple[RecoveryRecord, ...]]


@pytest.fixture(scope="module")
def pool(hosts: tuple[Host, Host]) -> Iterator[Pool]:
    """A pool of one worker of each agent; it heals."""
    spec = f"{hosts[0].address}/cpu,{hosts[1].address}/cpu"
    with open_pool(spec, threads=1, grace_s=LONG_S) as opened:  # an agent may take as long to be there again
        assert len({device.host for device in opened.devices}) == 2  # so that no memory is shared
        yield opened


def trainer_on(pool: Pool, plan: Plan) -> onebox.Trainer:
    """Return a trainer of a model with dropout, which recovers as its pool has it."""
    case = CASES["dropping"]
    model = case.model()
    return onebox.Trainer(
        model, case.loss, OPTIMIZERS["adamw"](model), pool=pool, plan=plan, seed=7, engine=onebox.Engine(check_every=3)
    )


def run(pool: Pool, plan: Plan, blow: Callable[[], None] = lambda: None) -> Story:
    """Train; return the weights and what was lost."""
    with trainer_on(pool, plan) as trainer:
        for number, batch in enumerate(CASES["dropping"].batches([SAMPLES] * STEPS)):
            if number == BEFORE:
                blow()
            trainer.step(*batch)
        return trainer.tensors(), trainer.recoveries


def replicas() -> Plan:
    return Plan.data_parallel(range(2), (1.0, 1.0), micro_batch=MICRO_BATCH)


def stages() -> Plan:
    return staged("dropping", [0, 1], micro_batch=MICRO_BATCH)


@pytest.fixture(scope="module")
def undisturbed(pool: Pool) -> dict[Callable[[], Plan], dict[str, Tensor]]:
    """Weights of runs in which nothing is lost."""
    found = {}
    for plan in (replicas, stages):
        found[plan], stories = run(pool, plan())
        assert not stories
    return found


@pytest.mark.parametrize("plan", [replicas, stages])
def test_a_killed_worker_of_an_agent_is_replaced_unasked(
    plan: Callable[[], Plan], pool: Pool, undisturbed: dict[Callable[[], Plan], dict[str, Tensor]]
) -> None:
    found, (story,) = run(pool, plan(), lambda: os.kill(pool.process_ids[1], signal.SIGKILL))
    assert (story.lost, story.replaced, story.plan) == ((1,), (1,), None)
    assert all(torch.equal(found[name], tensor) for name, tensor in undisturbed[plan].items())


def test_a_killed_agent_that_is_started_again_gives_its_devices_again(
    hosts: tuple[Host, Host], pool: Pool, undisturbed: dict[Callable[[], Plan], dict[str, Tensor]]
) -> None:
    def blow() -> None:
        hosts[1].kill()
        hosts[1].start_again()

    found, stories = run(pool, stages(), blow)
    assert {worker for story in stories for worker in story.lost} == {1}
    assert not pool.gone
    assert hosts[1].held() == 1
    assert all(torch.equal(found[name], tensor) for name, tensor in undisturbed[stages].items())


def test_a_client_that_dies_is_resumed_from_its_checkpoint_and_its_workers_are_free_after_the_grace_time(
    hosts: tuple[Host, Host], tmp_path: Path
) -> None:
    script = f"""
import os, onebox
from tests.kit.models import CASES
from tests.process.agent.test_recovery import SAMPLES, STEPS, BEFORE, replicas, trainer_on
if __name__ == "__main__":
    with onebox.open("{hosts[0].address}/cpu,{hosts[1].address}/cpu", threads=1, grace_s={GONE_S}) as pool:
        trainer = trainer_on(pool, replicas())
        for batch in CASES["dropping"].batches([SAMPLES] * STEPS)[:BEFORE]:
            trainer.step(*batch)
        trainer.save({str(tmp_path)!r})
        for batch in CASES["dropping"].batches([SAMPLES] * STEPS)[BEFORE:-1]:
            trainer.step(*batch)  # which is lost
        os.kill(os.getpid(), 9)
"""
    with contextlib.ExitStack() as stack:
        lines = [stack.enter_context(contextlib.closing(connect_agent(host.address))) for host in hosts]

        def held() -> list[int]:
            return [sum(len(offer.holders) for offer in line.inspect().offers) for line in lines]

        before = held()
        died = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240, check=False)
        assert died.returncode == -signal.SIGKILL, died.stderr
        assert held() == [workers + 1 for workers in before]  # the client may be back in time
        until(lambda: held() == before)

    case = CASES["dropping"]
    model = case.model()
    with onebox.open(f"{hosts[0].address}/cpu,{hosts[1].address}/cpu", threads=1) as again:
        expected, _ = run(again, replicas())
        with onebox.Trainer.resume(tmp_path, model, case.loss, OPTIMIZERS["adamw"](model), pool=again) as trainer:
            assert trainer.steps_done == BEFORE
            for batch in case.batches([SAMPLES] * STEPS)[BEFORE:]:
                trainer.step(*batch)
            found = trainer.tensors()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_killed_agent_that_stays_away_leaves_the_run_to_the_others(
    hosts: tuple[Host, Host], undisturbed: dict[Callable[[], Plan], dict[str, Tensor]]
) -> None:
    spec = f"{hosts[0].address}/cpu,{hosts[1].address}/cpu"
    with open_pool(spec, threads=1, grace_s=SHORT_S) as pool:
        found, stories = run(pool, stages(), hosts[1].kill)
        assert pool.gone == {1}
    assert stories[-1].gone == (1,)
    assert stories[-1].plan is not None
    for name, tensor in undisturbed[stages].items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-10, atol=1e-10)
