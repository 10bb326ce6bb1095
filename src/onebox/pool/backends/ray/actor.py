"""The Ray actor beside each worker on its node: starts the worker as a child process and monitors it.

Its methods take and return only numbers and JSON text. The worker's key pair is made here, and only the public key
leaves; the worker's sockets are bound to the node's own address and accept the client alone.
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from onebox.errors import OneboxError, WorkerDied
from onebox.extras import import_extra
from onebox.pool.backends.compatibility import own_versions
from onebox.pool.errors import WorkerLocation
from onebox.reaping import end_process
from onebox.wire import new_keys
from onebox.wire.protocol.agents import SoftwareVersions
from onebox.worker import WorkerConfig

if TYPE_CHECKING:
    from onebox.pool.launch.worker_process import WorkerProcess

_DRIVER_S = 10.0
"""Bound of the GPU driver's answer about memory."""


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


class LaunchRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """A worker to start.

    Args:
        worker: Its number in the pool.
        host: Name of its node in the pool.
        device: ``cpu``, or ``cuda:0`` for the one GPU that Ray makes visible to this process.
        threads: Threads of its operators.
        client: The public key of its client.
        quota_bytes: The most bytes of its buffers; 0 for no limit.
        sharing_key: A secret of the workers that share memory.
    """

    worker: int
    host: str
    device: str
    threads: int
    client: str
    quota_bytes: int
    sharing_key: str = ""


class Launched(Struct, frozen=True, forbid_unknown_fields=True):
    """A started worker: the number of the start, its process id and its public key."""

    launch: int
    process: int
    key: str


class WorkerExit(Struct, frozen=True, forbid_unknown_fields=True, tag="ended"):
    """The end of a worker; or, without a status, the error of a start."""

    message: str
    exit_status: int | None = None
    last_words: str = ""


class BoundPorts(Struct, frozen=True, forbid_unknown_fields=True, tag="bound"):
    """The endpoints that a worker has bound."""

    commands: str
    heartbeats: str


class WorkerActor:
    """The actor: owner of one worker's process. Its methods may run concurrently, except :meth:`launch`."""

    def __init__(self) -> None:
        self._process: WorkerProcess | None = None
        self._launch = 0

    def find(self) -> str:
        """Return a :class:`NodeReport` as JSON."""
        import torch  # noqa: F401  # the suffix of its own version tells whether it can use a GPU

        ray = import_extra("ray", "a worker on a Ray cluster")

        node = ray.get_runtime_context().get_node_id()
        return _text(
            NodeReport(socket.gethostname(), ray.util.get_node_ip_address(), node, own_versions(), _gpu_bytes())
        )

    def launch(self, order_json: str) -> str:
        """Start a worker by an :class:`LaunchRequest`, in place of an earlier one; return :class:`Launched`."""
        ray = import_extra("ray", "a worker on a Ray cluster")

        order = msgspec.json.decode(order_json, type=LaunchRequest)
        self.end(self._launch)
        pair = new_keys()
        config = WorkerConfig(
            order.device,
            order.threads,
            pair.public,
            pair.secret,
            order.client,
            ray.util.get_node_ip_address(),
            quota_bytes=order.quota_bytes,
            sharing_key=order.sharing_key,
            owner=os.getpid(),
        )
        from onebox.pool.launch.worker_process import WorkerProcess  # of Linux, unlike the client's half

        self._process = WorkerProcess(WorkerLocation(worker=order.worker, host=order.host, device=order.device), config)
        self._launch += 1
        return _text(Launched(self._launch, self._process.pid, pair.public))

    def ports(self, launch: int) -> str:
        """Wait until a worker has bound its sockets; return :class:`BoundPorts`, or :class:`WorkerExit`."""
        process = self._of(launch)
        if process is None:
            return _text(_UNKNOWN)
        try:
            ports = process.ports()
        except WorkerDied as error:
            return _text(WorkerExit(str(error), error.exit_status, error.last_words))
        except OneboxError as error:
            return _text(WorkerExit(str(error)))
        return _text(BoundPorts(ports.commands, ports.heartbeats))

    def watch(self, launch: int, patience_s: float) -> str:
        """Wait for a worker's end for a while; return :class:`WorkerExit`, or an empty text while it runs."""
        process = self._of(launch)
        if process is None:
            return _text(_UNKNOWN)
        poll = select.poll()
        poll.register(process.descriptor, select.POLLIN)
        if not poll.poll(patience_s * 1000):
            return ""
        error = process.death()
        return _text(WorkerExit(str(error), error.exit_status, error.last_words))

    def end(self, launch: int) -> None:
        """End a worker at once."""
        process = self._of(launch)
        if process is not None:
            self._process = None
            process.close(grace_s=0.0)

    def _of(self, launch: int) -> WorkerProcess | None:
        return self._process if launch == self._launch else None


_UNKNOWN = WorkerExit("its actor was started again, and its worker ended with the one before")


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
