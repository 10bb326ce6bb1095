"""Groups of workers whose ranks are joined by carriers: by memory, TCP, or some by one and some by the other.

A sum is added up in the order of the ranks, whatever carries their parts, so that its bits are the same on all ranks,
and for any number of hosts among which they are divided. A small one takes one step: each rank sends its tensors to all
others, and adds all up. Where not all ranks share memory, the first rank of many adds up, and sends the result to the
others, so that not all pairs connect; and of a large sum of three ranks or more each adds up the share that is its own,
so that each byte goes twice, however many ranks there are.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import ExitStack

import torch
from torch import Tensor

from onebox.errors import WireError
from onebox.wire import TensorSpec, spec_of
from onebox.wire.protocol.groups import FormGroup
from onebox.wire.protocol.responses import Joined
from onebox.worker.accelerator import Accelerator
from onebox.worker.comm.agreement import collective_fingerprint
from onebox.worker.comm.api import Begun, Finish, RankLost, ReceivedTensor, RowRange, check_rows, parts_of
from onebox.worker.comm.carrier import FEW_RANKS, Carrier, Expected, Posted
from onebox.worker.comm.collectives import (
    MessageInfo,
    code_of,
    disagreement,
    flat_spec,
    joined,
    rank_sum,
    require_agreement,
    require_joint,
)
from onebox.worker.progress import WorkerProgress

SHARED_BYTES = 1 << 18
"""Bytes from which on ranks share the addition: less takes longer in two steps than in one."""

_LOOK_S = 0.1

_PARTS, _SUMS = -1 << 62, (-1 << 62) + 1
"""Channels of collectives: of the ranks' parts, and of the shares of sums."""

_Combine = Callable[[Sequence[Tensor], Sequence[TensorSpec], int | None], Tensor]
"""Makes the result of the ranks' parts, of which one may be overwritten."""


