"""Ways to train over slow links beside each other: exact steps, lossy messages, islands. Pure data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from onebox.cost import DeviceGroups
from onebox.plan.evaluate.traffic import Traffic
from onebox.plan.model.plan import Plan
from onebox.plan_names import LossyPart

_PUBLISHED_EVERY = 30
_PUBLISHED_LOSS = {
    35e6: {2: 0.007, 4: 0.020, 8: 0.039},
    180e6: {2: 0.003, 4: 0.011, 8: 0.023},
    1.3e9: {2: 0.002, 4: 0.005, 8: 0.013},
}
"""By parameters of a language model, and by islands: how much higher its loss is with an outer step every 30 steps than
with exact steps (Charles, Teston and others, Communication-efficient language model training scales reliably and
robustly: scaling laws for DiLoCo, 2025, arXiv:2503.09799)."""


@dataclass(frozen=True, kw_only=True)
class TrainingMode:
    """A way to train a model on a pool, with its prediction.

    Args:
        name: ``synchronous`` for exact steps, ``compressed`` for lossy messages, or ``islands``.
        text: Description of its plan, or of its plans.
        plans: The plan, or that of each island; empty if there is none, for the reason in ``text``.
        batch: Samples of a step; 0 without a plan.
        step_s: Seconds of a step.
        groups: Groups of near devices, or islands.
        traffic: Bytes of a step from group to group, by their places.
        peak_bytes: Memory of each device, by its number.
        accuracy: Published price in accuracy; empty for exact steps.
        loss: Loss on held-out data after a probe; ``None`` without one.
    """

    name: Literal["synchronous", "compressed", "islands"]
    text: str
    plans: tuple[Plan, ...] = ()
    batch: int = 0
    step_s: float = 0.0
    groups: DeviceGroups
    traffic: Traffic
    peak_bytes: Mapping[int, int]
    accuracy: str = ""
    loss: float | None = None

    @property
    def sample_s(self) -> float | None:
        """Seconds per sample; ``None`` if there is no such plan."""
        return self.step_s / self.batch if self.batch else None


def published_islands(parameters: int, islands: int) -> str:
    """Return what is published of the loss of a model that islands train, for the most similar setting.

    The size is the nearest published one by its logarithm; the number of islands is the next published one.

    Args:
        parameters: Parameters of the model.
        islands: Number of islands.

    Example:
        >>> published_islands(10_000_000, 2)
        'loss +0.7 % (2 islands, language model of 35M parameters, H=30: arXiv:2503.09799)'
        >>> published_islands(10_000_000, 9)
        'not published for more than 8 islands (arXiv:2503.09799)'
    """
    size = min(_PUBLISHED_LOSS, key=lambda known: abs(math.log(known / max(parameters, 1))))
    counts = [count for count in _PUBLISHED_LOSS[size] if count >= islands]
    if not counts:
        return f"not published for more than {max(_PUBLISHED_LOSS[size])} islands (arXiv:2503.09799)"
    count = min(counts)
    text = f"{size / 1e9:g}B" if size >= 1e9 else f"{size / 1e6:g}M"
    return (
        f"loss +{_PUBLISHED_LOSS[size][count]:.1%} ({count} islands, language model of {text} parameters, "
        f"H={_PUBLISHED_EVERY}: arXiv:2503.09799)"
    ).replace("%", " %")


def published_codecs(lossy: Mapping[LossyPart, tuple[str, ...]]) -> str:
    """Return what is published of lossy messages.

    Args:
        lossy: The codecs of each part of the traffic, as of a plan.
    """
    known: dict[LossyPart, str] = {
        "gradients": "gradients: error feedback converges at the rate of exact SGD (arXiv:1901.09847)",
        "activations": "activations: no general figure is published",
    }
    return "; ".join(known[part] for part in lossy)
