"""Messages of a process group whose ranks have GPUs, and what it knows of a group that a worker has left."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from onebox.errors import UsageError
from onebox.vgpu.distributed.communicator import Communicator
from onebox.vgpu.distributed.process_group import VirtualProcessGroup


def test_gpus_refuse_tags_which_nccl_would_ignore(monkeypatch: pytest.MonkeyPatch) -> None:
    """With them, messages of one size that are received in another order would swap."""
    group, rank = VirtualProcessGroup(dist.HashStore(), 0, 2), Rank()
    monkeypatch.setattr(group, "_at", lambda tensor: rank.communicator(tagged=False))
    for call in (group.send, group.recv):
        with pytest.raises(UsageError, match="tag=5: NCCL has no tags"):
            call([torch.zeros(2)], 1, 5)


class Rank:
    """A rank in a group of which it is known after a while that a worker has left it because of a failure."""

    def __init__(self) -> None:
        self.asked = 0
        self.lost_peer = 0
        self.channel = SimpleNamespace(moment=0, lost_peer=lambda: self.lost_peer)
        self.pool = SimpleNamespace(attached=False, is_whole=self._is_whole, has_failed=lambda group: self.asked > 2)

    def _is_whole(self, group: int) -> bool:
        self.asked += 1
        return self.asked <= 2

    def communicator(self, *, tagged: bool = True) -> Communicator:
        queue: Any = self
        return Communicator(queue, 1, 0, 2, tagged=tagged)


def test_a_rank_that_has_lacked_data_learns_who_has_left_before_its_next_collective() -> None:
    rank = Rank()
    joined = rank.communicator()
    assert not joined.has_failed()
    rank.channel.moment = 1  # told of a failure on its own device
    assert not joined.has_failed()
    assert rank.asked == 0
    rank.channel.moment, rank.lost_peer = 2, 7
    assert joined.has_failed()
