"""A Ray cluster of two nodes on this machine, started once for all tests of this folder."""

from __future__ import annotations

import contextlib
import shutil
import socket
import tempfile
import time
import warnings
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

STORE_BYTES = 80 << 20
"""Of Ray's object store, which nothing here uses; it can be no smaller than 75 MiB."""

HEAD, OTHER = "127.0.0.2", "127.0.0.3"

SETTLE_S = 30.0


class Nodes:
    """The cluster: nodes of two cores, each with an address of its own."""

    def __init__(self, cluster: Any) -> None:
        self.cluster = cluster
        self._handles: dict[str, Any] = {}
        with socket.create_server((HEAD, 0)) as free:
            self.port = free.getsockname()[1]
            """Where the head listens for clients from outside."""

    def add(self, address: str, **options: Any) -> None:
        """Start a node."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # Ray leaves log files open
            self._handles[address] = self.cluster.add_node(
                num_cpus=2, object_store_memory=STORE_BYTES, node_ip_address=address, **options
            )

    def stop(self, address: str) -> None:
        """End a node in order: the cluster knows at once that it is gone."""
        self.cluster.remove_node(self._handles.pop(address), allow_graceful=True)

    def kill(self, address: str) -> None:
        """Kill all processes of Ray on a node."""
        self.cluster.remove_node(self._handles.pop(address), allow_graceful=False)


@pytest.fixture(scope="session")
def nodes() -> Iterator[Nodes]:
    """The cluster, which ``RAY_ADDRESS`` names."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'onebox[cluster]'")
    from ray.cluster_utils import Cluster

    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # a short path, for sockets lie in it
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", folder)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_worker_niceness", "0")  # else actors wait for minutes beside other tests: Ray's own is 15
        nodes = Nodes(Cluster())
        try:
            nodes.add(HEAD, include_dashboard=False, ray_client_server_port=nodes.port)
            nodes.add(OTHER)
            patch.setenv("RAY_ADDRESS", nodes.cluster.address)
            yield nodes
        finally:
            nodes.cluster.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


def remains() -> list[str]:
    """Return the command lines of the cluster's actors, which are descendants of this process."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            found.append(" ".join(process.cmdline()))
    return [line for line in found if "AgentActor" in line]


@pytest.fixture(autouse=True)
def nothing_remains(nodes: Nodes) -> Iterator[None]:
    """Require that a test leaves no actor, nothing reserved and no connection with the cluster."""
    yield
    import ray

    assert not ray.is_initialized()
    end_s = time.monotonic() + SETTLE_S
    while remains() and time.monotonic() < end_s:
        time.sleep(0.1)
    assert remains() == []
    ray.init(log_to_driver=False, configure_logging=False)
    try:
        groups = ray.util.placement_group_table().values()
        assert [group for group in groups if group["state"] != "REMOVED"] == []
        while ray.available_resources().get("CPU") != ray.cluster_resources()["CPU"] and time.monotonic() < end_s:
            time.sleep(0.1)
        assert ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"]
    finally:
        ray.shutdown()
