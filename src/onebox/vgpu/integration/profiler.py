"""PyTorch's profiler with the times of virtual devices: those of the workers, between marks around each operator."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from onebox.errors import OneboxError
from onebox.vgpu import native
from onebox.vgpu.runtime import context
from onebox.vgpu.runtime.command_queue import CommandQueue
from onebox.vgpu.runtime.request_channel import SentMessage

Mark = dict[CommandQueue, SentMessage]
"""A place in the operators of each device that is used: a question for the time there."""


def timing(begin: Callable[..., None]) -> Callable[..., None]:
    """Wrap the start of ``torch.autograd.profiler.profile``, which takes device times from marks, and not from traces.

    Each operator is recorded with a mark before it and after it.
    """

    @functools.wraps(begin)
    def init(
        self: Any, enabled: bool = True, *, use_cuda: bool = False, use_device: Any = None, **options: Any
    ) -> None:
        if (use_cuda and context.called == "cuda") or use_device in ("vgpu", context.called):
            marked = enabled and options.get("use_cpu", True) and any(True for _ in context.open_queues())
            if marked:
                native.load()
                options["use_kineto"] = False
            use_cuda, use_device = False, "vgpu" if marked else None
        if use_cuda:
            options["use_cuda"] = True
        begin(self, enabled, use_device=use_device, **options)

    return init


def mark() -> Mark:
    """Return a mark at the present place."""
    return {queue: queue.ask_time() for queue in context.open_queues() if queue.begun}


def elapsed_us(begin: Mark | None, end: Mark | None) -> float:
    """Return the microseconds between two marks, of all devices together; none for devices that have failed."""
    total_s = 0.0
    for queue, sent in (end or {}).items():
        first = (begin or {}).get(queue)
        if first is not None and first is not sent:
            try:
                total_s += queue.time_s(sent) - queue.time_s(first)
            except OneboxError:  # the next use of the device raises the error
                continue
    return total_s * 1e6


__all__ = ["elapsed_us", "mark", "timing"]
