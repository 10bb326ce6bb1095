"""PyTorch's operators on tensors of a modelled accelerator: each is queued as a kernel that calls the CPU's operator.

Results are laid out as the CPU lays them out: the first call with arguments of some shapes makes them of zeros. What an
operator's shapes depend on values waits for them, as it does on a GPU. Random operators draw when they are launched.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from tests.kit.accelerator.allocator import CachingAllocator, PinnedMemory
from tests.kit.accelerator.happens_before import Range, byte_ranges
from tests.kit.accelerator.streams import Kernel, Scheduler

aten = torch.ops.aten

_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_METADATA = ("aten::set_", "aten::_reshape_alias", "aten::_has_same_storage_numel")
_BY_DEVICE = {"aten::convolution", "aten::convolution_backward"}
"""Operators that choose a library by the device."""

_INDEXED = ("aten::index", "aten::_index", "aten::_unsafe_index")
_UNKNOWN = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)

Layout = tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]
"""Element type, shape and strides."""


class ModelOperators:
    """Operators, allocations and copies of a device.

    Args:
        scheduler: Its streams.
        allocator: Its memory.
        pinned: Page-locked memory of the host.
    """

    def __init__(self, scheduler: Scheduler, allocator: CachingAllocator, pinned: PinnedMemory) -> None:
        self.pageable_copies = 0
        self.captured_draws: list[Callable[[Tensor], None]] = []
        """Functions that set the random numbers of captured operators, in their order."""
        self._scheduler = scheduler
        self._allocator = allocator
        self._pinned = pinned
        self._layouts: dict[object, list[Layout | int | None] | None] = {}

    def call(self, operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an operator for tensors of the device."""
        name = operator._schema.name
        if name in ("aten::empty", "aten::empty_strided"):
            return self._empty(operator, args, kwargs)
        if name == "aten::_copy_from":
            return self._copy(*args, **kwargs)
        if name == "aten::_local_scalar_dense":
            return self._read(args[0])
        if name == "aten::resize_":
            return self._resize(*args[:2])
        if operator.is_view or name in _METADATA:
            return operator.redispatch(_CPU, *args, **kwargs)
        return self._launch(operator, args, kwargs)

    # ---- memory

    def new(self, layout: Layout) -> Tensor:
        """Return a new tensor, poisoned."""
        dtype, shape, strides = layout
        size_bytes = 0
        if 0 not in shape:
            last = sum(stride * (size - 1) for size, stride in zip(shape, strides, strict=True))
            size_bytes = (last + 1) * dtype.itemsize
        flat = self._allocator.bytes(size_bytes)
        made = flat if dtype is torch.uint8 else aten.view.dtype.redispatch(_CPU, flat, dtype)
        return aten.as_strided.default.redispatch(_CPU, made, shape, strides)

    def _empty(self, operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        kept = {key: value for key, value in kwargs.items() if key in ("dtype", "layout", "memory_format")}
        like = operator(*args, **kept, device="meta")
        return self.new((like.dtype, tuple(like.shape), like.stride()))

    def _resize(self, tensor: Tensor, shape: Sequence[int]) -> Tensor:
        """Change the shape of a tensor, which gets other memory if its own does not suffice."""
        like = torch.empty(shape, dtype=tensor.dtype, device="meta")
        if like.nbytes > tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.itemsize:
            storage = self.new((tensor.dtype, tuple(shape), like.stride())).untyped_storage()
            aten.set_.source_Storage_storage_offset.redispatch(_CPU, tensor, storage, 0, shape, like.stride())
        elif tuple(tensor.shape) != tuple(shape):
            storage, offset = tensor.untyped_storage(), tensor.storage_offset()
            aten.set_.source_Storage_storage_offset.redispatch(_CPU, tensor, storage, offset, shape, like.stride())
        return tensor

    def _is_own(self, tensor: Tensor) -> bool:
        return tensor.device.type not in ("cpu", "meta")

    def _on_host(self, tensor: Tensor) -> Tensor:
        """Return a tensor's memory as a tensor of the CPU, for a kernel."""
        if not self._is_own(tensor):
            return tensor
        if not tensor.numel():  # it may have no memory
            return torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype)
        return self._allocator.host_view(tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def _bytes_of(self, tensor: Tensor) -> list[Range]:
        if not tensor.numel():
            return []
        return byte_ranges(tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.itemsize)

    # ---- copies

    def _copy(self, source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
        own = self._is_own(source), self._is_own(target)
        held, pageable = [tensor for tensor, mine in zip((source, target), own, strict=True) if not mine], False
        if held and held[0].numel():
            pageable = not self._is_pinned(held[0])
        if pageable and own[1] and source.numel():
            source = source.clone()  # the driver has read it when the call returns
        seen = [tensor for tensor in (source, target) if not (pageable and not self._is_own(tensor))]
        reads = self._bytes_of(source) if any(each is source for each in seen) else []
        writes = self._bytes_of(target) if any(each is target for each in seen) else []
        before, after = self._on_host(source), self._on_host(target)
        name = "copy" if all(own) else f"copy {'to' if own[1] else 'from'} the device"
        kernel = Kernel(name, reads, writes, lambda: after.copy_(before), link=not all(own), keeps=held)
        done = self._scheduler.launch(kernel)
        self.pageable_copies += pageable
        if held and (pageable or not non_blocking):
            done.synchronize()
        return target

    def _is_pinned(self, tensor: Tensor) -> bool:
        ranges = self._bytes_of(tensor)
        return self._pinned.holds(ranges[0][0], ranges[-1][1])

    def _read(self, tensor: Tensor) -> Any:
        """Return the value of a tensor of one element, which the host waits for."""
        found = torch.empty(tensor.shape, dtype=tensor.dtype)
        memory = self._on_host(tensor)
        self._scheduler.launch(
            Kernel("item", self._bytes_of(tensor), (), lambda: found.copy_(memory), link=True)
        ).synchronize()
        return found.item()

    # ---- kernels

    def _launch(self, operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        flat, tree = tree_flatten((args, kwargs))
        written = _written(operator, args, kwargs)
        taken = [value.clone() if _is_host(value) else value for value in flat]
        self._check_places(operator, taken)
        if any(argument.is_out for argument in operator._schema.arguments):
            self._fit(operator, taken, tree, written)
        on_host = [self._on_host(value) if isinstance(value, Tensor) else value for value in taken]
        reads = [
            place
            for value in flat
            if isinstance(value, Tensor) and id(value) not in written and self._is_own(value)
            for place in self._bytes_of(value)
        ]
        writes = [place for value in written.values() for place in self._bytes_of(value)]
        call = _Call(operator, on_host, tree)
        if torch.Tag.nondeterministic_seeded in operator.tags:
            call.draw(self._zeros(on_host))
            if self._scheduler.captures():
                self.captured_draws.append(call.set_state)
        if not operator._schema.returns and not written:  # an assertion
            self._scheduler.launch(Kernel(str(operator), reads, (), call))
            return None
        if any(tag in operator.tags for tag in _UNKNOWN):
            return self._launch_known(operator, call, reads)
        if written and all(id(value) in written for value in _returned(operator, args, kwargs)):
            self._scheduler.launch(Kernel(str(operator), reads, writes, call))
            return _returned_whole(operator, args, kwargs)
        layouts = self._layouts_of(operator, flat, on_host, tree)
        if layouts is None:
            return self._launch_known(operator, call, reads)
        return self._launch_into(operator, call, layouts, reads, writes, flat)

    def _fit(self, operator: OpOverload, values: Sequence[Any], tree: Any, written: dict[int, Tensor]) -> None:
        """Let empty tensors that are given for results have the shapes of these."""
        if all(tensor.numel() for tensor in written.values()):
            return
        zeros = self._zeros(values)
        _Call(operator, zeros, tree)()
        for value, zero in zip(values, zeros, strict=True):
            if id(value) in written:
                self._resize(value, tuple(zero.shape))

    def _launch_into(
        self,
        operator: OpOverload,
        call: _Call,
        layouts: Sequence[Layout | int | None],
        reads: Sequence[Range],
        writes: Sequence[Range],
        flat: Sequence[Any],
    ) -> Any:
        """Launch an operator that makes new tensors."""
        outputs: list[Any] = [
            self.new(layout) if isinstance(layout, tuple) else None if layout is None else flat[layout]
            for layout in layouts
        ]
        new = [
            (index, self._on_host(outputs[index])) for index, layout in enumerate(layouts) if isinstance(layout, tuple)
        ]
        made = [place for index, _ in new for place in self._bytes_of(outputs[index])]

        def run() -> None:
            found, _ = tree_flatten(call())
            for index, memory in new:
                memory.copy_(found[index])

        self._scheduler.launch(Kernel(str(operator), reads, [*writes, *made], run))
        return _shaped(operator, outputs)

    def _launch_known(self, operator: OpOverload, call: _Call, reads: Sequence[Range]) -> Any:
        """Call an operator whose results can only be laid out when its arguments are there."""
        self._scheduler.launch(Kernel(str(operator), reads, (), lambda: None)).synchronize()
        found, tree = tree_flatten(call())
        outputs: list[Any] = []
        for value in found:
            if isinstance(value, Tensor):
                made = self.new((value.dtype, tuple(value.shape), value.stride()))
                memory, kept = self._on_host(made), value
                run = functools.partial(memory.copy_, kept)
                self._scheduler.launch(Kernel(str(operator), (), self._bytes_of(made), run), counted=False)
                outputs.append(made)
            else:
                outputs.append(value)
        return tree_unflatten(outputs, tree)

    def _check_places(self, operator: OpOverload, values: Sequence[Any]) -> None:
        """Require that tensors of the host are single values or indices, as on a GPU."""
        for value in values:
            if _is_host(value) and value.dim() and not operator._schema.name.startswith(_INDEXED):
                raise RuntimeError(
                    f"{operator}: expected all tensors to be on the same device, but one of {list(value.shape)} is on "
                    "the CPU"
                )

    def _layouts_of(
        self, operator: OpOverload, flat: Sequence[Any], on_host: Sequence[Any], tree: Any
    ) -> list[Layout | int | None] | None:
        """Return the layouts of results, or the argument that is returned; ``None`` if only values decide."""
        key = (operator, str(tree), tuple(_signature(value) for value in flat))
        if key not in self._layouts:
            self._layouts[key] = self._laid_out(operator, on_host, tree)
        return self._layouts[key]

    def _laid_out(self, operator: OpOverload, on_host: Sequence[Any], tree: Any) -> list[Layout | int | None] | None:
        zeros = self._zeros(on_host)
        places = {value.data_ptr(): index for index, value in enumerate(zeros) if isinstance(value, Tensor)}
        before = torch.default_generator.get_state()
        try:
            found, _ = tree_flatten(_Call(operator, zeros, tree)())
        except Exception:  # not for zeros: the values that come may do
            return None
        finally:
            torch.default_generator.set_state(before)
        layouts: list[Layout | int | None] = []
        for value in found:
            if not isinstance(value, Tensor):
                layouts.append(None)
            elif value.numel() and value.data_ptr() in places:
                layouts.append(places[value.data_ptr()])
            else:
                layouts.append((value.dtype, tuple(value.shape), value.stride()))
        return layouts

    def _zeros(self, values: Sequence[Any]) -> list[Any]:
        """Return arguments of the same layouts, of zeros."""
        return [
            torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).zero_()
            if isinstance(value, Tensor)
            else value
            for value in values
        ]


class _Call:
    """A call of the CPU's operator, with the random numbers of its launch."""

    def __init__(self, operator: OpOverload, values: Sequence[Any], tree: Any) -> None:
        self._operator = operator
        self._values = list(values)
        self._tree = tree
        self._state: Tensor | None = None

    def draw(self, zeros: Sequence[Any]) -> None:
        """Take the random numbers now: the generator goes on as if the operator had run."""
        self._generator = next(
            (value for value in zeros if isinstance(value, torch.Generator)), torch.default_generator
        )
        self._state = self._generator.get_state()
        _Call(self._operator, zeros, self._tree)()

    def set_state(self, state: Tensor) -> None:
        """Set the random numbers of the next runs."""
        self._state = state

    def __call__(self) -> Any:
        args, kwargs = tree_unflatten(self._values, self._tree)
        kwargs = {key: value for key, value in kwargs.items() if key != "device"} | (
            {"device": torch.device("cpu")} if "device" in kwargs else {}
        )
        if self._state is None:
            return self._run(args, kwargs)
        now = self._generator.get_state()
        self._generator.set_state(self._state)
        try:
            return self._run(args, kwargs)
        finally:
            self._generator.set_state(now)

    def _run(self, args: Any, kwargs: Any) -> Any:
        with torch.inference_mode(), _disable_current_modes():
            return self._operator(*args, **kwargs)


class HostAccessWatch(TorchDispatchMode):
    """Notes what operators of the host, in this thread, read and write of page-locked memory.

    Args:
        scheduler: The streams of the device.
        pinned: Page-locked memory.
    """

    def __init__(self, scheduler: Scheduler, pinned: PinnedMemory) -> None:
        super().__init__()
        self._scheduler = scheduler
        self._pinned = pinned

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Prevent that the first operator imports torch's compiler only to disable it: 1 s and 70 MB in each worker."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._pinned and not func.is_view and not func._schema.name.startswith(_METADATA):
            flat = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, Tensor)]
            if all(tensor.device.type == "cpu" for tensor in flat):
                self._note(func, flat, _written(func, args, kwargs))
        return func(*args, **kwargs)

    def _note(self, func: OpOverload, flat: Sequence[Tensor], written: dict[int, Tensor]) -> None:
        for tensor in flat:
            if tensor.numel() and self._pinned.holds(tensor.data_ptr(), tensor.data_ptr() + tensor.itemsize):
                places = byte_ranges(tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.itemsize)
                mine = id(tensor) in written
                self._scheduler.touch([] if mine else places, places if mine else [], str(func))


