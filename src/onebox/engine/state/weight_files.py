"""Weights in a folder of safetensors files, as on a hub: matched with a model by name, read one tensor at a time.

The folder has one file, ``model.safetensors``, or several with ``model.safetensors.index.json``, which names the file
of each tensor. Everything is checked from the headers of the files before anything is read.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import msgspec
import torch
from msgspec import Struct
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy

from onebox.engine.state.partial_saves import temporary_folder
from onebox.engine.state.tensor_files import StoredTensor, stored_tensors, write_tensors
from onebox.engine.workload.named_state import NamedState
from onebox.errors import CheckpointError, UsageError
from onebox.files import make_folder, read_regular, sync
from onebox.frozen_weights import QuantizedLinear
from onebox.trainer_options import Weights
from onebox.wire import DTYPES, TensorSpec

_LOG = logging.getLogger("onebox")

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_INDEX_BYTES = 64 << 20
_FILE_NAME = re.compile(r"[^/\\:\0]+\.safetensors")
_PEFT_PREFIX = "base_model.model."
_PEFT_PARTS = re.compile(r"\.(?:base_layer|original_module|modules_to_save\.[^.]+)(?=\.)")
"""Parts of names that PEFT adds to those of the model that it has wrapped (its ``BaseTunerLayer`` and
``ModulesToSaveWrapper``)."""

_CHUNK_BYTES = 4 << 20


class _Index(Struct):
    """An index of files."""

    weight_map: dict[str, str]


class StoredWeights(Mapping[str, Tensor]):
    """The weights of a model in files, by their names in the training state; each access reads the tensor anew.

    Args:
        found: Reads each.
    """

    def __init__(self, found: Mapping[str, Callable[[], Tensor]]) -> None:
        self._found = dict(found)

    def __getitem__(self, name: str) -> Tensor:
        return self._found[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


class _QuantizedWeight:
    """A weight in a file, of which a layer has codes and scales.

    Args:
        stored: The weight.
        layer: The layer.
    """

    def __init__(self, stored: StoredTensor, layer: QuantizedLinear) -> None:
        self._stored, self._layer = stored, layer
        self._scales: Tensor | None = None

    def codes(self) -> Tensor:
        """Return the codes; the scales, which are small, are kept until they are asked for."""
        codes, self._scales = self._quantized()
        return codes

    def scales(self) -> Tensor:
        """Return the scales."""
        scales, self._scales = self._scales, None
        return self._quantized()[1] if scales is None else scales

    def _quantized(self) -> tuple[Tensor, Tensor]:
        codes, scales = self._layer.quantized(self._stored.read())
        return codes.to(self._layer.codes.dtype), scales.to(self._layer.scales.dtype)


@contextlib.contextmanager
def meta_parameters() -> Iterator[None]:
    """Make the parameters of modules that this thread makes within the context on the meta device, without memory.

    Buffers have values, which their modules compute. The values of the parameters come from ``weights=`` of
    :class:`Trainer`; a parameter that is in no file gets values in this process by the module's ``to_empty`` and its
    own initialisation.

    Example:
        >>> import torch
        >>> with meta_parameters():
        ...     model = torch.nn.Sequential(torch.nn.Linear(4096, 4096), torch.nn.BatchNorm1d(4))
        >>> model[0].weight.device, model[1].running_var
        (device(type='meta'), tensor([1., 1., 1., 1.]))
    """
    own = threading.get_ident()
    made: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter]] = {}

    def moved(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if threading.get_ident() != own or parameter is None or parameter.is_meta or is_lazy(parameter):
            return None
        known, on_meta = made.get(id(parameter), (None, None))
        if known is None or known() is not parameter:  # one that another module has already stays the same for both
            on_meta = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
            made[id(parameter)] = weakref.ref(parameter), on_meta
        return on_meta

    handle = register_module_parameter_registration_hook(moved)  # type: ignore[arg-type] # may return a parameter
    try:
        yield
    finally:
        handle.remove()


def first_values(weights: str | Path | Weights | None, model: nn.Module, state: NamedState) -> Mapping[str, Tensor]:
    """Return the values of the tensors on the meta device, read when they are used; see :func:`load_weights`.

    Args:
        weights: The folder; ``None`` for none.
        model: The model.
        state: Its training state, and that of the loss.

    Raises:
        UsageError: A tensor is on the meta device without a folder, or the model has no such part.
        CheckpointError: The folder cannot be read, or does not fit the model; nothing has been written.
    """
    meta = [name for name, tensor in state.tensors.items() if tensor.is_meta]
    if weights is None:
        if meta:
            raise UsageError(
                f"{_listed(meta)} on the meta device, without values: give the folder of the weights, weights=..., or "
                "make the model on the CPU"
            )
        return {}
    return load_weights(weights if isinstance(weights, Weights) else Weights(weights), model, state)


def load_weights(weights: Weights, model: nn.Module, state: NamedState) -> StoredWeights:
    """Match the weights in a folder with a model, and write those into it whose tensors are not on the meta device.

    Args:
        weights: The folder, and the part of the model that it is for.
        model: The model.
        state: Its training state.

    Returns:
        The weights of the tensors on the meta device.

    Raises:
        UsageError: The model has no such part.
        CheckpointError: The folder cannot be read, or does not fit the model; nothing has been written.
    """
    part = _part_of(model, weights.module)
    own = _own_values(part)
    stored = {
        name: each
        for name, each in _stored_in(Path(weights.path).expanduser()).items()
        if name not in own and not any(fnmatchcase(name, pattern) for pattern in weights.skip)
    }
    wanted = _names_in_files(part, state, own)
    layers = {name: layer for name, layer in _quantized_layers(part).items() if name in stored}
    known = {*layers, *(candidate for names in wanted.values() for candidate in names)}
    if strangers := sorted(set(stored) - known):
        raise CheckpointError(
            f"weights={str(weights.path)!r} has {_listed(strangers)}, which the model has not: make the model that it "
            f"is for, name its place with onebox.Weights(folder, module=...), or leave that out with "
            f"onebox.Weights(folder, skip=[{strangers[0]!r}])",
            path=stored[strangers[0]].file,
        )
    found: dict[str, Callable[[], Tensor]] = {}
    for name, candidates in wanted.items():
        there = [stored[candidate] for candidate in candidates if candidate in stored]
        if there:
            found[name] = there[0].read
            _require_alike(there)
            _require_spec(name, there[0], state.spec(name))
    names = {id(tensor): name for name, tensor in state.tensors.items()}
    for name, layer in layers.items():
        _require_spec(
            name, stored[name], TensorSpec(_float_type(stored[name]), (layer.out_features, layer.in_features))
        )
        weight = _QuantizedWeight(stored[name], layer)
        found |= {names[id(layer.codes)]: weight.codes, names[id(layer.scales)]: weight.scales}
    if lost := [name for name, tensor in state.tensors.items() if tensor.is_meta and name not in found]:
        raise CheckpointError(
            f"weights={str(weights.path)!r} has nothing for {_listed(lost)}, on the meta device in the model, without "
            "values: give values in this process, as module.to_empty(device='cpu') and the module's own initialisation "
            "do, or make the model under onebox.meta_parameters(), which gives buffers values",
            path=weights.path,
        )
    if kept := [name for name in wanted if name not in found]:
        _LOG.info("weights=%r has nothing for %s: what the model has is kept", str(weights.path), _listed(kept))
    here = {name: each for name, each in found.items() if not state.tensors[name].is_meta}
    with torch.no_grad():
        for name, each in here.items():
            state.tensors[name].copy_(each())
    return StoredWeights({name: each for name, each in found.items() if name not in here})


def _part_of(model: nn.Module, path: str) -> nn.Module:
    try:
        return model.get_submodule(path)
    except AttributeError:
        names = [name for name, _ in model.named_children()]
        raise UsageError(f"module={path!r}: the model has no such part; it has {', '.join(names) or 'none'}") from None


def _names_in_files(part: nn.Module, state: NamedState, own_values: Collection[str]) -> dict[str, list[str]]:
    """Return the names in files that each tensor of a part of the model may have: those of tied tensors, too."""
    places = {id(tensor): name for name, tensor in state.tensors.items()}
    found: dict[str, list[str]] = {}
    for own, tensor in itertools.chain(
        part.named_parameters(remove_duplicate=False), part.named_buffers(remove_duplicate=False)
    ):
        if id(tensor) in places and own not in own_values:
            names = found.setdefault(places[id(tensor)], [])
            names += [name for name in dict.fromkeys((own, _bare(own))) if name not in names]
    return found


def _quantized_layers(part: nn.Module) -> dict[str, QuantizedLinear]:
    """Return the layers that take their codes from a weight in a file, by the names that it may have."""
    found: dict[str, QuantizedLinear] = {}
    for path, module in part.named_modules(remove_duplicate=False):
        if isinstance(module, QuantizedLinear):
            own = f"{path}.weight" if path else "weight"
            found |= dict.fromkeys((own, _bare(own)), module)
    return found


def _bare(name: str) -> str:
    """Return a name without what PEFT adds to it."""
    return _PEFT_PARTS.sub("", name.removeprefix(_PEFT_PREFIX))


def _float_type(stored: StoredTensor) -> str:
    """Return the type of a weight that is to be quantised, float32 if it is none that can be."""
    spec = stored.spec
    return spec.dtype if spec is not None and DTYPES[spec.dtype].is_floating_point else "float32"


def _own_values(module: nn.Module) -> set[str]:
    """Return the names of buffers with values that are no part of a module's state dict."""
    return {
        f"{path}.{name}" if path else name
        for path, part in module.named_modules(remove_duplicate=False)
        for name in part._non_persistent_buffers_set
        if (buffer := part._buffers.get(name)) is not None and not buffer.is_meta
    }


