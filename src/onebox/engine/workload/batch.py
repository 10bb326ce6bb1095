"""Batches: nested inputs and targets, flattened to tensors and cut along the samples."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from onebox.engine.workload.late_number import LateNumber
from onebox.errors import UsageError, WireError
from onebox.wire import TensorSpec, copy_of, elements_of, program_dtype_name

Constant = int | float | bool | complex | None
"""A leaf that is not a tensor, passed unchanged to the model and the loss."""


@dataclass(frozen=True)
class BatchStructure:
    """Nesting of inputs and targets, and the constants between their tensors.

    Args:
        nesting: Nesting of tensors and constants.
        constants: For each leaf in order, whether it is a constant, and its value.
    """

    nesting: pytree.TreeSpec
    constants: tuple[tuple[bool, Constant], ...]

    def nest(self, tensors: Sequence[Any]) -> tuple[Any, Any]:
        """Return (inputs, targets) rebuilt from tensors, with the constants in their places."""
        left = iter(tensors)
        leaves = [value if constant else next(left) for constant, value in self.constants]
        inputs, targets = pytree.tree_unflatten(leaves, self.nesting)
        return inputs, targets

    @property
    def key(self) -> Hashable:
        """Key that ignores the values of numbers but distinguishes everything else."""
        return str(self.nesting), tuple(type(value).__name__ if constant else "" for constant, value in self.constants)

    @property
    def numbers(self) -> tuple[str, ...]:
        """Values of the constants as Python prints them, so that NaN equals itself and -0.0 differs from 0.0."""
        return tuple(repr(value) for constant, value in self.constants if constant)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Inputs and targets of one step.

    Args:
        leaves: The tensors, flattened; the first dimension of each is the samples.
        structure: The nesting.
        size: Number of samples.
        samples: Sample identifiers, ``int64 [B]``, if known.
        python_state: Number of the Python state to compute it in; see
            :meth:`~onebox.engine.workload.captures.Captures.stamped`.
        normalisers: Results of the user's weight function for the targets of its micro-batches, by where they are cut.
    """

    leaves: tuple[Tensor, ...]
    structure: BatchStructure
    size: int
    samples: Tensor | None = None
    python_state: int = 0
    normalisers: dict[Hashable, tuple[float, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(leaf.nbytes for leaf in self.leaves)

    def __str__(self) -> str:
        """Return a readable description of inputs and targets."""

        def described(nested: Any) -> str:
            leaves = [leaf for leaf in pytree.tree_leaves(nested) if isinstance(leaf, Tensor)]
            found = [f"{str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape)}" for leaf in leaves]
            return ", ".join(found) or "none"

        inputs, targets = self.structure.nest(self.leaves)
        return f"inputs {described(inputs)}; targets {described(targets)}"

    def kept(self) -> Batch:
        """Return a dense copy that later writes to the user's tensors do not change."""
        # One thread only: several would contend for cores that workers use.
        copies = [copy_of(leaf) for leaf in self.leaves]
        kept = dataclasses.replace(self, leaves=tuple(leaf for leaf, _, _ in copies))
        vars(kept)["_elements"] = tuple((spec, frame) for _, spec, frame in copies)  # the cached property
        return kept

    def slice(self, start: int, size: int) -> tuple[Tensor, ...]:
        """Return the tensors of a range of samples."""
        return tuple(leaf[start : start + size] for leaf in self.leaves)

    @cached_property
    def _elements(self) -> tuple[tuple[TensorSpec, memoryview], ...]:
        return tuple(map(elements_of, self.leaves))

    def elements(self, leaf: int, start: int, size: int) -> tuple[TensorSpec, memoryview]:
        """Return the spec and the elements of a range of samples of a tensor; they are not copied if it is dense."""
        spec, frame = self._elements[leaf]
        row_bytes = len(frame) // max(1, self.size)
        part = TensorSpec(spec.dtype, (size, *spec.shape[1:]))
        return part, frame[start * row_bytes : (start + size) * row_bytes]

    def example(self, size: int) -> tuple[Any, Any]:
        """Return (inputs, targets) of a given size in the original nesting; only shapes and types are meaningful."""
        return self.structure.nest([leaf.new_zeros((size, *leaf.shape[1:])) for leaf in self.leaves])

    def signature(self, size: int) -> Hashable:
        """Return the key of everything that a capture for a size depends on."""
        return self.kind(size), tuple(tuple(leaf.shape[1:]) for leaf in self.leaves)

    def kind(self, size: int) -> Hashable:
        """Return the key of a capture for a size, without the sizes of other dimensions."""
        leaves = tuple((leaf.dim(), leaf.dtype) for leaf in self.leaves)
        return self.structure.key, self.structure.numbers, leaves, size, self.python_state


def as_batch(inputs: Any, targets: Any = None, samples: Any = None) -> Batch:
    """Flatten inputs and targets.

    Args:
        inputs: Tensors and numpy arrays nested in tuples, lists and dicts, the samples in the first dimension of each;
            also ``None`` and Python numbers, which are the same for all samples.
        targets: Likewise.
        samples: Integers that identify the samples, if known.

    Raises:
        UsageError: They contain another type, or the tensors differ in the number of samples.
        WireError: A tensor has an element type that is not supported.
    """
    values, nesting = pytree.tree_flatten((inputs, targets), is_leaf=_is_list_of_numbers)
    found: list[Tensor] = []
    constants: list[tuple[bool, Constant]] = []
    for place, value in enumerate(values):
        leaf = _leaf(value, place, inputs, targets)
        if isinstance(leaf, Tensor):
            found.append(leaf)
        constants.append((False, None) if isinstance(leaf, Tensor) else (True, leaf))
    sizes = {leaf.shape[0] if leaf.dim() else 0 for leaf in found}
    if len(sizes) != 1 or 0 in sizes:
        raise _sizes_differ(inputs, targets, found, [place for place, (fixed, _) in enumerate(constants) if not fixed])
    (size,) = sizes
    return Batch(
        leaves=tuple(leaf.detach().to("cpu") for leaf in found),
        structure=BatchStructure(nesting, tuple(constants)),
        size=size,
        samples=None if samples is None else _numbers(samples, size),
    )


def as_pair(item: Any) -> tuple[Any, Any]:
    """Return (inputs, targets) of one item of a loader: a pair, or inputs alone.

    Args:
        item: A tuple or list of one or two elements, or a tensor, array or dict, which are inputs without targets.

    Raises:
        UsageError: It is a tuple or list of another length.
    """
    if not isinstance(item, tuple | list):
        return item, None
    if len(item) not in (1, 2):
        raise UsageError(
            f"a batch is a {type(item).__name__} of {len(item)}; allowed are (inputs, targets), (inputs,), or a tensor "
            "or dict of inputs alone. Put several inputs into one tuple: ((x, mask), targets)"
        )
    return item[0], item[1] if len(item) == 2 else None


def _is_list_of_numbers(value: Any) -> bool:
    """Return whether a value is a (nested) list that holds only numbers."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(one, int | float | complex | np.generic) or _is_list_of_numbers(one) for one in value)
    )


def _leaf(value: Any, place: int, inputs: Any, targets: Any) -> Tensor | Constant:
    """Return a leaf as a tensor or a constant."""
    if isinstance(value, Tensor):
        _require_dtype(value, place, inputs, targets)
        return value
    if isinstance(value, np.ndarray):
        tensor = _from_array(value, place, inputs, targets)
        _require_dtype(tensor, place, inputs, targets)
        return tensor
    if value is None or type(value) in (int, float, bool, complex):
        constant: Constant = value
        return constant
    if isinstance(value, np.number | np.bool_ | LateNumber):
        number: Constant = value.item()
        return number
    where = _names(inputs, targets)[place]
    if isinstance(value, list):
        raise UsageError(
            f"{where} is a list of {len(value)} numbers; make it a tensor, torch.tensor({where}), if it has a value "
            "for each sample, or a tuple, if they are the same for all samples"
        )
    raise UsageError(
        f"inputs and targets must be tensors, nested in tuples, lists and dicts; {where} is a {type(value).__name__}. "
        "Allowed beside tensors are numpy arrays, numbers and None"
    )


def _require_dtype(tensor: Tensor, place: int, inputs: Any, targets: Any) -> None:
    try:
        program_dtype_name(tensor.dtype)
    except WireError as error:
        raise type(error)(f"{_names(inputs, targets)[place]}: {error}") from None


def _from_array(array: np.ndarray[Any, Any], place: int, inputs: Any, targets: Any) -> Tensor:
    """Return an array as a tensor that shares its memory where PyTorch can do that."""
    if isinstance(array, np.ma.MaskedArray):
        where = _names(inputs, targets)[place]
        raise UsageError(f"{where} is a masked array, and a tensor has no mask: pass {where}.filled(0), and the mask")
    if array.dtype.kind in "biufc":
        plain = np.require(array.astype(array.dtype.newbyteorder("="), copy=False), requirements=["C", "A", "W"])
        try:
            return torch.from_numpy(plain)
        except TypeError:
            pass  # PyTorch has no float128
    raise UsageError(
        f"{_names(inputs, targets)[place]} is an array of {array.dtype}, of which PyTorch has no tensors; allowed are "
        "arrays of numbers, such as float32 and int64"
    )


def _names(inputs: Any, targets: Any) -> list[str]:
    """Return the path of each leaf of inputs and targets: ``inputs[0]['mask']``."""
    flat, _ = pytree.tree_flatten_with_path((inputs, targets), is_leaf=_is_list_of_numbers)
    return [("inputs" if path[0] == pytree.SequenceKey(0) else "targets") + pytree.keystr(path[1:]) for path, _ in flat]


def _sizes_differ(inputs: Any, targets: Any, tensors: Sequence[Tensor], places: Sequence[int]) -> UsageError:
    """Return the error for tensors with different numbers of samples, with its remedy."""
    names = [_names(inputs, targets)[place] for place in places]
    shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in zip(names, tensors, strict=True))
    said = (
        "every tensor of inputs and targets needs the same, non-zero number of samples as its first dimension; "
        f"shapes: {shapes or 'no tensor at all'}"
    )
    scalars = [name for name, tensor in zip(names, tensors, strict=True) if not tensor.dim()]
    if scalars:
        return UsageError(
            f"{said}. {scalars[0]} has no dimension: give it as a number, {scalars[0]}.item(), if it is a constant, or "
            f"with a value for each sample, {scalars[0]}.expand(batch_size)"
        )
    size, how_many = Counter(tensor.shape[0] for tensor in tensors).most_common(1)[0] if tensors else (0, 0)
    second = {tensor.shape[1] if tensor.dim() > 1 else tensor.shape[0] for tensor in tensors}
    if len(second) == 1 and second != {0}:
        return UsageError(
            f"{said}. If the samples are in dimension 1 (batch_first=False), pass tensor.transpose(0, 1), and let the "
            "model transpose it back"
        )
    odd = [name for name, tensor in zip(names, tensors, strict=True) if tensor.shape[0] != size]
    if size and odd and how_many > 1:
        one = tensors[names.index(odd[0])]
        shape = (size, *(one.shape[1:] if one.shape[0] == 1 else one.shape))
        return UsageError(
            f"{said}. If {odd[0]} is the same for all samples, make it a buffer of the model, or expand it: "
            f"{odd[0]}.expand({', '.join(map(str, shape))})"
        )
    return UsageError(said)


def _numbers(samples: Any, size: int) -> Tensor:
    found = torch.as_tensor(samples)
    if found.shape != (size,) or found.dtype.is_floating_point or found.dtype.is_complex or found.dtype is torch.bool:
        raise UsageError(
            f"samples= is {found.dtype} {list(found.shape)}; allowed are whole numbers, one for each of {size} samples"
        )
    return found.to("cpu", torch.int64)
