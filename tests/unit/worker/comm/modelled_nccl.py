"""NCCL as ``torch.distributed.ProcessGroupNCCL`` shows it, for ranks that are threads and tensors in host memory.

Its rules, not its speed: see :mod:`onebox.worker.comm.nccl`. The operations of a communicator run in the order in which
its rank has called them, and one only when those of the other ranks that belong to it are the next ones there; tags are
ignored; point-to-point operations use a communicator of the pair, made at first use by both at once, unless the process
group has been connected before; a wait returns without an error when the communicator is aborted; a thread of each
process group looks into its store; a GPU may be in a communicator once.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_HEARTBEAT_S = 0.05


class Deadlock(AssertionError):
    """A wait that would not have ended."""


@dataclass
class Operation:
    """A call, and its work.

    Args:
        kind: Its name.
        tensors: What it reads or fills.
        peer: The other rank, or the root, as a rank of its communicator.
    """

    nccl: ModelledNccl
    kind: str
    tensors: list[Tensor]
    peer: int = -1
    parts: list[Tensor] = field(default_factory=list)
    done: bool = False
    aborted: bool = False
    error: Exception | None = None

    def is_completed(self) -> bool:
        """Return whether it has ended in any way."""
        return self.done or self.aborted or self.error is not None

    def exception(self) -> Exception | None:
        """Return its error."""
        return self.error

    def wait(self) -> bool:
        """Wait as the device's stream would; the library does not report failures here."""
        if self.nccl.returns_at_once:
            return True
        self.nccl.until(self.is_completed, f"a {self.kind} of rank {self.peer}")
        return True


