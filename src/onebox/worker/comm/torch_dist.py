"""Groups over torch.distributed, and those over Gloo: between hosts, and for mixed devices."""

from __future__ import annotations

import functools
import os
import queue
import select
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from math import prod
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from onebox.errors import WireError
from onebox.wire import DTYPES, TensorSpec, spec_of
from onebox.wire.protocol.groups import FormGroup
from onebox.wire.protocol.responses import Joined
from onebox.worker.accelerator import Accelerator
from onebox.worker.comm.agreement import (
    FINGERPRINT_ELEMENTS,
    check_fingerprints,
    collective_fingerprint,
    fingerprint_elements,
)
from onebox.worker.comm.api import Begun, Finish, RankLost, ReceivedTensor, RowRange, check_rows, parts_of
from onebox.worker.comm.gloo_forwarder import GlooForwarder
from onebox.worker.comm.link_meter import LinkMeter, LinkMeters
from onebox.worker.comm.tls_mesh import DuplexLink
from onebox.worker.progress import WorkerProgress
from onebox.worker.system.tcp_connections import ConnectionState, epoll_sets, listeners

CLOSE_S = 5.0
"""Longest wait of a leaving worker for its sends to be received, without any byte of them."""

_LOOK_S = 0.5
"""Interval at which a wait looks at the connections."""

_HEAD_BYTES = 16

_COLLECT, _BROADCAST = 1, 2  # fingerprints of collectives other than an all-reduce


