"""Links over a long way: where one connection does not fill them, several carry what it would, in the same order."""

from __future__ import annotations

import os
import re
import socket
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import onebox
from onebox.vgpu.runtime.context import current_context
from onebox.vgpu.runtime.upload_packing import MEASURED_BYTES
from onebox.wire import TensorSpec, from_frame, to_frame
from onebox.wire.protocol.groups import LeaveGroup
from onebox.wire.protocol.instructions import Get, Receive, Send
from onebox.wire.protocol.requests import Put
from onebox.wire.protocol.responses import GroupTraffic
from onebox.worker.comm.tcp.carrier import CLOSE_S
from onebox.worker.comm.tcp.mesh import MOST_CONNECTIONS
from onebox.worker.comm.tcp.meter import LinkMeters
from onebox.worker.comm.tcp.stream import ConnectionReader, ConnectionWriter
from tests.kit.reference import assert_same
from tests.net.fleet import GRACE_S, MACHINES, Fleet
from tests.net.hosts import Network
from tests.net.training import alone, batch, outcome, parts, plans
from tests.unit.ranks import Keys
from tests.unit.worker.comm.tcp.meshes import WITHIN_S, Ends, closing, connect_mesh

DELAY_S = 0.04
RATE_BPS = 100_000_000
WINDOW_BYTES = 1 << 19
FEW_BYTES = 1 << 16
"""Of windows that hold back even a small model."""


@pytest.mark.feature("Networks: Fill a far link with several connections")
def test_a_link_that_windows_hold_back_has_several_connections_and_one_order() -> None:
    with far_hosts() as network:
        narrow(network, ("here", "there"))
        passed = passed_on(network, 1 << 25)
    assert sum(each > 1 << 19 for each in passed.connections) > 1, "how many depends on what else the machine does"
    assert 0.9 * (1 << 25) < passed.carried.size_bytes < 1.1 * (1 << 25), "of all connections"
    assert 0 < passed.carried.busy_ns < 1e9 * (passed.lasted_s + 0.5), "of the one that was busy for longest"


def test_a_link_that_one_connection_fills_has_one() -> None:
    with far_hosts() as network:
        for host in network.hosts.values():
            host.limit(RATE_BPS)
        passed = passed_on(network, 1 << 24)
    first, *others = passed.connections
    assert first > 0.9 * (1 << 24)
    assert max(others) < 1 << 16, "the handshake"


def test_a_worker_that_leaves_a_group_stays_as_long_as_a_slow_link_carries_what_it_has_sent(tmp_path: Path) -> None:
    """Longer than it waits for a link that carries nothing."""
    rate_bps, numel = 8_000_000, 2_000_000
    with Network([*MACHINES, "client"]) as network, Fleet(network, tmp_path) as fleet:
        for name in MACHINES:
            fleet.pair(name)
        fleet.start(MACHINES)
        with fleet.client(), onebox.open(fleet.spec(), threads=1, grace_s=GRACE_S, virtual_devices=False) as pool:
            group = pool.form_group([0, 1], "workers")
            for name in MACHINES:
                network[name].limit(rate_bps)
            assert 8 * 4 * numel / rate_bps > CLOSE_S
            spec, sent, received = TensorSpec("float32", (numel,)), pool.new_number(), pool.new_number()
            data = torch.arange(numel, dtype=torch.float32)
            pool.post(0, [Put((sent,), (spec,)), Send(sent, group, 1), LeaveGroup(group)], [to_frame(data)])
            asked = pool.post(1, [Receive(received, spec, group, 0), Get((received,))], answer=True)
            assert torch.equal(from_frame(spec, asked.result(WITHIN_S).frames[0]), data)
            pool.leave_group(group, [1])


def test_training_over_several_connections_has_the_result_of_one_process(tmp_path: Path) -> None:
    try:
        network = Network([*MACHINES, "client"], delay_s=DELAY_S)
    except RuntimeError as error:
        pytest.skip(f"no cables that take their time here: {error}")
    plan, steps = plans()["data-parallel"], 3
    with network, Fleet(network, tmp_path) as fleet:
        narrow(network, MACHINES, FEW_BYTES)
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
            used = [used_connections(network, name) for name in MACHINES]
    assert_same(found, alone(plan, steps))
    assert between >= 2 * len(MACHINES) * (len(MACHINES) - 1) * MOST_CONNECTIONS, "at both ends of each"
    assert max(max(each.values()) for each in used) > 1, "of those to one peer"


