"""Whatever a script does with views, aliases and in place, its values are those of the CPU, to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.process.vgpu.beside import HERE, normal

pytestmark = pytest.mark.usefixtures("pool")


class Tensors(list[Tensor]):
    """Tensors of 4 x 4, some of which see the same memory."""

    def forget(self, place: int) -> None:
        if len(self) > 3:
            self.pop(place % len(self))


def there_and_back(a: Tensor) -> Tensor:
    return a.to("vgpu:0").to(HERE) if a.device.type == "vgpu" else a.clone()


STEPS: dict[str, Callable[[Tensors, Tensor, Tensor, int], Any]] = {
    "new": lambda them, a, b, place: them.append(a + b),
    "turned": lambda them, a, b, place: them.append(a.t()),
    "alias": lambda them, a, b, place: them.append(a.detach()),
    "flat": lambda them, a, b, place: them.append(a.reshape(-1).view(4, 4)),
    "chosen": lambda them, a, b, place: them.append(torch.where(a > b, a, b).softmax(place % 2)),
    "parts": lambda them, a, b, place: them.append(torch.cat(a.split(2)[::-1])),
    "moved": lambda them, a, b, place: them.append(there_and_back(a)),
    "read": lambda them, a, b, place: them.append(a * a[0, place % 4].item()),
    "forgotten": lambda them, a, b, place: them.forget(place),
    "scaled": lambda them, a, b, place: a.mul_(1 - place / 16),
    "added": lambda them, a, b, place: a.add_(b.clone(), alpha=place / 8),
    "copied": lambda them, a, b, place: a.copy_(b.clone()),
    "row": lambda them, a, b, place: a[place % 4].copy_(b[place // 4].clone()),
    "diagonal": lambda them, a, b, place: a.diagonal().add_(place),
    "masked": lambda them, a, b, place: a.__setitem__(a > 0.1 * place, 0.5),
    "doubled": lambda them, a, b, place: a.mul_(a),
    "indexed": lambda them, a, b, place: a.__setitem__(
        (slice(None), torch.tensor([place % 4, 0], device=a.device)), -1
    ),
}
Steps = list[tuple[str, int, int, int]]


def run(device: str, steps: Steps, again: int) -> list[Tensor]:
    """Return the tensors that steps leave, done so often: what comes again is a block on the worker."""
    made = []
    for _ in range(again):
        tensors = Tensors(normal(4, 4, device=device) * factor for factor in (1, 2, 3))
        for kind, first, second, place in steps:
            STEPS[kind](tensors, tensors[first % len(tensors)], tensors[second % len(tensors)], place)
        made += [tensor.clone() for tensor in tensors]
    return [tensor.cpu() for tensor in made]


numbers = st.integers(0, 15)


@given(st.lists(st.tuples(st.sampled_from(sorted(STEPS)), numbers, numbers, numbers), max_size=40), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_programs_give_what_they_give_on_the_cpu(steps: Steps, again: int) -> None:
    for mine, plain in zip(run(HERE, steps, again), run("cpu", steps, again), strict=True):
        assert torch.equal(mine.nan_to_num(), plain.nan_to_num())
