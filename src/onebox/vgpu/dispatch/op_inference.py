"""Inference of an operator: the kernel for a worker, and the layouts of the results.

Result layouts are inferred once for each (operator, layouts of its tensors, other arguments), by running it on the
``meta`` device. Floating-point numbers are not part of that key, because they differ from step to step and no shape
depends on them, except for the operators in :data:`SHAPED_BY_FLOATS`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from onebox.errors import WireError
from onebox.vgpu import native
from onebox.vgpu.core.metadata import Metadata, metadata_of
from onebox.vgpu.core.tensor import is_virtual, layout_of
from onebox.vgpu.dispatch.shape_rules import depends_on_values, is_learned, only_checks
from onebox.vgpu.runtime.command_queue import RecordedOp
from onebox.wire import (
    Complex,
    DType,
    GeneratorArgument,
    Hole,
    KernelSpec,
    LayoutArgument,
    Many,
    MemoryFormat,
    OwnDevice,
    SlotArgument,
    dtype_name,
    overload,
)
from onebox.worker.programs.kernels import written_inputs
from onebox.worker.sandbox.allow_list import EAGER, pinned_names

aten = torch.ops.aten

SHAPED_BY_FLOATS = frozenset(
    getattr(packet, name).name() for packet in (aten.arange, aten.range) for name in packet.overloads()
)
"""Names of the overloads whose result sizes depend on a floating-point number."""


class UnknownResult(Exception):
    """The result layout cannot be inferred here: the worker must determine it."""


class InferredOp(RecordedOp):
    """An inferred operator for one kind of arguments.

    Args:
        kernel: The kernel for the worker.
        returns: For each returned tensor, with lists flattened: the layout of a new one, the input number of an
            existing one, or ``None`` for an undefined one.
        changes: Inputs whose layout changes.
        rebuild: Maps the list of returned tensors to the operator's result; ``None`` where that is the first.
        shared: For each returned tensor, the input that a new one is a view of; -1 for none.
    """

    __slots__ = ("changes", "lengths", "rebuild", "returns", "shared")

    def __init__(
        self,
        kernel: KernelSpec,
        returns: tuple[Metadata | int | None, ...],
        changes: tuple[tuple[int, Metadata], ...],
        rebuild: Callable[[list[Any]], Any] | None,
        shared: tuple[int, ...] = (),
    ) -> None:
        super().__init__(kernel, sum(isinstance(item, Metadata) for item in returns))
        self.returns = returns
        self.changes = changes
        self.rebuild = rebuild
        self.shared = shared or (-1,) * len(returns)
        self.lengths: list[int] = []
        """For each return of the operator: the length of a list, or -1."""


def infer_op(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> InferredOp:
    """Infer the effects of an operator.

    Args:
        func: The overload.
        args: Its positional arguments; tensors are virtual ones.
        kwargs: Its keyword arguments.

    Raises:
        Unknown: The worker must run it first, also to raise its error if there is one.
        WireError: An argument is of a kind that cannot be sent.
    """
    kernel = describe(func, args, kwargs)
    if is_learned(func, args) or depends_on_values(func, args) or only_checks(func):
        raise UnknownResult(str(func))
    twins: dict[int, Tensor] = {}
    order: list[Tensor] = []

    def twin(value: Any) -> Any:
        if is_virtual(value):
            order.append(value)
            if id(value) not in twins:
                twins[id(value)] = layout_of(value).on_meta()
            return twins[id(value)]
        if isinstance(value, torch.device):
            return torch.device("meta")
        return None if isinstance(value, torch._C.Generator) else value

    try:
        result = func(*changed(args, twin), **{key: changed(value, twin) for key, value in kwargs.items()})
    except Exception as error:
        raise UnknownResult(str(error)) from error
    return _compared(func, kernel, order, twins, result)


def changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return an argument with a replacement for it or, in a list, for each of its items.

    A module-level function, because a recursive closure is a reference cycle: tensors that it references would stay
    until the garbage collector runs.
    """
    if isinstance(value, list | tuple):
        return type(value)(changed(item, change) for item in value)
    return change(value)


def _compared(func: Any, kernel: KernelSpec, order: list[Tensor], twins: dict[int, Tensor], result: Any) -> InferredOp:
    """Return what is inferred from the results of an operator on ``meta``."""
    flat, rebuild = flatten(func, result)
    writes = written_inputs(kernel)
    positions: dict[int, int] = {}
    for number, tensor in enumerate(order):  # the same tensor may occur twice: the one written to is returned
        if number in writes or id(twins[id(tensor)]) not in positions:
            positions[id(twins[id(tensor)])] = number
    storages = {twins[id(tensor)].untyped_storage()._cdata: number for number, tensor in enumerate(order)}
    if all(value.alias_info is None for value in func._schema.returns):
        flat = [item.clone() if id(item) in positions else item for item in flat]  # only ``meta`` returns an argument
    returns: list[Metadata | int | None] = []
    for item in flat:
        if item is None:
            returns.append(None)
        elif not isinstance(item, Tensor) or item.device.type != "meta" or item.layout != torch.strided:
            raise UnknownResult(f"{func} returns {type(item).__name__}")
        elif id(item) in positions:
            returns.append(positions[id(item)])
        else:
            returns.append(metadata_of(item))
    changes = []
    replaces = kernel.name.startswith("aten.set_.")
    gaps = any(not twins[id(tensor)].is_contiguous() for number, tensor in enumerate(order) if number not in writes)
    for number in sorted(writes):  # not of a read one that is the same tensor: in another call it may be none
        tensor = order[number]
        now = metadata_of(twins[id(tensor)])
        if now is layout_of(tensor) and not replaces:  # else perhaps in other memory
            continue
        if gaps and now.shape != tensor.shape and not replaces:
            raise UnknownResult(f"{func}: kernels for ``meta`` do not lay out what they resize by what they read")
        changes.append((number, now))
    outs = tuple(item.strided() if isinstance(item, Metadata) else None for item in returns)
    whole = KernelSpec(kernel.name, kernel.args, kernel.kwargs, kernel.inputs, kernel.floats, outs)
    shared = tuple(-1 if item is None else storages.get(item.untyped_storage()._cdata, -1) for item in flat)
    made = InferredOp(whole, tuple(returns), tuple(changes), rebuild, shared)
    several = () if not func._schema.returns else result if isinstance(result, tuple) else (result,)
    made.lengths = [len(item) if isinstance(item, list | tuple) else -1 for item in several]
    return made


