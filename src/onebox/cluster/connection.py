"""The connection of this process to a Ray cluster, shared by all its pools. The client imports Ray here only."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

from onebox.cluster.spec import GPU_MEMORY, RayNode
from onebox.errors import PoolError, UsageError
from onebox.extras import import_extra
from onebox.sizes import parse_size

REACH_S = 5.0
"""How long the head of a cluster may take to accept a connection."""

_LINE = 500

_ATTEMPTS = 3
"""Attempts of an outside client to get a server: Ray's proxy gives up on one that takes more than 30 s to start, as on
a busy head; the next starts faster because the libraries are then in memory."""

_LATE = ("Proxy failed to Connect to backend", "Starting Ray client server failed")
"""Messages of Ray's proxy in that case, or about a server that did not come up at all."""

_UNLUCKY = ("psutil.ZombieProcess", "psutil.NoSuchProcess")
"""Messages of a server that looked through the head's processes, of which one ended meanwhile."""

_log = logging.getLogger("onebox.pool")

_lock = threading.Lock()
_pools = 0
_mine: str | None = None
"""Address of the connection that was made here, while there is one."""


def import_ray() -> Any:
    """Return the package ``ray``.

    Raises:
        MissingExtra: It is not installed.
    """
    import_extra("ray.util.scheduling_strategies", "a pool on a Ray cluster")
    return import_extra("ray", "a pool on a Ray cluster")


def connect(address: tuple[str, int] | None) -> Any:
    """Connect to a cluster, or reuse the connection of this process; every call needs one :func:`disconnect`.

    Args:
        address: Host and port of its head; ``None`` for the cluster that this machine is a node of, or that
            ``RAY_ADDRESS`` names.

    Returns:
        The package ``ray``.

    Raises:
        MissingExtra: Ray is not installed.
        UsageError: This process is connected to another cluster.
        PoolError: The cluster cannot be reached.
    """
    global _pools, _mine  # noqa: PLW0603 (Ray's connection is process-wide, too)
    ray = import_ray()
    wanted = "auto" if address is None else f"ray://{_joined(*address)}"
    with _lock:
        if ray.is_initialized():
            if address is not None and wanted != _mine:
                raise UsageError(
                    f"pool {wanted!r}: this process is connected to a Ray cluster already; open 'ray' for a pool on "
                    "that one, or call ray.shutdown() first"
                )
        else:
            _reach(address)
            _initialize(ray, wanted)
            _mine = wanted
        _pools += 1
    return ray


def disconnect() -> None:
    """Undo one :func:`connect`; the last call closes the connection if it was made there."""
    global _pools, _mine  # noqa: PLW0603
    with _lock:
        _pools -= 1
        if not _pools and _mine is not None:
            _mine = None
            import_ray().shutdown()


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _reach(address: tuple[str, int] | None) -> None:
    """Check quickly that something listens: Ray itself tries for minutes."""
    hint = "let this machine reach its port for clients (10001 unless --ray-client-server-port says otherwise)"
    if address is None:
        named = os.environ.get("RAY_ADDRESS", "")
        host, _, port = named.removeprefix("ray://").partition("/")[0].rpartition(":")
        if not host or not port.isdecimal():  # Ray finds its own processes here, or reports that there are none
            return
        address, hint = (host.strip("[]"), int(port)), f"name another one in RAY_ADDRESS, which is {named}"
    try:
        socket.create_connection(address, REACH_S).close()
    except (OSError, OverflowError) as error:
        raise PoolError(
            f"no Ray cluster answers at {_joined(*address)} ({error}): start one with 'ray start --head' there, or "
            f"{hint}"
        ) from None


def _initialize(ray: Any, address: str) -> None:
    quiet = {"log_to_driver": False} if address == "auto" else {}  # a client would get a warning
    with _own_signals():
        for left in reversed(range(_ATTEMPTS)):
            try:
                ray.init(address=address, configure_logging=False, **quiet)
                return
            except Exception as error:  # of many types, including builtin ones
                with contextlib.suppress(Exception):
                    ray.shutdown()  # else the next attempt of this process goes to the same address
                late, unlucky = (any(words in str(error) for words in known) for known in (_LATE, _UNLUCKY))
                if not (late or unlucky) or not left:
                    where = "this machine" if address == "auto" else address
                    raise PoolError(
                        f"no Ray cluster can be reached from {where}: {error_summary(error)}\n  {_hint(late)}"
                    ) from None
                why = "was too busy to start" if late else "failed to start"
                _log.warning("the head at %s %s a server for this client; asking again", address, why)


def _hint(late: bool) -> str:
    """Return advice about a cluster that cannot be reached."""
    if late:
        return (
            "its head starts a server for each client from outside, and did not in time: start the head with "
            "RAY_CLIENT_SERVER_CHECK_CHANNEL_TIMEOUT_S=120 (seconds; Ray's own is 30), or run the program on a node "
            "('ray job submit'), with pool 'ray'"
        )
    return (
        "start one with 'ray start --head', let this machine join it with 'ray start --address=HEAD:6379', or name its "
        "head: ray://HOST:10001"
    )


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Restore the SIGTERM handler, which Ray replaces."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def nodes(ray: Any) -> list[RayNode]:
    """Return the living nodes of the cluster."""
    return [
        RayNode(
            id=node["NodeID"],
            host=node["NodeManagerHostname"],
            address=node["NodeManagerAddress"],
            resources=node["Resources"],
            gpu_bytes=_labelled(node),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def _labelled(node: dict[str, Any]) -> int:
    """Return the GPU memory that a node's label states, or 0.

    Raises:
        UsageError: The label is not a size.
    """
    text = (node.get("Labels") or {}).get(GPU_MEMORY)
    where = f"the label {GPU_MEMORY} of the Ray node {node['NodeManagerAddress']}"
    return 0 if text is None else parse_size(where, text)


def error_summary(error: BaseException) -> str:
    """Summarise an error of Ray in a line: its first line and, of a traceback, the last."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    ends = dict.fromkeys(line[:_LINE] for line in (lines[:1] + lines[-1:] if "Traceback" in str(error) else lines[:1]))
    return f"{type(error).__name__}: {' … '.join(ends)}"
