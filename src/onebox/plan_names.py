"""Names of schedules and activation policies, which plan files and the command line share; imports no PyTorch."""

from __future__ import annotations

from typing import Literal

ASYNC = "async-1f1b"
"""The schedule that never runs empty: gradients are applied one step late."""

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "auto")
"""Names of exact schedules; ``table`` stands for one that the plan spells out."""

ChainPolicy = Literal["keep", "recompute", "offload", "swap", "cpu"]
"""Activation policy of a span of a chain: one of a stage, or ``cpu`` for a span on the host's processor."""

ACTIVATION_POLICIES: tuple[ChainPolicy, ...] = ("keep", "recompute", "offload", "swap", "cpu")

Sync = Literal["workers", "client"]
"""Place where the gradients of replicas are averaged."""

UpdateAt = Literal["device", "host"]
"""Place of the optimizer's state and step."""