@pytest.mark.feature("Virtual devices: Compress uploads to far workers without loss")
def test_a_script_sends_a_far_worker_less_than_its_batches_and_waits_only_for_values(tmp_path: Path) -> None:
    name, generator = MACHINES[0], torch.Generator().manual_seed(0)
    try:
        network = Network([name, "client"], delay_s=DELAY_S)
    except RuntimeError as error:
        pytest.skip(f"no cables that take their time here: {error}")
    images = torch.randint(256, (8, 32, 784), dtype=torch.uint8, generator=generator)
    images[torch.rand(images.shape, generator=generator) < 0.8] = 0
    with network, Fleet(network, tmp_path) as fleet:
        network["client"].limit(RATE_BPS)
        fleet.pair(name)
        fleet.start([name])
        with fleet.client(), onebox.open(fleet.spec(name), threads=1, grace_s=GRACE_S) as pool:
            (queue,) = current_context().queues
            torch.zeros(MEASURED_BYTES + 1, dtype=torch.uint8).to("vgpu:0")
            weight = torch.ones(784, 10, device="vgpu:0") / 784
            queue.synchronize()
            waits, before = queue.channel.waits, pool.sent_bytes[0]
            outs = [batch.to("vgpu:0", non_blocking=True).float() @ weight for batch in images]
            total, largest = sum(out.sum() for out in outs), outs[-1].amax()
            assert queue.channel.waits == waits
            queue.synchronize()
            sent = pool.sent_bytes[0] - before
            values = total.item(), largest.item()
            there = images.to("vgpu:0").cpu()
    assert sent < 0.7 * images.nbytes
    assert torch.equal(there, images)
    assert values[0] == pytest.approx(10 * images.float().sum().item() / 784)
    assert values[1] == pytest.approx(images[-1].float().mean(1).amax().item())


class Passed(NamedTuple):
    """Account of bytes that one rank has sent to another one.

    Args:
        connections: Bytes that each connection carried.
        carried: What the meter says.
        lasted_s: Time that it took.
    """

    connections: list[int]
    carried: GroupTraffic
    lasted_s: float


def far_hosts() -> Network:
    """Return two hosts with a long way between them."""
    try:
        return Network(["here", "there"], delay_s=DELAY_S)
    except RuntimeError as error:
        pytest.skip(f"no cables that take their time here: {error}")


def narrow(network: Network, names: Iterable[str], size_bytes: int = WINDOW_BYTES) -> None:
    """Let TCP connections of hosts have little on the way."""
    for name in names:
        for way in ("rmem", "wmem"):
            setting = f"echo 4096 {size_bytes} {size_bytes} > /proc/sys/net/ipv4/tcp_{way}"
            network[name].run("sh", "-c", setting).check_returncode()


def passed_on(network: Network, size_bytes: int) -> Passed:
    """Send so many bytes, which have to arrive as they are, from one rank to the other."""
    store, hosts = Keys(), list(network.hosts.values())

    def connect(rank: int) -> dict[int, Ends]:
        with hosts[rank].inside():
            return connect_mesh(rank, 2, hosts[rank].address, store)

    sent = b"".join(number.to_bytes(4) for number in range(size_bytes // 4))
    with ThreadPoolExecutor(2) as threads:
        links = list(threads.map(connect, range(2)))
        with closing(*links):
            assert [len(way) for mesh in links for link in mesh.values() for way in link] == 4 * [MOST_CONNECTIONS]
            outgoing, meters, found = links[1][0].outgoing, LinkMeters(), memoryview(bytearray(size_bytes))
            writer = ConnectionWriter(outgoing, meters.add(outgoing, 0, 0))
            meters.take()
            begin_s = time.monotonic()
            writing = threads.submit(writer.write, b"", memoryview(sent))
            assert ConnectionReader(links[0][1].incoming).read_into(found)
            writing.result(WITHIN_S)
            lasted_s = time.monotonic() - begin_s
            (carried,) = meters.take()
            counted = [acknowledged_bytes(each.raw) for each in outgoing]
    assert found == sent
    return Passed(counted, carried, lasted_s)


def acknowledged_bytes(connection: socket.socket) -> int:
    """Return how many bytes the other end of a connection has acknowledged."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    return int.from_bytes(info[120:128], "little")


def used_connections(network: Network, name: str) -> Counter[str]:
    """Return how many connections of a machine have carried more than a handshake, by the address that they lead to."""
    listed = network[name].run("ss", "--tcp", "--numeric", "--info", "--oneline", "--no-header")
    listed.check_returncode()
    others = {network[other].address for other in MACHINES} - {network[name].address}
    found: Counter[str] = Counter()
    for line in listed.stdout.splitlines():
        target = line.split()[4].rpartition(":")[0]
        acknowledged = re.search(r"bytes_acked:(\d+)", line)
        found[target] += target in others and acknowledged is not None and int(acknowledged[1]) > 1 << 14
    return found


def connections(process: int, network: Network) -> int:
    """Return how many TCP connections a worker has with workers of other hosts."""
    own = {os.readlink(link) for link in Path(f"/proc/{process}/fd").iterdir() if link.is_symlink()}
    machines = {socket.inet_aton(network[name].address)[::-1].hex().upper() for name in MACHINES}
    lines = [line.split() for line in Path(f"/proc/{process}/net/tcp").read_text().splitlines()[1:]]
    return sum(f"socket:[{line[9]}]" in own and line[2].partition(":")[0] in machines for line in lines)
