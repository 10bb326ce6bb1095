"""Check that the hosts of a group's ranks reach each other, before a library connects them without encryption.

Gloo and NCCL wait for a connection as long as for any operation, half an hour, and do not say which pair of hosts it
is. So each rank first listens at its address, at a port that the system chooses as it does for theirs, and connects to
all others, within a bound. All ranks learn of the first failure and fail with the same words.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait

from onebox.worker.comm.api import RankLost
from onebox.worker.comm.tls_mesh import MembershipStore

REACH_S = 20.0
"""Time after which a host that cannot be connected to is given up: longer than an interruption that a run survives."""

_ATTEMPT_S = 3.0
_RETRY_S = 0.1
_LOOK_S = 0.5
_THREADS = 16

_REMEDY = (
    "Without encryption (plain_links, --plain-links) workers of different hosts connect to each other directly, both "
    "ways, at ports that the system chooses: let the firewalls between them pass these, or start the agents with an "
    "address that the others reach (onebox serve --advertise). Encrypted connections, the default, go by way of the "
    "client where hosts do not reach each other."
)


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
        RankLost: A host cannot be connected to in time; or the group is dissolved.
    """
    others = [other for other in ranks if other != rank]
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as listener:
        if address:  # the kernel accepts what connects; nobody reads from it
            listener.bind((address, 0))
            listener.listen(len(ranks))
        store.set(f"{name}/at/{rank}", f"{address} {listener.getsockname()[1] if address else 0}")
        found = {other: store.get(f"{name}/at/{other}").decode().rsplit(" ", 1) for other in others}
        wanted = {other: (host, int(port)) for other, (host, port) in found.items() if host not in ("", address)}
        over = threading.Event()
        with ThreadPoolExecutor(min(_THREADS, len(wanted)) or 1, "onebox-reach") as threads:
            asked = {other: threads.submit(_why_not, endpoint, over) for other, endpoint in wanted.items()}
            try:
                while wait(asked.values(), _LOOK_S).not_done:
                    store.check([f"{name}/at/{rank}"])
            finally:
                over.set()
            whys = {other: future.result() for other, future in asked.items()}
        said = next(
            (
                f"rank {rank} of the group, at {address}, cannot connect to rank {other}, at {wanted[other][0]}, "
                f"within {REACH_S:.0f} s: {why}. {_REMEDY}"
                for other, why in whys.items()
                if why
            ),
            "",
        )
        store.set(f"{name}/said/{rank}", said)
        told = [said, *(store.get(f"{name}/said/{other}").decode() for other in others)]  # others may still connect
    if first := next(filter(None, told), ""):
        raise RankLost(first)


def _why_not(endpoint: tuple[str, int], over: threading.Event) -> str:
    """Connect to an endpoint, trying for a while, or until nobody waits for it any more; return why that is impossible,
    or nothing."""
    end_s = time.monotonic() + REACH_S
    while True:
        try:
            socket.create_connection(endpoint, min(_ATTEMPT_S, REACH_S)).close()
        except OSError as error:
            why = error.strerror or str(error)
        else:
            return ""
        if time.monotonic() + _RETRY_S > end_s or over.wait(_RETRY_S):
            return why


__all__ = ["REACH_S", "require_reachable"]
