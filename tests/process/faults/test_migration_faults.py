"""Workers are lost while another plan takes over: the run goes on with the same bits, or says why it cannot."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import onebox
from onebox.engine.adaptive.migration import Migration
from onebox.errors import OneboxError, OperatorError, ReplicasParted
from onebox.plan import Plan, Stage
from onebox.pool import Fault, open_pool
from tests.kit.trainer_arguments import grouped

STEPS, BEFORE = 6, 3
SEGMENTS = ("model.0", "model.1", "model.2", "model.3")


def parts() -> tuple[nn.Module, Callable[..., Tensor], torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in SEGMENTS)).double()
    return model, nn.functional.mse_loss, torch.optim.AdamW(model.parameters(), lr=0.01)


def cut(bound: int, *, late: bool = False) -> Plan:
    own = (SEGMENTS[:bound], SEGMENTS[bound:])
    stages = tuple(Stage(segments=names, replicas=((d,),), shares=(1.0,)) for d, names in enumerate(own))
    return Plan(stages=stages, micro_batch=2, schedule="async-1f1b" if late else "1f1b")


def train(
    pool: onebox.Pool, disturb: str = "", *, recover: bool = True, late: bool = False
) -> tuple[list[float], dict[str, Tensor], int]:
    """Train, with a plan that takes over and a worker that is killed before or after that."""
    generator = torch.Generator().manual_seed(1)
    more = {"recover": recover, "snapshot_every": 2 if recover else None}
    more |= {"staleness": 1, "delay": "none", "warm_up": 0} if late else {}
    with onebox.Trainer(*parts(), **grouped(pool=pool, plan=cut(2, late=late), **more)) as trainer:
        losses = []
        for step in range(STEPS):
            if step == BEFORE and disturb:
                if disturb == "before":
                    os.kill(pool.process_ids[1], signal.SIGKILL)
                trainer._run.adopt(cut(1, late=late))
                if disturb == "after":
                    os.kill(pool.process_ids[0], signal.SIGKILL)
            x, y = torch.randn(2, 8, 8, dtype=torch.float64, generator=generator)
            losses.append(trainer.step(x, y))
        if disturb:
            # the loss of a worker during the change may be known before the change is made, or only after it
            allowed = {"before": (2,), "during": (2, 1), "after": (1,)}[disturb]
            assert trainer.plan in [cut(stages, late=late) for stages in allowed], (
                "it takes over as a whole or not at all"
            )
        return [float(loss) for loss in losses], trainer.tensors(), len(trainer.recoveries)


@pytest.fixture(scope="module")
def undisturbed() -> tuple[list[float], dict[str, Tensor], int]:
    with open_pool("cpu*2", threads=1) as pool:
        return train(pool, recover=False)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_loss_beside_a_change_of_plan_costs_no_bit(
    when: str, undisturbed: tuple[list[float], dict[str, Tensor], int]
) -> None:
    with open_pool("cpu*2", threads=1) as pool:
        losses, tensors, lost = train(pool, when)
    assert lost == 1
    assert losses == undisturbed[0]
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in undisturbed[1].items())


@pytest.mark.parametrize(("instruction", "count"), [("optimizerstep", 3), ("branch", 2)])
def test_a_worker_that_is_lost_in_a_change_that_nobody_waits_for_costs_no_bit(instruction: str, count: int) -> None:
    with open_pool("cpu*2", threads=1) as pool:
        whole = train(pool, recover=False, late=True)
    faults = {1: (Fault("kill", instruction, count),)}
    with open_pool("cpu*2", threads=1, faults=faults) as pool:
        losses, tensors, lost = train(pool, "during", late=True)
    assert lost == 1
    assert losses == whole[0]
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in whole[1].items())


def test_what_is_left_of_a_step_and_fails_is_what_the_next_one_says() -> None:
    late = {"staleness": 1, "delay": "none", "warm_up": 0}
    batch = torch.ones(2, 8, 8, dtype=torch.float64)
    with (
        open_pool("cpu*2", threads=1, faults={0: (Fault("error", "optimizerstep", 2),)}) as pool,
        onebox.Trainer(*parts(), **grouped(pool=pool, plan=cut(2, late=True), **late)) as trainer,
    ):
        trainer.step(*batch)
        trainer.step(*batch).item()  # the first update is in its window
        trainer._run.adopt(cut(1, late=True))
        with pytest.raises(OperatorError, match="optimizer") as caught:
            trainer.step(*batch).item()
        assert caught.value.worker == 0
        with pytest.raises(OperatorError, match="optimizer"):
            trainer.wait()


def test_without_recovery_a_loss_is_an_error_that_names_the_worker() -> None:
    with open_pool("cpu*2", threads=1) as pool, pytest.raises(OneboxError, match="worker 1"):
        train(pool, "before", recover=False)


def test_an_interrupt_in_the_middle_voids_the_state_and_every_later_call_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(self: Migration) -> None:
        raise KeyboardInterrupt

    with open_pool("cpu*2", threads=1) as pool, onebox.Trainer(*parts(), pool=pool, plan=cut(2)) as trainer:
        x, y = torch.ones(2, 8, 8, dtype=torch.float64)
        trainer.step(x, y).item()
        monkeypatch.setattr(Migration, "_group", interrupted)
        with pytest.raises(KeyboardInterrupt):
            trainer._run.adopt(cut(1))
        with pytest.raises(ReplicasParted, match="change of plan was interrupted"):
            trainer.step(x, y)