class TorchDistGroup(ABC):
    """Collectives of a group without global state in ``torch.distributed``.

    Args:
        rank: This worker's rank.
        size: Number of ranks.
        group: The process group.
        accelerator: Device of the tensors.
        staged: Whether the process group takes tensors of the host.
        progress: Marked during waits.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        group: Any,
        *,
        accelerator: Accelerator,
        staged: bool,
        progress: WorkerProgress,
    ) -> None:
        self.rank = rank
        self._size = size
        self._group = group
        self._accelerator = accelerator
        self._staged = staged
        self._device = torch.device("cpu") if staged else accelerator.device
        self._progress = progress
        self._order = 0

    @property
    def joined(self) -> Joined:
        """Return that no memory is shared."""
        return Joined()

    def reduce(self, tensors: Sequence[Tensor]) -> Finish:
        """Begin to sum tensors of one type over the ranks, as one flat tensor."""
        specs = [spec_of(tensor) for tensor in tensors]
        fingerprint = self._fingerprint(specs)
        flat = self._flat(tensors, fingerprint)
        work = self._begin(lambda: self._group.allreduce([flat]), flat)
        return self._finish([work], self._checked(flat, specs, fingerprint, self._size))

    def collect(self, tensors: Sequence[Tensor], root: int) -> Begun:
        """Begin to sum tensors of one type for one rank."""
        self._check_root(root)
        specs = [spec_of(tensor) for tensor in tensors]
        fingerprint = self._fingerprint(specs, _COLLECT, root)
        flat = self._flat(tensors, fingerprint)
        options = dist.ReduceOptions()
        options.rootRank = root
        work = self._begin(lambda: self._group.reduce([flat], options), flat, sent=self.rank != root)
        if self.rank == root:
            return self._finish([work], self._checked(flat, specs, fingerprint, self._size))
        return time.monotonic_ns()

    def broadcast(self, specs: Sequence[TensorSpec], tensors: Sequence[Tensor], root: int) -> Begun:
        """Begin to broadcast tensors of one type from one rank."""
        self._check_root(root)
        fingerprint = self._fingerprint(specs, _BROADCAST, root)
        if self.rank == root:
            flat = self._flat(tensors, fingerprint)
        else:
            dtype = DTYPES[specs[0].dtype]
            count = sum(prod(spec.shape) for spec in specs) * (2 if dtype.is_complex else 1) + FINGERPRINT_ELEMENTS
            flat = torch.empty(count, dtype=dtype.to_real(), device=self._device)
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        work = self._begin(lambda: self._group.broadcast([flat], options), flat, sent=self.rank == root)
        if self.rank != root:
            return self._finish([work], self._checked(flat, specs, fingerprint, 1))
        return time.monotonic_ns()

    def _check_root(self, root: int) -> None:
        if not 0 <= root < self._size:
            raise WireError(f"rank {root} of a group of {self._size}; allowed are 0 to {self._size - 1}")

    def _fingerprint(self, specs: Sequence[TensorSpec], *more: int) -> tuple[int, int]:
        """Return the number of the next collective, and the fingerprint of this rank's call."""
        order, self._order = self._order, self._order + 1
        return order, collective_fingerprint(order, specs, *more)

    def _flat(self, tensors: Sequence[Tensor], fingerprint: tuple[int, int]) -> Tensor:
        """Return tensors as one real tensor, with the fingerprint appended."""
        parts = [as_real(tensor).reshape(-1) for tensor in tensors]
        fingerprint_part = fingerprint_elements(fingerprint[1], parts[0].dtype, self._size, self._device)
        return torch.cat([*map(self._stage, parts), fingerprint_part])

    def _stage(self, tensor: Tensor) -> Tensor:
        """Return a tensor where the backend takes it."""
        return self._accelerator.to_host(tensor) if self._staged else tensor

    def _checked(
        self, flat: Tensor, specs: Sequence[TensorSpec], fingerprint: tuple[int, int], times: int
    ) -> Callable[[], Tensor]:
        """Return a function that returns the received elements after checking the fingerprint; ``times`` is its
        multiplicity.
        """
        order, own = fingerprint
        kind = collective_fingerprint(times, specs)

        def made() -> Tensor:
            self._require(
                flat[-FINGERPRINT_ELEMENTS:],
                kind,
                lambda summed: check_fingerprints(summed, own, self._size, order, times=times),
            )
            elements = flat[:-FINGERPRINT_ELEMENTS]
            complex_made = elements.dtype is not DTYPES[specs[0].dtype]
            elements = self._accelerator.to_device(elements)
            return torch.view_as_complex(elements.view(-1, 2)) if complex_made else elements

        return made

    def _require(self, summed: Tensor, kind: int, check: Callable[[Tensor], None]) -> None:
        """Check the fingerprints of a collective.

        Args:
            summed: Their sum, or another tensor of as many bytes at most, where the backend has made it.
            kind: The same number for all collectives with the same types and sizes.
            check: Checks it in the host's memory.

        Raises:
            WireError: They differ.
        """
        check(summed)

    def gather(self, tensor: Tensor, spec: TensorSpec, dim: int, sizes: Sequence[int]) -> Finish:
        """Begin to gather the ranks' tensors along a dimension.

        Each rank sends as many bytes as the longest part has, behind the fingerprint of its call.

        Raises:
            WireError: The tensor is no such part; or later, another rank's call differs.
        """
        order, self._order = self._order, self._order + 1
        specs = parts_of(spec_of(tensor), spec, dim, sizes, self.rank)
        if len(specs) != self._size:
            raise WireError(f"{len(specs)} parts of a gather in a group of {self._size}")
        fingerprint = crc32(f"gather {order} {spec} {dim} {sizes}".encode())
        longest = max(part.size_bytes for part in specs)
        mine = torch.zeros(_HEAD_BYTES + longest, dtype=torch.uint8, device=self._device)
        mine[:_HEAD_BYTES].view(torch.int64).fill_(fingerprint)
        mine[_HEAD_BYTES : _HEAD_BYTES + tensor.nbytes] = self._stage(tensor).contiguous().view(-1).view(torch.uint8)
        parts = [torch.empty_like(mine) for _ in specs]
        work = self._begin(lambda: self._group.allgather([parts], [mine]), mine, *parts)

        def check(seen: Tensor) -> None:
            if (rank := int(seen[0])) >= 0:
                raise WireError(f"rank {rank} came for another gather than that of {spec} along dimension {dim}")

        def made() -> Tensor:
            others = torch.stack([part[:_HEAD_BYTES].view(torch.int64)[0] for part in parts]) != fingerprint
            first = torch.where(others.any(), others.to(torch.uint8).argmax(), -1).reshape(1)
            self._require(first, crc32(f"gather {spec} {dim} {sizes}".encode()), check)
            dtype, end = DTYPES[spec.dtype], _HEAD_BYTES
            dense = [
                part[end : end + of.size_bytes].view(dtype).view(of.shape)
                for part, of in zip(parts, specs, strict=True)
            ]
            return self._accelerator.to_device(torch.cat(dense, dim))

        return self._finish([work], made)

    def check(self) -> int:
        """Return 0: a wait for an operation is one of the host, which fails with it."""
        return 0

    @abstractmethod
    def _begin(self, call: Callable[[], Any], *tensors: Tensor, sent: bool = False) -> Any:
        """Begin an operation and return its work.

        Args:
            call: Begins it.
            tensors: Tensors that it uses until it is complete.
            sent: Whether nobody waits for it here.
        """

    def _await(self, work: Any) -> None:
        """Wait for an operation.

        Raises:
            RuntimeError: It has failed.
        """
        work.wait()

    def _finish(self, works: Sequence[Any], made: Callable[[], Tensor]) -> Finish:
        def finish() -> ReceivedTensor:
            with self._progress.wait():
                for work in works:
                    self._guard(functools.partial(self._await, work))
            return ReceivedTensor(made(), time.monotonic_ns())

        return finish

    def _guard(self, call: Callable[[], Any]) -> Any:
        if self._group is None:
            raise RankLost("the group has been left")
        try:
            return call()
        except RuntimeError as error:
            raise RankLost(str(error).splitlines()[0]) from error


