"""Groups of workers over TCP: between hosts, and for mixed devices.

A small sum takes one step: each rank sends its tensors to all others, and adds all up. Of a larger one among three
ranks or more, each rank adds up the share that is its own, and sends the result to the others: so each byte goes twice,
however many ranks there are. Both add in the order of the ranks, so that the bits are the same.
"""

from __future__ import annotations

import functools
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout

import torch
from torch import Tensor

from onebox.errors import WireError
from onebox.wire import TensorSpec, spec_of
from onebox.wire.protocol.groups import FormGroup
from onebox.wire.protocol.responses import Joined
from onebox.worker.accelerator import Accelerator
from onebox.worker.comm.agreement import collective_fingerprint
from onebox.worker.comm.api import (
    Begun,
    Finish,
    MembershipStore,
    RankLost,
    ReceivedTensor,
    RowRange,
    check_rows,
    parts_of,
)
from onebox.worker.comm.collectives import (
    code_of,
    disagreement,
    flat_spec,
    joined,
    rank_sum,
    require_agreement,
    require_joint,
)
from onebox.worker.comm.tcp.link import Expected, Link
from onebox.worker.comm.tcp.mesh import GroupNetwork, Mesh, RelayTo
from onebox.worker.comm.tcp.messages import Header, Message
from onebox.worker.comm.tcp.stream import StreamWriter
from onebox.worker.progress import WorkerProgress

EAGER_RANKS = 8
"""Ranks up to which all connect to all when a group is formed, so that a firewall is told of before work begins; in a
larger group two connect when they first exchange something."""

CLOSE_S = 5.0
"""Longest wait of a leaving worker for its sends to be received, without any byte of them."""

SHARED_BYTES = 1 << 18
"""Bytes from which on ranks share the addition: less takes longer in two steps than in one."""

_MOVES_S = 0.002
_LOOK_S = 0.1

_PARTS, _SUMS = -1 << 62, (-1 << 62) + 1
"""Channels of collectives: of the ranks' parts, and of the shares of sums."""


