"""A device whose worker is this process: what the C++ device records is run with tensors of the host.

It stands in for what is above the device (what a call means, what a batch is sent as) and below it (a worker), in the
least lines that run PyTorch's own operators, so that the device alone is tested.
"""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from onebox.vgpu import native
from onebox.vgpu.dispatch.op_inference import SHAPED_BY_FLOATS

aten = torch.ops.aten
Layout = tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int, int, bool, bool]

FIRST = 1 << 30
"""The first number of a buffer."""


def is_virtual(value: Any) -> bool:
    """Return whether a value is a tensor of the device."""
    return isinstance(value, Tensor) and value.device.type == "vgpu"


def layout_of(tensor: Tensor) -> Layout:
    """Return the layout of any tensor."""
    return (
        tensor.dtype,
        tuple(tensor.shape),
        tensor.stride(),
        int(tensor.storage_offset()),
        tensor.untyped_storage().nbytes(),
        tensor.is_conj(),
        tensor.is_neg(),
    )


def in_storage(storage: torch.UntypedStorage, layout: Layout) -> Tensor:
    """Return a tensor with a layout in a storage."""
    dtype, sizes, strides, offset, _, conjugate, negative = layout
    made = torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, sizes, strides)
    torch._C._set_conj(made, conjugate)
    torch._C._set_neg(made, negative)
    return made


