"""Compiled calls of operators: the function to call, the mapping of values to its arguments, and the selection of its
results."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from onebox.errors import WireError
from onebox.wire import (
    DTYPES,
    GeneratorArgument,
    Hole,
    KernelSpec,
    Many,
    SlotArgument,
    Strided,
    dtype_name,
    overload,
)
from onebox.wire.protocol.responses import WorkerFailure
from onebox.worker.memory.buffers import Poisoned
from onebox.worker.optimizer.fused_kernels import exactly
from onebox.worker.programs.arguments import ValueIndex, by_keyword, constant, picker
from onebox.worker.programs.bindings import TENSOR, fastest, spreads
from onebox.worker.sandbox.allow_list import EAGER, allowed
from onebox.worker.sandbox.argument_checks import check_constants, guarded, zeros_strided

_RUNNING = frozenset({"running_mean", "running_var"})
"""Arguments that operators of the batch norm family write to without declaring it."""

_RESIZING = frozenset({"resize_", "resize_as_", "set_"})
"""Operators that change the size of an argument's storage, or the storage itself; those with ``out=`` do, too."""

_KNOWN_STRIDES = 4
"""Most remembered strides that differ from the expected ones only in irrelevant dimensions."""

_INPUTS = 1 << 16


class Places:
    """Where arguments of operators are among the registers of a tape, or among the values of one call; constants are
    added as they come.

    Args:
        slots: The register of each tensor.
        floats: Those of floating-point numbers.
        first: That of the first constant.
        device: The worker's device.
        generator: Returns the random number generator with a number.
    """

    def __init__(
        self,
        slots: Mapping[int, int] | range,
        floats: range,
        first: int,
        device: torch.device,
        generator: Callable[[int], torch.Generator] | None = None,
    ) -> None:
        self.constants: list[Any] = []
        self._slots, self._floats, self._first = slots, floats, first
        self._device = device
        self._generator = generator
        self._integers: dict[int, int] = {}

    def place(self, name: str, value: Any) -> ValueIndex:
        """Return the register of an operator's argument, or the registers of a list that has open ones."""
        if isinstance(value, SlotArgument):
            if value.index not in self._slots:
                raise WireError(f"{name} takes tensor {value.index} of a call that brings {len(self._slots)}")
            return self._slots[value.index]
        if isinstance(value, Hole):
            if not 0 <= value.index < len(self._floats):
                raise WireError(f"{name} takes number {value.index} of a call that brings {len(self._floats)}")
            return self._floats[value.index]
        if isinstance(value, Many) and is_open(value):
            return tuple(self.place(name, item) for item in value.items)  # type: ignore[misc]
        known = self._integers.get(value) if value.__class__ is int else None
        if known is not None:
            return known
        self.constants.append(self.constant(value))
        register = self._first + len(self.constants) - 1
        if value.__class__ is int:
            self._integers[value] = register
        return register

    def example(self, value: Any) -> Any:
        """Return an argument as it may be in a call, :data:`TENSOR` in place of tensors."""
        if isinstance(value, Many):
            return [self.example(item) for item in value.items]
        if isinstance(value, SlotArgument | Hole):
            return TENSOR if isinstance(value, SlotArgument) else 0.5
        return self.constant(value)

    def constant(self, value: Any) -> Any:
        """Return an argument that is the same in every call."""
        if isinstance(value, GeneratorArgument):
            if self._generator is None:
                raise WireError("a program draws from no generator but its own")
            return self._generator(value.number)
        return constant(value, self._device)


def compile_call(
    call: OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    places: Places,
    implementation: Callable[[], Callable[..., Any] | None] | None = None,
) -> tuple[Callable[..., Any], list[ValueIndex]]:
    """Return the function that calls an operator with its open arguments and some constants, and where these are.

    Args:
        call: The operator.
        args: Its positional arguments, as in messages.
        kwargs: Its keyword arguments, likewise.
        places: Where arguments are.
        implementation: Returns another function for positional arguments, if there is one; given for calls that are
            worth the search.

    Raises:
        WireError: An argument is not allowed, or does not exist.
    """
    check_constants(call, args, kwargs)
    name = str(call)
    given = [places.example(value) for value in args]
    named = [key for key, value in kwargs.items() if is_open(value)]
    run = exactly(call)
    if run is call:
        run = fastest(call, given, {key: places.example(value) for key, value in kwargs.items()})
    other = implementation() if implementation is not None and not named else None
    direct = run = other or run
    run = guarded(call, run)
    whole = list(args)
    if implementation is not None and other is None and run is direct and not kwargs and spreads(run, call, given):
        whole[-1:] = given[-1]
    fixed = {key: places.constant(value) for key, value in kwargs.items() if key not in named}
    if fixed:
        run = functools.partial(run, **fixed)
    if named:
        run = by_keyword(run, tuple(named))
    return run, [places.place(name, value) for value in (*whole, *(kwargs[key] for key in named))]


