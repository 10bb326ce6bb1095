"""Check that the hosts of a group's ranks reach each other, before a library connects them without encryption.

NCCL waits for a connection as long as for any operation, half an hour, and does not say which pair of hosts it is. So
each rank first listens at its address, at a port that the system chooses as it does for NCCL's, and connects to all
others, within a bound. All ranks learn of the first failure and fail with the same words.
"""

from __future__ import annotations

import contextlib
import functools
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

from onebox.worker.comm.api import MembershipStore, RankLost
from onebox.worker.comm.tcp.mesh import PLAIN_REMEDY

REACH_S = 20.0
"""Time after which a host that cannot be connected to is given up: longer than an interruption that a run survives."""

_ATTEMPT_S = 3.0
_RETRY_S = 0.1
_LOOK_S = 0.5
_LAST_PORT = (1 << 16) - 1


def require_reachable(rank: int, ranks: Sequence[int], address: str, store: MembershipStore, name: str) -> None:
    """Require that all ranks of a group reach each other's hosts; all of them call it.

    Args:
        rank: This rank.
        ranks: The ranks.
        address: This host's IP address, at which the rank will listen; empty where it is not known, so that nobody
            tries it.
        store: The group's key-value store.
        name: Prefix of the keys.

    Raises:
        RankLost: A host cannot be listened at, or not be connected to in time; or the group is dissolved.
    """
    others = [other for other in ranks if other != rank]
    with contextlib.ExitStack() as held:
        port, said = 0, ""
        if address:  # the kernel accepts what connects; nobody reads from it
            try:
                port = held.enter_context(_listening(address, len(ranks))).getsockname()[1]
            except OSError as error:
                said = f"rank {rank} of the group cannot listen at {address}: {error.strerror or error}. {PLAIN_REMEDY}"
        store.set(f"{name}/at/{rank}", f"{address if port else ''} {port}")
        found = dict(zip(others, store.multi_get([f"{name}/at/{other}" for other in others]), strict=True))
        whys = {} if said else _failures(found, address, functools.partial(store.check, [f"{name}/at/{rank}"]))
        for other, (there, why) in whys.items():
            said = said or (
                f"rank {rank} of the group, at {address}, cannot connect to rank {other}, at {there}, "
                f"within {REACH_S:.0f} s: {why}. {PLAIN_REMEDY}"
            )
        store.set(f"{name}/said/{rank}", said)
        heard = store.multi_get([f"{name}/said/{other}" for other in others])  # others may still connect
        told = [said, *(text.decode() for text in heard)]
    if first := next(filter(None, told), ""):
        raise RankLost(first)


def _listening(address: str, count: int) -> socket.socket:
    """Return a socket that listens at an IP address, which may have a zone, for so many connections."""
    family, kind, protocol, _, endpoint = socket.getaddrinfo(
        address, 0, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.bind(endpoint)
        listener.listen(count)
    except BaseException:
        listener.close()
        raise
    return listener


def _failures(found: Mapping[int, bytes], own: str, require_group: Callable[[], object]) -> dict[int, tuple[str, str]]:
    """Connect to all ranks at the same time; return the host of each that cannot be connected to, and the reason.

    Args:
        found: Host and port of each rank, as it has told them; the host is empty where nobody tries it.
        own: The host of this rank, which is not tried.
        require_group: Raises an error where the group is dissolved.
    """
    failed: dict[int, tuple[str, str]] = {}
    wanted: dict[int, tuple[str, int]] = {}
    for other, value in found.items():
        host, _, port = value.decode(errors="replace").rpartition(" ")
        if not port.isdecimal() or int(port) > _LAST_PORT:
            failed[other] = repr(value), "that is no address and port"
        elif host not in ("", own):
            wanted[other] = host, int(port)
    over, end_s = threading.Event(), time.monotonic() + REACH_S
    with ThreadPoolExecutor(len(wanted) or 1, "onebox-reach") as threads:
        asked = {other: threads.submit(_why_not, endpoint, over, end_s) for other, endpoint in wanted.items()}
        try:
            while wait(asked.values(), _LOOK_S).not_done:
                require_group()
        finally:
            over.set()
        whys = {other: future.result() for other, future in asked.items()}
    return failed | {other: (wanted[other][0], why) for other, why in whys.items() if why}


def _why_not(endpoint: tuple[str, int], over: threading.Event, end_s: float) -> str:
    """Connect to an endpoint, trying until a time, or until nobody waits for it any more; return why that is
    impossible, or nothing."""
    while True:
        try:
            socket.create_connection(endpoint, max(_RETRY_S, min(_ATTEMPT_S, end_s - time.monotonic()))).close()
        except (OSError, ValueError) as error:  # ValueError: a host that is none
            why = getattr(error, "strerror", None) or str(error)
        else:
            return ""
        if time.monotonic() + _RETRY_S > end_s or over.wait(_RETRY_S):
            return why


__all__ = ["REACH_S", "require_reachable"]