def _require_alike(there: Sequence[StoredTensor]) -> None:
    """Require that stored tensors which are one in the model have the same elements."""
    first, *others = there
    for other in others:
        same = (first.dtype, first.shape) == (other.dtype, other.shape)
        if same and first.spec is not None:
            one, two = (each.read().reshape(-1).view(torch.uint8) for each in (first, other))
            chunks = zip(one.split(_CHUNK_BYTES), two.split(_CHUNK_BYTES), strict=True)
            same = all(torch.equal(a, b) for a, b in chunks)
        if not same:
            raise CheckpointError(
                f"{first.file.parent} has different weights for {first.name} and {other.name}, which are one parameter "
                "of the model: make the model without tied weights, or leave one of them out with "
                f"onebox.Weights(folder, skip=[{other.name!r}])",
                path=other.file,
            )


def _require_spec(name: str, stored: StoredTensor, spec: TensorSpec) -> None:
    if stored.spec is None:
        raise CheckpointError(
            f"{stored.name} in {stored.file} is of type {stored.dtype}, which cannot be trained with: convert it, for "
            "example to BF16",
            path=stored.file,
        )
    if stored.shape != spec.shape:
        raise CheckpointError(
            f"{stored.name} in {stored.file} has the shape {list(stored.shape)}, and {name} in the model "
            f"{list(spec.shape)}: make the model that the weights are for",
            path=stored.file,
        )
    if stored.spec != spec:
        raise CheckpointError(
            f"{stored.name} in {stored.file} is of {stored.spec.dtype}, and {name} in the model of {spec.dtype}: make "
            f"the model in the files' type, as model.to(torch.{stored.spec.dtype}) does before the optimizer is made",
            path=stored.file,
        )


