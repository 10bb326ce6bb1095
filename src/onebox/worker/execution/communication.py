"""Collective executor: exchanges between workers: sends, receives, reductions, gathers, broadcasts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from torch import Tensor

from onebox.errors import WireError
from onebox.wire import TensorSpec, spec_of
from onebox.wire.protocol.instructions import Broadcast, Gather, Receive, Reduce, Send
from onebox.worker.comm.api import Finish, RankLost, RowRange
from onebox.worker.comm.manager import GroupManager
from onebox.worker.memory.buffers import BufferStore
from onebox.worker.progress import Moment, Trace

Resolve = Callable[[int], int]
"""Maps a reference to a buffer's number."""

Communication = Send | Receive | Reduce | Gather | Broadcast
"""Instructions that it executes."""


class CollectiveExecutor:
    """Executes ``Send``, ``Receive``, ``Reduce``, ``Gather`` and ``Broadcast``.

    Args:
        store: The buffers.
        groups: The groups of this worker.
        before_update: Called before existing buffers are overwritten, so that pending reads are completed or copied
            first.
    """

    def __init__(self, store: BufferStore, groups: GroupManager, before_update: Callable[[], None]) -> None:
        self._store = store
        self._groups = groups
        self._before_update = before_update

    def run(self, what: Communication, resolve: Resolve, trace: Trace) -> None:
        """Begin an exchange; readers of its result wait for it.

        Args:
            what: The instruction.
            resolve: Maps references to buffers.
            trace: Notified of its start, and of its end once known.

        Raises:
            Poisoned: An input is void.
            RankLost: This worker is no longer in the group.
            QuotaExceeded: There is no room for its result.
        """
        match what:
            case Send():
                tensor = self._store.get(resolve(what.buffer))
                trace.ready()
                within = None if what.whole is None else RowRange(what.whole, what.first)
                trace.until(self._groups.get(what.group).send(tensor, what.peer, what.channel, within))
            case Receive():
                self._store.reserve(what.spec.size_bytes)  # nothing begins without room for its result
                finish = self._groups.get(what.group).receive(what.spec, what.peer, what.channel, what.rows)
                self._promise(resolve(what.buffer), what.spec, finish, trace)
            case Reduce():
                self._reduce(what, resolve, trace)
            case Broadcast():
                self._broadcast(what, resolve, trace)
            case Gather():
                tensor = self._store.get(resolve(what.buffer))
                trace.ready()
                self._store.reserve(what.spec.size_bytes)
                finish = self._groups.get(what.group).gather(tensor, what.spec, what.dim, what.sizes)
                self._promise(resolve(what.into), what.spec, finish, trace)

    def _reduce(self, reduce: Reduce, resolve: Resolve, trace: Trace) -> None:
        numbers = [resolve(reference) for reference in reduce.buffers]
        tensors = [self._store.get(number) for number in numbers]
        trace.ready()
        shapes = [tensor.shape for tensor in tensors]
        size_bytes = sum(tensor.nbytes for tensor in tensors)
        group = self._groups.get(reduce.group)
        if reduce.root in (-1, group.rank):
            self._store.reserve(size_bytes)
        begun = group.reduce(tensors) if reduce.root < 0 else group.collect(tensors, reduce.root)
        del tensors
        if isinstance(begun, int):
            trace.until(begun)
            for number in numbers:
                self._store.forget(number)
        else:
            self._store.promise(numbers, PendingBucket(numbers, shapes, size_bytes, begun, trace.later()))

    def _broadcast(self, broadcast: Broadcast, resolve: Resolve, trace: Trace) -> None:
        numbers = [resolve(reference) for reference in broadcast.buffers]
        group = self._groups.get(broadcast.group)
        mine = group.rank == broadcast.root
        there = [self._store.get(number) for number in numbers] if mine or not broadcast.specs else []
        trace.ready()
        specs = broadcast.specs or tuple(spec_of(tensor) for tensor in there)
        if len(specs) != len(numbers):
            raise WireError(f"{len(specs)} specifications for the {len(numbers)} buffers of a broadcast")
        begun = group.broadcast(specs, there if mine else (), broadcast.root)
        if isinstance(begun, int):
            trace.until(begun)
            return
        if there:
            self._before_update()
        shapes, size_bytes = [spec.shape for spec in specs], sum(spec.size_bytes for spec in specs)
        self._store.promise(numbers, PendingBucket(numbers, shapes, size_bytes, begun, trace.later(), there))

    def _promise(self, number: int, spec: TensorSpec, finish: Finish, trace: Trace) -> None:
        """Register a buffer that is filled at its first use."""
        self._store.promise([number], PendingBucket([number], [spec.shape], spec.size_bytes, finish, trace.later()))


class PendingBucket:
    """Buffers that are being received as one flat tensor; implements
    :class:`~onebox.worker.memory.buffers.PendingBuffers`.

    Args:
        numbers: Their numbers.
        shapes: Their shapes.
        size_bytes: Total bytes.
        finish: Waits for all elements.
        done: Called once when they are present, with the time since which they are known to be.
        into: Destination tensors of these shapes; empty for new ones.
    """

    def __init__(
        self,
        numbers: Sequence[int],
        shapes: Sequence[tuple[int, ...]],
        size_bytes: int,
        finish: Finish,
        done: Callable[[Moment], None],
        into: Sequence[Tensor] = (),
    ) -> None:
        self.size_bytes = size_bytes
        self._into = into
        self._numbers = numbers
        self._shapes = shapes
        self._finish: Finish | None = finish
        self._done = done
        self._failure = ""

    def wait(self) -> dict[int, Tensor]:
        """Wait for the elements and return each buffer's part of them.

        Raises:
            RankLost: They will not arrive; repeated calls raise the same error.
            WireError: Another rank sent something else.
        """
        if self._finish is None:
            raise RankLost(f"what was waited for before did not come: {self._failure}")
        finish, self._finish = self._finish, None
        try:
            flat, at_ns = finish()
        except Exception as error:
            self._failure = str(error)
            raise
        self._done(at_ns)
        made = _parts(flat, self._shapes)
        if self._into:
            made = [own.copy_(part) for own, part in zip(self._into, made, strict=True)]
        return dict(zip(self._numbers, made, strict=True))

    def end(self) -> None:
        """Do nothing: later data is ignored."""


def _parts(flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Return views of a flat tensor; the tensor itself if it is a single part of its shape, as in most messages."""
    if len(shapes) == 1 and flat.shape == shapes[0]:
        return [flat]
    parts = flat.reshape(-1).split([prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
