"""Links over a long way: several connections carry what one would, in the same order."""

from __future__ import annotations

import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

import onebox
from onebox.worker.comm.gloo_forwarder import GlooForwarder, loopback_address
from onebox.worker.comm.link_meter import LinkMeters
from onebox.worker.comm.tls_mesh import MOST_CONNECTIONS, DuplexLink, connect_mesh
from tests.net.fleet import GRACE_S, MACHINES, Fleet
from tests.net.hosts import Network
from tests.net.training import alone, batch, outcome, parts, plans
from tests.reference import assert_same
from tests.unit.worker.comm.test_gloo_forwarder import endpoint, in_place
from tests.unit.worker.comm.test_tls_mesh import WITHIN_S, Store

DELAY_S = 0.04


def test_a_link_over_a_long_way_has_several_connections_and_one_order() -> None:
    try:
        network = Network(["here", "there"], delay_s=DELAY_S)
    except RuntimeError as error:
        pytest.skip(f"no cables that take their time here: {error}")
    store, hosts = Store(), list(network.hosts.values())

    def connect(rank: int) -> dict[int, DuplexLink]:
        with hosts[rank].inside():
            return connect_mesh(rank, 2, hosts[rank].address, store)

    sent = b"".join(number.to_bytes(4) for number in range(1 << 21))
    with network, ThreadPoolExecutor(2) as threads:
        links = list(threads.map(connect, range(2)))
        assert [len(way) for mesh in links for link in mesh.values() for way in link] == 4 * [MOST_CONNECTIONS]
        meters = LinkMeters()
        meter = meters.add(links[1][0].outgoing, 0, 0)
        meters.take()
        there = GlooForwarder(0, links[0], dist.HashStore())
        here = GlooForwarder(1, links[1], dist.HashStore(), {0: meter})
        begin_s = time.monotonic()
        with socket.create_server((loopback_address(0), 0)) as listener:
            listener.settimeout(WITHIN_S)
            there.store.set("0", endpoint(0, listener.getsockname()[1]))
            with socket.create_connection((loopback_address(0), in_place(here, 0)), WITHIN_S) as one:
                sending = threads.submit(one.sendall, sent)
                other, _ = listener.accept()
                with other:
                    other.settimeout(WITHIN_S)
                    found = bytearray()
                    while len(found) < len(sent) and (part := other.recv(1 << 16)):
                        found += part
                    sending.result(WITHIN_S)
        lasted_s = time.monotonic() - begin_s
        (carried,) = meters.take()
        for forwarder in (here, there):
            forwarder.close(WITHIN_S)
    assert found == sent
    assert 0.9 * len(sent) < carried.size_bytes < 1.1 * len(sent), "of all connections"
    assert 0 < carried.busy_ns < 1e9 * (lasted_s + 0.5), "of the one that was busy for longest"


@pytest.mark.long
def test_training_over_several_connections_has_the_result_of_one_process(tmp_path: Path) -> None:
    try:
        network = Network([*MACHINES, "client"], delay_s=DELAY_S)
    except RuntimeError as error:
        pytest.skip(f"no cables that take their time here: {error}")
    plan, steps = plans()["data-parallel"], 3
    with network, Fleet(network, tmp_path) as fleet:
        for name in MACHINES:
            fleet.pair(name)
        fleet.start(MACHINES)
        with (
            fleet.client(),
            onebox.open(fleet.spec(), threads=1, grace_s=GRACE_S) as pool,
            onebox.Trainer(*parts(), pool=pool, plan=plan) as trainer,
        ):
            found = outcome(trainer, [trainer.step(*batch(step)) for step in range(steps)])
            between = sum(connections(process, network) for process in pool.process_ids)
    assert_same(found, alone(plan, steps))
    assert between >= 2 * len(MACHINES) * (len(MACHINES) - 1) * MOST_CONNECTIONS, "at both ends of each"


def connections(process: int, network: Network) -> int:
    """Return how many TCP connections a worker has with workers of other hosts."""
    own = {os.readlink(link) for link in Path(f"/proc/{process}/fd").iterdir() if link.is_symlink()}
    machines = {socket.inet_aton(network[name].address)[::-1].hex().upper() for name in MACHINES}
    lines = [line.split() for line in Path(f"/proc/{process}/net/tcp").read_text().splitlines()[1:]]
    return sum(f"socket:[{line[9]}]" in own and line[2].partition(":")[0] in machines for line in lines)
