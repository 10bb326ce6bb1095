"""The network of the tests is one."""

from __future__ import annotations

import platform
import socket
import threading
import time

import pytest

from tests.net.delay_line import Way
from tests.net.fleet import MACHINES
from tests.net.hosts import Network, tool

pytestmark = pytest.mark.short  # the rest of the folder is of the long tier


def test_hosts_have_names_addresses_and_networks_of_their_own(network: Network) -> None:
    names = [network[name].run("hostname").stdout.strip() for name in MACHINES]
    assert names == list(MACHINES) and platform.node() not in names
    red, client = network["red"], network["client"]
    with red.inside():
        listener = socket.create_server((red.address, 0))
    listener.settimeout(5)
    port = listener.getsockname()[1]
    with listener:
        with pytest.raises(OSError), socket.create_connection((red.address, port), 0.5):
            pass  # from outside
        with client.inside(), socket.create_connection((red.address, port), 5):
            peer, address = listener.accept()
            peer.close()
        assert address[0] == client.address
        with client.inside(), pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), 5)


def test_a_cable_can_be_pulled_and_put_back(network: Network) -> None:
    red, client = network["red"], network["client"]
    with red.inside():
        listener = socket.create_server((red.address, 0))
    port = listener.getsockname()[1]
    with listener, client.inside():
        red.plug(False)
        try:
            with pytest.raises(OSError):
                socket.create_connection((red.address, port), 0.3)
        finally:
            red.plug(True)
        with socket.create_connection((red.address, port), 5):
            pass


def test_what_a_network_holds_ends_with_it() -> None:
    try:
        with Network(["alone"]) as made:
            space = made["alone"].space
            process = made["alone"].start("sleep", "1000")
            while space not in tool("ip", "netns", "identify", str(process.pid)):
                time.sleep(0.01)
    except RuntimeError as error:
        pytest.skip(f"no network here: {error}")
    assert process.wait(30) == -9
    assert space not in tool("ip", "netns", "list")


def test_a_frame_is_handed_on_when_it_is_due() -> None:
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(2)]
    with pairs[0][0], pairs[0][1] as source, pairs[1][0] as target, pairs[1][1]:
        for end in (source, target, pairs[1][1]):
            end.setblocking(False)
        way = Way(source.fileno(), target.fileno(), 0.05)
        pairs[0][0].send(b"one")
        way.take(7.0)
        way.give(7.04)
        with pytest.raises(BlockingIOError):
            pairs[1][1].recv(9)
        assert way.due_s == pytest.approx(7.05)
        way.give(7.06)
        assert pairs[1][1].recv(9) == b"one" and way.due_s == float("inf")


def test_what_is_sent_over_slow_cables_arrives_whole() -> None:
    try:
        made = Network(["here", "there"], delay_s=0.05)
    except RuntimeError as error:
        pytest.skip(f"no cables that take their time here: {error}")
    with made:
        here, there = made["here"], made["there"]
        with there.inside():
            listener = socket.create_server((there.address, 0))
        listener.settimeout(5)
        port = listener.getsockname()[1]
        with listener, here.inside(), socket.create_connection((there.address, port), 5) as near:
            far, _ = listener.accept()
            with far:
                far.settimeout(10)
                near.settimeout(10)
                sent = bytes(range(256)) * 4096
                near.sendall(sent[:1])
                far.sendall(far.recv(1))
                assert near.recv(1) == sent[:1]
                writer = threading.Thread(target=near.sendall, args=(sent,))
                writer.start()
                got = bytearray()
                while len(got) < len(sent) and (more := far.recv(1 << 16)):
                    got += more
                writer.join(10)
        assert got == sent, "frames of 64 KiB and what is left of them, in order"
