"""Batches: nested inputs and targets, flattened to tensors and cut along the samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from onebox.errors import UsageError
from onebox.wire import from_frame, program_dtype_name, spec_of, to_frame


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Inputs and targets of one step.

    Args:
        leaves: Their tensors, flattened; each has the samples as its first dimension.
        structure: How to nest them again.
        size: Samples.
        samples: Which they are, ``int64 [B]``, if that is known.
        python_state: Which of the states of Python it is to be computed in; see
            :meth:`~onebox.engine.compiler.Captures.stamped`.
        normalisers: What the user's function made of the targets of its micro-batches, by where they are cut.
    """

    leaves: tuple[Tensor, ...]
    structure: Any
    size: int
    samples: Tensor | None = None
    python_state: int = 0
    normalisers: dict[Hashable, tuple[float, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(leaf.nbytes for leaf in self.leaves)

    def kept(self) -> Batch:
        """Return a copy, which stays as it is when the user writes to the tensors; it is dense."""
        # By one thread: several would wait for each other where workers use the cores.
        leaves = tuple(from_frame(spec_of(leaf), to_frame(leaf)) for leaf in self.leaves)
        return dataclasses.replace(self, leaves=leaves)

    def slice(self, start: int, size: int) -> tuple[Tensor, ...]:
        """Return the tensors of some samples."""
        return tuple(leaf[start : start + size] for leaf in self.leaves)

    def example(self, size: int) -> tuple[Any, Any]:
        """Return (inputs, targets) of some size, nested as they came; only shapes and types are meant to be read."""
        leaves = [leaf.new_zeros((size, *leaf.shape[1:])) for leaf in self.leaves]
        inputs, targets = pytree.tree_unflatten(leaves, self.structure)
        return inputs, targets

    def signature(self, size: int) -> Hashable:
        """Return what a capture for a size depends on."""
        return self.kind(size), tuple(tuple(leaf.shape[1:]) for leaf in self.leaves)

    def kind(self, size: int) -> Hashable:
        """Return what a capture for a size depends on beside the sizes of other dimensions."""
        leaves = tuple((leaf.dim(), leaf.dtype) for leaf in self.leaves)
        return str(self.structure), leaves, size, self.python_state


def as_batch(inputs: Any, targets: Any, samples: Any = None) -> Batch:
    """Flatten inputs and targets.

    Args:
        inputs: Tensors nested in tuples and dicts.
        targets: Likewise.
        samples: Whole numbers that tell the samples from all others, if that is known.

    Raises:
        UsageError: They hold something else than tensors, or the tensors differ in the number of samples.
    """
    leaves, structure = pytree.tree_flatten((inputs, targets))
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            raise UsageError(
                f"inputs and targets must be tensors, nested in tuples and dicts; found a {type(leaf).__name__}"
            )
        program_dtype_name(leaf.dtype)
    sizes = sorted({leaf.shape[0] if leaf.dim() else 0 for leaf in leaves})
    if len(sizes) != 1 or sizes[0] == 0:
        shapes = ", ".join(str(list(leaf.shape)) for leaf in leaves)
        raise UsageError(
            f"every tensor of inputs and targets needs the same, non-zero number of samples as its first dimension; "
            f"shapes: {shapes or 'no tensor at all'}"
        )
    return Batch(
        leaves=tuple(leaf.detach().to("cpu") for leaf in leaves),
        structure=structure,
        size=sizes[0],
        samples=None if samples is None else _numbers(samples, sizes[0]),
    )


def _numbers(samples: Any, size: int) -> Tensor:
    found = torch.as_tensor(samples)
    if found.shape != (size,) or found.dtype.is_floating_point or found.dtype.is_complex or found.dtype is torch.bool:
        raise UsageError(
            f"samples= is {found.dtype} {list(found.shape)}; allowed are whole numbers, one for each of {size} samples"
        )
    return found.to("cpu", torch.int64)
