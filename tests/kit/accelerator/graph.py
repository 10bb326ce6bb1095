"""Graphs of a modelled accelerator: kernels that were captured once and are queued again, with a CUDA graph's rules.

Captured kernels do not run in the capture. Their addresses are those of the capture, in memory that is the graph's;
each replay overwrites what the tensors there held. Nothing of the host is repeated, and it cannot wait in a capture.
"""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from tests.kit.accelerator.allocator import CachingAllocator
from tests.kit.accelerator.operators import ModelOperators
from tests.kit.accelerator.streams import Kernel, Scheduler

_Made = TypeVar("_Made")

_Set = Callable[[Tensor], None]


class ModelGraph:
    """Captured kernels; see :class:`onebox.worker.accelerator.interface.Graph`.

    Args:
        scheduler: The streams of the device.
        kernels: The kernels.
        draws: For each random operator the functions that set its random numbers.
        size_bytes: Bytes of its memory.
    """

    def __init__(
        self, scheduler: Scheduler, kernels: Sequence[Kernel], draws: Sequence[Sequence[_Set]], size_bytes: int
    ) -> None:
        self.size_bytes = size_bytes
        self._scheduler = scheduler
        self._kernels = kernels
        self._draws = draws

    def replay(self, seeds: Sequence[int]) -> None:
        """Queue the kernels on the stream of this thread."""
        chosen = [
            (one, torch.Generator().manual_seed(seed).get_state())
            for draws, seed in zip(self._draws, seeds, strict=True)
            for one in draws
        ]

        def begin() -> None:
            for set_state, state in chosen:
                set_state(state)

        if chosen:
            self._scheduler.launch(Kernel("seeds", (), (), begin), counted=False)
        for number, kernel in enumerate(self._kernels):
            self._scheduler.launch(dataclasses.replace(kernel), counted=number == 0)


def capture(
    scheduler: Scheduler,
    allocator: CachingAllocator,
    operators: ModelOperators,
    work: Callable[[Callable[[], None]], _Made],
    draws: int,
) -> tuple[ModelGraph, _Made]:
    """Capture the kernels of a function; see :meth:`onebox.worker.accelerator.interface.Accelerator.capture`."""
    stream = scheduler.stream()
    found = operators.captured_draws = []
    before = allocator.reserved_bytes
    allocator.make_private(stream)
    begun: list[int] = []
    try:
        with scheduler.capture(stream) as kernels:
            made = work(lambda: begun.append(len(found)))
        if len(begun) != draws:
            raise RuntimeError(f"{len(begun)} random operators were captured; {draws} were announced")
    except BaseException:
        allocator.give_up(stream)
        raise
    starts = [*begun, len(found)]
    sets = [found[start:end] for start, end in itertools.pairwise(starts)]
    graph = ModelGraph(scheduler, kernels, sets, allocator.reserved_bytes - before)
    weakref.finalize(graph, allocator.give_up, stream)
    return graph, made


__all__ = ["ModelGraph", "capture"]
