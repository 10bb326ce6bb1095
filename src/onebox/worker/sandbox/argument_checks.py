"""Argument checks: no operator reads or writes outside of its tensors, or returns memory that nothing has written.

The kernels of ATen trust some of their arguments: sizes that the functions above them compute, indices that forward
has returned. A client names operators one by one, with any arguments. So an operator with rules is checked before it
runs, in programs as well as in eager calls; one of a kind that needs none runs as it is, at no cost; any other one is
refused (:mod:`.argument_rules`).

Shapes are checked in the first call, and again when the shapes, types or strides of tensors, or other arguments, differ
from the call before. Elements of index tensors are checked in every call. Elements that decide where a kernel reads or
writes are in memory of this process, also where it checks them itself: tensors in that of other workers are copied
before.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from onebox.errors import WireError
from onebox.wire.program import DType, LayoutArgument, MemoryFormat
from onebox.wire.tensors import is_dense
from onebox.worker.memory.shared import LENT_STORAGES
from onebox.worker.sandbox.argument_rules import base_name, kind_of, rules_of
from onebox.worker.sandbox.overlaps import require_apart, require_shape
from onebox.worker.sandbox.rule_language import Arguments, Row

Run = Callable[..., Any]

_EMPTY = frozenset({"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"})
"""Operators whose results are whatever the memory held."""

_GROWS = frozenset({"resize_", "resize_as_", "set_"})
"""Operators that may enlarge the storage of an argument."""

_ENUMERATIONS = {
    "ScalarType": (DType, torch.dtype),
    "Layout": (LayoutArgument, torch.layout),
    "MemoryFormat": (MemoryFormat, torch.memory_format),
}
"""Types of arguments that PyTorch also takes as a number, which it does not check: those of messages and its own."""


_WINDOWS = frozenset({"kernel_size", "dilation", "padding", "output_padding", "pad", "stride"})
"""Arguments that say where windows lie; of an operator that has a ``size``, a stride is one of memory."""

_WIDEST = 1 << 30

_READ_AGAIN = frozenset({"index", "indices", "mask", "sorter", "target"})
"""Arguments whose integers an operator may check itself, or count, before it reads them again as places."""

_UNDEFINED = frozenset({"attn_bias", "cum_seq_q", "cum_seq_k", "philox_seed", "philox_offset"})
"""Tensors that gradients of attention on GPUs do without if forward did."""

_PLAIN = frozenset({int, float, bool, str, type(None)})
"""Classes of arguments without tensors."""

_MISSING = object()


def check_arguments(operator: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Require that a call stays within the memory of its tensors.

    Args:
        operator: An operator of an allow-list.
        args: Its positional arguments, in PyTorch's form.
        kwargs: Its keyword arguments.

    Raises:
        WireError: It might not; the message names the operator, the argument and what is allowed.
    """
    if (rules := rules_of(operator)) is not None:
        _Guard(operator, operator, rules).check(args, kwargs)


