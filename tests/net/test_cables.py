"""A cable is pulled while a model is trained over three hosts: for a moment, and for good."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import pytest

import onebox
from onebox.errors import OneboxError
from tests.net.conftest import MACHINES
from tests.net.hosts import Host, Network
from tests.net.workers import alone, batch, outcome, parts, plans, pool_of
from tests.reference import assert_same

CUT_S = 2.0
WITHIN_S = 5.0
"""What happens is noticed within this time."""


@contextlib.contextmanager
def cut(host: Host, for_s: float) -> Iterator[threading.Thread]:
    """Pull a host's cable, and put it back after a while from a thread; it is in again in any case afterwards."""

    def mend() -> None:
        ended.wait(for_s)
        host.plug(True)

    ended = threading.Event()
    thread = threading.Thread(target=mend)
    host.plug(False)
    thread.start()
    try:
        yield thread
    finally:
        ended.set()
        thread.join()


@pytest.mark.parametrize(("kind", "name"), [("data-parallel", "green"), ("pipelined", "client")])
def test_a_short_cut_is_ridden_out(kind: str, name: str, pool: onebox.Pool, network: Network) -> None:
    plan = plans()[kind]
    with onebox.Trainer(*parts(), pool=pool, plan=plan, check_every=0) as trainer:
        losses = [trainer.step(*batch(step)) for step in range(2)]
        float(losses[-1])
        with cut(network[name], CUT_S) as mending:
            while mending.is_alive() or len(losses) < 6:
                losses.append(trainer.step(*batch(len(losses))))
                float(losses[-1])
        found = outcome(trainer, losses)
    assert_same(found, alone(plan, len(losses)))


def test_a_cut_for_good_is_one_error_that_names_the_host(own_network: Network) -> None:
    network = own_network
    with network["client"].inside():
        pool = pool_of([network[name] for name in MACHINES])
    with pool, onebox.Trainer(*parts(), pool=pool, plan=plans()["data-parallel"], check_every=0) as trainer:
        float(trainer.step(*batch(0)))
        with cut(network["blue"], 60.0):
            start_s = time.monotonic()
            with pytest.raises(OneboxError, match="blue") as caught:
                for step in range(1, 10_000):
                    float(trainer.step(*batch(step)))
            assert time.monotonic() - start_s < WITHIN_S
            with pytest.raises(OneboxError) as again:
                trainer.pull()
            assert again.value is caught.value