def learn_op(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> InferredOp | None:
    """Return what is known of calls like one that a worker has run; ``None`` where the result does not determine it.

    Args:
        func: The overload.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        result: Its result.
    """
    flat, rebuild = flatten(func, result)
    if not is_learned(func, args) or not all(item is None or is_virtual(item) for item in flat):
        return None
    returns = tuple(None if item is None else layout_of(item) for item in flat)
    kernel = describe(func, args, kwargs)
    outs = tuple(None if layout is None else layout.strided() for layout in returns)
    whole = KernelSpec(kernel.name, kernel.args, kernel.kwargs, kernel.inputs, kernel.floats, outs)
    return InferredOp(whole, returns, (), rebuild)


def flatten(func: Any, result: Any) -> tuple[list[Any], Callable[[list[Any]], Any] | None]:
    """Flatten an operator's result; also return the function that rebuilds it."""
    if not func._schema.returns:
        return [], _nothing
    if not isinstance(result, list | tuple):
        return [result], None
    lengths = [len(item) if isinstance(item, list | tuple) else -1 for item in result]
    flat: list[Any] = []
    for item in result:
        flat.extend(item) if isinstance(item, list | tuple) else flat.append(item)
    kind = list if isinstance(result, list) else tuple

    def rebuild(values: list[Any]) -> Any:
        left = iter(values)
        return kind(next(left) if n < 0 else [next(left) for _ in range(n)] for n in lengths)

    return flat, rebuild


def _nothing(values: list[Any]) -> None:
    return None


# ---- versions

_UNVERSIONED = ("_amp_foreach_", "_fused_")
"""Beginnings of names of operators whose kernels write to lists and raise no version in PyTorch either."""


def versioned_inputs(kernel: KernelSpec) -> tuple[int, ...]:
    """Return the inputs whose versions the caller has to raise: those in lists that an operator writes to.

    PyTorch raises the version of a single tensor above the device, but leaves lists to the device's kernels.
    """
    function = overload(kernel.name)
    if not function._schema.is_mutable or function._schema.name.partition("::")[2].startswith(_UNVERSIONED):
        return ()
    found: list[int] = []
    for place, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = kernel.args[place] if place < len(kernel.args) else kernel.kwargs.get(argument.name)
            if isinstance(given, Many):
                found += [item.index for item in given.items if isinstance(item, SlotArgument)]
    return tuple(found)


# ---- the kernel


def _source(generator: torch.Generator) -> int:
    device, number = native.load().origin(generator)
    if device is None:
        raise RuntimeError(f"Expected a 'vgpu' device type for generator but found '{generator.device}'")
    return int(number)


def describe(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> KernelSpec:
    """Return the kernel of an operator, with placeholders for its tensors and floating-point numbers.

    Raises:
        WireError: An argument cannot be sent, or workers do not run the operator.
    """
    if str(func) not in pinned_names(EAGER):
        if "sparse" in func.name():
            raise WireError(
                f"{func} is not supported on virtual devices: they hold dense (strided) tensors only; make the tensor "
                "dense, or keep it on the CPU (nn.Embedding and nn.EmbeddingBag: sparse=False)"
            )
        raise WireError(f"{func} is not supported on virtual devices: it is not on the workers' list of operators")
    counts = [0, 0]
    keep = func.name() in SHAPED_BY_FLOATS

    def scalar(value: Any) -> Any:
        if is_virtual(value):
            counts[0] += 1
            return SlotArgument(counts[0] - 1)
        if isinstance(value, float) and not keep:
            counts[1] += 1
            return Hole(counts[1] - 1)
        if isinstance(value, complex):
            return Complex(value.real, value.imag)
        if value is None or isinstance(value, bool | int | float):
            return value
        raise WireError(f"{func} with an argument of {type(value).__name__} cannot run on a virtual device")

    def argument(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return Many(tuple(scalar(item) for item in value))
        if isinstance(value, str):
            return value
        if isinstance(value, torch.dtype):
            return DType(dtype_name(value))
        if isinstance(value, torch.device):
            return OwnDevice()
        if isinstance(value, torch.memory_format):
            return MemoryFormat(str(value).removeprefix("torch."))
        if isinstance(value, torch.layout):
            if value is not torch.strided:
                raise WireError(f"{func} of layout {value}: virtual devices hold dense (strided) tensors only")
            return LayoutArgument()
        if isinstance(value, torch._C.Generator):
            return GeneratorArgument(_source(value))
        return scalar(value)

    whole = tuple(argument(value) for value in args)
    named = {key: argument(value) for key, value in kwargs.items()}
    return KernelSpec(str(func), whole, named, counts[0], counts[1])
