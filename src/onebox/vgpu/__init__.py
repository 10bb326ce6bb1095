"""The virtual device: the devices of a pool as ``vgpu:0 … vgpu:N-1`` of PyTorch."""

from __future__ import annotations

from typing import Any

from onebox.pool import Pool, open_pool
from onebox.vgpu.box import attach, current_box
from onebox.vgpu.registration import install
from onebox.vgpu.tensor import VirtualTensor


def open_devices(spec: str = "auto", **options: Any) -> Pool:
    """Open a pool and let its devices be ``vgpu:0 …``; see :func:`onebox.pool.open_pool` for the arguments."""
    pool = open_pool(spec, **options)
    try:
        install()
        attach(pool)
    except BaseException:
        pool.close()
        raise
    return pool


def set_synchronous(on: bool) -> None:
    """Let every operator be waited for, so that an error is raised at its own line; for finding it."""
    for stream in current_box().streams:
        stream.synchronous = on


__all__ = ["Pool", "VirtualTensor", "attach", "install", "open_devices", "set_synchronous"]
