"""Offsets in the random numbers of generators that have none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import _random

from onebox.vgpu.distributed.sharded_random import patches, state_at


def rand(state: Tensor) -> list[float]:
    source = torch.Generator()
    source.set_state(state)
    return torch.rand(4, generator=source).tolist()


@pytest.fixture
def view() -> Iterator[Any]:
    """Return PyTorch's view of a state, as it is for sharded tensors."""
    patches().apply()
    yield _random._PhiloxState
    patches().remove()


def test_a_state_at_an_offset_is_one_of_its_own() -> None:
    state, other = (torch.Generator().manual_seed(seed).get_state() for seed in (1, 2))
    assert state_at(state, 0) is state
    drawn = [rand(state_at(begin, offset)) for begin in (state, other) for offset in (0, 4, 8)]
    assert len(set(map(tuple, drawn))) == len(drawn)
    assert rand(state_at(state.clone(), 4)) == drawn[1]


def test_a_generator_without_offsets_begins_at_0_and_is_set_to_others(view: Any) -> None:
    state = torch.Generator().manual_seed(1).get_state()
    seen = view(state)
    begin = seen.offset.clone()
    assert begin.tolist() == [0]
    seen.offset = begin + 4
    assert torch.equal(seen.state, state_at(state, 4))
    seen.offset = begin + 8
    assert torch.equal(seen.state, state_at(state, 8)), "from where it began"


def test_the_state_of_a_gpu_is_seen_as_by_pytorch(view: Any) -> None:
    seen = view(torch.tensor([5, 12]).view(torch.uint8))
    assert seen.offset.tolist() == [12]
    seen.offset = seen.offset + 4
    assert seen.state.view(torch.int64).tolist() == [5, 16]