class GlooGroup(TorchDistGroup):
    """A group over Gloo.

    Args:
        form: The group, with this worker's rank.
        store: Key-value store for the rendezvous.
        accelerator: Device of the tensors.
        progress: Marked during waits.
        address: IP address of this host to listen at while the group forms.
        links: Encrypted connections with the other ranks, closed with this group; ``None`` to connect without
            encryption.
        meters: The meters of this worker's connections.
        connections: Returns the state of the group's connections, once it has formed.
    """

    def __init__(
        self,
        form: FormGroup,
        store: dist.Store,
        accelerator: Accelerator,
        progress: WorkerProgress,
        address: str,
        links: Mapping[int, DuplexLink] | None = None,
        meters: LinkMeters | None = None,
        connections: Callable[[], ConnectionState] = lambda: ConnectionState(False, 0),
    ) -> None:
        self._store = store
        self._connections = connections
        self._given_up = False
        self._waiters: list[_Waiter] = []
        """Those that wait for nothing."""
        self._outgoing = _Outgoing()
        try:
            self._forwarder = None
            if links is not None:
                own: dict[int, LinkMeter] = {}
                if meters is not None:
                    own = {peer: meters.add(link.outgoing, form.group, peer) for peer, link in links.items()}
                self._forwarder = GlooForwarder(form.rank, links, store, own)
        except BaseException:
            self._outgoing.drain(CLOSE_S)
            raise
        try:
            group = self._connect(form, address)
        except BaseException:
            self._outgoing.drain(CLOSE_S)
            if self._forwarder is not None:
                self._forwarder.close()
            raise
        super().__init__(form.rank, form.size, group, accelerator=accelerator, staged=True, progress=progress)

    def _connect(self, form: FormGroup, address: str) -> Any:
        """Return the process group; nothing listens for it any more."""
        forwarder = self._forwarder
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        device, listener = _listening_device(address if forwarder is None else forwarder.address)
        options._devices = [device]
        options._timeout = timedelta(seconds=form.timeout_s)
        options._threads = 1
        store = self._store if forwarder is None else forwarder.store
        group = dist.ProcessGroupGloo(store, form.rank, form.size, options)
        _stop_listening(listener)
        if forwarder is not None:
            forwarder.formed()
        return group

    def send(self, tensor: Tensor, peer: int, channel: int, within: RowRange | None = None) -> int:
        """Begin to send a tensor to a rank with its present contents: eager operators may overwrite it before it is
        sent.

        A chunk is sent like any tensor; the reader knows the chunks.
        """
        dense = self._stage(tensor).contiguous()
        if dense.data_ptr() == tensor.data_ptr():
            dense = dense.clone()
        self._begin(lambda: self._group.send([as_real(dense)], peer, channel), dense, sent=True)
        return time.monotonic_ns()

    def receive(self, spec: TensorSpec, peer: int, channel: int, rows: Sequence[int] = ()) -> Finish:
        """Begin to receive a tensor from a rank; its chunks are written to their places.

        Raises:
            WireError: The chunks do not form the whole.
        """
        check_rows(spec, rows)
        tensor = torch.empty(spec.shape, dtype=DTYPES[spec.dtype], device=self._device)
        parts = tensor.split(list(rows)) if rows else [tensor]
        works = [
            self._begin(functools.partial(self._group.recv, [as_real(part)], peer, channel), part) for part in parts
        ]
        return self._finish(works, lambda: self._accelerator.to_device(tensor))

    def interrupt(self) -> None:
        """Note that the group is given up: waits end when its sockets are shut down
        (:mod:`onebox.worker.system.tcp_connections`), and nothing more comes or goes."""
        self._given_up = True

    def close(self) -> None:
        """Leave the group when sends have been received, or after a timeout; waiting peers then fail at once."""
        if self._group is None:
            return
        with self._progress.wait():
            while_moving(self._outgoing.drain, self._connections, given_up=lambda: self._given_up)
        if hasattr(self._group, "abort"):
            self._group.abort()
        self._outgoing.close()
        self._group = None
        for waiter in self._waiters:
            waiter.close()
        if self._forwarder is not None:
            with self._progress.wait():
                if not self._given_up and while_moving(self._forwarder.drain, self._connections):
                    # a link that carries nothing for a moment may be dead; the kernel goes on sending in any case
                    while_moving(self._forwarder.acknowledged, self._connections, within_s=_LOOK_S)
                self._forwarder.close()

    def _await(self, work: Any) -> None:
        """Wait for an operation, in a thread that is left behind where the wait cannot end: Gloo never gives up a
        tensor of which a part had come when its connection ended.

        Raises:
            RuntimeError: It has failed; or a connection of the group has ended, and nothing comes over the others.
        """
        waiter = self._waiters.pop() if self._waiters else _Waiter()
        waiter.begin(work)
        if not while_moving(waiter.end, self._connections, even_if_open=True, given_up=lambda: self._given_up):
            _left_behind.append(self._group)
            waiter.close()
            raise RuntimeError("a connection of the group ended, and with it the rest of what was to come")
        if self._group is None:  # the group was left meanwhile
            waiter.close()
        else:
            self._waiters.append(waiter)
        waiter.raise_failure()

    def _begin(self, call: Callable[[], Any], *tensors: Tensor, sent: bool = False) -> Any:
        """Begin an operation on a tensor and return its work."""
        work = self._guard(call)
        if sent:
            self._outgoing.add(work, tensors)
        return work


