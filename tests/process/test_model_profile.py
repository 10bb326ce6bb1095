"""Profiles of models: which segments are trained, and what the others get."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import onebox
from onebox.engine.planning import profile as planning_profile
from onebox.engine.planning.profile import profile_model
from onebox.engine.session import TrainingSession

WIDTH, BLOCKS, BATCH = 16, 9, 8


class Blocks(nn.Module):
    """Equal residual blocks that read a common value, in whose gradient all of them take part."""

    def __init__(self, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.begin, self.context, self.end = nn.Linear(4, WIDTH), nn.Linear(4, WIDTH), nn.Linear(WIDTH, 2)
        self.blocks = nn.ModuleList(nn.Sequential(norm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        h, context = self.begin(x), self.context(x)
        for block in self.blocks:
            h = h + functional.gelu(functional.dropout(block(h * context), 0.1))
        return self.end(h)  # type: ignore[no-any-return]


@pytest.mark.parametrize("norm", [nn.LayerNorm, pytest.param(nn.BatchNorm1d, marks=pytest.mark.long)])
def test_equal_blocks_are_measured_once(norm: type[nn.Module]) -> None:
    model, batch = Blocks(norm), (torch.ones(BATCH, 4), torch.zeros(BATCH, 2))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters())
    with onebox.open("cpu*2", threads=1) as pool:
        profile, _ = profile_model(
            model, functional.mse_loss, optimizer, *batch, pool=pool, sizes=(2, BATCH), cache=False
        )
    names = [segment.name for segment in profile.bytes.segments]
    assert [times.size for times in profile.times["cpu"]] == [2, BATCH]
    for times in profile.times["cpu"]:
        assert len(times.seconds) == len(names) > BLOCKS
        assert min(map(min, times.seconds)) > 0 < times.update_s
        assert max(Counter(times.seconds).values()) == BLOCKS - 4, "those of the blocks in the middle"
        assert times.slowdown is not None
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.long
@pytest.mark.parametrize(
    ("room", "expected"),
    [
        (0.25, [1, 1, 8, 8, *[1] * 4, 8, 8, *[1] * 4, 8, 8, 8, 8, 8, 8]),
        (0.0, [*[1] * 10, *[8] * 10]),
    ],
)
def test_sizes_take_turns_in_slices_as_long_as_a_batch_if_there_is_memory_for_all(
    room: float, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    class Recording(TrainingSession):
        def step(self, batch: Any, **options: Any) -> Any:
            sizes.append(batch.size // 2)
            return super().step(batch, **options)

    monkeypatch.setattr(planning_profile, "TrainingSession", Recording)
    monkeypatch.setattr(planning_profile, "_TOGETHER", room)
    monkeypatch.setattr(planning_profile, "_LONG_S", 1e3)
    monkeypatch.setattr(planning_profile, "_MOST", 10)
    model = nn.Sequential(nn.Linear(4, WIDTH), nn.Linear(WIDTH, 2))
    batch, optimizer = (torch.ones(BATCH, 4), torch.zeros(BATCH, 2)), torch.optim.SGD(model.parameters())
    with onebox.open("cpu", threads=1) as pool:
        found, _ = profile_model(model, functional.mse_loss, optimizer, *batch, pool=pool, sizes=[1, 8], cache=False)
    assert sizes == expected
    small, large = found.times["cpu"]
    assert small.slowdown is None and large.slowdown is None, "six slices are too few for quantiles"
    assert (small.size, large.size) == (1, 8)


@pytest.mark.long
@pytest.mark.parametrize(("enough_s", "steps"), [(0.0, 2), (1e3, 10)])
def test_long_steps_are_measured_once_and_short_ones_until_it_is_enough(
    enough_s: float, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: Counter[int] = Counter()

    class Counting(TrainingSession):
        def step(self, *arguments: Any, **options: Any) -> Any:
            counted[id(self)] += 1
            return super().step(*arguments, **options)

    monkeypatch.setattr(planning_profile, "TrainingSession", Counting)
    monkeypatch.setattr(planning_profile, "_LONG_S", enough_s)
    monkeypatch.setattr(planning_profile, "_MOST", 10)
    model = nn.Sequential(nn.Linear(4, WIDTH), nn.Linear(WIDTH, 2))
    batch, optimizer = (torch.ones(BATCH, 4), torch.zeros(BATCH, 2)), torch.optim.SGD(model.parameters())
    with onebox.open("cpu", threads=1) as pool:
        found, _ = profile_model(model, functional.mse_loss, optimizer, *batch, pool=pool, sizes=[BATCH], cache=False)
    assert list(counted.values()) == [steps]
    (times,) = found.times["cpu"]
    assert min(map(min, times.seconds)) > 0 < times.update_s
