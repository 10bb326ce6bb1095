"""Messages of a process group whose ranks have GPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from onebox.errors import UsageError
from onebox.vgpu.distributed.communicator import Communicator
from onebox.vgpu.distributed.process_group import VirtualProcessGroup


def test_gpus_refuse_tags_which_nccl_would_ignore(monkeypatch: pytest.MonkeyPatch) -> None:
    """With them, messages of one size that are received in another order would swap."""
    group, queue = VirtualProcessGroup(dist.HashStore(), 0, 2), Any
    monkeypatch.setattr(group, "_at", lambda tensor: Communicator(queue, 1, 0, 2, tagged=False))  # type: ignore[arg-type]
    for call in (group.send, group.recv):
        with pytest.raises(UsageError, match="tag=5: NCCL has no tags"):
            call([torch.zeros(2)], 1, 5)
