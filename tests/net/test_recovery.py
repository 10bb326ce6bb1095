"""Runs over three agents that go on after faults, and end with the bits of runs that nothing befell.

Each agent has one core to lease, and the pool has it: a worker is replaced only where what it had is given back.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest

import onebox
from onebox.pool.liveness import SILENCE_S
from tests.kit.reference import Outcome, assert_same
from tests.kit.waiting import until
from tests.net.fleet import GRACE_S, Fleet
from tests.net.hosts import Host, Network, crawl, cut
from tests.net.training import NARROW, STEPS, alone, assert_bits, plans, run

NOTICED_S = 5.0
"""What fails is noticed within this time."""

AWAY_S = 2.0
"""A pause that is ridden out."""

SLOW_BPS = 200_000

Disturbance = Callable[[], contextlib.AbstractContextManager[object]]


@pytest.fixture(autouse=True)
def on_the_client(fleet: Fleet) -> Iterator[None]:
    """Whether new workers can be reached is tried from the client's host."""
    with fleet.client():
        yield


@pytest.fixture
def undisturbed(pool: onebox.Pool, known: dict[str, Outcome]) -> dict[str, Outcome]:
    """Results of runs that nothing befalls: those of one process."""
    for name, plan in plans().items():
        if name not in known:
            found = run(pool, plan)
            assert not found.recoveries
            assert_same(found.outcome, alone(plan, STEPS, NARROW))
            known[name] = found.outcome
    return known


@pytest.fixture(scope="module")
def known() -> dict[str, Outcome]:
    """What is known of undisturbed runs."""
    return {}


@contextlib.contextmanager
def lasting(stack: contextlib.ExitStack, disturbance: contextlib.AbstractContextManager[object]) -> Iterator[None]:
    """Let something last for longer than a run."""
    stack.enter_context(disturbance)
    yield


@contextlib.contextmanager
def struck(pool: onebox.Pool, worker: int, number: signal.Signals) -> Iterator[None]:
    """Send a worker a signal."""
    os.kill(pool.process_ids[worker], number)
    yield


@contextlib.contextmanager
def paused(process: int) -> Iterator[None]:
    """Stop a process, and continue it after a while from a thread."""

    def resume() -> None:
        ended.wait(AWAY_S)
        os.kill(process, signal.SIGCONT)

    ended = threading.Event()
    thread = threading.Thread(target=resume)
    os.kill(process, signal.SIGSTOP)
    thread.start()
    try:
        yield
    finally:
        thread.join()


@contextlib.contextmanager
def narrow(host: Host) -> Iterator[None]:
    """Let so little in and out of a host that a step takes it a second, and much of it late."""
    try:
        host.limit(SLOW_BPS, burst="2kb")
    except RuntimeError as error:
        pytest.skip(f"no links of a limited rate here: {error}")
    try:
        yield
    finally:
        held = host.unlimit()
    assert held > 0


@pytest.mark.parametrize("kind", ["data-parallel", "pipelined"])
def test_a_worker_that_is_killed_is_replaced(kind: str, pool: onebox.Pool, undisturbed: dict[str, Outcome]) -> None:
    found = run(pool, plans()[kind], partial(struck, pool, 1, signal.SIGKILL))
    (story,) = found.recoveries
    assert (story.lost, story.replaced, story.plan) == ((1,), (1,), None)
    assert "SIGKILL" in story.failure
    assert_bits(found.outcome, undisturbed[kind])


@pytest.mark.feature("Recovery: Replace workers that die or hang, with the same bits")
def test_a_worker_that_hangs_is_noticed_and_replaced(
    pool: onebox.Pool, fleet: Fleet, undisturbed: dict[str, Outcome]
) -> None:
    hung = pool.process_ids[2]
    found = run(pool, plans()["pipelined"], partial(struck, pool, 2, signal.SIGSTOP))
    (story,) = found.recoveries
    assert (story.lost, story.replaced, story.plan) == ((2,), (2,), None)
    (silent_s,) = re.findall(r"gave no sign of life for ([\d.]+) s", story.failure)
    assert float(silent_s) >= SILENCE_S and SILENCE_S < NOTICED_S
    assert_bits(found.outcome, undisturbed["pipelined"])
    until(lambda: fleet.workers("blue") == [pool.process_ids[2]])
    assert hung != pool.process_ids[2]


def disturbances(pool: onebox.Pool, fleet: Fleet, network: Network) -> dict[str, tuple[str, Disturbance]]:
    """Return what is ridden out: a plan, and what befalls its run."""
    return {
        "a worker stops for a while": ("data-parallel", lambda: paused(pool.process_ids[0])),
        "an agent stops for a while": ("pipelined", lambda: paused(fleet.agents["green"].pid)),
        "a host's cable is out for a while": ("data-parallel", lambda: cut(network["green"], AWAY_S)),
        "the client's cable is out for a while": ("pipelined", lambda: cut(network["client"], AWAY_S)),
        "a host is slow to a crawl": ("data-parallel", lambda: crawl(network["red"], period_s=1.0)),
        "a link is slow to a crawl": ("data-parallel", lambda: narrow(network["blue"])),
    }


@pytest.mark.parametrize("what", disturbances(None, None, None))  # type: ignore[arg-type]
def test_what_does_not_last_is_ridden_out(
    what: str, pool: onebox.Pool, fleet: Fleet, network: Network, undisturbed: dict[str, Outcome]
) -> None:
    processes = tuple(pool.process_ids)
    kind, disturbance = disturbances(pool, fleet, network)[what]
    found = run(pool, plans()[kind], disturbance)
    assert not found.recoveries
    assert tuple(pool.process_ids) == processes
    assert_bits(found.outcome, undisturbed[kind])


@pytest.mark.feature("Recovery: Go on with fewer devices")
def test_what_is_left_goes_on_without_a_host_whose_cable_is_out_for_good(
    pool: onebox.Pool, fleet: Fleet, network: Network, undisturbed: dict[str, Outcome]
) -> None:
    (worker,) = fleet.workers("blue")
    with contextlib.ExitStack() as stack:
        found = run(pool, plans()["data-parallel"], lambda: lasting(stack, cut(network["blue"], 600.0)))
        (story,) = found.recoveries
        assert (story.lost, story.gone, story.replaced) == ((2,), (2,), ())
        assert network["blue"].address in story.failure
        assert any(word in story.failure for word in ("has been silent for", "gave no sign of life for"))
        assert max(GRACE_S, SILENCE_S) < NOTICED_S
        assert story.plan is not None and pool.present == (0, 1)
        assert_same(found.outcome, undisturbed["data-parallel"])
        until(lambda: worker not in fleet.workers("blue"))
    assert "expired" in fleet.told("blue")


def test_an_agent_that_is_killed_takes_its_workers_along_and_has_them_again_when_it_is_back(
    opened: list[onebox.Pool], fleet: Fleet, network: Network, undisturbed: dict[str, Outcome]
) -> None:
    opened.pop().close()
    with fleet.client():
        patient = onebox.open(fleet.spec(), threads=1, grace_s=30.0)
    opened.append(patient)

    @contextlib.contextmanager
    def anew() -> Iterator[None]:
        (worker,) = fleet.workers("green")
        fleet.kill("green")
        until(lambda: worker not in network["green"].processes())
        fleet.start(["green"], "--bind", "0.0.0.0", "--advertise", network["green"].address)
        yield

    found = run(patient, plans()["pipelined"], anew)
    (story,) = found.recoveries
    assert (story.lost, story.replaced, story.plan) == ((1,), (1,), None)
    assert_bits(found.outcome, undisturbed["pipelined"])
    opened.pop().close()