def _written(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, Tensor]:
    """Return the arguments that an operator writes to, by identity."""
    found: dict[int, Tensor] = {}
    for index, argument in enumerate(operator._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            for tensor in tree_flatten(value)[0]:
                if isinstance(tensor, Tensor):
                    found[id(tensor)] = tensor
    return found


def _returned(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments that an operator returns, and ``None`` for each other result."""
    named: dict[str, Any] = {}
    for index, argument in enumerate(operator._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            named |= dict.fromkeys(argument.alias_info.before_set, value)
    return [
        next((named[key] for key in result.alias_info.before_set if key in named), None) if result.alias_info else None
        for result in operator._schema.returns
    ]


def _returned_whole(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    found = _returned(operator, args, kwargs)
    return None if not found else found[0] if len(found) == 1 else tuple(found)


def _shaped(operator: OpOverload, outputs: list[Any]) -> Any:
    """Return results as an operator returns them."""
    returns = operator._schema.returns
    if len(returns) != 1:
        return tuple(outputs)
    return outputs[0] if str(returns[0].type) == "Tensor" else outputs


def _is_host(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "cpu"


def _signature(value: Any) -> object:
    """Return what the layouts of results depend on."""
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), value.stride(), value.device.type
    return None if isinstance(value, torch.Generator) else (type(value).__name__, str(value))


# ---- PyTorch's one private device

_lock = threading.Lock()
_present: list[ModelOperators] = []
_libraries: list[torch.library.Library] = []


def device_name() -> str:
    """Return the name of PyTorch's private device, which is set up if need be."""
    name = str(torch._C._get_privateuse1_backend_name())
    with _lock:
        if not hasattr(torch, name):
            _setup_privateuseone_for_python_backend()
    return name


def install(operators: ModelOperators) -> None:
    """Let the private device be a modelled one; it replaces another."""
    device_name()
    with _lock:
        _present[:] = [operators]
        if not _libraries:
            library = torch.library.Library("_", "IMPL")
            library.fallback(_dispatched, "PrivateUse1")
            own = torch.library.Library("aten", "IMPL")
            for name in _whole():
                space, _, overload = name.removeprefix("aten::").partition(".")
                operator = getattr(getattr(aten, space), overload or "default")
                own.impl(name, functools.partial(_dispatched, operator), "PrivateUse1")
            _libraries.extend((library, own))


def uninstall() -> None:
    """Let the private device have no operators."""
    with _lock:
        _present.clear()
        while _libraries:
            _libraries.pop()._destroy()


def _whole() -> list[str]:
    """Return the operators that PyTorch would divide for an unknown device, but not for a CPU."""
    divided, of_cpu = (
        set(torch._C._dispatch_get_registrations_for_dispatch_key(key)) for key in ("CompositeExplicitAutograd", "CPU")
    )
    return sorted({name for name in divided & of_cpu if name.startswith("aten::")} | _BY_DEVICE)


def _dispatched(operator: OpOverload, *args: Any, **kwargs: Any) -> Any:
    if not _present:
        raise RuntimeError(f"{operator}: the modelled device is closed")
    return _present[0].call(operator, args, kwargs)


__all__ = ["HostAccessWatch", "ModelOperators", "device_name", "install", "uninstall"]
