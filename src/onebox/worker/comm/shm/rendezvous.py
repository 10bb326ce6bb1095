"""Shared-memory rendezvous: ranks publish their location, those in one place exchange memory, and all agree on the
result.

It takes two rounds over the group's key-value store at the client. In the first, every rank publishes its location and
the name of its memory, signed with a key that workers have from their owner; ranks in one place and of one owner then
exchange descriptors: who has a memory can write there. In the second, every rank publishes the ranks
whose memory it has received. Two ranks share memory if each has received that of the other; obstacles are reported.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from onebox.errors import WireError
from onebox.wire.protocol.groups import FormGroup
from onebox.worker.comm.api import KeyValueStore, RankLost
from onebox.worker.comm.shm.descriptors import DescriptorExchange
from onebox.worker.comm.shm.layout import LEFT
from onebox.worker.comm.shm.segment import LEAST_BYTES, SPAN_BYTES, SharedMemory
from onebox.worker.system.process_watch import ProcessWatch

PATIENCE_S, PATIENCE_EACH_S = 10.0, 0.5
"""Longest wait for the descriptors of ranks known to be present: for those of a small group, and more for each rank, as
each sends its own to all others."""

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_SPACES = ("user", "pid", "net")
"""Namespaces: of users; of processes, whose numbers are valid inside only; of networks, with the names of sockets."""


@functools.cache
def shm_domain() -> str:
    """Return an identifier shared by processes under one kernel, in the same namespaces; and of one user, where the
    system hides processes of others.

    Host names do not identify it: containers have their own names, and one machine may have several. If the system does
    not provide the information, the identifier is unique to this process.
    """
    try:
        places = [os.readlink(f"/proc/self/ns/{space}") for space in _SPACES]
        user = "" if os.path.exists("/proc/1/stat") else str(os.getuid())  # leases of one client have several users
        text = "\n".join([_BOOT.read_text().strip(), user, *places])
    except OSError:
        text = secrets.token_hex(16)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class ShmPeers:
    """Result of a rendezvous for one rank.

    Args:
        memories: Its own memory and that of its peers, by rank.
        watches: Watches of the peers' processes.
        paged: Whether the driver of an accelerator has registered some of the memory by pages.
        apart: Ranks in the same place that do not share memory with it, with the reason.
        whole: Whether all ranks of the group share memory with each other; all of them say the same.
    """

    memories: Mapping[int, SharedMemory]
    watches: Mapping[int, ProcessWatch]
    paged: bool = False
    apart: tuple[tuple[int, str], ...] = ()
    whole: bool = False


@dataclass(frozen=True)
class _Card:
    """Location of a rank, whether the driver of its device registers memory by pages (0 or 1), and its memory: process,
    bytes, inode, name of its :class:`DescriptorExchange`."""

    place: str
    paged: int
    process: int
    size: int
    inode: int
    post: str
    signature: str = ""

    def __str__(self) -> str:
        return f"{self._text}:{self.signature}"

    @property
    def _text(self) -> str:
        return f"{self.place}:{self.paged}:{self.process}:{self.size}:{self.inode}:{self.post}"

    def signed(self, key: bytes, group: int, rank: int) -> _Card:
        """Return it with the signature of a rank."""
        text = f"{group}:{rank}:{self._text}".encode()
        return replace(self, signature=hashlib.blake2b(text, key=key, digest_size=32).hexdigest())

    def of_owner(self, key: bytes, group: int, rank: int) -> bool:
        """Return whether it was signed by that rank with this key."""
        return hmac.compare_digest(self.signature, self.signed(key, group, rank).signature)

    @classmethod
    def of(cls, text: bytes) -> _Card:
        """Parse a rank's published location.

        Raises:
            WireError: It is malformed.
        """
        try:
            place, paged, process, size, inode, post, signature = text.decode("ascii").split(":")
            bytes.fromhex(post)
            card = cls(place, int(paged), int(process), int(size), int(inode), post, signature)
        except ValueError:
            raise WireError(f"a rank's memory is named {text[:80]!r}, which is no name of one") from None
        if not LEAST_BYTES <= card.size <= SPAN_BYTES or card.size % 8 or not post:
            raise WireError(f"a memory of {card.size} bytes; allowed are {LEAST_BYTES} to {SPAN_BYTES}")
        return card


def find_shm_peers(form: FormGroup, keys: KeyValueStore, *, paged: bool = False, sharing_key: bytes = b"") -> ShmPeers:
    """Find the ranks that share memory with this one, possibly none.

    Args:
        form: The group, with this worker's rank.
        keys: The group's key-value store.
        paged: Whether the driver of its device registers memory by pages.
        sharing_key: The key that this worker's owner gives to the workers which share memory, 64 bytes at most.

    Raises:
        RankLost: Another rank has ended, or did not join.
        WireError: Another rank published invalid data.
    """
    own = SharedMemory.make()
    memories = {form.rank: own}
    try:
        near, came = _exchange(form, keys, own, paged, sharing_key)
        try:
            for rank in list(came):
                memories[rank] = SharedMemory.of(came.pop(rank), near[rank].size)
        finally:
            for descriptor in came.values():
                os.close(descriptor)
        keys.set(f"shares/{form.rank}", ",".join(map(str, memories)))
        told = keys.multi_get([f"shares/{rank}" for rank in near])
        shares = {form.rank: set(memories), **{rank: _ranks(text) for rank, text in zip(near, told, strict=True)}}
        agreed = {rank for rank in near if form.rank in shares[rank]}
    except BaseException:
        own.publish(LEFT, 1)
        raise
    finally:
        own.seal()
    together = agreed & memories.keys()
    return ShmPeers(
        {rank: memory for rank, memory in memories.items() if rank == form.rank or rank in together},
        {rank: _watch(near[rank]) for rank in together},
        paged or any(near[rank].paged for rank in together),
        tuple(
            (rank, "it could not have this one's memory" if rank in memories else "its memory did not come")
            for rank in sorted(near.keys() - together)
        ),
        [shares.get(rank) for rank in range(form.size)] == [set(range(form.size))] * form.size,
    )


def share_no_memory(form: FormGroup, keys: KeyValueStore) -> None:
    """Tell the other ranks of a group, which may share memory, that this one does not."""
    keys.set(f"memory/{form.rank}", "")


def _exchange(
    form: FormGroup, keys: KeyValueStore, own: SharedMemory, paged: bool, sharing_key: bytes
) -> tuple[dict[int, _Card], dict[int, int]]:
    """Return the ranks in the same place as this one and of its owner, and the descriptors received from them."""
    post = DescriptorExchange()
    try:
        card = _Card(shm_domain(), int(paged), os.getpid(), len(own.map), own.inode, post.name)
        keys.set(f"memory/{form.rank}", str(card.signed(sharing_key, form.group, form.rank)))
        others = [rank for rank in range(form.size) if rank != form.rank]
        told = zip(others, keys.multi_get([f"memory/{rank}" for rank in others]), strict=True)
        cards = {rank: _Card.of(text) for rank, text in told if text}
        near = {
            rank: other
            for rank, other in cards.items()
            if other.place == card.place and other.of_owner(sharing_key, form.group, rank)
        }
        watches = {rank: _watch(other) for rank, other in near.items()}
        names = {rank: other.post for rank, other in near.items()}
        inodes = {rank: other.inode for rank, other in near.items()}
        end_s = time.monotonic() + min(PATIENCE_S + PATIENCE_EACH_S * form.size, form.timeout_s)

        def waiting(rank: int) -> bool:
            if watches[rank].ended():
                raise RankLost(f"rank {rank} has ended: process {watches[rank].process} is gone")
            return time.monotonic() < end_s

        return near, post.exchange(own.descriptor, names, inodes, waiting)
    finally:
        post.close()


def _watch(card: _Card) -> ProcessWatch:
    try:
        return ProcessWatch(card.process)
    except ProcessLookupError as error:
        raise RankLost(str(error)) from None


def _ranks(text: bytes) -> set[int]:
    try:
        return {int(word) for word in text.decode("ascii").split(",")}
    except ValueError:
        raise WireError(f"a rank shares memory with {text[:80]!r}, which are no ranks") from None
