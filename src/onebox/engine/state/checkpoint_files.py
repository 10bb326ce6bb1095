"""Checkpoints: folders of safetensors files and one JSON manifest, written atomically, checked when read.

A checkpoint folder holds one folder a save, ``step-00000020``, written under another name, synced to disk and renamed;
a process killed at any moment leaves only complete ones. Nothing is ever unpickled.

Saves are numbered in the order in which they were written, and know the save that their run had made or read before
them. A run that goes back to an earlier save begins a branch there: the newest save of a folder is the one that was
written last, whatever its step.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import msgspec
import safetensors.torch
import torch
from msgspec import Struct
from safetensors import SafetensorError
from torch import Tensor

from onebox.engine.state.partial_saves import remove_save, temporary_folder
from onebox.engine.state.pieces import Key
from onebox.engine.state.tensor_files import write_tensors
from onebox.engine.workload.loss_reduction import ReductionName
from onebox.errors import CheckpointError, UsageError
from onebox.files import make_folder, open_regular, read_regular, sync
from onebox.graph import Precision
from onebox.plan import Plan
from onebox.plan_names import LossyPart
from onebox.trainer_options import Engine, Outer, Recovery, Staging, StaleGradients
from onebox.wire import DTYPES, TensorSpec, spec_of
from onebox.wire.protocol.instructions import Options

VERSION = 4
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
    """A non-tensor entry of an optimizer's state."""

    parameter: str
    key: str
    value: bool | int | float | None


