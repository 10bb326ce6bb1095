"""Detection of user writes to the tensors of a model that is trained remotely.

In-place writes increment a tensor's version counter and are detected in microseconds. Writes through ``.data`` do not,
so a sample of each tensor's elements is compared, too. While the local model equals the workers' state, as right after
``pull()``, such a change can still be uploaded: then all elements are compared by an integer sum of their bits.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from onebox.engine.workload.named_state import NamedState, named_state
from onebox.errors import UsageError
from onebox.wire import spec_of, to_frame

_RUNS, _RUN_ELEMENTS = 4, 8
"""Number and length of the runs of elements that are compared in each tensor at each step: joining their bytes takes
some 20 us for 300 tensors, 300 calls of PyTorch take 400."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
"""Integer type by bytes of an element; one of 16 bytes is two integers."""

_SUM_BYTES = 8


class ChangeDetector:
    """Detector of tensors that have changed since they were last recorded.

    Args:
        model: The model.
        loss: The loss, which may be a module.
        named: Their tensors, by name.
    """

    def __init__(self, model: nn.Module, loss: Any, named: NamedState) -> None:
        self._model, self._loss, self._named = model, loss, named
        self._noted = False
        self._specs = {name: spec_of(tensor) for name, tensor in named.tensors.items()}
        self._versions: list[int] = []
        self._places: list[int] = []
        self._views: dict[str, list[memoryview]] = {}
        self._bytes: dict[str, bytes] = {}
        self._sums: dict[str, tuple[int, ...]] = {}
        self._all_views: list[memoryview] = []
        self._all_bytes = b""
        self._find_tables()

    def changed(self, *, fully: bool) -> list[str]:
        """Return the names of changed tensors; none before the first :meth:`note`.

        Args:
            fully: Whether to compare all elements of the tensors that were recorded fully.

        Raises:
            UsageError: A parameter was replaced by another one, or a tensor has become one of another kind.
        """
        replaced: list[str] = []
        if not all(map(is_, map(dict.get, self._tables, self._keys), self._objects)):
            replaced = self._take_replaced()
            self._find_tables()
        if not self._noted:
            return []
        versions, places = _versions(self._tensors), _places(self._tensors)
        if not (fully or replaced) and versions == self._versions and places == self._places and self._alike():
            return []
        marks = zip(self._names, self._tensors, versions, self._versions, places, self._places, strict=True)
        found = [
            name
            for name, tensor, version, version_before, place, place_before in marks
            if name in replaced
            or version != version_before
            or place != place_before
            or not self._same(name)
            or (fully and name in self._sums and self._sums[name] != _sum(tensor))
        ]
        for name in found:
            self._require_kind(name)
        return found

    def _require_kind(self, name: str) -> None:
        """Refuse a tensor that has become one of another shape or type, as by ``.data`` or a conversion of the model.

        Raises:
            UsageError: It has.
        """
        now, before = spec_of(self._named.tensors[name]), self._specs[name]
        if now != before:
            raise UsageError(
                f"{name}, of {before} when this trainer was made, is now of {now}: the workers hold it as it was. "
                "Convert or resize the model before the trainer is made; or pull() the weights, close this trainer, "
                "change the model and its optimizer, and make another trainer; nothing was done"
            )

    def note(self, names: Collection[str] | None = None, *, fully: bool = False) -> None:
        """Record the present state of tensors.

        Args:
            names: Names of the tensors; ``None`` for all, as in the first call.
            fully: Whether to record all of their elements.
        """
        if names is not None and not self._noted:
            return
        chosen = set(self._names if names is None else names)
        before = zip(self._versions, self._places, strict=True) if self._noted else ()
        marks = dict(zip(self._names, before, strict=False))
        for name, tensor in zip(self._names, self._tensors, strict=True):
            if name not in chosen:
                continue
            marks[name] = _version(tensor), tensor.data_ptr()
            self._sums.pop(name, None)
            if fully and _readable(tensor):
                self._sums[name] = _sum(tensor)
            self._views[name] = _sample(tensor)
            self._bytes[name] = b"".join(self._views[name])
        self._versions = [marks[name][0] for name in self._names]
        self._places = [marks[name][1] for name in self._names]
        self._all_views = [view for name in self._names for view in self._views[name]]
        self._all_bytes = b"".join(self._bytes[name] for name in self._names)
        self._noted = True

    def _alike(self) -> bool:
        """Return whether the sampled elements are unchanged."""
        return b"".join(self._all_views) == self._all_bytes

    def _same(self, name: str) -> bool:
        return b"".join(self._views[name]) == self._bytes[name]

    def _find_tables(self) -> None:
        """Collect the dictionaries in which modules hold submodules and tensors."""
        self._names = tuple(self._named.tensors)
        self._tensors = list(self._named.tensors.values())
        known = {id(tensor) for tensor in self._tensors}
        self._tables: list[dict[str, Any]] = []
        self._keys: list[str] = []
        self._objects: list[Any] = []
        for root in (self._model, self._loss):
            modules = root.modules() if isinstance(root, nn.Module) else ()
            for module in (each for each in modules if not isinstance(each, torch.jit.ScriptModule)):  # have no dicts
                for table in (module._modules, module._parameters, module._buffers):
                    for key, found in table.items():
                        if isinstance(found, nn.Module) or id(found) in known:
                            self._tables.append(table)
                            self._keys.append(key)
                            self._objects.append(found)

    def _take_replaced(self) -> list[str]:
        """Adopt buffers that were replaced by others of the same kind; return their names.

        Raises:
            UsageError: A parameter was replaced, a buffer has another kind, or a tensor was removed.
        """
        now = named_state(self._model, self._loss, lambda: 0).tensors
        replaced = []
        for name, tensor in self._named.tensors.items():
            other = now.get(name)
            if other is tensor:
                continue
            kind = "parameter" if name in self._named.parameters else "buffer"
            if other is None or kind == "parameter" or spec_of(other) != spec_of(tensor):
                found = "gone" if other is None else f"another one, of {spec_of(other)}"
                raise UsageError(
                    f"{name}, a {kind} of {spec_of(tensor)} when this trainer was made, is {found}: write into the one "
                    "that was there, as copy_() under torch.no_grad() does; or pull() the weights, close this trainer "
                    "and make another one; nothing was done"
                )
            replaced.append(name)
        self._named.replace({name: now[name] for name in replaced})
        return replaced


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:  # tensors made in inference mode have no version counter
        return [_version(tensor) for tensor in tensors]


