"""Checkpoints: folders of safetensors files and one JSON manifest, written atomically, checked when read.

A checkpoint folder holds one folder a save, ``step-00000020``, written under another name, synced to disk and renamed;
a process that is killed at any moment leaves whole ones only. Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import safetensors.torch
from msgspec import Struct
from safetensors import SafetensorError
from torch import Tensor

from onebox.engine.loss_reduction import ReductionName
from onebox.errors import CheckpointError, UsageError
from onebox.graph import Precision
from onebox.plan import Plan
from onebox.wire.steps import Options

VERSION = 2
_MANIFEST = "manifest.json"
_FILES = ("model.safetensors", "loss.safetensors", "optimizer.safetensors")
_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
_MANIFEST_BYTES = 256 << 20


class FileEntry(Struct, frozen=True, forbid_unknown_fields=True):
    """A file of a checkpoint: its name, bytes, and SHA-256."""

    name: str
    size_bytes: int
    sha256: str


class GroupEntry(Struct, frozen=True, forbid_unknown_fields=True):
    """A parameter group: the names of its parameters, and its options."""

    parameters: tuple[str, ...]
    options: Options


class NumberEntry(Struct, frozen=True, forbid_unknown_fields=True):
    """An entry of an optimizer's state that is no tensor."""

    parameter: str
    key: str
    value: bool | int | float | None


class Manifest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a checkpoint is.

    Args:
        format: Always the same word.
        version: Of this form.
        torch: The torch version that wrote it.
        step: Steps done.
        seed: The run's seed.
        precision: ``fp32``, ``bf16`` or ``auto``.
        clip_grad_norm: For clipping.
        plan: The plan; none before the first step.
        optimizer: Class in ``torch.optim`` of each parameter group; in checkpoints of earlier days one for all.
        groups: The parameter groups, those of several optimizers one behind the other.
        numbers: Entries of the optimizer's state that are no tensors.
        extra: What the user added, such as the position in the data.
        files: The other files.
        fuse: Whether activations that are written out become single operators.
        staleness: How many steps old the weights may be that a step is computed with.
        delay: What was asked to be done about gradients that are late because of it.
        warm_up: So many steps come before the first that is computed with older weights.
        overlap: Whether exact steps overlap.
        loss_reduction: ``mean``, ``sum``, ``weighted`` with a function that is no part of it, or none.
    """

    format: Literal["onebox-checkpoint"]
    version: int
    torch: str
    step: int
    seed: int
    precision: Precision
    clip_grad_norm: float | None
    plan: Plan | None
    optimizer: str | tuple[str, ...]
    groups: tuple[GroupEntry, ...]
    numbers: tuple[NumberEntry, ...]
    extra: dict[str, Any]
    files: tuple[FileEntry, ...] = ()
    fuse: bool = False
    staleness: int = 0
    delay: str = "auto"
    warm_up: int = 0
    overlap: bool = False
    loss_reduction: ReductionName | None = None

    @property
    def kinds(self) -> tuple[str, ...]:
        """Class in ``torch.optim`` of each parameter group."""
        return (self.optimizer,) * len(self.groups) if isinstance(self.optimizer, str) else self.optimizer


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint in memory.

    Args:
        manifest: What it is.
        state: Parameters and buffers; names begin with ``model.`` or ``loss.``.
        optimizer: Tensors of the optimizer's state, by (parameter, key); and versions of parameters, likewise.
    """

    manifest: Manifest
    state: Mapping[str, Tensor]
    optimizer: Mapping[tuple[str, str], Tensor]


def write(folder: Path, checkpoint: Checkpoint, *, keep: int | None) -> Path:
    """Write a checkpoint into a folder, atomically.

    Args:
        folder: Made if it is not there.
        checkpoint: What to write.
        keep: How many saves to keep: this one and the newest others; all when ``None``.

    Returns:
        The folder of this save.

    Raises:
        UsageError: ``keep`` is less than 1, or ``extra`` is not JSON.
        CheckpointError: The disk is full, or the folder cannot be written to; older saves are whole.
    """
    if keep is not None and keep < 1:
        raise UsageError(f"keep={keep}: at least the newest checkpoint must be kept")
    try:
        json.dumps(checkpoint.manifest.extra, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"extra={checkpoint.manifest.extra!r} cannot be written as JSON: {error}") from None
    temporary = folder / f".writing-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(folder)
        temporary.mkdir()
        try:
            final = _write_files(temporary, folder, checkpoint)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"the checkpoint could not be written to {folder}: {error}; earlier ones there are whole: make room, or "
            "save to another folder",
            path=folder,
        ) from error
    others = [save for save in saves(folder) if save != final]
    for old in others[keep - 1 :] if keep is not None else ():
        shutil.rmtree(old, ignore_errors=True)
    return final


