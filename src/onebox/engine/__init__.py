"""Training on a pool: lowering, steps, evaluation, checkpoints."""

from onebox.engine.data.prefetch import UploadCounters, UploadedBatch
from onebox.engine.state.background_save import BackgroundSave
from onebox.engine.steps.link_use import LinkEvent, LinkUse
from onebox.engine.steps.results import Evaluation, StepLoss, TraceEvent
from onebox.engine.trainer import Trainer
from onebox.engine.workload.loss_reduction import Weighted

__all__ = [
    "BackgroundSave",
    "Evaluation",
    "LinkEvent",
    "LinkUse",
    "StepLoss",
    "TraceEvent",
    "Trainer",
    "UploadCounters",
    "UploadedBatch",
    "Weighted",
]
