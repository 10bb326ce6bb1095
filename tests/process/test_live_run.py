"""The state of the live page of a run in this process, as its records and steps come."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import onebox
from onebox.report.page import live_run, pool_watch
from onebox.report.page.live_run import LiveRun
from onebox.report.page.state import PageState


@pytest.fixture(scope="module")
def pool() -> Iterator[onebox.Pool]:
    with onebox.open("cpu*2", threads=1) as opened:
        yield opened


def parts() -> tuple[nn.Module, object, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    return model, nn.functional.mse_loss, torch.optim.AdamW(model.parameters())


def steps(trainer: onebox.Trainer, live: LiveRun, count: int) -> PageState:
    """Make steps, record them, and return the state."""
    for _ in range(count):
        loss = trainer.step(torch.ones(16, 16), torch.zeros(16, 4)).item()
        step = {"event": "step", "step": trainer.steps_done, "epoch": 1, "loss": loss, "samples": 16}
        live.add({**step, "time": 1e9 + trainer.steps_done})
    return live.state()


def test_a_run_from_before_its_first_step_to_its_end(pool: onebox.Pool) -> None:
    with onebox.Trainer(*parts(), pool=pool, plan=onebox.DataParallel(shares="equal", micro_batch=4)) as trainer:
        live = LiveRun("mlp on numbers", trainer, folder="runs/a", total_steps=10, epochs=1)
        before = live.state()
        assert before.head.state == "waiting" and before.schedule is None and live.trace() is None
        assert [device.state for device in before.hosts[0].devices] == ["present", "present"]
        found = steps(trainer, live, 4)
        assert found.head.state == "running" and found.head.trace
        assert found.run is not None and (found.run.step, found.run.samples_per_s, found.run.eta_s) == (4, 16.0, 6.0)
        assert found.run.step_s and 0 <= (found.run.bubble or 0) < 1 and found.run.bound
        assert found.schedule is not None and found.schedule.step == 4 and found.schedule.spans
        assert found.plan is not None and found.plan.text == trainer.plan.describe()  # type: ignore[union-attr]
        assert all(time.measured_s for stage in found.plan.stages for time in stage.times)
        for device in found.hosts[0].devices:
            assert 0 < (device.used_bytes or 0) <= (device.peak_bytes or 0) <= (device.budget_bytes or 0)
            assert 0 < (device.busy or 0) <= 1
        trace = json.loads(live.trace() or b"")
        assert {event["args"].get("step") for event in trace["traceEvents"] if event["ph"] == "X"} == {1, 2, 3, 4}
        live.finish("failed", "the disk is full")
        ended = live.state()
        assert (ended.head.state, ended.head.text) == ("failed", "the disk is full")
        assert ended.events[-1].severity == "failure"


def test_islands_have_an_age(pool: onebox.Pool) -> None:
    outer = onebox.Outer(every=3)
    with onebox.Trainer(*parts(), pool=pool, islands=[[0], [1]], outer=outer) as trainer:
        live = LiveRun("mlp", trainer, folder="", total_steps=10, epochs=1, outer_every=3)
        found = steps(trainer, live, 4)
        assert found.run is not None
        assert found.run.bound and "feed or client" not in found.run.bound, "nothing is known of the other island"
        assert [(each.devices, each.state, each.age_steps) for each in found.run.islands] == [
            ("0", "present", 1),
            ("1", "present", 1),
        ]


def test_details_that_fail_leave_the_rest_and_are_not_made_at_once_again(
    pool: onebox.Pool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made: list[int] = []

    def fail(*rest: object) -> None:
        made.append(1)
        raise ValueError("a detail")

    with onebox.Trainer(*parts(), pool=pool, plan=onebox.DataParallel()) as trainer:
        live = LiveRun("mlp", trainer, folder="", total_steps=10, epochs=1)
        monkeypatch.setattr(live_run, "_details_of", fail)
        monkeypatch.setattr(live_run, "_OFTEN_S", 600.0)
        monkeypatch.setattr(live_run, "_SELDOM_S", 600.0)
        for step in (1, 2, 3):
            found = steps(trainer, live, 1)
            assert found.run is not None and found.run.step == step and found.plan is not None
        trainer.pull()
    assert len(made) == 1
    assert [each.getMessage() for each in caplog.records if each.levelname == "WARNING" and each.name == "onebox"] == [
        "the details of steps cannot be shown: ValueError('a detail')"
    ]


def test_a_worker_that_is_lost_and_replaced(pool: onebox.Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    recovery = onebox.Recovery(snapshot_every=1)
    with onebox.Trainer(*parts(), pool=pool, plan=onebox.DataParallel(), recovery=recovery) as trainer:
        live = LiveRun("mlp", trainer, folder="", total_steps=10, epochs=1)
        later = pool_watch.PoolWatch(pool)
        steps(trainer, live, 2)
        os.kill(pool.process_ids[1], signal.SIGKILL)
        end_s = time.monotonic() + 60
        kinds: list[str] = []
        while "return" not in kinds and time.monotonic() < end_s:
            kinds = [event.kind for event in steps(trainer, live, 1).events]
        assert kinds == ["loss", "return"]
        assert [event.kind for event in steps(trainer, live, 1).events] == kinds
        monkeypatch.setattr(pool_watch, "_RECENT_S", 0.0)
        found = [(event.kind, event.at_s) for event in later.news()]
        assert found == [("loss", None), ("return", None)], "when it happened is not known"