class TcpGroup:
    """A group over TCP.

    Args:
        form: The group, with this worker's rank.
        store: Key-value store for the rendezvous.
        accelerator: Device of the tensors.
        progress: Marked during waits.
        address: IP address of this host to listen at.
        encrypted: Whether connections are encrypted.
        advertised: The IP address that leads the others there; ``address`` by default.
        network: Where others find this worker, and the meters of its connections.
        relay: Asks the client to relay to peers that cannot be connected to; ``None`` to do without.

    Raises:
        RankLost: A rank did not come, or cannot be reached.
        WireError: What a rank says of itself is not understood.
    """

    def __init__(
        self,
        form: FormGroup,
        store: MembershipStore,
        accelerator: Accelerator,
        progress: WorkerProgress,
        address: str,
        *,
        encrypted: bool,
        advertised: str = "",
        network: GroupNetwork | None = None,
        relay: RelayTo | None = None,
    ) -> None:
        self._form = form
        self._accelerator = accelerator
        self._progress = progress
        self._network = network or GroupNetwork()
        self._order = 0
        self._left = self._given_up = False
        self._adder: _Adder | None = None
        others = [rank for rank in range(form.size) if rank != form.rank]
        self._links = {rank: Link(rank, functools.partial(self._connect, rank)) for rank in others}
        self._mesh = Mesh(
            form.rank,
            form.size,
            address,
            store,
            encrypted=encrypted,
            came=lambda rank, connections: self._links[rank].came(connections),
            advertised=advertised,
            network=self._network,
            relay=relay,
        )
        if form.size > EAGER_RANKS:
            return
        try:
            self._connect_all(store)
        except BaseException:
            self._end()
            raise

    @property
    def rank(self) -> int:
        """This worker's rank."""
        return self._form.rank

    @property
    def joined(self) -> Joined:
        """Return that no memory is shared."""
        return Joined()

    def send(self, tensor: Tensor, peer: int, channel: int, within: RowRange | None = None) -> int:
        """Begin to send a tensor to a rank with its present contents: eager operators may overwrite it before it is
        sent.
        """
        dense = self._stage(tensor).contiguous()
        if dense.data_ptr() == tensor.data_ptr():
            dense = dense.clone()
        whole, start = spec_of(dense), 0
        if within is not None:
            whole, start = self._part(whole, within)
        self._post(peer, Header(channel, 0, start, dense.nbytes, whole), dense)
        return time.monotonic_ns()

    def receive(self, spec: TensorSpec, peer: int, channel: int, rows: Sequence[int] = ()) -> Finish:
        """Begin to receive a tensor from a rank; it arrives whole, in whatever parts it is sent."""
        check_rows(spec, rows)

        def check(message: Message) -> None:
            if message.spec != spec:
                raise WireError(f"rank {peer} sent {message.spec} on channel {channel}, where {spec} was to come")

        return self._finish(self._link(peer).expect(channel), check)

    def reduce(self, tensors: Sequence[Tensor]) -> Finish:
        """Begin to sum tensors of one type over the ranks, as one flat tensor."""
        specs = [spec_of(tensor) for tensor in tensors]
        code, order = code_of("a sum", collective_fingerprint(self._order, specs)), self._next()
        flat = self._flat(tensors)
        if self._form.size > 2 and flat.nbytes >= SHARED_BYTES:
            return self._reduce_shares(flat, code, order)
        return self._all_parts(flat, code, order, self._sum)

    def collect(self, tensors: Sequence[Tensor], root: int) -> Begun:
        """Begin to sum tensors of one type for one rank."""
        self._check_root(root)
        specs = [spec_of(tensor) for tensor in tensors]
        code = code_of("a sum for one rank", collective_fingerprint(self._order, specs, root))
        order, flat = self._next(), self._flat(tensors)
        if root != self.rank:
            self._post_flat(root, _PARTS, code, flat)
            return time.monotonic_ns()
        return self._await_parts(flat, code, order, self._sum)

    def broadcast(self, specs: Sequence[TensorSpec], tensors: Sequence[Tensor], root: int) -> Begun:
        """Begin to broadcast tensors of one type from one rank."""
        self._check_root(root)
        code, spec = code_of("a broadcast", collective_fingerprint(self._order, specs, root)), flat_spec(specs)
        order = self._next()
        if root == self.rank:
            flat = self._flat(tensors)
            for peer in self._links:
                self._post_flat(peer, _PARTS, code, flat)
            return time.monotonic_ns()
        own = Message(code, spec, torch.empty(0))

        def check(message: Message) -> None:
            if (message.code, message.spec) != (code, spec):
                raise disagreement(order, self.rank, own, root, message)

        return self._finish(self._link(root).expect(_PARTS), check)

    def gather(self, tensor: Tensor, spec: TensorSpec, dim: int, sizes: Sequence[int]) -> Finish:
        """Begin to gather the ranks' tensors along a dimension.

        Raises:
            WireError: The tensor is no such part; or later, another rank's call differs.
        """
        specs = parts_of(spec_of(tensor), spec, dim, sizes, self.rank)
        if len(specs) != self._form.size:
            raise WireError(f"{len(specs)} parts of a gather in a group of {self._form.size}")
        dense = self._stage(tensor).contiguous()
        if dense.data_ptr() == tensor.data_ptr():
            dense = dense.clone()

        def made(parts: Sequence[Tensor], found: Sequence[TensorSpec]) -> Tensor:
            require_joint(found, dim, spec)
            return joined(parts, found, dim)

        return self._all_parts(dense, dim, self._next(), made)

    def check(self) -> int:
        """Return 0: waits are those of the host."""
        return 0

    def attend(self) -> bool:
        """Ask the client what connections that are being made need; return whether there are any.

        Raises:
            RankLost: One could not be made.
        """
        if self._left or self._mesh.ended:
            return False
        for link in self._links.values():
            if link.unreachable:
                raise RankLost(link.unreachable)
        self._mesh.attend()
        return any(link.connecting for link in self._links.values())

    def interrupt(self) -> None:
        """End all waits; callable from any thread."""
        self._given_up = True
        self._mesh.end("the group is given up")
        for rank, link in self._links.items():
            link.shut(f"rank {rank} is waited for no longer: the group is given up")

    def close(self) -> None:
        """Leave the group when what was sent has been received, or nothing moves any more; waiting peers then fail at
        once. Idempotent."""
        if self._left:
            return
        self._left = True
        links = self._links.values()
        for link in links:
            link.leave()
        try:
            with self._progress.wait():
                moved, since_s = -1, time.monotonic()
                while not self._given_up and not all(link.sent for link in links):
                    self._mesh.attend()
                    now = sum(link.moved_bytes for link in links)
                    if now != moved:
                        moved, since_s = now, time.monotonic()
                    elif time.monotonic() > since_s + CLOSE_S:
                        break
                    time.sleep(_MOVES_S)
        finally:
            self._end()

    def _end(self) -> None:
        self._mesh.close()
        for link in self._links.values():
            link.close()
        if self._adder is not None:
            self._adder.close()

    # ---- connections

    def _connect(self, rank: int) -> StreamWriter:
        connections = self._mesh.connect(rank)
        return StreamWriter(connections, self._network.meters.add(connections, self._form.group, rank))

    def _connect_all(self, store: MembershipStore) -> None:
        """Connect to all ranks, and wait for all; all learn of the first failure.

        Raises:
            RankLost: A rank cannot connect to another one.
        """
        said = ""
        for link in self._links.values():
            link.begin()
        while not said and not all(link.connected[0] for link in self._links.values()):
            time.sleep(_MOVES_S)
            self._mesh.attend(missing=True)
            said = next((link.unreachable for link in self._links.values() if link.unreachable), "")
        store.set(f"said/{self.rank}", said)
        told = [text.decode() for text in store.multi_get([f"said/{rank}" for rank in self._links])]
        if first := next(filter(None, (said, *told)), ""):
            raise RankLost(first)
        while not all(link.connected[1] for link in self._links.values()):  # their last words are on the way
            time.sleep(_MOVES_S)
            self._mesh.attend(missing=True)
        self._mesh.stop_listening()

    def _link(self, peer: int) -> Link:
        if self._left:
            raise RankLost("the group has been left")
        link = self._links.get(peer)
        if link is None:
            raise WireError(f"rank {peer} of a group of {self._form.size}; allowed are 0 to {self._form.size - 1}")
        return link

    def _check_root(self, root: int) -> None:
        if not 0 <= root < self._form.size:
            raise WireError(f"rank {root} of a group of {self._form.size}; allowed are 0 to {self._form.size - 1}")

    # ---- messages

    def _part(self, spec: TensorSpec, within: RowRange) -> tuple[TensorSpec, int]:
        """Return the spec of the whole of a part, and the part's first byte there.

        Raises:
            WireError: It is no part of it.
        """
        whole, first = within
        rows = spec.shape[0] if spec.shape else 0
        fits = rows > 0 and spec == TensorSpec(whole.dtype, (rows, *whole.shape[1:]))
        if not fits or not 0 <= first <= whole.shape[0] - rows:
            raise WireError(f"{spec} is sent as the part of {whole} from row {first} on")
        return whole, first * (spec.size_bytes // rows)

    def _stage(self, tensor: Tensor) -> Tensor:
        return self._accelerator.to_host(tensor).resolve_conj().resolve_neg()

    def _flat(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return a new tensor with tensors of one type, concatenated."""
        if self._left:
            raise RankLost("the group has been left")
        return torch.cat([self._stage(tensor).reshape(-1) for tensor in tensors])

    def _next(self) -> int:
        """Return the number of the next collective, from 1."""
        self._order += 1
        return self._order

    def _post(self, peer: int, header: Header, dense: Tensor) -> None:
        self._link(peer).post(header, _bytes_of(dense), dense)

    def _post_flat(self, peer: int, channel: int, code: int, dense: Tensor) -> None:
        self._post(peer, Header(channel, code, 0, dense.nbytes, spec_of(dense)), dense)

    def _wait(self, expected: Expected) -> Message:
        with self._progress.wait():
            return expected.wait(self._form.timeout_s, self._mesh.attend)

    def _finish(self, expected: Expected, check: Callable[[Message], None]) -> Finish:
        def finish() -> ReceivedTensor:
            message = self._wait(expected)
            check(message)
            return ReceivedTensor(self._accelerator.to_device(message.tensor), time.monotonic_ns())

        return finish

    # ---- collectives

    def _all_parts(
        self,
        mine: Tensor,
        code: int,
        order: int,
        combine: Callable[[Sequence[Tensor], Sequence[TensorSpec]], Tensor],
    ) -> Finish:
        """Send a part to all ranks, and combine those of all."""
        for peer in self._links:
            self._post_flat(peer, _PARTS, code, mine)
        return self._await_parts(mine, code, order, combine)

    def _await_parts(
        self,
        mine: Tensor,
        code: int,
        order: int,
        combine: Callable[[Sequence[Tensor], Sequence[TensorSpec]], Tensor],
    ) -> Finish:
        own = Message(code, spec_of(mine), mine)
        expected = {peer: self._link(peer).expect(_PARTS) for peer in self._links}

        def finish() -> ReceivedTensor:
            messages = [own if rank == self.rank else self._wait(expected[rank]) for rank in range(self._form.size)]
            require_agreement(order, self.rank, messages)
            made = combine([message.tensor for message in messages], [message.spec for message in messages])
            return ReceivedTensor(self._accelerator.to_device(made), time.monotonic_ns())

        return finish

    def _sum(self, parts: Sequence[Tensor], specs: object = None) -> Tensor:
        """Return the sum of parts, of which all but that of this rank are its own to overwrite."""
        return rank_sum(parts, int(self.rank == 0))

    def _reduce_shares(self, flat: Tensor, code: int, order: int) -> Finish:
        """Begin a sum of which each rank adds up its share, in a thread: others wait for it, whatever this rank does
        next."""
        shares = list(_shares(flat, self._form.size))
        for peer in self._links:
            self._post_flat(peer, _PARTS, code, shares[peer])
        parts = {peer: self._link(peer).expect(_PARTS) for peer in self._links}
        sums = {peer: self._link(peer).expect(_SUMS) for peer in self._links}
        self._adder = self._adder or _Adder()
        future = self._adder.begin(lambda: self._add_share(flat, shares, code, order, parts, sums))

        def finish() -> ReceivedTensor:
            with self._progress.wait():
                made = self._result(future)
            return ReceivedTensor(self._accelerator.to_device(made), time.monotonic_ns())

        return finish

    def _add_share(
        self,
        flat: Tensor,
        shares: Sequence[Tensor],
        code: int,
        order: int,
        parts: dict[int, Expected],
        sums: dict[int, Expected],
    ) -> Tensor:
        rank, within_s = self.rank, self._form.timeout_s
        own = Message(code, spec_of(shares[rank]), shares[rank])
        messages = [own if peer == rank else parts[peer].wait(within_s, _nothing) for peer in range(self._form.size)]
        require_agreement(order, rank, messages)
        share = self._sum([message.tensor for message in messages])
        del messages
        for peer in self._links:
            self._post_flat(peer, _SUMS, code, share)
        made = torch.empty_like(flat)
        for peer, target in enumerate(_shares(made, self._form.size)):
            target.copy_(share if peer == rank else sums[peer].wait(within_s, _nothing).tensor.view(target.shape))
        return made

    def _result(self, future: Future[Tensor]) -> Tensor:
        while True:
            try:
                return future.result(_LOOK_S)
            except FutureTimeout:
                if future.done():
                    raise
                self._mesh.attend(missing=not all(link.connected[1] for link in self._links.values()))


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


def _shares(flat: Tensor, size: int) -> Iterator[Tensor]:
    """Return each rank's share of a flat tensor."""
    count = len(flat)
    for rank in range(size):
        yield flat[count * rank // size : count * (rank + 1) // size]


def _bytes_of(dense: Tensor) -> memoryview:
    if not dense.nbytes:
        return memoryview(b"")
    return dense.reshape(-1).view(torch.uint8).numpy().data


def _nothing(*, missing: bool) -> None:
    """Do nothing: the thread that owns the channel attends."""


__all__ = ["CLOSE_S", "EAGER_RANKS", "SHARED_BYTES", "TcpGroup"]
