"""The client's services for groups of workers: their key-value stores, sums of their buckets, and notices about members
that left. Pure.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import psutil
from torch import Tensor

from onebox.errors import WireError
from onebox.pool.errors import WorkerLocation
from onebox.wire import from_frame, to_frame
from onebox.wire.group_listener import GroupListener, decode_listener, is_listener_key, listener_key
from onebox.wire.protocol.groups import Reduced, Rendezvous, TicketCancelled
from onebox.wire.protocol.responses import (
    LOOKUP_KEYS,
    Contribution,
    GroupTraffic,
    Left,
    LinkTraffic,
    Lookup,
    RelayRequest,
)

KEYS = 1 << 16
KEY_BYTES = 64 << 20
"""Limits of a group's key-value store: what members say of themselves takes some 500 bytes each, and lookups that wait,
of 512 members for all others, take 24 MiB."""

WAITING = 4
"""Most lookups of a worker in a group that wait: its store waits for one at a time, and gives up those that took too
long."""

_OBJECT_BYTES = 80
"""Bytes of a text of no characters, and of a reference to it."""

_DIGITS = 32
"""Most digits of a counter."""

_PORTS = range(1024, 1 << 16)
"""Ports of listeners: a confined worker listens at none below."""

ORDERS = 1 << 16
"""Most sums of a group that wait for some of its members."""


@dataclass(frozen=True)
class LookupReply:
    """The reply to a worker's lookup.

    Args:
        worker: The worker's number.
        ticket: The worker's number of the lookup.
        values: The values of its keys, or the one value that is the result.
    """

    worker: int
    ticket: int
    values: tuple[bytes, ...]


@dataclass
class _Waiting:
    """A lookup that waits for a key, the first of those that were not set when it was last looked at."""

    worker: int
    ticket: int
    keys: tuple[str, ...]
    place: int = 0
    """Position of that key."""

    @property
    def size_bytes(self) -> int:
        """Bytes that it takes."""
        return sum(map(_size, self.keys))


@dataclass
class _Store:
    """The key-value store of one group, with limits: an operation that would exceed them changes nothing."""

    group: int
    values: dict[str, bytes] = field(default_factory=dict)
    waiting: dict[str, list[_Waiting]] = field(default_factory=dict)  # by the key that they wait for
    lookups: Counter[int] = field(default_factory=Counter)  # that wait, by worker
    size_bytes: int = 0  # of keys, values and waiting lookups

    def set(self, key: str, value: bytes) -> list[LookupReply]:
        """Set a key and return the replies that it releases."""
        known = self.values.get(key)
        more_bytes = len(value) + _size(key) if known is None else len(value) - len(known)
        self._require(more_bytes, another_key=known is None)
        self.size_bytes += more_bytes
        self.values[key] = value
        replies = []
        for waiting in self.waiting.pop(key, ()):
            if self._advance(waiting):
                self.waiting.setdefault(waiting.keys[waiting.place], []).append(waiting)
            else:
                self.lookups[waiting.worker] -= 1
                self.size_bytes -= waiting.size_bytes
                replies.append(self._reply(waiting))
        return replies

    def get(self, waiting: _Waiting) -> list[LookupReply]:
        """Return the reply to a ``get``; none as long as one of its keys is not set, for which it waits then."""
        if not self._advance(waiting):
            return [self._reply(waiting)]
        if self.lookups[waiting.worker] >= WAITING:
            raise WireError(f"{WAITING} lookups of worker {waiting.worker} in group {self.group} wait; no more may")
        size_bytes = waiting.size_bytes
        self._require(size_bytes)
        self.size_bytes += size_bytes
        self.lookups[waiting.worker] += 1
        self.waiting.setdefault(waiting.keys[waiting.place], []).append(waiting)
        return []

    def delete(self, key: str) -> bool:
        """Delete a key and return whether it existed."""
        gone = self.values.pop(key, None)
        if gone is not None:
            self.size_bytes -= _size(key) + len(gone)
        return gone is not None

    def _advance(self, waiting: _Waiting) -> bool:
        """Go on to the next key that is not set, at last over all from the first; return whether there is one."""
        keys = waiting.keys
        for place in chain(range(waiting.place, len(keys)), range(waiting.place)):
            if keys[place] not in self.values:
                waiting.place = place
                return True
        return False

    def _reply(self, waiting: _Waiting) -> LookupReply:
        return LookupReply(waiting.worker, waiting.ticket, tuple(self.values[name] for name in waiting.keys))

    def _require(self, more_bytes: int, *, another_key: bool = False) -> None:
        """Refuse what would exceed a limit."""
        if (another_key and len(self.values) >= KEYS) or self.size_bytes + more_bytes > KEY_BYTES:
            raise WireError(f"the store of group {self.group} is full: {KEYS} keys and {KEY_BYTES} bytes are allowed")


class KeyValues:
    """The key-value stores of all groups; a ``get`` is answered once its keys are set."""

    def __init__(self) -> None:
        self._stores: dict[int, _Store] = {}

    def lookup(self, worker: int, lookup: Lookup) -> list[LookupReply]:
        """Apply a worker's operation and return the replies that it releases.

        Raises:
            WireError: It needs a number that is none, it names too many keys or one twice, too many lookups of the
                worker wait, or the group's store is full.
        """
        if not lookup.keys:
            return [LookupReply(worker, lookup.ticket, (b"",))]
        if len(lookup.keys) > LOOKUP_KEYS:
            raise WireError(f"a lookup of worker {worker} names {len(lookup.keys)} keys; allowed are {LOOKUP_KEYS}")
        if len(set(lookup.keys)) < len(lookup.keys):  # a reply has each value once, and so has a bound
            raise WireError(f"a lookup of worker {worker} names a key twice")
        store = self._stores.setdefault(lookup.group, _Store(lookup.group))
        key = lookup.keys[0]
        match lookup.action:
            case "set":
                return store.set(key, lookup.value)
            case "get":
                return store.get(_Waiting(worker, lookup.ticket, lookup.keys))
            case "add":
                total = b"%d" % (_number(store.values.get(key, b"0")) + _number(lookup.value))
                return [*store.set(key, total), LookupReply(worker, lookup.ticket, (total,))]
            case "check":
                there = all(name in store.values for name in lookup.keys)
                return [LookupReply(worker, lookup.ticket, (b"1" if there else b"0",))]
            case "delete":
                return [LookupReply(worker, lookup.ticket, (b"1" if store.delete(key) else b"0",))]

    def value(self, group: int, key: str) -> bytes:
        """Return the value of a group's key; empty if it is not set."""
        store = self._stores.get(group)
        return b"" if store is None else store.values.get(key, b"")

    def forget(self, group: int) -> list[tuple[int, int]]:
        """Drop a group's keys and return the (worker, ticket) of pending lookups."""
        store = self._stores.pop(group, _Store(group))
        return [(each.worker, each.ticket) for waiting in store.waiting.values() for each in waiting]


