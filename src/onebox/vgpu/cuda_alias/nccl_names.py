"""``torch.multiprocessing.spawn`` and NCCL: ranks are threads of the client instead of processes."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
import torch.multiprocessing
from torch.distributed import distributed_c10d

from onebox.vgpu.cuda_alias.functions import yes
from onebox.vgpu.cuda_alias.patches import Patches
from onebox.vgpu.distributed import process_group, ranks

_MEANT = "nccl"


def translate_distributed(patches: Patches) -> None:
    """Make a script's ranks start as threads, and accept its names of backends."""
    spawning = sys.modules["torch.multiprocessing.spawn"]
    for owner in (torch.multiprocessing, spawning):
        patches.set(owner, "spawn", ranks.spawn)
    backend = _called(distributed_c10d.get_backend)
    for module in (dist, distributed_c10d):
        patches.set(module, "get_backend", backend)
        patches.set(module, "is_nccl_available", yes)


def _called(get_backend: Callable[..., str]) -> Callable[..., str]:
    @functools.wraps(get_backend)
    def called(group: Any = None) -> str:
        name = get_backend(group)
        return _MEANT if name == process_group.NAME else name

    return called
