"""onebox: every GPU that you can reach, as one box for training PyTorch models.

>>> import onebox
>>> pool = onebox.open("cpu*2")
>>> len(pool)
2
>>> pool.close()

Importing this package starts nothing and imports PyTorch only when something is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onebox.engine import Evaluation, StepLoss, Trainer, Weighted
    from onebox.engine.planning.make_plan import make_plan
    from onebox.engine.planning.memory_fit import estimate_memory
    from onebox.engine.state.weight_files import meta_parameters
    from onebox.errors import OneboxError
    from onebox.feed import Feed
    from onebox.frozen_weights import quantize_frozen
    from onebox.padding import Buckets
    from onebox.plan import Plan
    from onebox.pool import Link, Pool
    from onebox.stop_signals import StopSignals
    from onebox.trainer_options import DataParallel, Engine, Outer, Recovery, Staging, StaleGradients, Weights
    from onebox.vgpu import open_devices as open

__version__ = "0.1.0"

__all__ = [
    "Buckets",
    "DataParallel",
    "Engine",
    "Evaluation",
    "Feed",
    "Link",
    "Numerics",
    "OneboxError",
    "Outer",
    "Plan",
    "Pool",
    "Recovery",
    "Staging",
    "StaleGradients",
    "StepLoss",
    "StopSignals",
    "Trainer",
    "Weighted",
    "Weights",
    "estimate_memory",
    "make_plan",
    "meta_parameters",
    "open",
    "quantize_frozen",
]

_HOMES = {
    "Buckets": "onebox.padding",
    "DataParallel": "onebox.trainer_options",
    "Engine": "onebox.trainer_options",
    "Evaluation": "onebox.engine",
    "Feed": "onebox.feed",
    "Link": "onebox.pool",
    "Numerics": "onebox.trainer_options",
    "OneboxError": "onebox.errors",
    "Outer": "onebox.trainer_options",
    "Plan": "onebox.plan",
    "Pool": "onebox.pool",
    "Recovery": "onebox.trainer_options",
    "Staging": "onebox.trainer_options",
    "StaleGradients": "onebox.trainer_options",
    "StepLoss": "onebox.engine",
    "StopSignals": "onebox.stop_signals",
    "Trainer": "onebox.engine",
    "Weighted": "onebox.engine",
    "Weights": "onebox.trainer_options",
    "estimate_memory": "onebox.engine.planning.memory_fit",
    "make_plan": "onebox.engine.planning.make_plan",
    "meta_parameters": "onebox.engine.state.weight_files",
    "open": "onebox.vgpu",
    "quantize_frozen": "onebox.frozen_weights",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'onebox' has no attribute {name!r}")
    return getattr(importlib.import_module(home), "open_devices" if name == "open" else name)


def __dir__() -> list[str]:
    return sorted(__all__)