# ---- the folder


def _stored_in(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors in a folder, or in one file, by name.

    Raises:
        CheckpointError: There is none, the index is damaged, or a file is missing or damaged.
    """
    if path.is_file() and path.suffix == ".safetensors":
        return stored_tensors(path)
    if not path.is_dir():
        raise CheckpointError(f"weights={str(path)!r}: there is no such folder or safetensors file", path=path)
    if (path / _SINGLE).is_file():
        return stored_tensors(path / _SINGLE)
    index = path / _INDEX
    if not index.is_file():
        others = sorted(each.name for each in path.iterdir() if each.suffix in (".bin", ".pt", ".pth"))
        also = f"; {others[0]} there would have to be unpickled, which onebox does not do: convert it" if others else ""
        raise CheckpointError(f"{path} has neither {_SINGLE} nor {_INDEX}{also}", path=path)
    places = _read_index(index)
    found: dict[str, StoredTensor] = {}
    for file in dict.fromkeys(places.values()):
        if not (path / file).is_file():
            raise CheckpointError(f"{path / file} is missing, which {_INDEX} names: fetch it again", path=path / file)
        for name, each in stored_tensors(path / file).items():
            if name in found:
                raise CheckpointError(f"{name} is in both {found[name].file} and {each.file}", path=each.file)
            found[name] = each
    for name, file in places.items():
        if name not in found or found[name].file.name != file:
            raise CheckpointError(f"{index} says that {name} is in {file}, and it is not there", path=index)
    return found


def _read_index(index: Path) -> dict[str, str]:
    """Return the file of each tensor as an index says."""
    try:
        places = msgspec.json.decode(read_regular(index, _INDEX_BYTES), type=_Index).weight_map
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{index} cannot be read: {error}", path=index) from None
    for name, file in places.items():
        if not _FILE_NAME.fullmatch(file):
            raise CheckpointError(
                f"{index} says that {name} is in {file!r}: allowed are names of .safetensors files beside it, without "
                "a folder",
                path=index,
            )
    return places


def write_weights(
    folder: Path,
    specs: Mapping[str, TensorSpec],
    elements: Callable[[Sequence[str]], Iterable[Tensor]],
    *,
    shard_bytes: int,
) -> None:
    """Write weights into a folder as hubs have them, in files of at most so many bytes unless one tensor is larger.

    Args:
        folder: The folder; created if missing. What else lies there stays.
        specs: Spec of each tensor, by name.
        elements: Maps names to the elements of their tensors; see :func:`write_tensors`.
        shard_bytes: Most bytes of the tensors of a file.

    Raises:
        UsageError: The folder has weights already.
        CheckpointError: It cannot be written; nothing is left there.
    """
    there = [each.name for each in (folder.iterdir() if folder.is_dir() else ()) if each.suffix == ".safetensors"]
    if there or (folder / _INDEX).exists():
        raise UsageError(f"{folder} has weights already, {(there or [_INDEX])[0]}: give another folder, or remove them")
    shards = _shards(specs, shard_bytes)
    files = [
        _SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        for number in range(1, len(shards) + 1)
    ]
    try:
        make_folder(folder)
        with temporary_folder(folder) as temporary:
            for file, names in zip(files, shards, strict=True):
                own = {name: specs[name] for name in names}
                write_tensors(temporary / file, own, elements, metadata={"format": "pt"})
                sync(temporary / file)
            if len(shards) > 1:
                places = {name: file for file, names in zip(files, shards, strict=True) for name in names}
                total_bytes = sum(spec.size_bytes for spec in specs.values())
                index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(places.items()))}
                (temporary / _INDEX).write_bytes(msgspec.json.format(msgspec.json.encode(index)))
                sync(temporary / _INDEX)
            for file in (*files, *([_INDEX] if len(shards) > 1 else [])):  # the index last: it makes the others valid
                (temporary / file).rename(folder / file)
            sync(folder)
    except OSError as error:
        raise CheckpointError(
            f"the weights could not be written to {folder}: {error}; make room, or give another folder", path=folder
        ) from error


def _shards(specs: Mapping[str, TensorSpec], shard_bytes: int) -> list[list[str]]:
    """Divide names among files, in order."""
    shards: list[list[str]] = [[]]
    left_bytes = shard_bytes
    for name, spec in specs.items():
        if shards[-1] and spec.size_bytes > left_bytes:
            shards.append([])
            left_bytes = shard_bytes
        shards[-1].append(name)
        left_bytes -= spec.size_bytes
    return shards


def _listed(names: Sequence[str]) -> str:
    more = len(names) - 1
    return f"{names[0]!r}" + (f" and {more} more tensor{'s' if more > 1 else ''}" if more else "")
