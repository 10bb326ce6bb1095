"""Ranks of a group that are threads of this process, and a client that serves their rendezvous."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from onebox.emulator.device import EmulatedAccelerator
from onebox.emulator.group import EmulatedGroup
from onebox.emulator.links import EmulatedLinks
from onebox.pool.client.group_services import KeyValues
from onebox.wire.protocol.groups import EmulatedLink, FormGroup, Reduced, Rendezvous
from onebox.wire.protocol.responses import Contribution, Left, Lookup, RelayRequest
from onebox.worker.accelerator import Accelerator
from onebox.worker.comm.api import RankLost
from onebox.worker.comm.group import CarriedGroup
from onebox.worker.comm.shm.carrier import ShmCarrier
from onebox.worker.comm.shm.gpu_sender import ShmCopier
from onebox.worker.comm.shm.rendezvous import ShmPeers, find_shm_peers
from onebox.worker.memory.shared import SharedMemoryQuota
from onebox.worker.progress import WorkerProgress
from tests.unit.programs import HOST


class Keys:
    """A key-value store of threads, whose group a test may dissolve."""

    def __init__(self, values: Mapping[str, str] | None = None, timeout_s: float = 30.0) -> None:
        self.values = {key: value.encode() for key, value in (values or {}).items()}
        self.dissolved = False
        self._changed = threading.Condition()
        self._timeout_s = timeout_s

    def set(self, key: str, value: str) -> None:
        """Set a key."""
        with self._changed:
            self.values[key] = value.encode()
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        """Return the value of a key, waiting for it."""
        with self._changed:
            if not self._changed.wait_for(lambda: key in self.values, self._timeout_s):
                raise RankLost(f"nobody set {key}")
        return self.values[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return the values of keys, waiting for them."""
        return [self.get(key) for key in keys]

    def check(self, keys: list[str]) -> bool:
        """Fail once the group is dissolved."""
        if self.dissolved:
            raise RankLost("another worker has left the group")
        return True


def memory_card(
    rank: int, place: str, *, process: int, post: str, group: int = 3, inode: int = 3, key: bytes = b""
) -> str:
    """Return what a rank publishes of its memory, signed with a key."""
    text = f"{place}:0:{process}:{1 << 26}:{inode}:{post}"
    signature = hashlib.blake2b(f"{group}:{rank}:{text}".encode(), key=key, digest_size=32)
    return f"{text}:{signature.hexdigest()}"


class Hub:
    """A client that serves the rendezvous of threads."""

    def __init__(self) -> None:
        self.keys = KeyValues()
        self.changed = threading.Condition()
        self.answers: dict[tuple[int, int], tuple[bytes, ...]] = {}
        self.dissolved = False

    def channel(self, worker: int) -> HubChannel:
        """Return the channel of a worker."""
        return HubChannel(self, worker)


class HubChannel:
    """The channel of one worker to a hub."""

    def __init__(self, hub: Hub, worker: int) -> None:
        self.hub = hub
        self.worker = worker
        self.tickets = 0
        self.left: list[int] = []

    def new_ticket(self) -> int:
        """Return a number that no other ticket of this worker has."""
        self.tickets += 1
        return self.tickets

    def send_to_client(self, message: Lookup | Contribution | Left | RelayRequest, frames: Sequence[Any] = ()) -> None:
        """Serve a lookup; take note that the worker has left a group. Nobody relays."""
        if isinstance(message, Left):
            self.left.append(message.group)
            return
        if isinstance(message, RelayRequest):
            return
        assert isinstance(message, Lookup)
        with self.hub.changed:
            for answer in self.hub.keys.lookup(self.worker, message):
                self.hub.answers[answer.worker, answer.ticket] = answer.values
            self.hub.changed.notify_all()

    def await_ticket(self, ticket: int, timeout_s: float) -> tuple[Rendezvous | Reduced, Sequence[Any]]:
        """Wait for an answer."""
        with self.hub.changed:
            if not self.hub.changed.wait_for(lambda: (self.worker, ticket) in self.hub.answers, timeout_s):
                raise RankLost("nobody came")
            return Rendezvous(ticket, self.hub.answers.pop((self.worker, ticket))), ()


class MemoryGroup(CarriedGroup):
    """A group of ranks that share memory; arguments as for the carrier."""

    def __init__(
        self,
        form: FormGroup,
        met: ShmPeers,
        device: Accelerator = HOST,
        copier: ShmCopier | None = None,
        quota: SharedMemoryQuota | None = None,
    ) -> None:
        progress = WorkerProgress()
        self.memory = ShmCarrier(form, met, progress, copier, quota)
        super().__init__(form, [self.memory], device, progress, self.memory.joined)


Rank = Callable[[int, Any], Any]


def in_threads(size: int, one: Callable[[int], Any]) -> list[Any]:
    """Call a function with the number of each rank, in threads, and return what each returns."""
    with ThreadPoolExecutor(size) as threads:
        return [future.result(60) for future in [threads.submit(one, number) for number in range(size)]]


def in_group(group: Any, rank: Callable[[Any], Any], done: threading.Barrier) -> Any:
    """Call a function with a group, and leave it when all ranks are done."""
    try:
        found = rank(group)
        done.wait(30)  # one that leaves would be missed by those that have not met it
        return found
    except BaseException:
        done.abort()
        raise
    finally:
        group.close()


def run_ranks(
    size: int,
    rank: Rank,
    *,
    timeout_s: float = 30.0,
    devices: Sequence[Accelerator] = (),
    links: Mapping[int, Sequence[EmulatedLink]] | None = None,
    copiers: Mapping[int, ShmCopier] | None = None,
    quotas: Mapping[int, SharedMemoryQuota] | None = None,
) -> list[Any]:
    """Form a group, run a function for each rank, in threads, and return what each returns.

    Args:
        size: How many ranks.
        rank: Called with the number of the rank and its group.
        timeout_s: Bound of every wait.
        devices: Of each rank; CPUs where left out.
        links: Links that each rank, if it is an emulated device, has to others.
        copiers: What copies for ranks whose device is an accelerator.
        quotas: Limits of the memory that ranks share.
    """
    keys = Keys()

    def one(number: int) -> Any:
        own = tuple((links or {}).get(number, ()))
        form = FormGroup(3, number, size, "tcp", "127.0.0.1", timeout_s, True, own)
        copier = (copiers or {}).get(number)
        met = find_shm_peers(form, keys, paged=copier is not None)
        if len(met.memories) < size:
            raise RankLost(f"only ranks {sorted(met.memories)} share memory")
        device, quota = devices[number] if devices else HOST, (quotas or {}).get(number)
        group: CarriedGroup
        if isinstance(device, EmulatedAccelerator):
            group = EmulatedGroup(form, met, device, WorkerProgress(), device.clock, EmulatedLinks(), quota)
        else:
            group = MemoryGroup(form, met, device, copier, quota)
        del met
        try:
            return rank(number, group)
        finally:
            group.close()

    return in_threads(size, one)
