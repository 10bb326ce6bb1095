"""What a worker exchanges with other workers: sent, received, summed, gathered."""

from __future__ import annotations

from collections.abc import Callable

import torch

from onebox.wire import TensorSpec
from onebox.wire.messages import Gather, Receive, Reduce, Send
from onebox.worker.groups import Bucket
from onebox.worker.membership import Memberships
from onebox.worker.peers import Finish
from onebox.worker.store import BufferStore
from onebox.worker.trace import Trace

Resolve = Callable[[int], int]
"""From a reference to a buffer's number."""


class Traffic:
    """Carries out ``Send``, ``Receive``, ``Reduce`` and ``Gather``.

    Args:
        store: The buffers.
        groups: The groups that this worker is in.
    """

    def __init__(self, store: BufferStore, groups: Memberships) -> None:
        self._store = store
        self._groups = groups

    def run(self, what: Send | Receive | Reduce | Gather, resolve: Resolve, trace: Trace) -> None:
        """Begin an exchange; who reads what comes of it waits for that.

        Args:
            what: Which.
            resolve: Finds the numbers of its buffers.
            trace: Told when it begins, and when its end is known.

        Raises:
            Poisoned: What it would hand on is void.
            PeerLost: This worker is not in the group any more.
            QuotaExceeded: There is no room for what it would bring.
        """
        match what:
            case Send():
                tensor = self._store.get(resolve(what.buffer))
                trace.ready()
                trace.until(self._groups.get(what.group).send(tensor, what.peer, what.channel))
            case Receive():
                finish = self._groups.get(what.group).receive(what.spec, what.peer, what.channel)
                self._promise(resolve(what.buffer), what.spec, finish, trace)
            case Reduce():
                self._reduce(what, resolve, trace)
            case Gather():
                tensor = self._store.get(resolve(what.buffer))
                trace.ready()
                finish = self._groups.get(what.group).gather(tensor, what.spec, what.dim)
                self._promise(resolve(what.into), what.spec, finish, trace)

    def _reduce(self, reduce: Reduce, resolve: Resolve, trace: Trace) -> None:
        numbers = [resolve(reference) for reference in reduce.buffers]
        tensors = [self._store.get(number) for number in numbers]
        trace.ready()
        shapes = [tensor.shape for tensor in tensors]
        size_bytes = sum(tensor.nbytes for tensor in tensors)
        finish = self._groups.get(reduce.group).reduce(tensors)
        del tensors
        self._store.promise(numbers, Bucket(numbers, shapes, size_bytes, finish, trace.later()))

    def _promise(self, number: int, spec: TensorSpec, finish: Finish, trace: Trace) -> None:
        """Let a buffer be filled when somebody asks for it."""
        shape = torch.Size(spec.shape)
        self._store.promise([number], Bucket([number], [shape], spec.size_bytes, finish, trace.later()))
