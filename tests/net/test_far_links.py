"""Links over a long way: several connections carry what one would, in the same order."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from onebox.worker.comm.gloo_forwarder import GlooForwarder, loopback_address
from onebox.worker.comm.link_meter import LinkMeters
from onebox.worker.comm.tls_mesh import MOST_CONNECTIONS, DuplexLink, connect_mesh
from tests.net.hosts import Network
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
