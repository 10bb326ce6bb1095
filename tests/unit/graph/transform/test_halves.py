"""A model of which backward is whole gives one in halves without being traced again: the very same programs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from onebox.graph import TracedModel
from tests.kit.captures import capture


def small() -> nn.Module:
    """Return a model with convolutions, whose backward comes in halves, and statistics that forward changes."""
    torch.manual_seed(0)
    first = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.1))
    return nn.Sequential(*first, nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))


@pytest.mark.parametrize("policy", ["keep", "recompute"])
def test_halves_are_those_of_a_model_that_was_traced_for_them(policy: str) -> None:
    batch = torch.zeros(6, 2, 8, 8), torch.zeros(6, dtype=torch.int64)
    captured = capture(small(), nn.functional.cross_entropy, batch)
    whole = TracedModel(captured, backward=True)
    traced = TracedModel(capture(small(), nn.functional.cross_entropy, batch), backward=True, halves=True)
    names = [[name] for name in traced.segments]
    before = whole.divide(names, policies=[policy] * len(names))
    halved = whole.halved()
    assert halved.segments == traced.segments
    found, wanted = (model.divide(names, policies=[policy] * len(names)) for model in (halved, traced))
    assert found.phases == wanted.phases
    assert found.updates == wanted.updates
    assert {phase.kind for phase in found.phases} == {"F", "B", "I", "W"}
    assert whole.divide(names, policies=[policy] * len(names)).phases == before.phases, "it stays as it was"
