"""Islands on hosts of a network: one that is cut off leaves, and joins again when it is back."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import onebox
from tests.kit.models import CASES, OPTIMIZERS
from tests.kit.waiting import until
from tests.net.fleet import MACHINES, Fleet
from tests.net.hosts import Network
from tests.process.test_island_membership import Changing, compare, training

MOST = 3000
"""Steps of a run."""

BACK_S = 60.0
STOP_S = 1.0
"""Longer than islands take for a step."""

PAUSE_S = 0.1


@pytest.mark.feature("Islands: Go on without a lost island")
def test_an_island_that_is_cut_off_leaves_within_seconds_and_joins_when_its_host_is_back(
    fleet: Fleet, network: Network
) -> None:
    outer = onebox.Outer(every=4)
    batches, losses = CASES["mlp"].batches([12] * MOST), list[Any]()

    def step() -> None:
        losses.append(trainer.step(*batches[len(losses)]))
        trainer.wait()
        time.sleep(PAUSE_S)

    def step_until(kind: str, times: int) -> None:
        until(lambda: [change.kind for change in trainer.island_changes].count(kind) >= times, BACK_S, step)

    with (
        fleet.client(),
        onebox.open(fleet.spec(), threads=1) as pool,
        training(pool, "devices", outer) as trainer,
    ):
        losses.append(trainer.step(*batches[0]))
        trainer.wait()  # the loss of a step in flight would lack the lost island's part
        for number in (1, 2):
            network[MACHINES[-1]].plug(False)
            try:
                step_until("left", number)
                for _ in range(6):  # an outer step at least without it
                    losses.append(trainer.step(*batches[len(losses)]))
                    trainer.wait()
            finally:
                network[MACHINES[-1]].plug(True)
            step_until("joined", number)
        for _ in range(6):
            losses.append(trainer.step(*batches[len(losses)]))
        assert {change.island for change in trainer.island_changes} <= {2, None}
        compare(trainer, losses, Changing("mlp", "adamw", [1, 1, 1], outer), batches[: len(losses)])


@pytest.mark.parametrize("overlap", [1, 2])
def test_an_island_behind_a_dead_link_is_late_though_sums_need_it(overlap: int, fleet: Fleet, network: Network) -> None:
    """It is cut off between the step after which they begin and the one after which they are due."""
    outer = onebox.Outer(every=4, overlap=overlap, quorum=2, grace_s=0.3)
    with fleet.client(), onebox.open(fleet.spec(), threads=1) as pool, training(pool, "devices", outer) as trainer:
        run = LateRun(trainer)
        run.steps(3 + overlap)
        trainer.wait()
        network[MACHINES[-1]].plug(False)
        try:
            run.steps(1)
            assert [change.kind for change in trainer.island_changes] == ["late", "redone"]
        finally:
            network[MACHINES[-1]].plug(True)
        run.end(outer)


@pytest.mark.parametrize("overlap", [0, 2])
def test_an_island_that_stops_while_a_sum_travels_is_late(overlap: int, fleet: Fleet, network: Network) -> None:
    """It has made its steps, and begun the sum, which does not come as one of its links is dead."""
    outer = onebox.Outer(every=4, overlap=overlap, quorum=2, grace_s=0.3)
    victim = network[MACHINES[-1]]
    with fleet.client(), onebox.open(fleet.spec(), threads=1) as pool, training(pool, "devices", outer) as trainer:
        run = LateRun(trainer)
        run.steps(3)
        trainer.wait()
        for name in MACHINES[:-1]:
            victim.block(network[name].address, True)
        stop = threading.Timer(STOP_S, lambda: signal_all(fleet.workers(MACHINES[-1]), signal.SIGSTOP))
        try:
            run.steps(overlap)
            stop.start()
            run.steps(1)
            assert [change.kind for change in trainer.island_changes] == ["late", "redone"]
        finally:
            stop.join()
            signal_all(fleet.workers(MACHINES[-1]), signal.SIGCONT)
            for name in MACHINES[:-1]:
                victim.block(network[name].address, False)
        run.end(outer)


class LateRun:
    """Steps of a run of islands of one device each, one of which is late.

    Args:
        trainer: The trainer.
    """

    def __init__(self, trainer: onebox.Trainer) -> None:
        self._trainer = trainer
        self._batches = CASES["mlp"].batches([12] * MOST)
        self._losses = list[Any]()

    def steps(self, number: int) -> None:
        """Begin steps."""
        for _ in range(number):
            self._losses.append(self._trainer.step(*self._batches[len(self._losses)]))

    def end(self, outer: onebox.Outer) -> None:
        """Go on until all islands are punctual, and compare with the reference."""

        def step() -> None:
            self.steps(1)
            time.sleep(PAUSE_S)

        until(lambda: self._trainer.island_changes[-1].kind == "punctual", BACK_S, step)
        self.steps(6)
        assert {change.kind for change in self._trainer.island_changes} == {"late", "redone", "punctual"}
        reference = Changing("mlp", "adamw", [1, 1, 1], outer)
        compare(self._trainer, self._losses, reference, self._batches[: len(self._losses)], late=True)


def signal_all(processes: Sequence[int], number: signal.Signals) -> None:
    for process in processes:
        os.kill(process, number)


def test_links_between_islands_carry_their_outer_steps(fleet: Fleet) -> None:
    case, model, outer = CASES["mlp"], CASES["mlp"].model(), onebox.Outer(every=4)
    arguments: dict[str, Any] = {"islands": [[0], [1], [2]], "outer": outer, "recovery": None}
    with (
        fleet.client(),
        onebox.open(fleet.spec(), threads=1) as pool,
        onebox.Trainer(model, case.loss, OPTIMIZERS["sgd"](model), pool=pool, **arguments) as trainer,
    ):
        for batch in case.batches([12] * 8):
            trainer.step(*batch)
        trainer.wait()
        carried = {(each.source, each.target): each.size_bytes for each in trainer.links}
        events = trainer.link_events()
    size_bytes = sum(parameter.nbytes for parameter in model.parameters())
    assert sum(carried.values()) >= 2 * 4 * size_bytes, "two rings of three islands"
    assert all(source != target for source, target in carried)
    outer_bytes = Counter[tuple[str, str]]()
    for event in events:
        outer_bytes[event.use.source, event.use.target] += event.use.size_bytes
    assert outer_bytes == carried
    assert {event.step for event in events} >= {3, 7}, "the steps before outer ones"


@pytest.mark.feature("Islands: Find them by measured links")
def test_islands_are_the_hosts_that_are_near_each_other(fleet: Fleet, network: Network) -> None:
    case, runs = CASES["mlp"], []
    try:
        network[MACHINES[-1]].limit(4_000_000)
    except RuntimeError as error:
        pytest.skip(f"no links of a limited rate here: {error}")
    try:
        with fleet.client(), onebox.open(fleet.spec(), threads=1) as pool:
            for islands in ("auto", [[0, 1], [2]]):
                model = case.model()
                arguments: dict[str, Any] = {"islands": islands, "outer": onebox.Outer(every=2, shares="equal")}
                optimizer = OPTIMIZERS["sgd"](model)
                with onebox.Trainer(model, case.loss, optimizer, pool=pool, **arguments) as trainer:
                    losses = [trainer.step(*batch) for batch in case.batches([12] * 4)]
                    trainer.pull()
                    found = [sorted(plan.devices) for plan in trainer.island_plans]
                    runs.append((found, [float(loss) for loss in losses], dict(model.state_dict())))
    finally:
        network[MACHINES[-1]].unlimit()
    (found, losses, weights), (given, expected, wanted) = runs
    assert found == given == [[0, 1], [2]]
    assert losses == pytest.approx(expected, abs=1e-10)
    for name, tensor in wanted.items():
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=1e-10)
