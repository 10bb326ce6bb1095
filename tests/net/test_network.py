"""The network of the tests is one, and workers' tensors go over it from host to host."""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.net.conftest import MACHINES
from tests.net.hosts import Network, tool

ROOT = Path(__file__).resolve().parents[2]


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
    assert process.wait(5) == -9
    assert process.stdin is not None
    process.stdin.close()
    assert space not in tool("ip", "netns", "list")


def test_tensors_of_a_group_go_from_host_to_host(network: Network, tmp_path: Path) -> None:
    elements = 200_000
    before = {name: network[name].traffic_bytes() for name in (*MACHINES, "client")}

    def member(rank: int) -> subprocess.CompletedProcess[str]:
        host = network[MACHINES[rank]]
        arguments = map(str, (rank, 3, host.address, tmp_path / "store", elements))
        env = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]), "OMP_NUM_THREADS": "1"}
        return host.run(sys.executable, "-P", "-m", "tests.net.ring", *arguments, env=env)

    with ThreadPoolExecutor(3) as threads:
        done = list(threads.map(member, range(3)))
    assert [one.returncode for one in done] == [0] * 3, "\n".join(one.stderr for one in done)
    for rank, one in enumerate(done):
        assert json.loads(one.stdout) == {"total": 6.0, "came": float((rank - 1) % 3 + 1), "alike": True}
    moved = {name: network[name].traffic_bytes() - before[name] for name in before}
    assert all(moved[name] > 2 * 8 * elements for name in MACHINES), moved
    assert moved["client"] < 20_000
