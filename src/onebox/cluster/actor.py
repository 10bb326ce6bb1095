"""The Ray actor of one device: it runs an agent on its node, for one client.

Its methods take and return only JSON text. The agent's key pair is made here, and only the public key leaves; it
listens at the node's own address and accepts the client alone.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import threading
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from onebox.extras import import_extra
from onebox.pool.backends.compatibility import own_versions
from onebox.reaping import end_process
from onebox.wire import new_keys
from onebox.wire.protocol.agents import SoftwareVersions

if TYPE_CHECKING:
    from onebox.agent.server import Agent

_DRIVER_S = 10.0
"""Bound of the GPU driver's answer about memory."""

_STOP_S = 10.0

_log = logging.getLogger("onebox.cluster")


class NodeReport(Struct, frozen=True, forbid_unknown_fields=True):
    """A node, its installed versions, and the memory of the GPU that Ray has assigned to the actor.

    Args:
        host: Its host's name.
        address: Its address.
        node: Ray's number for it.
        versions: What is installed.
        gpu_bytes: Memory of the GPU; 0 where there is none, or it is unknown.
    """

    host: str
    address: str
    node: str
    versions: SoftwareVersions
    gpu_bytes: int = 0


class ServeRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """An agent to start.

    Args:
        client: The public key of its one client.
        device: ``cpu``, or ``cuda:0`` for the one GPU that Ray makes visible to this process.
        threads: Cores that it offers.
        sharing_key: A secret of the workers that share memory, as hexadecimal digits: agents of one node have it in
            common.
    """

    client: str
    device: str
    threads: int
    sharing_key: str


class Serving(Struct, frozen=True, forbid_unknown_fields=True):
    """A started agent: its port and its public key."""

    port: int
    key: str


class AgentActor:
    """The actor: owner of one agent."""

    def __init__(self) -> None:
        self._agent: Agent | None = None
        self._thread: threading.Thread | None = None

    def find(self) -> str:
        """Return a :class:`NodeReport` as JSON."""
        import torch  # noqa: F401  # the suffix of its own version tells whether it can use a GPU

        ray = import_extra("ray", "a device of a Ray cluster")
        node = ray.get_runtime_context().get_node_id()
        return _text(
            NodeReport(socket.gethostname(), ray.util.get_node_ip_address(), node, own_versions(), _gpu_bytes())
        )

    def serve(self, request_json: str) -> str:
        """Start an agent by a :class:`ServeRequest`, in place of an earlier one; return :class:`Serving`."""
        from onebox.agent.admission import ClientLimits, Offered  # of Linux, unlike the client's half
        from onebox.agent.host_devices import offered_devices
        from onebox.agent.lease_processes import LeaseIsolation
        from onebox.agent.server import Agent

        ray = import_extra("ray", "a device of a Ray cluster")
        request = msgspec.json.decode(request_json, type=ServeRequest)
        self._end()
        [found] = offered_devices(request.device)
        offer = Offered(
            device=found.device, name=found.name, memory_bytes=found.memory_bytes, threads=request.threads
        )  # as many cores as Ray has reserved, whatever this process may use
        keys, address = new_keys(), ray.util.get_node_ip_address()
        self._agent = Agent(
            keys=keys,
            name_of=lambda key: "the pool" if key == request.client else None,
            bind=address,
            port=0,
            advertise=address,
            offers=[offer],
            limits=ClientLimits(),
            tell=lambda event, **fields: _log.info("%s %s", event, fields),
            has_clients=True,
            isolation=LeaseIsolation(import_per_client=True),  # one worker: nothing to fork it from would be used again
            sharing_key=bytes.fromhex(request.sharing_key),
        )
        self._thread = threading.Thread(target=self._agent.run, name="onebox-agent", daemon=True)
        self._thread.start()
        return _text(Serving(int(self._agent.endpoint.rpartition(":")[2]), keys.public))

    def _end(self) -> None:
        if self._agent is not None and self._thread is not None:
            self._agent.stop()
            self._thread.join(_STOP_S)
        self._agent = self._thread = None


def _gpu_bytes() -> int:
    """Return the memory of the one GPU that Ray makes visible to this process; 0 where there is none, or it is unknown.

    By the driver's own program: CUDA itself would take some of that memory for this process.
    """
    which = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0]
    if not which:
        return 0
    line = ["nvidia-smi", f"--id={which}", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        asked = subprocess.Popen(
            line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
    except OSError:
        return 0
    try:
        said = asked.communicate(timeout=_DRIVER_S)[0].strip()
    except subprocess.TimeoutExpired:  # the driver may hang, and then nothing ends it
        end_process(asked, "nvidia-smi", grace_s=0.0)
        return 0
    return int(said) << 20 if said.isdecimal() and not asked.returncode else 0


def _text(message: Struct) -> str:
    return msgspec.json.encode(message).decode()
