"""A network that breaks for a short while costs time and nothing else: no message is lost, and none is taken twice."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch

from onebox.errors import WorkerDied, WorkerHung
from onebox.pool import open_pool
from onebox.pool.backends.agents.keep_alive import CUT_S
from onebox.pool.errors import WorkerLocation
from onebox.pool.launch.worker_process import WorkerProcess
from tests.process.faults.far import behind
from tests.process.faults.proxy import Network
from tests.process.faults.training import WITHIN_S, Stopwatch, Tensors, fails, steps, train, trainer_on

AWAY_S = CUT_S
"""A cut that is to be ridden out."""

LONG_S = 4.5
"""A cut that is longer than silence is taken for, unless a longer grace was asked for."""


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Tensors]:
    """What training leads to on workers of this machine, with its groups made in each way."""
    with open_pool("cpu*2", threads=1) as pool:
        return {sync: train(pool, sync) for sync in ("workers", "client")}


def same(some: Tensors, others: Tensors) -> bool:
    """Tell whether two models are the same to the last bit."""
    return some.keys() == others.keys() and all(torch.equal(some[name], others[name]) for name in some)


# ---- connections that are cut, many times, anywhere


@pytest.mark.parametrize("sync", ["workers", "client"])
def test_training_over_connections_that_are_cut(sync: str, undisturbed: dict[str, Tensors]) -> None:
    network = Network(3, cuts=12, most_bytes=6_000)
    with behind(network, "cpu*2") as (pool, _):
        found = train(pool, sync)
    assert network.cuts_left == 0
    assert same(found, undisturbed[sync])


# ---- a network that is away for a while


def later(action: Callable[[], AbstractContextManager[None]], away_s: float) -> threading.Thread:
    """Let something hold for a while, beginning now, in a thread."""
    begun = threading.Event()

    def hold() -> None:
        with action():
            begun.set()
            threading.Event().wait(away_s)

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    begun.wait(30)
    return thread


@pytest.mark.feature("Recovery: Ride out a cut of the network")
@pytest.mark.parametrize("how", ["down", "stalled"])
def test_a_network_that_is_away_for_a_while_is_waited_for(how: str, undisturbed: dict[str, Tensors]) -> None:
    network = Network()
    with behind(network, "cpu*2") as (pool, _), trainer_on(pool, "client") as trainer:
        steps(trainer, 3)
        back = later(getattr(network, how), AWAY_S)
        found = steps(trainer, 8)
        back.join(30)
    assert same(found, undisturbed["client"])


def test_a_network_that_is_away_for_longer_is_waited_for_where_that_was_asked_for(
    undisturbed: dict[str, Tensors],
) -> None:
    network = Network()
    with behind(network, "cpu*2", patience_s=LONG_S + WITHIN_S) as (pool, _), trainer_on(pool, "client") as trainer:
        steps(trainer, 3)
        back = later(network.down, LONG_S)
        found = steps(trainer, 8)
        back.join(30)
    assert same(found, undisturbed["client"])


def test_a_network_that_is_away_for_good_is_noticed() -> None:
    network = Network()
    with behind(network, "cpu") as (pool, _), trainer_on(pool, "client") as trainer:
        steps(trainer, 2)
        with network.down():
            raised = fails(lambda: steps(trainer, 8), Stopwatch())
    assert isinstance(raised.error, WorkerHung)
    assert raised.after_s < WITHIN_S


def test_a_worker_that_has_started_anew_is_not_taken_for_the_one_before() -> None:
    network = Network()
    with behind(network, "cpu") as (pool, far), trainer_on(pool, "client") as trainer:
        steps(trainer, 2)
        other = WorkerProcess(WorkerLocation(worker=0, host="elsewhere", device="cpu"), far.configs[0])
        try:
            network.lead(0, other.ports().commands)
            network.cut()
            raised = fails(lambda: steps(trainer, 8), Stopwatch())
        finally:
            other.close(grace_s=0.0)
    assert isinstance(raised.error, WorkerDied)
    assert "started anew" in str(raised.error)
    assert raised.error.worker == 0
