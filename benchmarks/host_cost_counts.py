"""Waits of the host for its device, and copies from pageable memory, counted in a trainer's steps.

The worker is a real one, over real sockets, in a thread of this process, so that its counts can be read between steps.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from common import show
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import onebox
from onebox.errors import WorkerDied
from onebox.pool.discovery import LOCAL_HOST
from onebox.pool.errors import WorkerLocation
from onebox.pool.open import connect_pool
from onebox.wire import new_keys
from onebox.worker import Ports, WorkerConfig
from onebox.worker.accelerator import HostAccelerator
from onebox.worker.process.main import WorkerServer

WARM, STEPS = 3, 10

HOST_READS = ("aten.item", "aten._local_scalar_dense", "aten.equal", "aten.is_nonzero", "aten.nonzero")
"""Operators whose result the host needs, so that it waits for everything before them on a device that is not a CPU."""

WAITS, PAGEABLE = "waits of the host", "copies from or to pageable memory"


class CountingDevice(HostAccelerator):
    """An asynchronous device whose tensors are in host memory; counts what would make its host wait."""

    asynchronous = True

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__(torch.device("cpu"))
        self._counts = counts
        self._one = CountingStream(counts)

    def current(self) -> Any:
        return self._one

    def stream(self, *, priority: int = 0) -> Any:
        return self._one

    def synchronize(self) -> None:
        self._counts[WAITS] += 1

    def to_device(self, tensor: Tensor, *, copy: bool = False) -> Tensor:
        self._counts[PAGEABLE] += 1
        return super().to_device(tensor, copy=copy)

    def to_host(self, tensor: Tensor) -> Tensor:
        self._counts[WAITS] += 1
        self._counts[PAGEABLE] += 1
        return super().to_host(tensor)


class CountingStream:
    """A stream and its events; every mark is reached when it is asked for the second time."""

    def __init__(self, counts: Counter[str]) -> None:
        self._counts = counts
        self._at_ns = time.monotonic_ns()
        self._asked = False

    def record(self, *, timed: bool = False, yields: bool = False) -> CountingStream:
        return CountingStream(self._counts)

    def wait(self, event: Any) -> None:
        pass

    def wait_stream(self, other: Any) -> None:
        pass

    def query(self) -> bool:
        asked, self._asked = self._asked, True
        return asked

    def synchronize(self) -> None:
        self._counts[WAITS] += 1

    def time_ns(self) -> int:
        return self._at_ns


class HostReads(TorchDispatchMode):
    """Counts operators whose results the host reads, other than from a finished copy."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self._counts = counts
        self.paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func).rpartition(".")[0] in HOST_READS and not self.paused:
            self._counts[WAITS] += 1
        return func(*args, **(kwargs or {}))


class CountedServer(WorkerServer):
    """A worker; what a complete reply is made of is read from memory of the host, which is not counted."""

    reads: HostReads | None = None

    def _send_complete(self) -> None:
        if self.reads is None:
            return super()._send_complete()
        self.reads.paused, before = True, self.reads.paused
        try:
            return super()._send_complete()
        finally:
            self.reads.paused = before


class ThreadWorker:
    """A worker in a thread of this process; implements :class:`~onebox.pool.backends.base.WorkerHandle`."""

    address = "127.0.0.1"

    def __init__(self, number: int, client_key: str, counts: Counter[str]) -> None:
        self.place = WorkerLocation(worker=number, host=LOCAL_HOST, device="cpu")
        self.pid = os.getpid()
        self.keys = new_keys()
        self._folder = tempfile.TemporaryDirectory(prefix="onebox-")
        self.descriptor, self._lifeline = os.pipe()  # never readable: a thread does not die alone
        config = WorkerConfig("cpu", 1, self.keys.public, self.keys.secret, client_key, self._folder.name)
        with mock.patch("onebox.worker.device.accelerator_for", lambda name: CountingDevice(counts)):
            self._server = CountedServer(config, (self.descriptor,))
        self._counts = counts
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        self._server.reads = HostReads(self._counts)
        with self._server.reads:
            self._server.serve()

    def ports(self) -> Ports:
        """Return the bound endpoints."""
        return self._server.ports

    def death(self) -> WorkerDied:
        """Return the error of its end."""
        return WorkerDied(f"{self.place} has ended", worker=0, host=LOCAL_HOST, device="cpu")

    def close(self, *, grace_s: float) -> None:
        """Wait for the thread, which ends with the pool."""
        self._thread.join(max(grace_s, 5.0))


class ThreadSource:
    """Workers in threads; implements :class:`~onebox.pool.backends.base.WorkerSource`."""

    def __init__(self, count: int) -> None:
        self.counts = [Counter[str]() for _ in range(count)]

    def start(self, first: int, client_key: str) -> Sequence[tuple[ThreadWorker, str]]:
        """Start the workers."""
        made = [ThreadWorker(first + place, client_key, counts) for place, counts in enumerate(self.counts)]
        return [(worker, worker.keys.public) for worker in made]

    def connected(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing: nothing is shared."""


def batch() -> tuple[Tensor, Tensor]:
    """Return a batch of random numbers."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(32, 64, generator=generator), torch.randint(0, 10, (32,), generator=generator)


@contextlib.contextmanager
def trainer(source: ThreadSource) -> Iterator[onebox.Trainer]:
    """Train a small model with clipping, as most transformers are."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with (
        connect_pool([source]) as pool,
        onebox.Trainer(
            model, nn.functional.cross_entropy, optimizer, pool=pool, clip_grad_norm=1.0, loss_reduction="mean"
        ) as made,
    ):
        yield made


def step_counts() -> dict[str, object]:
    """Return waits and copies of a step after the first ones, as a mean over steps."""
    source = ThreadSource(1)
    with trainer(source) as training:
        for _ in range(WARM):
            training.step(*batch())
        training.wait()
        before = [Counter(counts) for counts in source.counts]
        for _ in range(STEPS):
            training.step(*batch())
        training.wait()
        found = sum((now - then for now, then in zip(source.counts, before, strict=True)), Counter[str]())
    waits, pageable = found[WAITS] / STEPS, found[PAGEABLE] / STEPS
    show("In each step", ("", "times"), [[WAITS, f"{waits:g}"], [PAGEABLE, f"{pageable:g}"]])
    return {"synchronisations_per_step": waits, "pageable_copies_per_step": pageable}
