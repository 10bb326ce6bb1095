"""How training changes buffers: what replicas can share exactly, and what they cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onebox.graph.transform.buffer_updates import BufferUpdate, buffer_updates
from tests.kit.captures import capture


class Changing(nn.Module):
    """A model that changes one buffer in a way of its own.

    Args:
        how: From (old value, data) to the new value.
        read: Whether the output depends on the old value.
    """

    def __init__(self, how: Any, *, read: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.how = how
        self.read = read
        self.register_buffer("kept", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        old = self.kept.clone()
        self.kept.copy_(self.how(old, x.mean(0)))
        return self.linear(x * old if self.read else x)


def updates(model: nn.Module) -> dict[str, BufferUpdate]:
    example = (torch.zeros(4, 3), torch.zeros(4, 2))
    captured = capture(model, nn.functional.mse_loss, example)
    return buffer_updates(captured.joint)


@pytest.mark.parametrize(
    ("how", "decay"),
    [
        (lambda old, new: 0.9 * old + 0.1 * new, 0.9),
        (lambda old, new: old + new, 1.0),
        (lambda old, new: new - old / 4, -0.25),
        (lambda old, new: new, 0.0),
        (lambda old, new: torch.lerp(old, new, 0.25), 0.75),
        (lambda old, new: old.lerp(new, 0.25) * 2, 1.5),
    ],
    ids=["mean", "sum", "difference", "replaced", "lerp", "scaled"],
)
def test_an_update_that_is_affine_in_the_buffer(how: Any, decay: float) -> None:
    (update,) = updates(Changing(how)).values()
    assert update.kind == "affine"
    assert update.decay == pytest.approx(decay)


@pytest.mark.parametrize(
    "how",
    [
        torch.maximum,
        lambda old, new: old * new,
        lambda old, new: torch.where(old > 0, old, new),
        lambda old, new: (0.9 * old).exp() + new,
        lambda old, new: old * 0.9 + old.detach().abs() * 0.05 + new,
    ],
    ids=["maximum", "product", "choice", "exponential", "absolute"],
)
def test_any_other_update_is_general(how: Any) -> None:
    assert [update.kind for update in updates(Changing(how)).values()] == ["general"]


def test_an_update_from_the_buffer_alone_is_constant() -> None:
    assert [u.kind for u in updates(Changing(lambda old, new: (old * old).exp())).values()] == ["constant"]


def test_a_buffer_that_the_loss_reads_cannot_be_shared() -> None:
    model = Changing(lambda old, new: 0.9 * old + 0.1 * new, read=True)
    assert [update.kind for update in updates(model).values()] == ["general"]


@pytest.mark.parametrize("momentum", [0.1, 0.25])
def test_batch_norm(momentum: float) -> None:
    model = nn.Sequential(nn.BatchNorm1d(3, momentum=momentum), nn.Linear(3, 2), nn.BatchNorm1d(2))
    found = updates(model)
    kinds = {name: update.kind for name, update in found.items()}
    assert kinds == {
        "model.0.running_mean": "affine",
        "model.0.running_var": "affine",
        "model.0.num_batches_tracked": "constant",
        "model.2.running_mean": "affine",
        "model.2.running_var": "affine",
        "model.2.num_batches_tracked": "constant",
    }
    assert found["model.0.running_mean"].decay == pytest.approx(1 - momentum)
    assert found["model.2.running_var"].decay == pytest.approx(0.9)


def test_batch_norm_in_eval_mode_changes_nothing() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
    model[0].eval()
    assert updates(model) == {}