class CompiledKernel:
    """A kernel with resolved operator, whose arguments are picked from one list of values.

    The values of a call are its tensors, then its floating-point numbers, then ``constants``:
    ``kernel.keep(kernel.run(*kernel.pick(values)))`` is what it keeps: a tensor if ``single``, otherwise a sequence.

    Args:
        kernel: The kernel.
        device: Its device.
        generator: Returns the random number generator with a number.

    Raises:
        WireError: It names an operator that is not allowed, or an input or number that calls do not have.
    """

    __slots__ = (
        "_dtype", "_listed", "_outs", "_shape", "_strides", "_views", "constants", "flat", "floats", "fresh", "inputs",
        "keep", "name", "needs_values", "new_bytes", "outputs", "pick", "plain", "reserves", "resizes", "returns",
        "run", "single", "views", "writes",
    )  # fmt: skip

    def __init__(self, kernel: KernelSpec, device: torch.device, generator: Callable[[int], torch.Generator]) -> None:
        call = allowed(kernel.name, EAGER)
        schema = call._schema
        if kernel.inputs < 0 or kernel.floats < 0:
            raise WireError(f"{kernel.name} takes {kernel.inputs} tensors and {kernel.floats} numbers")
        self._begin(kernel)
        self.returns = len(schema.returns)
        brought = kernel.inputs + kernel.floats
        places = Places(range(kernel.inputs), range(kernel.inputs, brought), brought, device, generator)
        self.run, found = compile_call(call, kernel.args, kernel.kwargs, places)
        self.constants: tuple[Any, ...] = tuple(places.constants)
        used = {one for place in found for one in (place if isinstance(place, tuple) else (place,))}
        self._views: list[InputView | None] = [None if view is None else InputView(view) for view in kernel.views]
        if self._views:
            if len(self._views) != kernel.inputs:
                raise WireError(f"{kernel.name} describes {len(self._views)} of its {kernel.inputs} tensors")
            self.run = viewing(self.run, found, self._views)
        if sum(one < brought for one in used) != brought:
            raise WireError(
                f"{kernel.name} has no use for some of its {kernel.inputs} tensors and {kernel.floats} numbers"
            )
        self.flat = not any(isinstance(place, tuple) for place in found)
        self.plain = not (self.floats or self.constants)
        """True if its calls bring nothing but tensors."""
        self.pick = picker(found)
        writes = written_inputs(kernel)
        self.writes = tuple(writes)
        self.resizes: tuple[int, ...] = tuple(index for index, resized in writes.items() if resized)
        kinds = [str(value.type) for value in schema.returns]
        self.needs_values = torch.Tag.dynamic_output_shape in call.tags or any("Tensor" not in kind for kind in kinds)
        self._listed = any(kind != "Tensor" for kind in kinds)
        if kernel.outs and not self._listed and len(kernel.outs) != len(kinds):
            raise WireError(f"{kernel.name} returns {len(kinds)} tensors, but {len(kernel.outs)} are described")
        self._outs = [None if out is None else OutputLayout(out) for out in kernel.outs]
        aliases = [value.alias_info for value in schema.returns]
        self.fresh = not any(aliases)
        self.views = torch.Tag.inplace_view in call.tags or (
            bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)
        )
        self.new_bytes = sum(max(0, out.storage_bytes) for out in kernel.outs if out is not None) if writes else 0
        """Bytes of the results of an operator that also writes to its arguments."""
        self.reserves = bool(self.new_bytes or self.resizes)
        """True if memory has to be reserved before a call."""
        single = self._outs[0] if kinds == ["Tensor"] and self._outs else None
        self.single = single is not None
        self.keep: Callable[[Any], Any] = self._keep_all if self.outputs else _keep_nothing
        """Selects what a call keeps from the operator's result, with the kernel's layout; raises ValueError for other
        results."""
        if single is not None:
            self._shape, self._strides = single.shape, single.strides
            self._dtype = single.dtype if single.plain else None
            self.keep = self._keep_one

    def _begin(self, kernel: KernelSpec) -> None:
        """Set what a kernel that could not be compiled has, too."""
        self.name = kernel.name
        self.inputs, self.floats = max(0, kernel.inputs), max(0, kernel.floats)
        self.outputs = sum(out is not None for out in kernel.outs)
        self.constants, self.resizes, self.new_bytes = (), (), 0
        self._views = []
        self.fresh = True
        """True if its results have storages of their own."""
        self.flat, self.plain, self.single, self.reserves, self.needs_values = True, False, False, False, False
        self.views = False
        """True if it makes views of its arguments, and reads and writes no elements."""

    @classmethod
    def void(cls, kernel: KernelSpec, failure: WorkerFailure) -> CompiledKernel:
        """Return a kernel that could not be compiled, each of whose calls fails for this reason."""
        made = cls.__new__(cls)
        made._begin(kernel)
        made.writes = tuple(index for index in written_inputs(kernel) if index < made.inputs)

        def run() -> None:
            raise Poisoned(failure)

        made.run, made.pick, made.keep = run, picker(()), _keep_nothing
        return made

    def seen(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors of a call as the operator sees them."""
        if len(self._views) != len(tensors):
            return list(tensors)
        return [tensor if view is None else view.of(tensor) for tensor, view in zip(tensors, self._views, strict=True)]

    def _keep_one(self, result: Any) -> Tensor:
        """Return the single tensor that a call keeps; a fast path for the checks of every call."""
        if result is not None and (
            result.shape == self._shape and result.stride() in self._strides and result.dtype is self._dtype
        ):
            return result
        return self._keep_all(result)[0]

    def _keep_all(self, result: Any) -> Sequence[Tensor]:
        """Return the tensors that a call keeps."""
        flat = flatten(result) if self._listed else result if isinstance(result, tuple | list) else (result,)
        if len(flat) != len(self._outs):
            raise ValueError(f"it returned {len(flat)} tensors where {len(self._outs)} are expected")
        return [out.fit(made, self.fresh) for made, out in zip(flat, self._outs, strict=True) if out is not None]


def _keep_nothing(result: Any) -> tuple[()]:
    """Return what a call without outputs keeps."""
    return ()


class InputView:
    """A view of the memory of a buffer, as which an operator sees an input.

    Args:
        layout: Its description from the wire.

    Raises:
        WireError: The description is invalid.
    """

    __slots__ = ("_bits", "_dtype", "_offset", "_reach", "_shape", "_strides")

    def __init__(self, layout: Strided) -> None:
        numbers = *layout.shape, *layout.strides, layout.offset
        if layout.dtype not in DTYPES or len(layout.shape) != len(layout.strides) or min(numbers) < 0:
            raise WireError(
                f"a view of {layout.dtype} {list(layout.shape)} with strides {list(layout.strides)} at {layout.offset} "
                "is none"
            )
        self._dtype = DTYPES[layout.dtype]
        self._shape, self._strides, self._offset = layout.shape, layout.strides, layout.offset
        self._bits = (layout.conjugate, layout.negative)
        self._reach = sum((size - 1) * step for size, step in zip(layout.shape, layout.strides, strict=True))

    def of(self, held: Tensor) -> Tensor:
        """Return the view of a buffer's tensor.

        Raises:
            RuntimeError: It reaches beyond the memory of the buffer.
        """
        if held.dtype is self._dtype and self._bits == (held.is_conj(), held.is_neg()) == (False, False):
            return held.as_strided(self._shape, self._strides, held.storage_offset() + self._offset)
        storage, item = held.untyped_storage(), self._dtype.itemsize
        begin, rest = divmod(int(held.storage_offset()) * held.itemsize, item)
        first = begin + self._offset
        if rest or (0 not in self._shape and (first + self._reach + 1) * item > storage.nbytes()):  # which would grow
            raise RuntimeError(
                f"a view of {self._dtype} {list(self._shape)} at {self._offset} is not within its buffer of "
                f"{storage.nbytes()} bytes"
            )
        made = torch.empty(0, dtype=self._dtype, device=held.device)
        made.set_(storage, first, self._shape, self._strides)
        torch._C._set_conj(made, self._bits[0])
        torch._C._set_neg(made, self._bits[1])
        return made


def viewing(
    run: Callable[..., Any], places: Sequence[ValueIndex], views: Sequence[InputView | None]
) -> Callable[..., Any]:
    """Return a function that calls another one with views of some inputs.

    Args:
        run: The other function.
        places: Its positional arguments: the number of an input, the numbers of a list of inputs, or higher ones.
        views: The view of each input, if it has one.
    """
    known = dict(enumerate(views))
    single = [(at, view) for at, place in enumerate(places) if isinstance(place, int) and (view := known.get(place))]
    listed = [(at, [known.get(item) for item in place]) for at, place in enumerate(places) if isinstance(place, tuple)]

    def run_on_views(*arguments: Any) -> Any:
        given = list(arguments)
        for at, view in single:
            given[at] = view.of(given[at])
        for at, items in listed:
            pairs = zip(given[at], items, strict=True)
            given[at] = [value if view is None else view.of(value) for value, view in pairs]
        return run(*given)

    return run_on_views


class OutputLayout:
    """Expected form of a kept tensor.

    Args:
        out: Its description from the wire.

    Raises:
        WireError: The description is invalid.
    """

    __slots__ = ("dtype", "lazy", "plain", "shape", "strides")

    def __init__(self, out: Strided) -> None:
        if out.dtype not in DTYPES or len(out.shape) != len(out.strides) or min(out.shape, default=0) < 0:
            raise WireError(f"a tensor of {out.dtype} {list(out.shape)} with strides {list(out.strides)} is none")
        self.dtype = DTYPES[out.dtype]
        self.shape = out.shape
        self.strides = [out.strides]  # as declared, then equivalent ones
        self.lazy = (out.conjugate, out.negative)
        self.plain = not (self.dtype.is_complex or out.conjugate or out.negative)

    def fit(self, made: Any, fresh: bool) -> Tensor:
        """Return a tensor in its expected form.

        Args:
            made: The tensor.
            fresh: Whether its storage is its own, so that its layout may be changed.

        Raises:
            ValueError: It has another form.
        """
        if not isinstance(made, Tensor) or made.shape != self.shape or made.dtype is not self.dtype:
            what = f"{made.dtype} {list(made.shape)}" if isinstance(made, Tensor) else type(made).__name__
            raise ValueError(f"it returned {what} where {self.dtype} {list(self.shape)} is expected")
        if self._lies_well(made) and (self.plain or (made.is_conj(), made.is_neg()) == self.lazy):
            return made
        if not fresh:
            raise ValueError(
                f"it returned a view with strides {list(made.stride())}, conjugate {made.is_conj()}, negative "
                f"{made.is_neg()}, where {list(self.strides[0])}, {self.lazy[0]}, {self.lazy[1]} are expected"
            )
        anew = zeros_strided(self.shape, self.strides[0], self.dtype, made.device)
        anew = anew.conj() if self.lazy[0] else anew
        return (torch._neg_view(anew) if self.lazy[1] else anew).copy_(made)

    def _lies_well(self, made: Tensor) -> bool:
        """Return whether strides are as declared, except for dimensions of size 1 and empty tensors."""
        strides = made.stride()
        if strides in self.strides:
            return True
        dimensions = zip(self.shape, strides, self.strides[0], strict=True)
        alike = 0 in self.shape or all(size == 1 or mine == other for size, mine, other in dimensions)
        if alike and len(self.strides) < _KNOWN_STRIDES:
            self.strides.append(strides)
        return alike


def flatten(result: Any) -> list[Any]:
    """Return an operator's result as a flat list."""
    if not isinstance(result, tuple | list):
        return [result]
    return [item for part in result for item in (part if isinstance(part, tuple | list) else (part,))]


def strided_of(tensor: Tensor) -> Strided:
    """Return the layout of a tensor for the wire.

    Raises:
        WireError: Its element type is not supported.
    """
    return Strided(
        dtype_name(tensor.dtype),
        tuple(tensor.shape),
        tensor.stride(),
        int(tensor.storage_offset()),
        tensor.untyped_storage().nbytes(),
        tensor.is_conj(),
        tensor.is_neg(),
    )


def is_open(value: Any) -> bool:
    """Return whether an argument differs from call to call."""
    return isinstance(value, SlotArgument | Hole) or (
        isinstance(value, Many) and any(isinstance(item, SlotArgument | Hole) for item in value.items)
    )


def written_inputs(kernel: KernelSpec) -> dict[int, bool]:
    """Return the inputs that a kernel may write to, and for each whether its storage may be replaced.

    An operator that this torch lacks is assumed to write to all of them.
    """
    try:
        schema = overload(kernel.name)._schema
    except WireError:
        return dict.fromkeys(range(min(kernel.inputs, _INPUTS)), True)
    named = dict(zip((argument.name for argument in schema.arguments), kernel.args, strict=False)) | kernel.kwargs
    changes = schema.name.removeprefix("aten::") in _RESIZING
    writes: dict[int, bool] = {}
    for argument in schema.arguments:
        marked = argument.alias_info is not None and argument.alias_info.is_write
        if marked or argument.name in _RUNNING:
            value = named.get(argument.name)
            for item in value.items if isinstance(value, Many) else (value,):
                if isinstance(item, SlotArgument) and item.index >= 0:  # the kernel may not have been checked
                    writes[item.index] = changes or argument.is_out
    return writes