class Kernel:
    """An operator with all of its arguments but tensors of the device and floating-point numbers.

    Args:
        op: The overload.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """

    def __init__(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.op = op
        self.floats_stay = op.name() in SHAPED_BY_FLOATS
        self.tensors: list[Tensor] = []
        self.floats: list[float] = []
        self._whole = tree_map(self._template, (args, kwargs))
        self.layouts = [None if DEVICE.is_base(tensor) else layout_of(tensor) for tensor in self.tensors]
        self.made: list[Layout | None] = []

    def _template(self, value: Any) -> Any:
        if is_virtual(value):
            self.tensors.append(value)
            number = len(self.tensors) - 1
            return lambda tensors, floats, device: tensors[number]
        if isinstance(value, float) and not self.floats_stay:
            self.floats.append(value)
            number = len(self.floats) - 1
            return lambda tensors, floats, device: floats[number]
        if isinstance(value, torch.device):
            return lambda tensors, floats, device: device
        if isinstance(value, torch.Generator):
            number = DEVICE.origin(value)[1]
            return lambda tensors, floats, device: None if device.type == "meta" else GENERATORS.made[number]
        return lambda tensors, floats, device: value

    def call(self, tensors: list[Tensor], floats: list[float], device: str) -> list[Any]:
        """Call the operator; return its results, with lists flattened."""
        place = torch.device(device)
        args, kwargs = tree_map(lambda fill: fill(tensors, floats, place), self._whole)
        result = self.op(*args, **kwargs)
        if not self.op._schema.returns:
            return []
        return list(result) if isinstance(result, tuple) else [result]

    def run(self, tensors: list[Tensor | Exception], floats: list[float]) -> list[Tensor | Exception]:
        """Run it with tensors of the host; return the new ones, laid out as the device expects, or what went wrong."""
        try:
            return self._run(tensors, floats)
        except Exception as error:
            return [error for layout in self.made if layout]

    def _run(self, tensors: list[Any], floats: list[float]) -> list[Any]:
        for tensor in tensors:
            if isinstance(tensor, Exception):
                raise tensor
        laid = [
            tensor if layout is None else in_storage(tensor.untyped_storage(), layout)
            for tensor, layout in zip(tensors, self.layouts, strict=True)
        ]
        found = []
        for value, layout in zip(flatten(self.call(laid, floats, "cpu")), self.made, strict=True):
            if layout is None:
                continue
            fits = layout_of(value) == layout
            found.append(value if fits else in_storage(torch.UntypedStorage(layout[4]), layout).copy_(value))
        return found


def flatten(values: list[Any]) -> list[Any]:
    """Return values with lists flattened."""
    return [one for value in values for one in (value if isinstance(value, list) else [value])]


class Worker:
    """The worker of each device: buffers by number, and the operators that it was taught."""

    def __init__(self) -> None:
        self.storages: dict[tuple[int, int], Tensor | Exception] = {}
        self.kernels: dict[int, Kernel] = {}
        self.batches: list[tuple[int, ...]] = []
        self._lock = threading.RLock()
        self._next = 0

    def new_kernel(self, kernel: Kernel) -> int:
        """Keep a kernel, and return its number."""
        with self._lock:
            self._next += 1
            self.kernels[self._next] = kernel
            return self._next

    def flush(self, index: int) -> None:
        """Run what is recorded."""
        with self._lock:
            code, inputs, outputs, strays, floats = QUEUES[index].take()
            self.batches.append(tuple(code))
            registers = {-n - 1: self.storages[index, number] for n, number in enumerate(inputs)}
            left = iter(floats)
            at = made = 0
            while at < len(code):
                number = code[at]
                if number == 0:
                    if code[at + 1] < 0:
                        del self.storages[index, inputs[-code[at + 1] - 1]]
                    del registers[code[at + 1]]
                    at += 2
                    continue
                kernel = self.kernels[number]
                count = len(kernel.layouts)
                tensors = [registers[slot] for slot in code[at + 1 : at + 1 + count]]
                at += 1 + count
                for tensor in kernel.run(tensors, [next(left) for _ in kernel.floats]):
                    registers[made] = tensor
                    made += 1
            alive = sorted(slot for slot in registers if slot >= 0)
            self.storages.update({(index, n): registers[slot] for slot, n in zip(alive, outputs, strict=True)})
            for number in strays:
                del self.storages[index, number]
            for number in QUEUES[index].take_evicted():
                del self.kernels[number]

    def read(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor on the host."""
        with self._lock:
            self.flush(tensor.device.index)
            held = self.storages[tensor.device.index, DEVICE.number(tensor)]
            if isinstance(held, Exception):
                raise held
            return in_storage(held.untyped_storage(), layout_of(tensor)).resolve_conj().resolve_neg().clone()

    def write(self, tensor: Tensor, index: int) -> Tensor:
        """Return a copy of a tensor of the host on a device."""
        copied = tensor.detach().clone(memory_format=torch.preserve_format)
        with self._lock:
            number = QUEUES[index].reserve(1)
            self.storages[index, number] = copied
        return QUEUES[index].make(number, layout_of(copied))


def missed(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do what the device does not know of, or teach it."""
    special = SPECIAL.get(op.name())
    if special is not None:
        result = special(*args, **kwargs)
        if result is not NotImplemented:
            return result
    values, _ = tree_flatten((args, kwargs))
    if not DEVICE.learnable():
        return on_one_device(op, args, kwargs, values)
    return learn(Kernel(op, args, kwargs))


def on_one_device(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], values: list[Any]) -> Any:
    """Run an operator that has single numbers of the host among its tensors."""
    places = {value.device for value in values if is_virtual(value)}
    if not places or len(places) == len({value.device for value in values if isinstance(value, Tensor)}) == 1:
        raise RuntimeError(f"{op}: its device is closed, or it is none of PyTorch's own")
    others = [value for value in values if isinstance(value, Tensor) and not is_virtual(value)]
    if len(places) != 1 or any(
        value.dim() and op not in (aten.index.Tensor, aten.index_put_.default) for value in others
    ):
        raise RuntimeError(f"Expected all tensors to be on the same device for {op}")

    def moved(value: Any) -> Any:
        return value.to(*places) if isinstance(value, Tensor) and not is_virtual(value) else value

    return op(*tree_map(moved, args), **tree_map(moved, kwargs))


def learn(kernel: Kernel) -> None:
    """Teach the device an operator: what its results are like is asked of the ``meta`` device."""
    twins: dict[int, Tensor] = {}
    for tensor in kernel.tensors:
        layout = layout_of(tensor)
        storage = torch.UntypedStorage(layout[4], device="meta")
        twins.setdefault(id(tensor), in_storage(storage, layout))
    order = [twins[id(tensor)] for tensor in kernel.tensors]
    results = kernel.call(order, kernel.floats, "meta")
    for tensor, twin in zip(kernel.tensors, order, strict=True):
        if layout_of(twin) != layout_of(tensor):
            raise NotImplementedError(f"{kernel.op} changes the layout of an argument")
    lengths = [len(value) if isinstance(value, list) else -1 for value in results]
    returns: list[tuple[int, Layout | None]] = []
    for value in flatten(results):
        place = next((n for n, twin in enumerate(order) if twin is value), -1)
        shared = next((n for n, twin in enumerate(order) if value is not None and _same(twin, value)), -1)
        returns.append((place, None) if value is None or place >= 0 else (shared, layout_of(value)))
    kernel.tensors.clear()  # or they lived as long as the kernel
    kernel.made = [layout if input_ < 0 else None for input_, layout in returns]
    local = bool(returns) and not any(kernel.made) and not kernel.op._schema.is_mutable
    DEVICE.learn(
        0 if local else WORKER.new_kernel(kernel), returns, lengths, kernel.op.name().startswith("aten::empty")
    )


def _same(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


# ---- operators that are no calls


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Any:
    if not is_virtual(target):
        return target.copy_(WORKER.read(source))
    if is_virtual(source) and source.device == target.device:
        return NotImplemented
    here = WORKER.write(WORKER.read(source) if is_virtual(source) else source, target.device.index)
    return target.copy_(here)


def _to_copy(tensor: Tensor, **options: Any) -> Any:
    device = options.pop("device", tensor.device)
    if device == tensor.device:
        return NotImplemented
    options.pop("non_blocking", None)
    changed = aten._to_copy(tensor, **options) if options else tensor
    if device.type != "vgpu":
        return WORKER.read(changed).to(device)
    index = torch.vgpu.current_device() if device.index is None else device.index  # type: ignore[attr-defined]
    return WORKER.write(WORKER.read(changed) if is_virtual(changed) else changed, index)


SPECIAL: dict[str, Callable[..., Any]] = {
    "aten::_copy_from": lambda source, target, non_blocking=False: _copy(target, source),
    "aten::_has_compatible_shallow_copy_type": lambda one, other: is_virtual(one) and is_virtual(other),
    "aten::_local_scalar_dense": lambda tensor: WORKER.read(tensor).item(),
    "aten::_to_copy": _to_copy,
    "aten::copy_": _copy,
    "aten::equal": lambda one, other: torch.equal(WORKER.read(one), WORKER.read(other)),
    "aten::masked_select": lambda one, mask: WORKER.write(
        WORKER.read(one).masked_select(WORKER.read(mask)), one.device.index
    ),
}


class Generators:
    """The generators of the workers; 0 is a device's own."""

    def __init__(self) -> None:
        self.made: dict[int, torch.Generator] = {0: torch.Generator()}

    def make(self, device: Any) -> int:
        """Return the number of a new one."""
        number = max(self.made) + 1
        self.made[number] = torch.Generator()
        return number

    def seed(self, device: Any, number: int, seed: int) -> None:
        """Seed one."""
        WORKER.flush(device.index)
        self.made[number].manual_seed(seed)

    def state(self, device: Any, number: int) -> Tensor:
        """Return the state of one."""
        WORKER.flush(device.index)
        return self.made[number].get_state()

    def set_state(self, device: Any, number: int, state: Tensor) -> None:
        """Set the state of one."""
        WORKER.flush(device.index)
        self.made[number].set_state(state)


def begin(devices: int, records: int = 1 << 16) -> None:
    """Register the device with PyTorch, and open some."""
    module = types.ModuleType("torch.vgpu")
    answers: dict[str, Callable[..., Any]] = {
        "current_device": torch.accelerator.current_device_index,
        "device_count": lambda: devices,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "_lazy_init": lambda: None,
        "get_rng_state": lambda: GENERATORS.state(QUEUES[0], 0),
        "manual_seed_all": GENERATORS.made[0].manual_seed,
        "set_rng_state": lambda state: GENERATORS.set_state(QUEUES[0], 0, state),
    }
    for name, answer in answers.items():
        setattr(module, name, answer)
    torch._register_device_module("vgpu", module)
    sys.modules["torch.vgpu"] = module
    DEVICE.set_device_count(devices)
    DEVICE.handle(missed, lambda queue: WORKER.flush(queue.index), lambda queue: None, GENERATORS, None)
    DEVICE.register_kernels(sorted(SHAPED_BY_FLOATS))
    for index in range(devices):
        opened(index, FIRST, records)


def opened(index: int, first: int, records: int) -> None:
    """Open a device."""
    QUEUES[index] = DEVICE.Queue(index, first, records)
    QUEUES[index].open()


torch.utils.rename_privateuse1_backend("vgpu")
DEVICE: Any = native.load()
QUEUES: dict[int, Any] = {}
WORKER = Worker()
GENERATORS = Generators()
