"""A run that follows its devices, on real workers: it decides nothing where nothing changes, and outlives losses."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest
import torch
from torch import nn

import onebox
from onebox.engine.adaptive.migration import Migration
from onebox.pool import open_pool
from tests.kit import reference
from tests.process.test_adaptive import MICRO_BATCH, MOST, adamw, batches, cut, model, problem_of

QUIET = 60
"""Steps of a run in which nothing changes: enough for a problem to be made of the first, and for long windows."""

QUIET_S = 0.001
"""For which a device sleeps for a layer's forward of a sample, and for each half of its backward: by so much more than
a sleep ends late where others use the cores, or that would be a change."""

BEHIND = 3
"""Steps behind a change, or a loss."""


def test_a_run_in_which_nothing_changes_decides_nothing() -> None:
    torch.manual_seed(0)
    built = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    x, y = torch.randn(2, 8, 16)
    costs = {f"model.{place}": (QUIET_S, QUIET_S, QUIET_S) for place in range(4)}
    with (
        open_pool("sim*2", threads=1) as pool,
        onebox.Trainer(
            built,
            nn.functional.mse_loss,
            adamw(built),
            pool=pool,
            plan=onebox.DataParallel(micro_batch=4),
            engine=onebox.Engine(costs=costs),
            adaptive=True,
        ) as trainer,
    ):
        for _ in range(QUIET):
            trainer.step(x, y).item()
        assert [made.line for made in trainer.decisions] == []
        assert trainer.plan is not None
        assert len(trainer.plan.devices) == 2


@pytest.mark.parametrize("when", ["prepared", "done"])
def test_a_worker_is_lost_beside_a_change_and_losses_are_those_of_one_process(
    when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Device 1 is said to be five times as quick as it is, so that layers leave it."""
    killed: list[int] = []
    with open_pool("cpu*2", threads=1) as pool:

        def kill() -> None:
            if not killed:
                killed.append(pool.process_ids[1])
                os.kill(killed[0], signal.SIGKILL)

        ask = Migration.ask

        def asking(self: Migration) -> None:
            if when == "prepared":
                kill()
            ask(self)

        monkeypatch.setattr(Migration, "ask", asking)
        losses, last = trained(pool, kill if when == "done" else lambda: None)
    assert killed
    built = model()
    plain = reference.train(
        built,
        nn.functional.mse_loss,
        adamw(built),
        list(batches(len(losses))),
        lambda samples: [MICRO_BATCH] * (samples // MICRO_BATCH),
    )
    assert last == 1
    assert losses == pytest.approx(plain.losses, rel=0, abs=reference.AGREE)


def trained(pool: onebox.Pool, changed: Callable[[], None]) -> tuple[list[float], int]:
    """Train until some steps behind a loss; return the losses of all steps, and how many workers were lost.

    Args:
        pool: Two workers.
        changed: Called when the plan has changed.
    """
    built, found, end = model(), [], MOST
    with onebox.Trainer(
        built,
        nn.functional.mse_loss,
        adamw(built),
        pool=pool,
        plan=cut(1),
        adaptive=problem_of(pool, (1.0, 5.0)),
        recovery=onebox.Recovery(snapshot_every=4),
    ) as trainer:
        for step, batch in enumerate(batches(MOST)):
            found.append(trainer.step(*batch).item())
            if any(made.moved_bytes for made in trainer.decisions):
                changed()
            if trainer.recoveries and end == MOST:
                end = step + BEHIND
            if step >= end:
                break
        return found, len(trainer.recoveries)
