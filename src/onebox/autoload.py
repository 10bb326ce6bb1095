"""Entry point of PyTorch's group ``torch.backends``: called when PyTorch is imported, in any process.

It does nothing unless the environment names devices: those of a parent process that shares its pool, as ``onebox run``
does, or those of ``ONEBOX_POOL``.
"""

from __future__ import annotations

import os
import sys

_OWN = ("onebox.agent", "onebox.cli", "onebox.worker")
"""Packages whose processes open a pool themselves, or need none."""


def autoload() -> None:
    """Make virtual devices known to PyTorch; the pool is attached, or opened, when a device is first used."""
    shared, own = os.environ.get("ONEBOX_PARENT"), os.environ.get("ONEBOX_POOL")
    if not (shared or own) or any(name in sys.modules for name in _OWN):
        return
    if shared:
        from onebox.vgpu import alias_cuda

        alias_cuda()
    else:
        from onebox.vgpu import install_on_demand

        install_on_demand()