_left_behind: list[Any] = []
"""Groups in which a thread waits that nothing ends: their destructors would wait for it."""


def while_moving(
    end: Callable[[float], bool],
    connections: Callable[[], ConnectionState],
    *,
    within_s: float = CLOSE_S,
    even_if_open: bool = False,
    given_up: Callable[[], bool] = lambda: False,
) -> bool:
    """Wait for an end as long as bytes move over connections; return whether it has come.

    Args:
        end: Waits so many seconds for the end, and returns whether it has come.
        connections: Returns the state of the connections.
        within_s: Longest wait without any byte.
        even_if_open: Whether to wait without a bound as long as no connection has ended.
        given_up: Returns whether the connections are given up, so that nothing more moves.
    """
    state, since_s = connections(), time.monotonic()
    while not end(_LOOK_S):
        if given_up():
            return end(_LOOK_S)
        before, state = state, connections()
        if state != before or (even_if_open and not state.ended):
            since_s = time.monotonic()
        elif time.monotonic() - since_s >= within_s:
            return False
    return True


class _Waiter:
    """A thread that waits for operations, one at a time."""

    def __init__(self) -> None:
        self._begun: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[RuntimeError | None] = queue.SimpleQueue()
        self._failure: RuntimeError | None = None
        threading.Thread(target=self._run, name="onebox-received", daemon=True).start()

    def begin(self, work: Any) -> None:
        """Begin to wait for an operation."""
        self._begun.put(work)

    def end(self, timeout_s: float) -> bool:
        """Return whether the operation has ended, waiting for it for a while."""
        try:
            self._failure = self._ended.get(timeout=timeout_s)
        except queue.Empty:
            return False
        return True

    def raise_failure(self) -> None:
        """Raise the failure of the operation that has ended, if it has failed."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Let the thread end, after its operation."""
        self._begun.put(None)

    def _run(self) -> None:
        while (work := self._begun.get()) is not None:
            failure = None
            try:
                work.wait()
            except RuntimeError as error:
                failure = error
            del work
            self._ended.put(failure)