def _size(key: str) -> int:
    """Return the most bytes that a key takes in CPython, which stores each character of some texts in 4 bytes."""
    return _OBJECT_BYTES + len(key) * (1 if key.isascii() else 4)


def _number(text: bytes) -> int:
    try:
        if len(text) <= _DIGITS:
            return int(text)
    except ValueError:
        pass
    raise WireError(f"a counter of a group is {text[:80]!r}, which is no number, or too large") from None


@dataclass(frozen=True)
class BucketSum:
    """The sum of a bucket, for the workers that contributed.

    Args:
        tickets: (worker, ticket) of each contribution.
        total: The sum.
    """

    tickets: tuple[tuple[int, int], ...]
    total: Tensor


@dataclass
class ClientSums:
    """Sums computed at the client: equal orders of all members of a group are added in the order of the members."""

    _members: dict[int, Sequence[int]] = field(default_factory=dict)
    _parts: dict[tuple[int, int], dict[int, tuple[int, Tensor]]] = field(default_factory=lambda: defaultdict(dict))
    most_bytes: int = field(default_factory=lambda: psutil.virtual_memory().total // 2)
    """Most bytes of contributions that wait for others."""
    _waiting_bytes: int = 0

    def form(self, group: int, members: Sequence[int]) -> None:
        """Set the members of a group."""
        self._members[group] = tuple(members)

    def forget(self, group: int) -> list[tuple[int, int]]:
        """Drop a group and return the (worker, ticket) of contributions that will not be summed."""
        self._members.pop(group, None)
        keys = [key for key in self._parts if key[0] == group]
        gone = [(worker, ticket, part) for key in keys for worker, (ticket, part) in self._parts.pop(key).items()]
        self._waiting_bytes -= sum(part.nbytes for _, _, part in gone)
        return [(worker, ticket) for worker, ticket, _ in gone]

    def contribute(self, worker: int, contribution: Contribution, bucket: Tensor) -> BucketSum | None:
        """Add a contribution; return the sum when it was the last one.

        Raises:
            WireError: The worker has contributed before, its contribution does not match the others, or too much
                waits.
        """
        members = self._members.get(contribution.group, ())
        if worker not in members:
            return None
        parts = self._parts[contribution.group, contribution.order]
        alike = all((part.dtype, part.shape) == (bucket.dtype, bucket.shape) for _, part in parts.values())
        if worker in parts or not alike:
            raise WireError(f"worker {worker} contributed {contribution.spec} twice, or to a sum of something else")
        parts[worker] = (contribution.ticket, bucket)
        self._waiting_bytes += bucket.nbytes
        if len(parts) < len(members):
            if self._waiting_bytes > self.most_bytes or len(self._parts) > ORDERS:
                raise WireError(
                    f"{self._waiting_bytes} bytes in {len(self._parts)} sums wait for others; allowed are "
                    f"{self.most_bytes} and {ORDERS}"
                )
            return None
        del self._parts[contribution.group, contribution.order]
        self._waiting_bytes -= sum(part.nbytes for _, part in parts.values())
        total = parts[members[0]][1].clone()
        for member in members[1:]:
            total += parts[member][1]
        return BucketSum(tuple((member, parts[member][0]) for member in members), total)


class GroupNotice(NamedTuple):
    """A message for a worker.

    Args:
        worker: Its number.
        instruction: The instruction.
        frames: Raw elements of its tensors.
    """

    worker: int
    instruction: Rendezvous | Reduced | TicketCancelled
    frames: tuple[Any, ...] = ()


class GroupServices:
    """Serves the groups of a pool; methods return the notices to send."""

    def __init__(self) -> None:
        self._key_values = KeyValues()
        self._sums = ClientSums()
        self._members: dict[int, tuple[int, ...]] = {}
        self._failed: set[int] = set()

    def form(self, group: int, members: Sequence[int]) -> None:
        """Start to serve a group, until one of its members leaves."""
        self._failed.discard(group)
        self._sums.form(group, members)
        self._members[group] = tuple(members)

    def serves(self, group: int) -> bool:
        """Return whether a group is served: it has been formed, and none of its members has left."""
        return group in self._members

    def has_failed(self, group: int) -> bool:
        """Return whether the first member that has left a group could not do its part."""
        return group in self._failed

    def members(self, group: int) -> tuple[int, ...]:
        """Return the workers of a group by rank; none if it is not served."""
        return self._members.get(group, ())

    def traffic(self, worker: int, found: Sequence[GroupTraffic]) -> tuple[LinkTraffic, ...]:
        """Return what a worker has carried to each other worker, in groups that are served and that it is in."""
        sums: dict[int, tuple[int, int]] = {}
        for each in found:
            members = self._members.get(each.group, ())
            if worker in members and each.peer < len(members):
                size_bytes, busy_ns = sums.get(other := members[each.peer], (0, 0))
                sums[other] = size_bytes + each.size_bytes, busy_ns + each.busy_ns
        return tuple(LinkTraffic(other, *carried) for other, carried in sorted(sums.items()))

    def relayed(self, place: WorkerLocation, message: RelayRequest) -> list[tuple[int, int, GroupListener]]:
        """Return who is to be connected: worker, rank and listener of the worker that asks, and of its peer; nobody if
        the group is not served, or the worker is no member.

        Raises:
            WireError: There is no such peer, or one of them does not listen for encrypted connections.
        """
        members = self.members(message.group)
        if place.worker not in members:
            return []
        rank = members.index(place.worker)
        if message.peer == rank or not 0 <= message.peer < len(members):
            raise WireError(f"{place}, rank {rank} of {len(members)}, asks for a relay to rank {message.peer}")
        found = []
        for each in (rank, message.peer):
            said = self._key_values.value(message.group, listener_key(each))
            listener = decode_listener(each, said, encrypted=True)
            if listener.port not in _PORTS:
                raise WireError(f"rank {each} of a group says that it listens at port {listener.port}")
            found.append((members[each], each, listener))
        return found

    def of(self, worker: int) -> list[int]:
        """Return the groups that a worker is in."""
        return [group for group, members in self._members.items() if worker in members]

    def may_leave(self, worker: int, group: int) -> bool:
        """Return whether a group is served and has a worker among its members; nobody else's word dissolves it."""
        return worker in self._members.get(group, ())

    def dissolve(self, group: int) -> list[GroupNotice]:
        """Stop serving a group; return notices for the workers that wait for it."""
        self._members.pop(group, None)
        waiting = self._key_values.forget(group) + self._sums.forget(group)
        return [GroupNotice(member, TicketCancelled(ticket)) for member, ticket in waiting]

    def take(
        self, place: WorkerLocation, message: Left | Lookup | Contribution, frames: Sequence[Any]
    ) -> list[GroupNotice]:
        """Process a worker's message to a group.

        Args:
            place: The worker.
            message: The message.
            frames: Raw elements of its tensors.

        Raises:
            WireError: The message violates the protocol.
        """
        if isinstance(message, Left):
            if not self.may_leave(place.worker, message.group):
                return []
            if message.failed:
                self._failed.add(message.group)
            return self.dissolve(message.group)
        if place.worker not in self._members.get(message.group, ()):
            return [GroupNotice(place.worker, TicketCancelled(message.ticket))]
        if isinstance(message, Contribution):
            return self._add_up(place, message, frames)
        if message.action not in ("get", "check"):
            own = listener_key(self._members[message.group].index(place.worker))
            if any(is_listener_key(key) and key != own for key in message.keys):
                raise WireError(f"{place} says where another worker listens: {message.keys[0]!r}")
        answers = self._key_values.lookup(place.worker, message)
        return [GroupNotice(answer.worker, Rendezvous(answer.ticket, answer.values)) for answer in answers]

    def _add_up(self, place: WorkerLocation, contribution: Contribution, frames: Sequence[Any]) -> list[GroupNotice]:
        """Add a contribution to a sum; the last one returns the sum for all contributors."""
        if len(frames) != 1:
            raise WireError(f"{place} contributed {len(frames)} frames to a sum; one is needed")
        bucket = from_frame(contribution.spec, frames[0])
        total = self._sums.contribute(place.worker, contribution, bucket)
        if total is None:
            return []
        frame = to_frame(total.total)
        return [GroupNotice(member, Reduced(ticket), (frame,)) for member, ticket in total.tickets]
