"""Setup of a run: its folder, its model and optimizer, and the trainer, new or from a checkpoint."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from onebox.cli.models import build_model
from onebox.cli.options.common import BUILT_IN_MODELS
from onebox.cli.options.jobs import DATA_PARALLEL, JobConfig, TrainConfig
from onebox.cli.options.run_config import read_config
from onebox.cli.training.training_loop import RunProgress
from onebox.cli.user_code import load_callable, own_model
from onebox.engine import Trainer
from onebox.engine.planning.make_plan import PlanningResult
from onebox.engine.state.checkpoint_files import read_manifest, saves
from onebox.engine.workload.parameter_groups import Optimizers
from onebox.errors import CheckpointError, DataError, UsageError
from onebox.feed import Data, Position, open_dataset
from onebox.plan import Plan
from onebox.pool import Pool
from onebox.report import RunFolder
from onebox.trainer_options import DataParallel


@dataclass(frozen=True, kw_only=True)
class StartedRun:
    """The initial state of a run.

    Args:
        trainer: The trainer.
        standing: Progress of the run.
        saved: The checkpoint that the trainer was restored from, if any.
    """

    trainer: Trainer
    standing: RunProgress
    saved: Path | None


def accuracy(outputs: object, targets: Tensor) -> Tensor:
    """Return the fraction of correctly classified samples; NaN for outputs that are not logits [B, classes]."""
    if not isinstance(outputs, Tensor) or outputs.dim() != 2:
        return torch.full((), math.nan)
    return (outputs.argmax(1) == targets).float().mean()


def load_data(config: JobConfig) -> Data:
    """Open the data set of a run.

    Raises:
        UsageError: There is no such data set.
        DataError: It cannot be read.
    """
    try:
        return open_dataset(config.data, size=config.image_size)
    except OSError as error:
        raise DataError(f"--data {config.data} cannot be read: {error}") from error


@contextlib.contextmanager
def run_folder(config: TrainConfig, data: str) -> Iterator[RunFolder]:
    """Create or open the run's folder; a new one is removed again if nothing was written into it.

    Raises:
        UsageError: It cannot be created, is not empty, or does not exist.
    """
    if config.resume is not None:
        yield RunFolder.resume(config.resume)
        return
    path = config.run.expanduser() if config.run else None
    try:
        folder = RunFolder.create(re.sub(r"\W+", "-", f"{config.model}-{data}", flags=re.ASCII).strip("-"), path=path)
    except OSError as error:
        place = error.filename or path or "under runs/"
        raise UsageError(f"the run folder {place} cannot be made: {error.strerror}; --run names another") from None
    try:
        yield folder
    finally:
        with contextlib.suppress(OSError):
            folder.path.rmdir()


def start_run(
    config: TrainConfig, folder: RunFolder, data: Data, pool: Pool, plan: Plan | PlanningResult | None
) -> StartedRun:
    """Make a trainer, or restore one from the newest checkpoint of the run.

    Args:
        config: The options, resolved.
        folder: The run's folder.
        data: The data set.
        pool: The devices.
        plan: The plan, or what was planned here; ``None`` for the options' own.

    Raises:
        UsageError: An option does not fit the pool.
        CheckpointError: The checkpoint is damaged or foreign.
    """
    if config.resume is not None:
        found = saves(folder.checkpoint)
        if found:
            return _resumed(config, found, data, pool, plan)
    model = make_model(config, data)
    trainer = Trainer(
        model,
        make_loss(config),
        make_optimizer(config, model),
        pool=pool,
        plan=plan or ("auto" if config.plan == "auto" else requested_data_parallel(config)),
        precision=config.precision,
        clip_grad_norm=config.clip_grad_norm,
        seed=config.seed,
        metrics={"accuracy": accuracy},
        adaptive=config.adaptive,
        loss_reduction="mean" if config.loss is None else None,  # None: checked before the first step
        stale=config.stale,
        lossy=config.lossy_parts,
        recovery=config.recovery,
        engine=config.engine,
        islands=config.island_devices,
        outer=config.outer,
    )
    return StartedRun(
        trainer=trainer, standing=RunProgress(position=Position(epoch=0, index=0, seed=config.seed)), saved=None
    )


def _resumed(
    config: TrainConfig, found: Sequence[Path], data: Data, pool: Pool, plan: Plan | PlanningResult | None
) -> StartedRun:
    """Restore a trainer from the newest of some saves or, for more epochs, from the one that it names for these."""
    assert config.resume is not None
    saved = found[0]
    model = make_model(config, data)
    stored = read_config(config.resume)
    before = stored.data_parallel
    placement: DataParallel | Literal["stored"] = "stored"
    if config.data_parallel != before:  # shares that were measured stay, unless others are given
        same = config.data_parallel.shares == before.shares
        placement = replace(config.data_parallel, shares="auto") if same else config.data_parallel
    elif config.plan == DATA_PARALLEL and stored.plan != DATA_PARALLEL:
        placement = config.data_parallel
    try:
        newest = RunProgress.from_extra(read_manifest(saved).extra, seed=config.seed, path=saved)
        if newest.position.epoch < config.epochs and newest.continues_from is not None:
            saved = next((save for save in found if save.name == newest.continues_from), saved)
        trainer = Trainer.resume(
            saved,
            model,
            make_loss(config),
            make_optimizer(config, model),
            pool=pool,
            plan=plan or placement,
            metrics={"accuracy": accuracy},
            adaptive=config.adaptive,
            recovery=config.recovery,
            islands="stored" if config.islands == stored.islands else config.island_devices,
        )
        standing = RunProgress.from_extra(trainer.extra, seed=config.seed, path=saved)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; to go on from the save before it, move {saved} away", path=saved) from None
    return StartedRun(trainer=trainer, standing=standing, saved=saved)


def requested_data_parallel(config: TrainConfig) -> DataParallel | None:
    """Return data parallel training as the options request it; ``None`` where they leave the plan to the trainer."""
    asked = config.data_parallel
    return asked if config.plan == DATA_PARALLEL or asked != DataParallel() else None


def make_model(config: JobConfig, data: Data) -> nn.Module:
    """Return the model of a run, for the images of its data.

    Raises:
        UsageError: A model of the user's own cannot be made.
    """
    if config.model not in BUILT_IN_MODELS:
        return own_model(config.model, data, config.seed)
    channels, height, width = data.shape
    return build_model(
        config.model,
        classes=data.classes,
        channels=channels,
        height=height,
        width=width,
        mean=data.mean,
        std=data.std,
        seed=config.seed,
    )


def make_loss(config: JobConfig) -> Callable[..., Any]:
    """Return the loss of a run.

    Raises:
        UsageError: A loss of the user's own cannot be imported.
    """
    return functional.cross_entropy if config.loss is None else load_callable("--loss", config.loss)


def make_optimizer(config: JobConfig, model: nn.Module) -> Optimizers:
    """Return the optimizer of a run with resolved options, or two in combination."""
    assert config.lr is not None and config.weight_decay is not None, "the options are resolved"
    lr, weight_decay = config.lr, config.weight_decay
    if config.optimizer == "sgd":
        momentum = config.momentum or 0.0
        return torch.optim.SGD(model.parameters(), lr=lr, weight_decay=weight_decay, momentum=momentum)
    if config.optimizer == "muon":
        return _with_muon(model, lr, weight_decay)
    kind = torch.optim.AdamW if config.optimizer == "adamw" else torch.optim.Adam
    return kind(model.parameters(), lr=lr, weight_decay=weight_decay)


def _with_muon(model: nn.Module, lr: float, weight_decay: float) -> Optimizers:
    """Return Muon for the matrices of a model except embedding tables, and AdamW for the rest.

    Muon's updates are scaled to the size of AdamW's, so that one learning rate suits both (arXiv:2502.16982, 2.2).
    """
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    matrices = [p for p in model.parameters() if p.dim() == 2 and id(p) not in tables]
    known = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in known]
    return [
        torch.optim.Muon(matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=lr, weight_decay=weight_decay),
    ]