def _write_files(temporary: Path, folder: Path, checkpoint: Checkpoint) -> Path:
    tensors: dict[str, dict[str, Tensor]] = {name: {} for name in _FILES}
    for name, tensor in checkpoint.state.items():
        prefix, _, rest = name.partition(".")
        tensors[f"{prefix}.safetensors"][rest] = tensor.contiguous()
    for (name, key), tensor in checkpoint.optimizer.items():
        tensors["optimizer.safetensors"][f"{name}/{key}"] = tensor.contiguous()
    entries = []
    for name in _FILES:
        safetensors.torch.save_file(tensors[name], temporary / name)
        entries.append(_entry(temporary / name))
        _sync(temporary / name)
    manifest = msgspec.structs.replace(checkpoint.manifest, files=tuple(entries))
    (temporary / _MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
    _sync(temporary / _MANIFEST)
    _sync(temporary)
    final = _free_name(folder, manifest.step)
    temporary.rename(final)
    _sync(folder)
    return final


def saves(folder: Path) -> list[Path]:
    """Return the saves in a checkpoint folder, newest first."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match:
            found.append(((int(match[1]), int(match[2] or 0)), path))
    return [path for _, path in sorted(found, reverse=True)]


def read(path: Path) -> Checkpoint:
    """Read a checkpoint: the newest save of a folder, or the folder of one save.

    Raises:
        CheckpointError: There is none, or it is damaged or foreign; the message says what is wrong.
    """
    if not (path / _MANIFEST).exists():
        found = saves(path)
        if not found:
            raise CheckpointError(f"{path} holds no checkpoint: no manifest.json and no step-… folder", path=path)
        path = found[0]
    manifest = _read_manifest(path)
    for entry in manifest.files:
        _verify(path, entry)
    tensors: dict[str, dict[str, Tensor]] = {}
    for name in _FILES:
        try:
            tensors[name] = safetensors.torch.load_file(path / name)
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(f"{path / name} is no safetensors file: {error}", path=path / name) from None
    state = {f"model.{name}": tensor for name, tensor in tensors["model.safetensors"].items()}
    state |= {f"loss.{name}": tensor for name, tensor in tensors["loss.safetensors"].items()}
    optimizer = {}
    for name, tensor in tensors["optimizer.safetensors"].items():
        parameter, _, key = name.rpartition("/")
        optimizer[parameter, key] = tensor
    return Checkpoint(manifest=manifest, state=state, optimizer=optimizer)


def _read_manifest(path: Path) -> Manifest:
    file = path / _MANIFEST
    try:
        if file.stat().st_size > _MANIFEST_BYTES:
            raise CheckpointError(f"{file} is larger than {_MANIFEST_BYTES} bytes", path=file)
        data = file.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}", path=file) from error
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{file} is damaged, or no manifest of onebox: {error}", path=file) from None
    if manifest.version != VERSION:
        raise CheckpointError(
            f"{file} is of version {manifest.version}; this onebox reads version {VERSION}", path=file
        )
    if len(manifest.kinds) != len(manifest.groups):
        raise CheckpointError(
            f"{file} has optimizers of {len(manifest.kinds)} parameter groups, but {len(manifest.groups)} groups",
            path=file,
        )
    if sorted(entry.name for entry in manifest.files) != sorted(_FILES):
        raise CheckpointError(f"{file} lists other files than {', '.join(_FILES)}", path=file)
    return manifest


def _verify(path: Path, entry: FileEntry) -> None:
    file = path / entry.name
    if not file.is_file():
        raise CheckpointError(f"{file} is missing; resume from an earlier save beside it", path=file)
    found = _entry(file)
    if found.size_bytes != entry.size_bytes:
        raise CheckpointError(
            f"{file} has {found.size_bytes} bytes, but the manifest says {entry.size_bytes}; it is cut short or "
            "foreign: resume from an earlier save beside it",
            path=file,
        )
    if found.sha256 != entry.sha256:
        raise CheckpointError(
            f"{file} has another checksum than the manifest says; it is damaged: resume from an earlier save beside it",
            path=file,
        )


def _entry(file: Path) -> FileEntry:
    with file.open("rb") as stream:
        return FileEntry(file.name, file.stat().st_size, hashlib.file_digest(stream, "sha256").hexdigest())


def _free_name(folder: Path, step: int) -> Path:
    """Return a name behind all those of the same step: one that a removed save had would be that of an older one."""
    name = f"step-{step:08d}"
    had = (_NAME.fullmatch(path.name) for path in folder.glob(f"{name}*"))
    again = max((int(match[2] or 0) + 1 for match in had if match and int(match[1]) == step), default=0)
    return folder / (f"{name}.{again}" if again else name)


def _remove_leftovers(folder: Path) -> None:
    """Remove what a process that is gone has left half written."""
    for path in folder.glob(".writing-*"):
        owner = path.name.removeprefix(".writing-")
        if not owner.isdigit() or int(owner) == os.getpid() or not Path(f"/proc/{owner}").exists():
            shutil.rmtree(path, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
