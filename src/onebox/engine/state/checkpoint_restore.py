"""Conversion of the workers' state to a checkpoint, and of a matching checkpoint to a user's model and optimizer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from onebox.engine.partition.weight_versions import KEYS
from onebox.engine.state.checkpoint_files import (
    VERSION,
    Checkpoint,
    CheckpointContents,
    GroupEntry,
    Manifest,
    NumberEntry,
)
from onebox.engine.state.pieces import Key
from onebox.engine.state.remote import RemoteState, StartState
from onebox.engine.state.transfer import StateTransfer
from onebox.engine.workload.named_state import NamedState, named_state
from onebox.engine.workload.parameter_groups import Optimizers, groups_of, optimizers_in
from onebox.errors import CheckpointError
from onebox.plan import Plan
from onebox.wire import spec_of


def group_entries(optimizer: Optimizers, state: NamedState) -> tuple[GroupEntry, ...]:
    """Return the parameter groups of optimizers with the names of their parameters."""
    names = {id(tensor): name for name, tensor in state.tensors.items()}
    return tuple(
        GroupEntry(tuple(names[id(parameter)] for parameter in group.parameters), group.options)
        for group in groups_of(optimizer)
    )


def contents(remote: RemoteState, transfer: StateTransfer, **settings: Any) -> CheckpointContents:
    """Return the contents of a checkpoint of the workers' state, read one tensor at a time.

    Args:
        remote: The remote state.
        transfer: The transfer that reads it.
        **settings: Fields of :class:`Manifest` from the trainer.

    Raises:
        OneboxError: A worker failed, or the pool is closed.
    """
    sources, here = dict(transfer.sources()), transfer.not_held()
    remembered = transfer.remembered()
    sources |= remembered.tensors
    here |= remembered.here
    sources |= transfer.versions()
    manifest = Manifest(
        format="onebox-checkpoint",
        version=VERSION,
        torch=str(torch.__version__),
        optimizer=tuple(group.kind for group in groups_of(remote.optimizer)),
        groups=group_entries(remote.optimizer, remote.named),
        numbers=tuple(NumberEntry(name, key, value) for (name, key), value in remembered.numbers.items()),
        **settings,
    )
    specs = {key: source.spec for key, source in sources.items()} | {key: spec_of(t) for key, t in here.items()}

    def elements(keys: Sequence[Key]) -> Iterator[Tensor]:
        for away, run in itertools.groupby(keys, lambda key: key in sources):
            if away:
                yield from transfer.elements({key: sources[key] for key in run})
            else:
                yield from (here[key].detach() for key in run)

    return CheckpointContents(manifest=manifest, specs=specs, elements=elements)


def planned_options(plan: Plan | None, devices: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a trainer that resumes with a plan.

    The plan itself, if the pool has its devices and the options do not override it; else the settings that apply to any
    devices.

    Args:
        plan: The checkpoint's plan; ``None`` for one saved before the first step.
        devices: Number of devices in the pool.
        options: The user's options.
    """
    if plan is None or "plan" in options:
        return {}
    said = said_of_plan(options)
    same = set(plan.devices) == set(range(devices))
    if plan.whole and not (same and plan.stages[0].formats and not said):
        shares = plan.stages[0].shares if same else "auto"
        return {
            "micro_batch": plan.micro_batch,
            "sync": plan.sync,
            "shares": shares,
            "update": plan.update,
            "shard_optimizer": plan.optimizer == "sharded",
        }
    if said or max(plan.devices) >= devices:
        return {"micro_batch": plan.micro_batch}
    return {"plan": plan}


def said_of_plan(options: Mapping[str, Any]) -> bool:
    """Return whether options other than ``plan`` override settings of a plan."""
    return bool({"micro_batch", "sync", "shares", "update", "shard_optimizer"} & set(options))


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """Point of a run from which a trainer continues.

    Args:
        step: Number of steps done.
        path: Path of the checkpoint.
        plan: Plan of the run, unless the user asks for another; ``None`` if unknown.
        extra: Data saved with the checkpoint by the user.
        state: State of the optimizer, and versions of parameters.
    """

    step: int
    path: Path
    plan: Plan | None
    extra: dict[str, Any]
    state: StartState


def resume_point(checkpoint: Checkpoint, path: Path, options: Mapping[str, Any]) -> ResumePoint:
    """Return the point of a run at which a checkpoint was saved.

    Args:
        checkpoint: The checkpoint.
        path: Its path.
        options: Arguments of the trainer that the user gives.
    """
    manifest = checkpoint.manifest
    remembered = [
        *((name, key, tensor) for (name, key), tensor in checkpoint.optimizer.items() if key not in KEYS),
        *((entry.parameter, entry.key, entry.value) for entry in manifest.numbers),
    ]
    versions = {(name, key): tensor for (name, key), tensor in checkpoint.optimizer.items() if key in KEYS}
    return ResumePoint(
        step=manifest.step,
        path=path,
        plan=None if said_of_plan(options) else manifest.plan,
        extra=manifest.extra,
        state=StartState(optimizer=remembered, versions=versions),
    )


def restore(checkpoint: Checkpoint, model: nn.Module, loss: Any, optimizer: Optimizers) -> None:
    """Overwrite a model's weights and the options of its optimizers with those of a checkpoint.

    Raises:
        CheckpointError: It belongs to another model or optimizer; nothing has been overwritten.
    """
    state = named_state(model, loss, lambda: 0)
    _check_state(checkpoint, state)
    _check_optimizer(checkpoint, optimizer, state)
    with torch.no_grad():
        for name, tensor in checkpoint.state.items():
            state.tensors[name].copy_(tensor)
    groups = [group for each in optimizers_in(optimizer) for group in each.param_groups]
    for group, entry in zip(groups, checkpoint.manifest.groups, strict=True):
        for key, value in entry.options.items():
            group[key] = tuple(value) if isinstance(value, list) else value


def _check_state(checkpoint: Checkpoint, state: NamedState) -> None:
    missing = sorted(set(state.tensors) - set(checkpoint.state))
    foreign = sorted(set(checkpoint.state) - set(state.tensors))
    if missing or foreign:
        which = f"it lacks {missing[0]}" if missing else f"it has {foreign[0]}, which the model has not"
        raise CheckpointError(f"the checkpoint belongs to another model: {which}")
    for name, tensor in checkpoint.state.items():
        if spec_of(tensor) != state.spec(name):
            raise CheckpointError(
                f"the checkpoint belongs to another model: {name} is {spec_of(tensor)} there and {state.spec(name)} "
                "in the model"
            )


def _check_optimizer(checkpoint: Checkpoint, optimizer: Optimizers, state: NamedState) -> None:
    written = list(zip(checkpoint.manifest.kinds, checkpoint.manifest.groups, strict=True))
    given = list(zip((group.kind for group in groups_of(optimizer)), group_entries(optimizer, state), strict=True))
    theirs, ours = (" and ".join(dict.fromkeys(kind for kind, _ in groups)) for groups in (written, given))
    if theirs != ours:
        raise CheckpointError(
            f"the checkpoint was written with {theirs}, but the optimizer is {ours}; give the same, in the same order"
        )
    if [(kind, entry.parameters) for kind, entry in given] != [(kind, entry.parameters) for kind, entry in written]:
        raise CheckpointError("the checkpoint has other parameter groups than the optimizer")