_creating = threading.Lock()
"""Held while a device of Gloo is created, so that its listener is the one that is new."""

_TICK_S = 0.03
"""Longer than a turn of Gloo's loop, which waits for events for 10 ms at a time."""


def _listening_device(address: str) -> tuple[Any, int]:
    """Create a device of Gloo at an IP address; return it and the descriptor of its listener."""
    with _creating:
        before = listeners(address)
        device = dist.ProcessGroupGloo.create_device(hostname=address)
        new = [descriptor for name, descriptor in listeners(address).items() if name not in before]
    watched = set[int]().union(*epoll_sets().values())
    (listener,) = watched.intersection(new)
    return device, listener


def _stop_listening(listener: int) -> None:
    """Close the listener of a device whose group has formed.

    Gloo itself does so only when the group ends, and keeps what anybody connects until then. It has to find a
    descriptor to remove from its loop then; and its loop ends the process when it cannot accept a connection, so that
    the listener leaves the loop before it is closed.
    """
    for loop, watched in epoll_sets().items():
        if listener not in watched:
            continue
        with select.epoll.fromfd(os.dup(loop)) as events:
            events.unregister(listener)
            time.sleep(_TICK_S)
            nothing = os.eventfd(0)
            os.dup2(nothing, listener, inheritable=False)
            os.close(nothing)
            events.register(listener, 0)


class _Outgoing:
    """Tensors that are being sent, each kept until completion.

    Completion of a Gloo send is only visible to a wait, and a wait with a timeout closes the group when it expires; so
    a thread waits for sends, in order.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Any, Sequence[Tensor]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._wait, name="onebox-sent", daemon=True)
        self._thread.start()

    def add(self, work: Any, tensors: Sequence[Tensor]) -> None:
        """Keep tensors until they have been sent."""
        self._queue.put((work, tensors))

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything is sent, with a timeout; return whether it is. Nothing is added from then on."""
        self._queue.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Release everything, after pending sends have been aborted."""
        self._thread.join(CLOSE_S)

    def _wait(self) -> None:
        while (item := self._queue.get()) is not None:
            with suppress(RuntimeError):
                item[0].wait()
            del item


def as_real(tensor: Tensor) -> Tensor:
    """Return a complex tensor as a real one for libraries without complex numbers: real and imaginary parts side by
    side.
    """
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
