"""The virtual device: the devices of a pool as ``vgpu:0 … vgpu:N-1`` of PyTorch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec

from onebox.pool import Pool, open_pool
from onebox.vgpu.core.tensor import VirtualTensor
from onebox.vgpu.cuda_alias import alias_cuda
from onebox.vgpu.distributed.ranks import Ranks, spawn
from onebox.vgpu.registration import install, uninstall
from onebox.vgpu.runtime.context import attach, current_context

P = ParamSpec("P")


def _with_devices(opener: Callable[P, Pool]) -> Callable[P, Pool]:
    """Wrap a function that opens a pool, so that the pool's devices also become ``vgpu:0 …``."""

    @functools.wraps(opener)
    def open_devices(*args: P.args, **kwargs: P.kwargs) -> Pool:
        return _attached(opener(*args, **kwargs))

    return open_devices


def _attached(pool: Pool) -> Pool:
    try:
        install()
        attach(pool)
    except BaseException:
        pool.close()
        raise
    return pool


open_devices = _with_devices(open_pool)


def set_synchronous(on: bool) -> None:
    """Set whether every operator is waited for, so that an error is raised at its own line; for debugging."""
    for queue in current_context().queues:
        queue.synchronous = on


__all__ = [
    "Pool",
    "Ranks",
    "VirtualTensor",
    "alias_cuda",
    "attach",
    "install",
    "open_devices",
    "set_synchronous",
    "spawn",
    "uninstall",
]
