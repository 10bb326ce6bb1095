"""Runs with late gradients that lose a worker for good go on with them, and end as one process that lost nothing."""

from __future__ import annotations

import pytest

import onebox
from onebox.plan import ASYNC
from onebox.pool import Fault, open_pool
from onebox.pool.backends.local import LocalSource
from tests.kit.models import CASES, OPTIMIZERS
from tests.kit.reference import Outcome, assert_same
from tests.kit.stages import SEED
from tests.kit.trainer_arguments import grouped
from tests.process.test_late_layouts import SIZES, layout, reference, steps


@pytest.mark.parametrize(("which", "delay"), [("stages", "predict"), ("shared out", "both")])
def test_a_run_that_lost_a_worker_for_good_stays_late(which: str, delay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another plan is sought, or replicas are left out; versions come from the snapshot, and each step counts once."""
    monkeypatch.setattr(LocalSource, "replace", lambda *_: None)
    plan = layout("mlp", which)
    case, model = CASES["mlp"], CASES["mlp"].model()
    given = model, case.loss, OPTIMIZERS["adamw"](model)
    late = {"staleness": 1, "delay": delay, "warm_up": 1}
    with (
        open_pool("cpu*3", threads=1, faults={1: (Fault("kill", "optimizerstep", 4),)}) as pool,
        onebox.Trainer(
            *given, **grouped(pool=pool, plan=plan, seed=SEED, recover=True, snapshot_every=2, **late)
        ) as trainer,
    ):
        found = steps(trainer, "mlp")
        assert pool.gone == {1}
        assert [story.gone for story in trainer.recoveries] == [(1,)]
        last, delays = trainer.plan, dict(trainer.delays)
    assert last is not None
    assert 1 not in last.devices
    assert last.schedule == ASYNC or len(last.stages) == 1
    assert last.optimizer == plan.optimizer
    assert delays == {0: 1, 1: len(SIZES) - 2}
    expected = reference("mlp", plan, "adamw", delay=delay, warm_up=1)
    assert_same(Outcome(losses=found.losses, norms=[], tensors=found.tensors), expected)
