"""Captures of the models that policies are forced on, shared by the tests of this folder."""

from __future__ import annotations

import functools

from onebox.engine.workload.captures import Captures, CaptureSpec
from tests.kit.models import FATED


@functools.cache
def captures(name: str) -> Captures:
    """Return what all trainers of a model share, as it takes longer than all of their steps."""
    case = FATED[name]
    model = case.model()
    trained = frozenset(f"model.{key}" for key, _ in model.named_parameters())
    return Captures(
        CaptureSpec(model=model, loss=case.loss, metrics={}, precision="fp32", device_type="cpu", trained=trained)
    )
