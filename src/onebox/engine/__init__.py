"""Training on a pool: lowering, steps, evaluation, checkpoints."""

from onebox.engine.loss_reduction import Weighted
from onebox.engine.results import Evaluation, Event, StepLoss
from onebox.engine.trainer import Trainer
from onebox.engine.upload import UploadCounters, Uploaded

__all__ = ["Evaluation", "Event", "StepLoss", "Trainer", "UploadCounters", "Uploaded", "Weighted"]