def check_constants(operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Require what can be required of an operator's arguments before there are tensors.

    PyTorch takes ``None`` for any tensor, and some kernels read it; of a number it makes an element type, a layout or a
    memory format, or none that there is. Kernels multiply the sizes of windows without looking at the carry.

    Args:
        operator: An operator of an allow-list.
        args: Its positional arguments, as in messages.
        kwargs: Its keyword arguments, as in messages.

    Raises:
        WireError: One is something else, or too large; the message names the operator and the argument.
    """
    arguments = operator._schema.arguments
    of_windows = _WINDOWS if all(argument.name != "size" for argument in arguments) else ()
    for place, argument in enumerate(arguments):
        value = args[place] if place < len(args) else kwargs.get(argument.name, _MISSING)
        if argument.name in of_windows:
            numbers = [one for one in getattr(value, "items", (value,)) if isinstance(one, int)]
            if max(map(abs, numbers), default=0) >= _WIDEST:
                raise WireError(f"{operator}: {argument.name} is {numbers}; allowed: less than {_WIDEST}")
        declared = str(argument.real_type)
        if value is None and declared == "Tensor" and argument.name not in _UNDEFINED:
            raise WireError(f"{operator}: {argument.name} is None; allowed: a tensor")
        kinds = _ENUMERATIONS.get(declared.removeprefix("Optional[").removesuffix("]"))
        if kinds is None or value is None or value is _MISSING:
            continue
        if not isinstance(value, kinds):
            raise WireError(f"{operator}: {argument.name} is {value!r}; allowed: {kinds[0].__name__}, or none")


def guarded(operator: OpOverload, run: Run) -> Run:
    """Return a function that calls an operator with its arguments checked and its results initialized.

    Args:
        operator: The operator.
        run: An implementation with the same arguments; it is returned itself if there is nothing to check.

    Raises:
        WireError: The operator has no rules, and is of no kind that needs none.
    """
    rules = rules_of(operator)
    base = base_name(operator)
    if base in _EMPTY:
        run = _Zeroed(run)
    elif base in _GROWS:
        run = _Grown(run)
    elif any(argument.is_out for argument in operator._schema.arguments):
        run = _Into(operator, run)
    elif base in _LARGER:
        run = _Fitted(run)
    elif base in _UNFINISHED:
        run = _Finished(operator, run, _UNFINISHED[base])
    elif torch.Tag.dynamic_output_shape in operator.tags:
        run = _Finished(operator, run, _finish_rest)
    if rules is not None:
        run = _Guard(operator, run, rules)
    by_elements = _counts(operator) or (rules is not None and bool(rules.elements))
    if by_elements or any(argument.name in _READ_AGAIN for argument in operator._schema.arguments):
        return _Owned(operator, run, floats=by_elements, in_place=rules is not None and not rules.apart)
    return run


@functools.cache
def _counts(operator: OpOverload) -> bool:
    """Return whether the shapes of an operator's results depend on elements; overloads with ``out=`` lack the tag."""
    packet = operator._overloadpacket
    tagged = any(torch.Tag.dynamic_output_shape in getattr(packet, name).tags for name in packet.overloads())
    return tagged or kind_of(operator) == "counted"


# ---- checks


class _Owned:
    """An operator that reads elements to find out where it reads or writes: another process must not change them
    meanwhile, so that it gets copies of the tensors that one could change.

    Args:
        operator: The operator.
        run: An implementation.
        floats: Whether numbers other than integers are such elements, too.
        in_place: Whether they may be of a tensor that it writes to, of which a copy would be another tensor: one that
            another process could change is refused.
    """

    def __init__(self, operator: OpOverload, run: Run, *, floats: bool, in_place: bool) -> None:
        arguments = operator._schema.arguments
        written = {one.name for one in arguments if one.alias_info is not None and one.alias_info.is_write}
        self._operator = operator
        self._run = run
        self._floats = floats
        self._changed = {place: one.name for place, one in enumerate(arguments) if one.name in written}
        if not in_place or any(one.is_out for one in arguments):
            self._changed = {}
        self._read = [one.name not in written for one in arguments]
        self._names = {one.name for one in arguments} - written

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if LENT_STORAGES:
            for place, name in self._changed.items():
                if _lent(args[place] if place < len(args) else kwargs.get(name)):
                    raise WireError(
                        f"{self._operator}: {name} is in memory that other workers can write; allowed: memory of this "
                        "worker, such as that of a clone"
                    )
            read = zip(args, self._read, strict=False)
            args = tuple(_own(value, self._floats) if is_read else value for value, is_read in read)
            kwargs = {name: _own(one, self._floats) if name in self._names else one for name, one in kwargs.items()}
        return self._run(*args, **kwargs)


def _own(value: Any, floats: bool) -> Any:
    """Return an argument with copies of tensors, or of those of integers, that are in the memory of other workers."""
    if isinstance(value, list | tuple):
        return [_own(item, floats) for item in value]
    if not isinstance(value, Tensor) or (value.is_floating_point() and not floats):
        return value
    return value.clone() if _lent(value) else value


def _lent(value: Any) -> bool:
    """Return whether an argument is a tensor in the memory of another worker."""
    return isinstance(value, Tensor) and value.untyped_storage()._cdata in LENT_STORAGES


class _Guard:
    """An operator with rules, checked before each call.

    Kernels make results in the layout of an input, and some rely on that of the input. If its elements overlap, results
    have another one; so the kernel gets a contiguous copy.
    """

    def __init__(self, operator: OpOverload, run: Run, rules: Row) -> None:
        arguments = operator._schema.arguments
        self._operator = operator
        self._run = run
        self._rules = rules
        self._names = [argument.name for argument in arguments]
        name = base_name(operator)
        self._defaults: dict[str, Any] = {"operator": name, "own": inspect.isfunction(run)}
        if (dimensions := re.search(r"(\d)d", name)) is not None:
            self._defaults["d"] = int(dimensions[1])
        self._defaults |= {one.name: one.default_value for one in arguments if one.has_default_value()}
        self._written = [
            one.name for one in arguments if rules.apart and one.alias_info is not None and one.alias_info.is_write
        ]
        self._computes = all(one.alias_info is None for one in arguments)
        self._overlaps = False
        self._seen: object = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.check(args, kwargs)
        if self._overlaps:
            args, kwargs = tuple(map(_apart, args)), {name: _apart(value) for name, value in kwargs.items()}
        return self._run(*args, **kwargs)

    def check(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Require that a call keeps the rules.

        Raises:
            WireError: It does not.
        """
        elements = self._rules.elements
        form = _form((*args, *kwargs.values()))
        if form == self._seen and not elements:
            return
        found = dict(self._defaults)
        found.update(zip(self._names, args, strict=False))
        found.update(kwargs)
        try:
            if form != self._seen:
                for rule in self._rules.shapes:
                    rule(found)
                self._overlaps = self._computes and any(map(_overlapping, _tensors([*args, *kwargs.values()])))
                self._seen = form
            if elements and self._written:
                self._require_apart(found)
            for rule in elements:
                rule(found)
        except WireError as error:
            raise WireError(f"{self._operator}: {error}") from None
        except (KeyError, IndexError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
            raise WireError(f"{self._operator}: an argument is missing or of another kind: {error}") from error

    def _require_apart(self, found: Arguments) -> None:
        """Require that checked elements are not those that the operator writes."""
        written = {tensor.untyped_storage()._cdata for name in self._written for tensor in _tensors(found.get(name))}
        for name, value in found.items():
            if name in self._written:
                continue
            for tensor in _tensors(value):
                if not tensor.dtype.is_floating_point and tensor.untyped_storage()._cdata in written:
                    raise WireError(f"{name} shares the memory that is written; allowed: memory of its own")


def _form(values: Sequence[Any]) -> list[Any]:
    """Return all of the arguments that rules of shapes read; of tensors shape, type and strides.

    Classes are compared first, which takes a fraction of the time of ``isinstance`` for ``Tensor``.
    """
    form: list[Any] = []
    for value in values:
        kind = value.__class__
        if kind is Tensor:
            form += (value.shape, value.dtype, value.stride(), Tensor)
        elif kind in _PLAIN:
            form.append(value)
        elif isinstance(value, list | tuple):
            form.append(_form(value))
        elif isinstance(value, Tensor):
            form += (value.shape, value.dtype, value.stride(), Tensor)
        else:
            form.append(value)
    return form


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _tensors(item)]
    return [value] if isinstance(value, Tensor) else []


def _overlapping(tensor: Tensor) -> bool:
    """Return whether elements of a tensor may lie on each other, other than by a stride of zero."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride > 0:
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False


def _apart(value: Any) -> Any:
    """Return an argument with contiguous copies of tensors whose elements may overlap."""
    if isinstance(value, list | tuple):
        return [_apart(item) for item in value]
    return value.contiguous() if isinstance(value, Tensor) and _overlapping(value) else value


# ---- initialized memory


class _Zeroed:
    """An operator that returns new memory, which is zeroed."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        made = self._run(*args, **kwargs)
        zero(made)
        return made


class _Grown:
    """An operator that may enlarge the storage of an argument, whose new bytes are zeroed."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def __call__(self, target: Tensor, *args: Any, **kwargs: Any) -> Any:
        tensors = [target, *_tensors([*args, *kwargs.values()])]
        before = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
        try:
            return self._run(target, *args, **kwargs)
        finally:
            storage = target.untyped_storage()
            zero(target, before.get(storage._cdata, 0))


class _Finished:
    """An operator that leaves parts of its results unwritten, which are zeroed."""

    def __init__(self, operator: OpOverload, run: Run, finish: Callable[[Sequence[Tensor], Arguments], None]) -> None:
        self._run = run
        self._finish = finish
        self._names = [argument.name for argument in operator._schema.arguments]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        made = self._run(*args, **kwargs)
        tensors = _tensors(made)
        if tensors and tensors[0].device.type != "meta":
            self._finish(tensors, {**dict(zip(self._names, args, strict=False)), **kwargs})
        return made


def _finish_states(made: Sequence[Tensor], found: Arguments) -> None:
    """Zero the states of a CTC loss [N, T, S] beyond the lengths of inputs and targets."""
    states_NTS = made[1]
    inputs_N, targets_N = (
        torch.as_tensor(found[name], device=states_NTS.device).reshape(-1, 1)
        for name in ("input_lengths", "target_lengths")
    )
    steps, states = (torch.arange(size, device=states_NTS.device) for size in states_NTS.shape[1:])
    beyond_NTS = (steps >= inputs_N)[:, :, None] | (states > 2 * targets_N)[:, None, :]
    states_NTS.masked_fill_(beyond_NTS, 0.0)


def _finish_rest(made: Sequence[Tensor], _: Arguments) -> None:
    """Zero what storages hold beyond their tensors: kernels begin with the largest size that there may be."""
    for tensor in made:
        if is_dense(tensor):
            zero(tensor, int(tensor.storage_offset()) * tensor.itemsize + tensor.nbytes)


_UNFINISHED: dict[str, Callable[[Sequence[Tensor], Arguments], None]] = {
    "_ctc_loss": _finish_states,
    "_embedding_bag": _finish_rest,
    "_embedding_bag_forward_only": _finish_rest,
}
"""Operators that leave parts of their results unwritten; found by running PyTorch's operator database with two fillings
of free memory."""


_LARGER = frozenset({
    "mse_loss", "mse_loss_backward", "smooth_l1_loss", "smooth_l1_loss_backward", "huber_loss", "huber_loss_backward",
    "im2col", "col2im", "ldexp", "glu_jvp", "binomial", "addmv",
})  # fmt: skip
"""Operators whose result may be the beginning of a larger memory, which nothing has written."""


class _Fitted:
    """An operator of :data:`_LARGER`: its result has memory of its own size."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        made = self._run(*args, **kwargs)
        return made.clone() if made.untyped_storage().nbytes() > made.nbytes else made


class _Into:
    """An operator with ``out=``: its kernel writes to contiguous memory, and none of it stays unwritten.

    Kernels resize a tensor that has another shape, but keep the strides of one that has not: some then write as if it
    were contiguous. One that is an input, too, would be resized before it is read. After an error, what was resized is
    zeroed; otherwise, what lies behind the result.
    """

    def __init__(self, operator: OpOverload, run: Run) -> None:
        self._operator = operator
        self._run = run
        arguments = operator._schema.arguments
        self._arguments = [one.name for one in arguments]
        self._places = {place: one.name for place, one in enumerate(arguments) if one.is_out}
        self._names = frozenset(self._places.values())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = [args[place] for place in self._places if place < len(args)]
        given += [value for name, value in kwargs.items() if name in self._names]
        outs = _tensors(given)
        if len(set(map(id, outs))) < len(outs):
            raise WireError(f"{self._operator}: a tensor is two results at once; allowed: one for each")
        before = [tensor.untyped_storage().nbytes() for tensor in outs]
        named = {**dict(zip(self._arguments, args, strict=False)), **kwargs}
        read = {name: _tensors(value) for name, value in named.items() if name not in self._names}
        memory = {tensor.untyped_storage()._cdata for tensors in read.values() for tensor in tensors}
        odd: list[Tensor] = []
        for out in outs:
            storage = out.untyped_storage()._cdata
            if not _in_order(out) or storage in memory:
                odd.append(out)
            memory.add(storage)
        if odd:
            require_apart(self._operator, odd, read)
        instead = {id(out): out.clone(memory_format=torch.contiguous_format) for out in odd}

        def swapped(value: Any) -> Any:
            if isinstance(value, list | tuple):
                return [swapped(item) for item in value]
            return instead.get(id(value), value)

        if instead:
            args = tuple(swapped(one) if place in self._places else one for place, one in enumerate(args))
            kwargs = {name: swapped(one) if name in self._names else one for name, one in kwargs.items()}
        try:
            made = self._run(*args, **kwargs)
            for out in outs:
                if (filled := instead.get(id(out))) is not None:
                    if out.shape != filled.shape:
                        require_shape(self._operator, out, filled.shape, read)
                        out.resize_(filled.shape)
                    out.copy_(filled)
            for out, size_bytes in zip(outs, before, strict=True):
                if out.untyped_storage().nbytes() > size_bytes:
                    zero(out, max(size_bytes, int(out.storage_offset()) * out.itemsize + out.nbytes))
        except Exception:
            for out, size_bytes in zip(outs, before, strict=True):
                zero(out, size_bytes)
            raise
        return (outs[0] if len(outs) == 1 and isinstance(made, Tensor) else tuple(outs)) if instead else made


def _in_order(tensor: Tensor) -> bool:
    """Return whether a tensor is contiguous, also by its strides where a size is 1: kernels divide by them."""
    step = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if stride != step:
            return False
        step *= max(size, 1)
    return True


def zero(tensor: Tensor, start_bytes: int = 0) -> None:
    """Zero a tensor's whole storage, from a byte on; nothing is done for one without elements."""
    storage = tensor.untyped_storage()
    if storage.nbytes() > start_bytes and tensor.device.type != "meta":
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        flat.set_(storage, start_bytes, (storage.nbytes() - start_bytes,), (1,)).zero_()


def zeros_strided(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a new tensor with given strides, whose gaps are zero; its elements are, too, or have to be written."""
    made = torch.empty_strided(shape, strides, dtype=dtype, device=device)
    if made.untyped_storage().nbytes() != made.nbytes:
        zero(made)
    return made
