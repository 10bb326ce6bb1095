"""Workers of two hosts that cannot reach each other, while the client reaches both: it relays what it cannot read."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

import pytest
import torch

import onebox
from onebox.errors import OneboxError
from onebox.graph import TracedModel
from onebox.graph.capture.export import capture
from onebox.plan import Plan, Stage
from onebox.pool import raise_first
from onebox.wire import TensorSpec, to_frame
from onebox.wire.protocol.instructions import Ask, Receive
from tests.kit.reference import assert_same
from tests.net.fleet import GRACE_S, Fleet
from tests.net.hosts import Host, Network
from tests.net.test_eavesdropping import exchange, overheard
from tests.net.training import NARROW, STEPS, alone, batch, outcome, parts, run

_PATTERN = 1.2345678e-7
_COUNT = 300_000

LIMIT_BPS = 80_000_000
"""Of the client's cable, in bits a second; buffers on the way make it look somewhat faster."""

CUT_S = 30.0
"""Bound of what follows after a relay was cut, on a machine that is busy with other things: usually a second or two."""


@pytest.fixture
def apart(network: Network) -> Iterator[tuple[Host, Host]]:
    """Two hosts without a way between them."""
    red, green = network["red"], network["green"]
    red.block(green.address, True)
    green.block(red.address, True)
    try:
        yield red, green
    finally:
        red.block(green.address, False)
        green.block(red.address, False)


def opened(fleet: Fleet, *names: str) -> onebox.Pool:
    """Return a pool whose threads are on the client's host."""
    with fleet.client():
        return onebox.open(fleet.spec(*names), threads=1, grace_s=GRACE_S)


@pytest.mark.feature("Networks: Relay between hosts that cannot connect, without reading")
def test_what_the_client_relays_cannot_be_read_there(
    fleet: Fleet, network: Network, apart: tuple[Host, Host], caplog: pytest.LogCaptureFixture
) -> None:
    tensor = torch.full((_COUNT,), _PATTERN)
    with opened(fleet, "red", "green") as pool, overheard(network["client"], bytes(to_frame(tensor[:4]))) as heard:
        before = network["client"].traffic_bytes()
        one, other = exchange(pool, tensor)
        assert one == other
        assert network["client"].traffic_bytes() - before > 2 * tensor.nbytes  # in and out again
        for host, process in zip(apart, pool.process_ids, strict=True):
            assert len(host.listening(process)) == 2, "those of its client, no longer those of its group"
        exchange(pool, tensor)  # in another group
    assert heard.seen_bytes > tensor.nbytes
    assert heard.found == 0
    told = [record.getMessage() for record in caplog.records if "go through this client" in record.getMessage()]
    assert len(told) == 2 and len(set(told)) == 2, "once for each direction"


def test_without_encryption_the_pair_is_named_and_with_it_the_client_relays(
    fleet: Fleet, network: Network, apart: tuple[Host, Host]
) -> None:
    """NCCL itself would wait for half an hour."""
    red, green = apart
    with fleet.client():
        pool = onebox.open(fleet.spec("red", "green"), threads=1, grace_s=GRACE_S, plain_links=True)
    with pool:
        with pytest.raises(OneboxError) as raised:
            pool.form_group([0, 1], "workers")
        said = str(raised.value)
        assert any(f"at {one.address}, cannot connect to rank" in said for one in apart), said
        assert red.address in said and green.address in said
        for way_out in ("--advertise", "firewalls", "plain_links", "by way of the client"):
            assert way_out in said
        green.block(red.address, False)
        red.block(green.address, False)
        one, other = exchange(pool, torch.full((100,), _PATTERN))
        assert one == other, "the workers are as good as before"
        green.block(red.address, True)
        red.block(green.address, True)
    with opened(fleet, "red", "green") as pool:
        one, other = exchange(pool, torch.full((100,), _PATTERN))
        assert one == other


def two_stages() -> Plan:
    """Return a plan of a stage on each of two devices."""
    model, loss, _ = parts(NARROW)
    names = TracedModel(capture(model, loss, batch(0)), backward=True).segments
    return Plan(
        stages=tuple(
            Stage(segments=own, replicas=((device,),), shares=(1.0,))
            for device, own in enumerate((names[:1], names[1:]))
        ),
        micro_batch=4,
        schedule="1f1b",
    )


PLANS = {"data-parallel": lambda: Plan.data_parallel(range(2), (1.0, 1.0), micro_batch=4), "pipelined": two_stages}


@pytest.mark.feature("Networks: Relay between hosts that cannot connect, without reading")
@pytest.mark.parametrize("kind", PLANS)
def test_runs_over_a_relay_equal_those_of_one_process(fleet: Fleet, apart: tuple[Host, Host], kind: str) -> None:
    plan = PLANS[kind]()
    with opened(fleet, "red", "green") as pool, onebox.Trainer(*parts(NARROW), pool=pool, plan=plan) as trainer:
        found = outcome(trainer, [trainer.step(*batch(step)) for step in range(STEPS)])
    assert_same(found, alone(plan, STEPS, NARROW))


def test_the_link_that_plans_rest_on_is_the_way_through_the_client(
    fleet: Fleet, network: Network, apart: tuple[Host, Host]
) -> None:
    with opened(fleet, "red", "green") as pool:
        network["client"].limit(LIMIT_BPS)
        try:
            profile = pool.profile(fresh=True, cache=False)
        finally:
            assert network["client"].unlimit()
    assert max(profile.bandwidth_bps[0][1], profile.bandwidth_bps[1][0]) < LIMIT_BPS / 8 * 2


def own_connections() -> dict[str, int]:
    """Return the descriptors of the TCP connections of this process, by their unique names."""
    found = {}
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(entry))) as each:
            if each.family == socket.AF_INET and each.getpeername():
                found[os.readlink(f"/proc/self/fd/{entry}")] = int(entry)
    return found


def shut_down(descriptor: int) -> None:
    """Shut down a connection of this process."""
    with socket.socket(fileno=os.dup(descriptor)) as each:
        each.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def relay_cut(known: set[str]) -> Iterator[None]:
    """Shut down the connections of this process that are new: those by which it relays; then all goes on soon."""
    found = [descriptor for name, descriptor in own_connections().items() if name not in known]
    assert found
    for descriptor in found:
        with contextlib.suppress(OSError):  # the end of one ends the others
            shut_down(descriptor)
    yield


def test_a_run_goes_on_after_its_relay_was_cut(fleet: Fleet, apart: tuple[Host, Host]) -> None:
    plan = PLANS["data-parallel"]()
    with opened(fleet, "red", "green") as pool:
        known = set(own_connections())
        story = run(pool, plan, lambda: relay_cut(known))
    assert len(story.recoveries) == 1
    assert_same(story.outcome, alone(plan, STEPS, NARROW))


def test_a_wait_over_a_relay_that_is_cut_ends_at_once(fleet: Fleet, apart: tuple[Host, Host]) -> None:
    with opened(fleet, "red", "green") as pool:
        known = set(own_connections())
        group = pool.form_group((0, 1), "workers")
        waiting = pool.post(0, [Receive(1, TensorSpec("float32", (2,)), group, 1, 0), Ask("digest", (1,))], answer=True)
        with relay_cut(known), pytest.raises(OneboxError, match="another worker of the group"):
            raise_first([waiting])