class CarriedGroup:
    """A group of workers.

    Args:
        form: The group, with this worker's rank.
        carriers: Of each other rank, the one that carries messages to it and from it; the group closes them.
        accelerator: Device of the tensors.
        progress: Marked during waits.
        near: The ranks that share memory with this one.
    """

    def __init__(
        self,
        form: FormGroup,
        carriers: Sequence[Carrier],
        accelerator: Accelerator,
        progress: WorkerProgress,
        near: Joined | None = None,
    ) -> None:
        self.rank = form.rank
        self.joined = near or Joined()
        self._size = form.size
        self._carriers = tuple(carriers)
        self._ways = {peer: carrier for carrier in carriers for peer in carrier.peers}
        self._others = [rank for rank in range(form.size) if rank != form.rank]
        self._accelerator = accelerator
        self._progress = progress
        self._order = 0
        self._left = False
        self._far = form.size > 2 and any(carrier.shares_sums for carrier in carriers)
        self._adder: _Adder | None = None

    def send(self, tensor: Tensor, peer: int, channel: int, within: RowRange | None = None) -> int:
        """Send a tensor, or the next part of one, to a rank with its present contents."""
        return self._way(peer).send(_resolved(tensor), peer, channel, within)

    def receive(self, spec: TensorSpec, peer: int, channel: int, rows: Sequence[int] = ()) -> Finish:
        """Begin to receive a tensor from a rank; it arrives whole, in whatever parts it is sent."""
        check_rows(spec, rows)

        def check(message: MessageInfo) -> None:
            if message.spec != spec:
                raise WireError(f"rank {peer} sent {message.spec} on channel {channel}, where {spec} was to come")

        return self._expect(peer, channel, check)

    def reduce(self, tensors: Sequence[Tensor]) -> Finish:
        """Begin to sum tensors of one type over the ranks, as one flat tensor."""
        self._require_member()
        specs = [spec_of(tensor) for tensor in tensors]
        spec, code = flat_spec(specs), code_of("a sum", collective_fingerprint(self._order, specs))
        if self._far and spec.size_bytes >= SHARED_BYTES:
            return self._reduce_shares(self._flat(tensors), range(self._size), code)
        if self._far and self._size > FEW_RANKS:
            return self._reduce_shares(self._flat(tensors), [0], code)
        return self._all_parts(tensors, spec, code, _sum)

    def collect(self, tensors: Sequence[Tensor], root: int) -> Begun:
        """Begin to sum tensors of one type for one rank, which receives those of the others."""
        self._check_root(root)
        specs = [spec_of(tensor) for tensor in tensors]
        spec, code = flat_spec(specs), code_of("a sum for one rank", collective_fingerprint(self._order, specs, root))
        if root != self.rank:
            self._order += 1
            return self._post(tensors, spec, [root], code)
        return self._await_parts(self._own(tensors), spec, code, _sum)

    def broadcast(self, specs: Sequence[TensorSpec], tensors: Sequence[Tensor], root: int) -> Begun:
        """Begin to broadcast tensors of one type from one rank, with a send to each of the others."""
        self._check_root(root)
        code, spec = code_of("a broadcast", collective_fingerprint(self._order, specs, root)), flat_spec(specs)
        order, self._order = self._order + 1, self._order + 1
        if root == self.rank:
            return self._post(tensors, spec, self._others, code)
        own = MessageInfo(code, spec)

        def check(message: MessageInfo) -> None:
            if (message.code, message.spec) != (code, spec):
                raise disagreement(order, self.rank, own, root, message)

        return self._expect(root, _PARTS, check)

    def gather(self, tensor: Tensor, spec: TensorSpec, dim: int, sizes: Sequence[int]) -> Finish:
        """Begin to gather the ranks' tensors along a dimension.

        Raises:
            WireError: The tensor is no such part; or later, another rank's call differs.
        """
        self._require_member()
        own = spec_of(tensor)
        parts = parts_of(own, spec, dim, sizes, self.rank)
        if len(parts) != self._size:
            raise WireError(f"{len(parts)} parts of a gather in a group of {self._size}")

        def join(found: Sequence[Tensor], specs: Sequence[TensorSpec], spare: int | None) -> Tensor:
            require_joint(specs, dim, spec)
            return joined(found, specs, dim)

        return self._all_parts([tensor], own, dim, join)

    def check(self) -> int:
        """Return 0: waits are those of the host."""
        return 0

    def attend(self) -> bool:
        """Ask the client what other threads need of it; return whether they may need more.

        Raises:
            RankLost: A rank cannot be reached.
        """
        more = False
        for carrier in self._carriers:
            more |= carrier.attend()
        return more

    def interrupt(self) -> None:
        """End all waits; callable from any thread."""
        for carrier in self._carriers:
            carrier.interrupt()

    def close(self) -> None:
        """Leave the group. What was sent can still be received; ranks that wait for more fail at once. Idempotent."""
        self._left = True
        with ExitStack() as closing:
            if self._adder is not None:
                closing.callback(self._adder.close)  # last, as its waits end with the carriers
            for carrier in reversed(self._carriers):
                closing.callback(carrier.close)

    def _require_member(self) -> None:
        if self._left:
            raise RankLost("the group has been left")

    def _way(self, peer: int) -> Carrier:
        self._require_member()
        carrier = self._ways.get(peer)
        if carrier is None:
            raise WireError(f"rank {peer} of a group of {self._size}; allowed are 0 to {self._size - 1}")
        return carrier

    def _check_root(self, root: int) -> None:
        self._require_member()
        if not 0 <= root < self._size:
            raise WireError(f"rank {root} of a group of {self._size}; allowed are 0 to {self._size - 1}")

    # ---- messages

    def _stage(self, tensor: Tensor) -> Tensor:
        return _resolved(self._accelerator.to_host(tensor))

    def _flat(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return a new tensor with tensors of one type, concatenated."""
        return torch.cat([self._stage(tensor).reshape(-1) for tensor in tensors])

    def _own(self, tensors: Sequence[Tensor]) -> Posted:
        """Return tensors as if they had been posted."""
        return Posted(self._flat(tensors), time.monotonic_ns())

    def _post(self, tensors: Sequence[Tensor], spec: TensorSpec, peers: Sequence[int], code: int) -> int:
        """Send tensors to some ranks; return when they have them."""
        staged = [self._stage(tensor) for tensor in tensors]
        return max([each.at_ns for each in self._posted(staged, spec, peers, code)], default=time.monotonic_ns())

    def _wait(self, expected: Expected) -> MessageInfo:
        with self._progress.wait():
            return expected.wait()

    def _expect(self, peer: int, channel: int, check: Callable[[MessageInfo], None]) -> Finish:
        """Expect the next message of a channel, which is checked on arrival."""
        expected = self._way(peer).expect(peer, channel)

        def finish() -> ReceivedTensor:
            try:
                message = self._wait(expected)
                check(message)
                made = expected.take()
            except BaseException:
                expected.give_back()
                raise
            return ReceivedTensor(made, message.at_ns)

        return finish

    # ---- collectives

    def _posted(
        self,
        tensors: Sequence[Tensor],
        spec: TensorSpec,
        peers: Sequence[int],
        code: int,
        channel: int = _PARTS,
        *,
        kept: bool = False,
    ) -> list[Posted]:
        """Send tensors of the host to some ranks, and return them as each carrier has them."""
        found = []
        for carrier in self._carriers:
            carried = [peer for peer in peers if self._ways[peer] is carrier]
            if carried:
                found.append(carrier.post(tensors, spec, carried, channel, code, kept=kept))
        return found

    def _all_parts(self, tensors: Sequence[Tensor], spec: TensorSpec, code: int, combine: _Combine) -> Finish:
        """Send a part to all ranks, and combine those of all."""
        staged = [self._stage(tensor) for tensor in tensors]
        posted = self._posted(staged, spec, self._others, code)
        return self._await_parts(posted[0] if posted else self._own(staged), spec, code, combine)

    def _await_parts(self, own: Posted, spec: TensorSpec, code: int, combine: _Combine) -> Finish:
        self._order += 1
        order, rank, mine = self._order, self.rank, MessageInfo(code, spec, own.at_ns)
        expected = {peer: self._ways[peer].expect(peer, _PARTS) for peer in self._others}

        def finish() -> ReceivedTensor:
            try:
                calls = [mine if each == rank else self._wait(expected[each]) for each in range(self._size)]
                require_agreement(order, rank, calls)
                parts = [own.part if each == rank else expected[each].part() for each in range(self._size)]
                made = combine(parts, [call.spec for call in calls], _spare(expected))
            finally:
                own.give_back()
                for each in expected.values():
                    each.give_back()
            return ReceivedTensor(self._accelerator.to_device(made), time.monotonic_ns())

        return finish

    def _reduce_shares(self, flat: Tensor, adders: Sequence[int], code: int) -> Finish:
        """Begin a sum of which some ranks add up a share each, in a thread: others wait for it, whatever such a rank
        does next."""
        self._order += 1
        order, shares = self._order, dict(zip(adders, _shares(flat, len(adders)), strict=True))
        for peer, share in shares.items():
            if peer != self.rank:
                self._posted([share], spec_of(share), [peer], code, kept=True)
        own = shares.get(self.rank)
        parts = {} if own is None else {peer: self._ways[peer].expect(peer, _PARTS) for peer in self._others}
        sums = {peer: self._ways[peer].expect(peer, _SUMS) for peer in adders if peer != self.rank}

        def add() -> Tensor:
            share = None if own is None else self._add_share(own, code, order, parts)
            made = torch.empty_like(flat)
            for peer, target in zip(adders, _shares(made, len(adders)), strict=True):
                if peer in sums:
                    self._take_share(target, code, order, peer, sums[peer])
                elif share is not None:
                    target.copy_(share)
            return made

        self._adder = self._adder or _Adder()
        future = self._adder.begin(add)

        def finish() -> ReceivedTensor:
            with self._progress.wait():
                made = self._result(future)
            return ReceivedTensor(self._accelerator.to_device(made), time.monotonic_ns())

        return finish

    def _add_share(self, mine: Tensor, code: int, order: int, parts: dict[int, Expected]) -> Tensor:
        """Return the sum of a share, which the other ranks get."""
        rank, own = self.rank, MessageInfo(code, spec_of(mine))
        calls = [own if each == rank else parts[each].wait(aside=True) for each in range(self._size)]
        require_agreement(order, rank, calls)
        share = rank_sum([mine if each == rank else parts[each].part() for each in range(self._size)], _spare(parts))
        for each in parts.values():
            each.give_back()
        self._posted([share], own.spec, self._others, code, _SUMS, kept=True)
        return share

    def _take_share(self, target: Tensor, code: int, order: int, peer: int, expected: Expected) -> None:
        """Put the sum of a share where it belongs."""
        due, call = MessageInfo(code, spec_of(target)), expected.wait(aside=True)
        if call[:2] != due[:2]:
            raise disagreement(order, self.rank, due, peer, call)
        target.copy_(expected.part())
        expected.give_back()

    def _result(self, future: Future[Tensor]) -> Tensor:
        while True:
            try:
                return future.result(_LOOK_S)
            except FutureTimeout:
                if future.done():
                    raise
                for carrier in self._carriers:
                    carrier.attend(waiting=True)


class _Adder:
    """A thread that does the work of sums, one after the other."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[tuple[Callable[[], Tensor], Future[Tensor]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="onebox-sums", daemon=True)
        self._thread.start()

    def begin(self, work: Callable[[], Tensor]) -> Future[Tensor]:
        """Begin a sum."""
        done: Future[Tensor] = Future()
        self._work.put((work, done))
        return done

    def close(self) -> None:
        """End when the work that was begun has ended, whose waits must have."""
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            work, done = item
            try:
                done.set_result(work())
            except Exception as error:
                done.set_exception(error)
            del item, work, done


def _resolved(tensor: Tensor) -> Tensor:
    """Return a tensor whose memory holds its elements, not those of which they are the conjugates or the negatives."""
    return tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor


def _sum(parts: Sequence[Tensor], specs: Sequence[TensorSpec], spare: int | None) -> Tensor:
    return rank_sum(parts, spare)


def _spare(expected: dict[int, Expected]) -> int | None:
    """Return which of the first two parts, if any, is this rank's own to overwrite."""
    return next((rank for rank in (0, 1) if rank in expected and expected[rank].lasting), None)


def _shares(flat: Tensor, size: int) -> Iterator[Tensor]:
    """Return so many shares of a flat tensor."""
    count = len(flat)
    for place in range(size):
        yield flat[count * place // size : count * (place + 1) // size]
