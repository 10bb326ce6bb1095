"""Detection of changes by hand: every way of writing to a tensor, and nothing where nothing was written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from onebox.engine.state.change_detection import ChangeDetector
from onebox.engine.workload.named_state import NamedState, named_state
from onebox.errors import UsageError


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 40, 3)
        self.norm = nn.BatchNorm2d(40)
        self.small = nn.Parameter(torch.randn(101, 7).bfloat16())
        self.odd = nn.Parameter(torch.randn(8, 999).t())
        self.one = nn.Parameter(torch.tensor(3.0, dtype=torch.float64))
        self.none = nn.Parameter(torch.zeros(0, 4))


def made() -> tuple[Model, NamedState, ChangeDetector]:
    model = Model()
    named = named_state(model, None, lambda: 0)
    return model, named, ChangeDetector(model, None, named)


def test_nothing_is_changed_that_was_not() -> None:
    model, _, detector = made()
    with torch.no_grad():
        model.small.zero_()
    assert detector.changed(fully=True) == [], "nothing has been noted"
    detector.note(fully=True)
    model.norm.momentum = 0.3
    model.eval()
    model.small.requires_grad_(False)
    model.extra = nn.ReLU()
    model.extra = nn.Tanh()
    assert detector.changed(fully=True) == []


@pytest.mark.parametrize("name", ["first.weight", "small", "odd", "one", "norm.running_mean"])
@pytest.mark.parametrize(
    "write",
    [
        lambda tensor: tensor.mul_(1.5).add_(0.25),
        lambda tensor: tensor.data.mul_(1.5).add_(0.25),
        lambda tensor: setattr(tensor, "data", tensor.data.clone()),
        lambda tensor: nn.init.constant_(tensor, 7.0),
        lambda tensor: tensor.copy_(tensor.clone()),
    ],
)
def test_each_way_of_writing_is_seen_with_each_step(name: str, write: Callable[[torch.Tensor], object]) -> None:
    _, named, detector = made()
    detector.note(fully=True)
    with torch.no_grad():
        write(named.tensors[f"model.{name}"])
    assert detector.changed(fully=False) == [f"model.{name}"]
    assert detector.changed(fully=True) == [f"model.{name}"]
    detector.note([f"model.{name}"])
    assert detector.changed(fully=True) == []


@pytest.mark.parametrize("name", ["first.weight", "small", "odd"])
@pytest.mark.parametrize("place", [0, 17, 500, -1])
def test_one_element_is_seen_where_all_are_looked_at(name: str, place: int) -> None:
    _, named, detector = made()
    detector.note(fully=True)
    data = named.tensors[f"model.{name}"].data
    (data.t() if name == "odd" else data).view(-1)[place] += 1
    assert detector.changed(fully=True) == [f"model.{name}"]


def test_another_buffer_is_taken_over_and_another_parameter_is_not() -> None:
    model, named, detector = made()
    detector.note(fully=True)
    model.norm.running_var = torch.full((40,), 2.0)
    assert detector.changed(fully=False) == ["model.norm.running_var"]
    assert named.tensors["model.norm.running_var"] is model.norm.running_var
    detector.note()
    assert detector.changed(fully=True) == []
    model.norm.running_var = torch.full((41,), 2.0)
    with pytest.raises(UsageError, match=r"model\.norm\.running_var, a buffer of float32\[40\] .* float32\[41\]"):
        detector.changed(fully=False)
    model.norm.running_var = named.tensors["model.norm.running_var"]
    model.first = nn.Conv2d(3, 40, 3)
    with pytest.raises(UsageError, match=r"model\.first\.weight, a parameter .* is another one"):
        detector.changed(fully=False)
    del model.first
    with pytest.raises(UsageError, match=r"model\.first\.weight, a parameter .* is gone"):
        detector.changed(fully=False)
