"""Conversion of the workers' state to a checkpoint, and of a matching checkpoint to a user's model and optimizer."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor, nn

from onebox.engine.partition.weight_versions import KEYS
from onebox.engine.state.checkpoint_files import (
    VERSION,
    Checkpoint,
    CheckpointContents,
    GroupEntry,
    IslandsEntry,
    Manifest,
    NumberEntry,
)
from onebox.engine.state.pieces import Key, TensorSource
from onebox.engine.state.remote import RESIDUAL, RemoteState, StartState
from onebox.engine.state.transfer import StateTransfer
from onebox.engine.state.weight_files import write_weights
from onebox.engine.workload.loss_reduction import LossReduction, ReductionName
from onebox.engine.workload.named_state import NamedState, named_state, trained_names
from onebox.engine.workload.parameter_groups import Optimizers, groups_of, notes_of, optimizers_in
from onebox.errors import CheckpointError, UsageError
from onebox.plan import Plan
from onebox.trainer_options import DataParallel, Shares
from onebox.wire import spec_of


def group_entries(optimizer: Optimizers, state: NamedState) -> tuple[GroupEntry, ...]:
    """Return the parameter groups of optimizers with the names of their parameters, and what schedulers keep there."""
    names = {id(tensor): name for name, tensor in state.tensors.items()}
    return tuple(
        GroupEntry(tuple(names[id(parameter)] for parameter in group.parameters), {**group.options, **notes})
        for group, notes in zip(groups_of(optimizer), notes_of(optimizer), strict=True)
    )


def contents(
    remote: RemoteState, transfer: StateTransfer, *, frozen: bool = False, **settings: Any
) -> CheckpointContents:
    """Return the contents of a checkpoint of the workers' state, read one tensor at a time.

    Args:
        remote: The remote state.
        transfer: The transfer that reads it.
        frozen: Whether to have workers copy it first, so that it can be read while steps go on; the copies are to be
            dropped by :meth:`StateTransfer.thaw`.
        **settings: Fields of :class:`Manifest` from the trainer.

    Raises:
        OneboxError: A worker failed, or the pool is closed.
    """
    sources, here = dict(transfer.sources()), transfer.not_held()
    remembered, residuals = transfer.remembered(), transfer.residuals()
    sources |= {**remembered.tensors, **transfer.versions(), **residuals.tensors}
    here |= {**remembered.here, **residuals.here}
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
    slots: Mapping[int, int] = {}
    if frozen:
        here = {key: tensor.detach().clone() for key, tensor in here.items()}
        copies = transfer.freeze(sources)
        sources, slots = dict(copies.sources), copies.slots
    elements = _elements(transfer, sources, here, aside=frozen)
    return CheckpointContents(manifest=manifest, specs=specs, elements=elements, slots=slots)


def _elements(
    transfer: StateTransfer, sources: Mapping[Key, TensorSource], here: Mapping[Key, Tensor], *, aside: bool = False
) -> Callable[[Sequence[Key]], Iterator[Tensor]]:
    """Return the function that reads tensors from workers, or from this process."""

    def elements(keys: Sequence[Key]) -> Iterator[Tensor]:
        for away, run in itertools.groupby(keys, lambda key: key in sources):
            if away:
                yield from transfer.elements({key: sources[key] for key in run}, aside=aside)
            else:
                yield from (here[key].detach() for key in run)

    return elements


def write_model(folder: Path, model: nn.Module, remote: RemoteState, transfer: StateTransfer, shard_bytes: int) -> None:
    """Write the weights of a model from the workers into a folder, under the names of its state dict.

    Args:
        folder: The folder; see :func:`write_weights`.
        model: The model.
        remote: The remote state.
        transfer: The transfer that reads it.
        shard_bytes: Most bytes of the tensors of a file.

    Raises:
        UsageError: The folder has weights already.
        CheckpointError: It cannot be written.
        OneboxError: A worker failed, or the pool is closed.
    """
    sources, here = transfer.sources(), transfer.not_held()
    saved = {f"model.{name}" for name in model.state_dict()}
    names = {name.removeprefix("model."): (name, "") for name in remote.named.tensors if name in saved}
    specs = {name: remote.named.spec(key[0]) for name, key in names.items()}
    elements = _elements(transfer, sources, here)
    write_weights(folder, specs, lambda wanted: elements([names[each] for each in wanted]), shard_bytes=shard_bytes)


Stored = Literal["stored"]
"""The value in the checkpoint, as an argument of a trainer that resumes."""


def resumed_plan(
    stored: Plan | None, asked: Plan | DataParallel | Literal["auto", "stored"], devices: int, *, spread: bool = False
) -> Plan | DataParallel | Literal["auto"] | None:
    """Return the plan of a trainer that resumes; ``None`` for that of a trainer without a request.

    The stored plan is used if the pool has its devices; else the run becomes data parallel with the same micro-batches.
    On one host a data-parallel run extends to further devices of the pool. Shares left to ``auto`` are the stored ones
    if the devices are the same.

    Args:
        stored: The checkpoint's plan; ``None`` for one saved before the first step.
        asked: The user's choice.
        devices: Number of devices in the pool.
        spread: Whether they are on several hosts, where a plan may leave devices idle on purpose.
    """
    if isinstance(asked, Plan) or asked == "auto":
        return asked
    same = stored is not None and set(stored.devices) == set(range(devices))
    shares: Shares = stored.stages[0].shares if stored is not None and stored.whole and same else "auto"
    if isinstance(asked, DataParallel):
        return dataclasses.replace(asked, shares=shares) if asked.shares == "auto" else asked
    if stored is None:
        return None
    if not stored.whole or (spread and not same and max(stored.devices) < devices):
        return stored if max(stored.devices) < devices else DataParallel(micro_batch=stored.micro_batch)
    if same and (stored.stages[0].formats or stored.codecs):
        return stored
    return DataParallel(
        micro_batch=stored.micro_batch,
        shares=shares,
        sync=stored.sync,
        update=stored.update,
        shard_optimizer=stored.optimizer == "sharded",
    )


def plan_elsewhere(plan: Plan, before: Sequence[int], now: Sequence[int]) -> Plan | DataParallel:
    """Return a plan for other devices, with the same micro-batches: the same plan if these are as many.

    Args:
        plan: The plan.
        before: The devices that it was made for.
        now: The devices in their places.
    """
    if len(before) != len(now):
        return DataParallel(micro_batch=plan.micro_batch)
    place = dict(zip(before, now, strict=True))
    stages = tuple(
        msgspec.structs.replace(
            stage, replicas=tuple(tuple(place[device] for device in replica) for replica in stage.replicas)
        )
        for stage in plan.stages
    )
    table = plan.table if list(before) == list(now) else ()
    schedule = plan.schedule if table == plan.table else "1f1b"
    return msgspec.structs.replace(plan, stages=stages, table=table, schedule=schedule)


def resumed_reduction(stored: ReductionName | None, asked: LossReduction | Stored) -> LossReduction:
    """Return the loss reduction of a trainer that resumes.

    Args:
        stored: The name in the checkpoint.
        asked: The user's choice.

    Raises:
        UsageError: The stored one is a function, which checkpoints do not contain, and the user gives none.
    """
    if asked != "stored":
        return asked
    if stored == "weighted":
        raise UsageError(
            "the checkpoint was made with loss_reduction=onebox.Weighted(fn), and a function is in no checkpoint: "
            "give the same one to resume(..., loss_reduction=onebox.Weighted(fn))"
        )
    return stored


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """Point of a run from which a trainer continues.

    Args:
        step: Number of steps done.
        failed: Number of steps that failed beside these.
        path: Folder of the save.
        identity: Its identity.
        plan: Plan of the run; ``None`` if unknown.
        extra: Data saved with the checkpoint by the user.
        state: State of the optimizer, and versions of parameters.
        islands: The islands; ``None`` for a run without.
        weights: Parameters and buffers.
    """

    step: int
    failed: int
    path: Path
    identity: str
    plan: Plan | None
    extra: dict[str, Any]
    state: StartState
    islands: IslandsEntry | None = None
    weights: Mapping[str, Tensor] = field(default_factory=dict)


def resume_point(checkpoint: Checkpoint, path: Path) -> ResumePoint:
    """Return the point of a run at which a checkpoint was saved.

    Args:
        checkpoint: The checkpoint.
        path: Folder of its save.
    """
    manifest = checkpoint.manifest
    remembered = [
        *(
            (name, key, tensor)
            for (name, key), tensor in checkpoint.optimizer.items()
            if key not in KEYS and key != RESIDUAL
        ),
        *((entry.parameter, entry.key, entry.value) for entry in manifest.numbers),
    ]
    versions = {(name, key): tensor for (name, key), tensor in checkpoint.optimizer.items() if key in KEYS}
    residuals = {name: tensor for (name, key), tensor in checkpoint.optimizer.items() if key == RESIDUAL}
    return ResumePoint(
        step=manifest.step,
        failed=manifest.failed,
        path=path,
        identity=manifest.identity,
        plan=manifest.plan,
        extra=manifest.extra,
        state=StartState(optimizer=remembered, versions=versions, residuals=residuals),
        islands=manifest.islands,
        weights=checkpoint.state,
    )


def restore(checkpoint: Checkpoint, model: nn.Module, loss: Any, optimizer: Optimizers) -> None:
    """Overwrite a model's weights, except on the meta device, and its optimizers' options with those of a checkpoint.

    Raises:
        CheckpointError: It belongs to another model or optimizer; nothing has been overwritten.
        UsageError: An optimizer has parameters that are none of the model's; likewise.
    """
    state = named_state(model, loss, lambda: 0)
    _check_state(checkpoint, state)
    _check_optimizer(checkpoint, optimizer, state)
    with torch.no_grad():
        for name, tensor in checkpoint.state.items():
            state.tensors[name].copy_(tensor)  # nothing is written on the meta device
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
    trained_names(state, optimizer)
    written = list(zip(checkpoint.manifest.optimizer, checkpoint.manifest.groups, strict=True))
    given = list(zip((group.kind for group in groups_of(optimizer)), group_entries(optimizer, state), strict=True))
    theirs, ours = (" and ".join(dict.fromkeys(kind for kind, _ in groups)) for groups in (written, given))
    if theirs != ours:
        raise CheckpointError(
            f"the checkpoint was written with {theirs}, but the optimizer is {ours}; give the same, in the same order"
        )
    if [(kind, entry.parameters) for kind, entry in given] != [(kind, entry.parameters) for kind, entry in written]:
        raise CheckpointError("the checkpoint has other parameter groups than the optimizer")