class Communicator:
    """One communicator of all its ranks: their queues of operations, and those that have come."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.gpus: list[object] = []
        self.queues: dict[int, deque[Operation]] = {rank: deque() for rank in range(size)}
        self.aborted: set[int] = set()

    def advance(self) -> None:
        """Run what can run."""
        while self._run():
            pass

    def _run(self) -> bool:
        heads = {rank: queue[0] for rank, queue in self.queues.items() if queue and rank not in self.aborted}
        for rank, head in heads.items():
            other = heads.get(head.peer)
            if head.kind == "send" and other is not None and (other.kind, other.peer) == ("recv", rank):
                other.tensors[0].reshape(-1)[:] = head.tensors[0].reshape(-1)
                return self._end([rank, head.peer])
        kinds = {(head.kind, head.peer) for head in heads.values()}
        if len(heads) == self.size and len(kinds) == 1 and (kind := kinds.pop()[0]) not in ("send", "recv"):
            self._collect(kind, [heads[rank] for rank in range(self.size)])
            return self._end(list(heads))
        return False

    def _end(self, ranks: list[int]) -> bool:
        for rank in ranks:
            self.queues[rank].popleft().done = True
        return True

    def _collect(self, kind: str, calls: list[Operation]) -> None:
        tensors = [call.tensors[0] for call in calls]
        root = calls[0].peer
        if kind == "allgather":
            for call in calls:
                for part, tensor in zip(call.parts, tensors, strict=True):
                    part.copy_(tensor)
        elif kind == "broadcast":
            for tensor in tensors:
                tensor.copy_(tensors[root])
        else:
            total = torch.stack(tensors).sum(0)
            for rank, tensor in enumerate(tensors):
                if kind == "allreduce" or rank == root:
                    tensor.copy_(total)


class ModelledNccl:
    """The library, as all ranks of a test share it.

    Args:
        patience_s: Time after which a wait counts as a deadlock: much more than the slowest machine takes.

    Attributes:
        returns_at_once: Whether a wait makes the host go on, as the library's do. Work on the device would begin later;
            here it begins at once, and reads whatever is there.
    """

    def __init__(self, patience_s: float = 120.0) -> None:
        self.returns_at_once = False
        self.changed = threading.Condition()
        self.patience_s = patience_s
        self.communicators: dict[bytes, Communicator] = {}
        self.made = 0
        self.here = threading.local()
        self.hang_in_abort = threading.Event()
        self._numbers = itertools.count()
        nccl = self

        class ProcessGroup(ModelledProcessGroup):
            library = nccl

        self.ProcessGroupNCCL = ProcessGroup

    def until(self, condition: Any, what: str) -> None:
        """Wait for a condition."""
        with self.changed:
            if not self.changed.wait_for(condition, self.patience_s):
                raise Deadlock(f"{what} waits for ever")

    def unique_id(self) -> bytes:
        """Return a new identifier of a communicator."""
        with self.changed:
            return f"id{next(self._numbers)}".encode()

    def join(self, name: bytes, size: int) -> Communicator:
        """Come to a communicator, and wait for its other ranks: nothing but the end of the process ends this wait."""
        with self.changed:
            found = self.communicators.setdefault(name, Communicator(size))
            found.gpus.append(getattr(self.here, "gpu", object()))
            self.made += 1
            self.changed.notify_all()
        self.until(lambda: len(found.gpus) == size, "a communicator")
        if len(set(found.gpus)) < size:
            raise RuntimeError("NCCL error: invalid usage, Duplicate GPU detected")
        return found


class ModelledProcessGroup:
    """One rank of a process group, with the interface of ``ProcessGroupNCCL``."""

    library: ModelledNccl

    class Options:
        """The options."""

        def __init__(self) -> None:
            self._timeout = timedelta(seconds=1800)
            self.config = SimpleNamespace(blocking=-1)

    def __init__(self, store: dist.Store, rank: int, size: int, options: Options) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._eager = False
        self._own: dict[str, tuple[Communicator, int]] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Make the communicator of the group."""
        try:
            self._communicator("0", self._rank, self._size)
        except BaseException:
            self._ended.set()  # the library's own thread ends with a group that nobody holds
            self._thread.join(5)
            raise
        self._eager = True

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Operation:
        """Send."""
        return self._to_peer("send", tensors, peer)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Operation:
        """Receive."""
        return self._to_peer("recv", tensors, peer)

    def allreduce(self, tensors: list[Tensor]) -> Operation:
        """Sum for all."""
        return self._of_all(Operation(self.library, "allreduce", tensors))

    def reduce(self, tensors: list[Tensor], options: dist.ReduceOptions) -> Operation:
        """Sum for one."""
        return self._of_all(Operation(self.library, "reduce", tensors, options.rootRank))

    def broadcast(self, tensors: list[Tensor], options: dist.BroadcastOptions) -> Operation:
        """Copy of one."""
        return self._of_all(Operation(self.library, "broadcast", tensors, options.rootRank))

    def allgather(self, parts: list[list[Tensor]], tensors: list[Tensor]) -> Operation:
        """All tensors for all."""
        return self._of_all(Operation(self.library, "allgather", tensors, parts=parts[0]))

    def abort(self) -> None:
        """End all operations of this rank, with any results."""
        end_s = time.monotonic() + self.library.patience_s
        while self.library.hang_in_abort.is_set() and time.monotonic() < end_s:
            time.sleep(0.01)
        with self.library.changed, torch.inference_mode():  # as tensors may have been made there
            for communicator, rank in self._own.values():
                communicator.aborted.add(rank)
                for operation in communicator.queues[rank]:
                    operation.aborted = True
                    for tensor in operation.tensors if operation.kind == "recv" else ():
                        tensor.fill_(77)  # anything
            self.library.changed.notify_all()
        self._ended.set()
        self._thread.join(5)

    def _to_peer(self, kind: str, tensors: list[Tensor], peer: int) -> Operation:
        if self._eager:
            return self._enqueue("0", Operation(self.library, kind, tensors, peer))
        low, high = sorted((self._rank, peer))
        self._communicator(f"{low}:{high}", int(self._rank == high), 2)
        return self._enqueue(f"{low}:{high}", Operation(self.library, kind, tensors, int(peer == high)))

    def _of_all(self, operation: Operation) -> Operation:
        self._communicator("0", self._rank, self._size)
        return self._enqueue("0", operation)

    def _communicator(self, key: str, rank: int, size: int) -> None:
        if key in self._own:
            return
        if rank == 0:
            name = self.library.unique_id()
            self._store.set(key, name.decode())
        else:
            name = self._store.get(key)
        self._own[key] = self.library.join(name, size), rank

    def _enqueue(self, key: str, operation: Operation) -> Operation:
        communicator, rank = self._own[key]
        with self.library.changed:
            if rank in communicator.aborted:
                raise RuntimeError("NCCL communicator was aborted")
            communicator.queues[rank].append(operation)
            communicator.advance()
            self.library.changed.notify_all()
        return operation

    def _look(self) -> None:
        """Look for announcements of failures, as the library's threads do."""
        while not self._ended.wait(_HEARTBEAT_S):
            with suppress(RuntimeError):  # as the library does
                self._store.check(["exception_dump"])