class IslandsEntry(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The islands of a run.

    Args:
        devices: Devices of each island.
        outer: Options of the outer optimizer.
        shares: Share of a batch of each island; empty before the first step.
        plans: Plan of each island, likewise.
        samples: For each fragment, the weight of each island's samples since the last outer step.
        due: For each fragment, the step after which sums that have begun are applied; 0 for none.
    """

    devices: tuple[tuple[int, ...], ...]
    outer: Outer
    shares: tuple[float, ...]
    plans: tuple[Plan, ...]
    samples: tuple[tuple[float, ...], ...]
    due: tuple[int, ...]


class Manifest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Manifest of a checkpoint.

    Args:
        format: Constant format name.
        version: Format version.
        torch: The torch version that wrote it.
        step: Number of completed steps.
        seed: The run's seed.
        precision: ``fp32``, ``bf16`` or ``auto``.
        clip_grad_norm: Gradient clipping norm.
        loss_reduction: ``mean``, ``sum``, ``weighted`` (the function itself is not stored), or none.
        stale: Stale gradients, with the number of exact steps.
        lossy: Parts of the traffic that may be compressed with a loss.
        failed: Number of steps that failed and changed nothing, beside ``step``: their seeds are used up.
        recovery: Recovery from losses.
        staging: Memory for batches beside a step's.
        engine: Execution of steps.
        plan: The plan; ``None`` before the first step.
        optimizer: Class in ``torch.optim`` of each parameter group.
        groups: The parameter groups; those of several optimizers are concatenated.
        numbers: Non-tensor entries of the optimizer's state.
        extra: The user's additions, such as the position in the data.
        identity: Random name of the save, which its copies share.
        parent: Identity of the save that the run had made or read before in this folder, if any.
        number: Its place in the order in which the saves of the folder were written, from 1.
        files: The other files.
        complex: For each file, its complex tensors, stored as pairs of real numbers.
        islands: The islands; ``None`` for a run without. Keys of the optimizer's state then end with their owner: ``@``
            and the number of an island, or ``outer``; an island's own parameters have no key before it.
    """

    format: Literal["onebox-checkpoint"]
    version: int
    torch: str
    step: int
    seed: int
    precision: Precision
    clip_grad_norm: float | None
    loss_reduction: ReductionName | None
    stale: StaleGradients | None
    recovery: Recovery | Literal["auto"] | None
    staging: Staging
    engine: Engine
    plan: Plan | None
    optimizer: tuple[str, ...]
    groups: tuple[GroupEntry, ...]
    numbers: tuple[NumberEntry, ...]
    extra: dict[str, Any]
    identity: str
    parent: str | None
    number: int = 0
    files: tuple[FileEntry, ...] = ()
    complex: dict[str, list[str]] = {}
    islands: IslandsEntry | None = None
    lossy: tuple[LossyPart, ...] = ()
    failed: int = 0


class _FormatVersion(Struct):
    """The version in a manifest, which says whether the rest can be read."""

    version: int


class _Header(_FormatVersion):
    """The entries of a manifest that place a save among others."""

    identity: str
    parent: str | None
    number: int


@dataclass(frozen=True, kw_only=True)
class _Save:
    """A save in a checkpoint folder.

    Args:
        path: Its folder.
        name: Step, and count of earlier saves of this step.
        header: Its place among others; ``None`` if its manifest cannot be read.
        version: Version of its manifest; 0 if it cannot be read.
    """

    path: Path
    name: tuple[int, int]
    header: _Header | None
    version: int


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint in memory.

    Args:
        manifest: The manifest.
        state: Parameters and buffers; names begin with ``model.`` or ``loss.``.
        optimizer: Tensors of the optimizer's state, by (parameter, key); and versions of parameters, likewise.
    """

    manifest: Manifest
    state: Mapping[str, Tensor]
    optimizer: Mapping[tuple[str, str], Tensor]

    def contents(self) -> CheckpointContents:
        """Return the contents to write."""
        tensors = {(name, ""): tensor for name, tensor in self.state.items()} | dict(self.optimizer)
        return CheckpointContents(
            manifest=self.manifest,
            specs={key: spec_of(tensor) for key, tensor in tensors.items()},
            elements=lambda keys: (tensors[key] for key in keys),
        )


@dataclass(frozen=True, kw_only=True)
class CheckpointContents:
    """Contents of a checkpoint to write, streamed rather than held in memory.

    Args:
        manifest: The manifest.
        specs: Spec of each tensor.
        elements: Maps a selection of tensors to their elements in order, one tensor after the other, in chunks of any
            shape.
        slots: Slots of workers that the elements are read from, for those that outlive the present state.
    """

    manifest: Manifest
    specs: Mapping[Key, TensorSpec]
    elements: Callable[[Sequence[Key]], Iterable[Tensor]]
    slots: Mapping[int, int] = field(default_factory=dict)


def write(folder: Path, contents: CheckpointContents, *, keep: int | None) -> Path:
    """Write a checkpoint into a folder, atomically.

    Args:
        folder: The folder; created if missing.
        contents: The contents.
        keep: Number of saves to keep, including this one: the newest of its branch, then the newest of others;
            ``None`` keeps all.

    Returns:
        The folder of this save.

    Raises:
        UsageError: ``keep`` is less than 1, or ``extra`` is not JSON.
        CheckpointError: The disk is full, or the folder is not writable; older saves are intact.
        OneboxError: The contents could not be read; older saves are intact.
    """
    if keep is not None and keep < 1:
        raise UsageError(f"keep={keep}: at least the newest checkpoint must be kept")
    try:
        json.dumps(contents.manifest.extra, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"extra={contents.manifest.extra!r} cannot be written as JSON: {error}") from None
    try:
        make_folder(folder)
        with temporary_folder(folder) as temporary:
            final = _write_files(temporary, folder, contents)
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint could not be written to {folder}: {error}; earlier ones there are whole: make room, or "
            "save to another folder",
            path=folder,
        ) from error
    for old in _by_worth(folder, contents.manifest.identity)[keep:] if keep is not None else ():
        remove_save(old)
    return final


def _write_files(temporary: Path, folder: Path, contents: CheckpointContents) -> Path:
    keys: dict[str, dict[str, Key]] = {name: {} for name in _FILES}
    for name, key in contents.specs:
        prefix, _, rest = name.partition(".")
        file, called = ("optimizer", f"{name}/{key}") if key else (prefix, rest)
        keys[f"{file}.safetensors"][called] = name, key
    entries = [_write_tensors(temporary / name, keys[name], contents) for name in _FILES]
    pairs = {name: [called for called, key in own.items() if _is_complex(contents, key)] for name, own in keys.items()}
    pairs = {name: found for name, found in pairs.items() if found}
    number = 1 + max((save.header.number for save in _listed(folder) if save.header is not None), default=0)
    manifest = msgspec.structs.replace(contents.manifest, number=number, files=tuple(entries), complex=pairs)
    (temporary / _MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
    sync(temporary / _MANIFEST)
    sync(temporary)
    final = _free_name(folder, manifest.step)
    temporary.rename(final)
    sync(folder)
    return final


def _is_complex(contents: CheckpointContents, key: Key) -> bool:
    return DTYPES[contents.specs[key].dtype].is_complex


def _real(spec: TensorSpec) -> TensorSpec:
    """Return the spec of a tensor as safetensors stores it: complex numbers become pairs in an additional dimension."""
    if not DTYPES[spec.dtype].is_complex:
        return spec
    return TensorSpec({"complex64": "float32", "complex128": "float64"}[spec.dtype], (*spec.shape, 2))


def _write_tensors(file: Path, keys: Mapping[str, Key], contents: CheckpointContents) -> FileEntry:
    """Write a file as its tensors arrive."""
    specs = {name: _real(contents.specs[key]) for name, key in keys.items()}
    written = write_tensors(file, specs, lambda names: contents.elements([keys[name] for name in names]))
    sync(file)
    return FileEntry(file.name, written.size_bytes, written.sha256)


def saves(folder: Path) -> list[Path]:
    """Return the saves in a checkpoint folder, from the one that was written last.

    One that cannot be read comes first if it may be the last one, by its name or the time of its folder.
    """
    found = _listed(folder)
    known = [save for save in found if save.header is not None]
    last = max(known, key=_order, default=None)

    def order(save: _Save) -> tuple[float, tuple[int, int]]:
        if save.header is not None:
            return _order(save)
        older = 0 < save.version < VERSION and last is not None
        return (-1 if older or (last is not None and not _may_follow(save, last)) else math.inf), save.name

    return [save.path for save in sorted(found, key=order, reverse=True)]


def find_save(path: Path) -> Path:
    """Return the folder of a save: that of the newest one for a checkpoint folder, or the path itself.

    Raises:
        CheckpointError: There is none.
    """
    if (path / _MANIFEST).exists():
        return path
    found = saves(path)
    if not found:
        raise CheckpointError(f"{path} holds no checkpoint: no manifest.json and no step-… folder", path=path)
    return found[0]


def _listed(folder: Path) -> list[_Save]:
    """Return the saves in a checkpoint folder."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match:
            found.append(_listed_save(path, (int(match[1]), int(match[2] or 0))))
    return found


def _listed_save(path: Path, name: tuple[int, int]) -> _Save:
    header, version = None, 0
    with contextlib.suppress(OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        data = _manifest_bytes(path)
        version = msgspec.json.decode(data, type=_FormatVersion).version
        header = msgspec.json.decode(data, type=_Header) if version == VERSION else None
    return _Save(path=path, name=name, header=header, version=version)


def _order(save: _Save) -> tuple[float, tuple[int, int]]:
    assert save.header is not None
    return save.header.number, save.name


def _may_follow(save: _Save, last: _Save) -> bool:
    """Return whether a save that cannot be read may have been written after another one."""
    with contextlib.suppress(OSError):  # removed meanwhile
        return save.name > last.name or save.path.stat().st_mtime_ns > last.path.stat().st_mtime_ns
    return False


def _by_worth(folder: Path, identity: str) -> list[Path]:
    """Return the saves in a checkpoint folder: those of a branch, newest first, then those that it has abandoned.

    Args:
        folder: The folder.
        identity: Identity of the branch's newest save.
    """
    known = {save.header.identity: (save.path, save.header.parent) for save in _listed(folder) if save.header}
    branch: list[Path] = []
    following: str | None = identity
    while following is not None and following in known:
        path, following = known.pop(following)
        branch.append(path)
    return [*branch, *(path for path in saves(folder) if path not in branch)]


def read(path: Path) -> Checkpoint:
    """Read a checkpoint: the newest save of a folder, or the folder of one save.

    Its tensors are views of the mapped files: uploading them takes no memory that the system could not take back.

    Raises:
        CheckpointError: There is none, or it is damaged or has another format; the message names the fault.
    """
    path = find_save(path)
    manifest = read_manifest(path)
    for entry in manifest.files:
        _verify(path, entry)
    tensors: dict[str, dict[str, Tensor]] = {}
    for name in _FILES:
        try:
            tensors[name] = safetensors.torch.load_file(path / name)
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(f"{path / name} is no safetensors file: {error}", path=path / name) from None
        for key in manifest.complex.get(name, ()):
            tensors[name][key] = _complex(path / name, key, tensors[name].get(key))
    state = {f"model.{name}": tensor for name, tensor in tensors["model.safetensors"].items()}
    state |= {f"loss.{name}": tensor for name, tensor in tensors["loss.safetensors"].items()}
    optimizer = {}
    for name, tensor in tensors["optimizer.safetensors"].items():
        parameter, _, key = name.rpartition("/")
        optimizer[parameter, key] = tensor
    return Checkpoint(manifest=manifest, state=state, optimizer=optimizer)


def _complex(path: Path, key: str, pairs: Tensor | None) -> Tensor:
    """Return a complex tensor that was stored as pairs.

    Raises:
        CheckpointError: The file has no such pairs.
    """
    if pairs is None or pairs.dtype not in (torch.float32, torch.float64) or not pairs.dim() or pairs.shape[-1] != 2:
        found = "nothing" if pairs is None else f"{pairs.dtype} {list(pairs.shape)}"
        raise CheckpointError(f"{path} has {found} for {key!r} where pairs for complex numbers are to be", path=path)
    return torch.view_as_complex(pairs)


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of a save, given its folder.

    Raises:
        CheckpointError: There is none, or it is damaged or has another format; the message names the fault.
    """
    file = path / _MANIFEST
    try:
        data = _manifest_bytes(path)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}", path=file) from error
    try:
        version = msgspec.json.decode(data, type=_FormatVersion).version
        if version != VERSION:
            raise CheckpointError(f"{file} is of version {version}; this onebox reads version {VERSION}", path=file)
        manifest = msgspec.json.decode(data, type=Manifest)
        _check_groups(msgspec.json.decode(data))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{file} is damaged, or no manifest of onebox: {error}", path=file) from None
    if len(manifest.optimizer) != len(manifest.groups):
        raise CheckpointError(
            f"{file} has optimizers of {len(manifest.optimizer)} parameter groups, but {len(manifest.groups)} groups",
            path=file,
        )
    if manifest.islands is not None and (fault := _fault_of(manifest.islands)):
        raise CheckpointError(f"{file} contradicts itself: {fault}", path=file)
    if sorted(entry.name for entry in manifest.files) != sorted(_FILES):
        raise CheckpointError(f"{file} lists other files than {', '.join(_FILES)}", path=file)
    return manifest


def _fault_of(islands: IslandsEntry) -> str:
    """Return a contradiction in the description of islands; empty if there is none."""
    count, fragments = len(islands.devices), islands.outer.fragments
    devices = [device for own in islands.devices for device in own]
    weights = [weight for own in (islands.shares, *islands.samples) for weight in own]
    if not all(islands.devices) or len(set(devices)) < len(devices) or min(devices, default=-1) < 0:
        return f"its islands have the devices {islands.devices}"
    for name, own in (("shares", islands.shares), ("plans", islands.plans)):
        if len(own) not in (0, count):
            return f"{len(own)} {name} for {count} islands"
    if len(islands.samples) != fragments or any(len(own) != count for own in islands.samples):
        return f"samples {islands.samples} for {fragments} fragments and {count} islands"
    if len(islands.due) != fragments or min(islands.due, default=0) < 0:
        return f"outer steps due after steps {islands.due} for {fragments} fragments"
    if min(weights, default=0.0) < 0:
        return f"shares {islands.shares} and samples {islands.samples}"
    return ""


def _manifest_bytes(path: Path) -> bytes:
    """Return the manifest of a save.

    Raises:
        OSError: It cannot be read, or is too large.
    """
    return read_regular(path / _MANIFEST, _MANIFEST_BYTES)


def _check_groups(manifest: Mapping[str, Any]) -> None:
    """Refuse unknown fields in groups of options, which msgspec ignores in data classes.

    Raises:
        msgspec.ValidationError: There is one.
    """
    for name, kind in (("stale", StaleGradients), ("recovery", Recovery), ("staging", Staging), ("engine", Engine)):
        given = manifest[name]
        unknown = set(given) - {field.name for field in fields(kind)} if isinstance(given, dict) else set()
        if unknown:
            raise msgspec.ValidationError(f"{name} has an unknown field {min(unknown)!r}")
    outer = (manifest.get("islands") or {}).get("outer", {})
    unknown = set(outer) - {field.name for field in fields(Outer)}
    if unknown:
        raise msgspec.ValidationError(f"outer has an unknown field {min(unknown)!r}")


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
    with open(open_regular(file), "rb") as stream:
        return FileEntry(file.name, file.stat().st_size, hashlib.file_digest(stream, "sha256").hexdigest())


def _free_name(folder: Path, step: int) -> Path:
    """Return a name that sorts after all saves of the same step; reusing the name of a removed save would sort it as
    older.
    """
    name = f"step-{step:08d}"
    had = (_NAME.fullmatch(path.name) for path in folder.glob(f"{name}*"))
    again = max((int(match[2] or 0) + 1 for match in had if match and int(match[1]) == step), default=0)
    return folder / (f"{name}.{again}" if again else name)