def _places(tensors: Sequence[Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def _readable(tensor: Tensor) -> bool:
    """Return whether reading a tensor's elements is cheap."""
    return tensor.device.type in ("cpu", "cuda") and tensor.layout == torch.strided and type(tensor) in _KINDS


_KINDS = (Tensor, nn.Parameter)


def _flat(tensor: Tensor) -> Tensor | None:
    """Return the elements of a tensor as integers, without a copy; ``None`` if they are not dense."""
    own = tensor.detach()
    if not own.is_contiguous():
        dense = sorted(zip(own.stride(), own.shape, strict=True))
        expected = 1
        for stride, size in dense:
            if size != 1 and stride != expected:
                return None
            expected *= size
        own = own.as_strided((own.numel(),), (1,))
    return own.reshape(-1).view(_INTEGERS[own.element_size()])


def _sample(tensor: Tensor) -> list[memoryview]:
    """Return the bytes of sampled elements of a tensor, without a copy; empty if that is impossible."""
    if tensor.device.type != "cpu" or not _readable(tensor) or (flat := _flat(tensor)) is None:
        return []
    count = flat.numel()
    if count <= _RUNS * _RUN_ELEMENTS:
        return [to_frame(flat)]
    starts = (place * (count - _RUN_ELEMENTS) // (_RUNS - 1) for place in range(_RUNS))
    return [to_frame(flat[start : start + _RUN_ELEMENTS]) for start in starts]


def _sum(tensor: Tensor) -> tuple[int, ...]:
    """Return sums over the bits of all elements of a tensor, and over the remainder of a multiple of eight bytes."""
    flat = _flat(tensor)
    if flat is None:
        flat = _flat(tensor.detach().contiguous())
        assert flat is not None
    if flat.dtype == torch.int64:
        return (int(flat.sum()),)
    whole = flat.nbytes // _SUM_BYTES * _SUM_BYTES // flat.element_size()
    if flat.storage_offset() * flat.element_size() % _SUM_BYTES:
        return (int(flat.sum(dtype=torch.int64)),)
    return int(flat[:whole].view(torch.int64).sum()), int(flat[whole:].sum(dtype=torch.int64))
