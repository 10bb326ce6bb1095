"""Padding to buckets: sequences of many lengths become batches of a few sizes, each of which is captured once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from onebox.errors import UsageError

_Leaf = Tensor | np.ndarray


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """Pads a dimension of tensors to the next of some sizes.

    What is added is data to the model and to the loss: a model that looks at other places of a sequence needs a mask,
    and a loss over places a value that it ignores.

    Args:
        sizes: The sizes that are allowed, ascending. Either these or ``multiple``.
        multiple: Pads to the next multiple of this, without a limit.
        dim: The dimension of batches that is padded, from 1: dimension 0 is the samples.
        value: What is added.
        tensors: The tensors that are padded, by name (``"inputs"``, ``"inputs[0]"``, ``"inputs['mask']"``,
            ``"targets"``), each to a bucket of its own; of a dict, with a value for each. ``None`` for all that have
            the dimension, which must be of the same size there.

    Raises:
        UsageError: An argument is wrong.

    Example:
        >>> import torch
        >>> pad = Buckets(sizes=(4, 8))
        >>> inputs, targets = pad((torch.ones(2, 3), torch.zeros(2)))
        >>> inputs.tolist(), targets.tolist()
        ([[1.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 0.0]], [0.0, 0.0])
    """

    sizes: Sequence[int] = ()
    multiple: int | None = None
    dim: int = 1
    value: float = 0
    tensors: Collection[str] | Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.sizes, str | int) or (self.sizes and self.multiple is not None):
            raise UsageError(
                f"Buckets has sizes={self.sizes!r} and multiple={self.multiple!r}; allowed are several sizes, as in "
                "sizes=(32, 64, 128), or a multiple, as in multiple=16"
            )
        if not self.sizes and self.multiple is None:
            raise UsageError("Buckets needs sizes=(32, 64, 128), for example, or multiple=16")
        sizes = tuple(self.sizes) if self.multiple is None else (self.multiple,)
        ascending = all(_is_whole(size) for size in sizes) and list(sizes) == sorted(set(sizes))
        if not ascending or sizes[0] < 1:
            given = f"sizes={self.sizes!r}" if self.sizes else f"multiple={self.multiple!r}"
            raise UsageError(f"Buckets has {given}; allowed are whole numbers from 1, sizes in ascending order")
        if not _is_whole(self.dim) or self.dim < 1:
            raise UsageError(f"Buckets has dim={self.dim!r}; allowed are whole numbers from 1, as 0 is the samples")
        if isinstance(self.tensors, str):
            raise UsageError(f"Buckets has tensors={self.tensors!r}; give a tuple of names: ({self.tensors!r},)")
        object.__setattr__(self, "sizes", tuple(self.sizes))

    def bucket(self, size: int) -> int:
        """Return the size to which a size is padded.

        Args:
            size: What comes.

        Raises:
            UsageError: It is larger than the largest bucket.

        Example:
            >>> Buckets(sizes=(32, 64)).bucket(33), Buckets(multiple=16).bucket(33)
            (64, 48)
        """
        if self.multiple is not None:
            return -(-size // self.multiple) * self.multiple
        found = next((each for each in self.sizes if each >= size), None)
        if found is None:
            raise UsageError(
                f"a size of {size} in dimension {self.dim} is larger than the largest bucket, {self.sizes[-1]}; cut "
                "such samples, or give a larger bucket"
            )
        return found

    def __call__(self, batch: Any) -> Any:
        """Return a batch, padded.

        Args:
            batch: A pair of inputs and targets, or inputs alone; tensors and arrays nested in tuples, lists and dicts.

        Raises:
            UsageError: A tensor is larger than the largest bucket, lacks the dimension, or differs from the others.
        """
        return self._padded([batch], self.dim)[0]

    def samples(self, samples: Sequence[Any]) -> list[Any]:
        """Return samples that have the same size, that of the bucket of the largest: so they can be collated.

        Args:
            samples: Each a pair of inputs and targets, or inputs alone, without a dimension for the samples.

        Raises:
            UsageError: As for a batch.
        """
        return self._padded(samples, self.dim - 1)

    def _padded(self, items: Sequence[Any], dim: int) -> list[Any]:
        """Return items of which each tensor is as large, in a dimension, as the bucket of the largest of its name."""
        flat = [_named(item) for item in items]
        largest: dict[str, int] = {}
        for leaves, _ in flat:
            chosen = self._chosen(leaves, dim)
            for name in chosen:
                largest[name] = max(largest.get(name, 0), leaves[name].shape[dim])
        target = {name: self.bucket(size) for name, size in largest.items()}
        return [
            nest([self._fitted(name, leaf, dim, target.get(name)) for name, leaf in leaves.items()])
            for leaves, nest in flat
        ]

    def _chosen(self, leaves: Mapping[str, Any], dim: int) -> list[str]:
        """Return the names of the tensors that are padded."""
        if self.tensors is not None:
            for name in self.tensors:
                self._require(name, leaves, dim)
            return list(self.tensors)
        found = [name for name, leaf in leaves.items() if isinstance(leaf, _Leaf) and leaf.ndim > dim]
        if not found:
            raise UsageError(f"no tensor has dimension {self.dim}, which Buckets is to pad; {_shapes(leaves)}")
        if len({leaves[name].shape[dim] for name in found}) > 1:
            raise UsageError(
                f"tensors differ in dimension {self.dim}, which Buckets is to pad; {_shapes(leaves)}. Name those that "
                f"it is for, each of which gets a bucket of its own: Buckets(..., tensors=({found[0]!r},))"
            )
        return found

    def _require(self, name: str, leaves: Mapping[str, Any], dim: int) -> None:
        leaf = leaves.get(name)
        if not isinstance(leaf, _Leaf):
            raise UsageError(f"Buckets is to pad {name}, and there is no such tensor; {_shapes(leaves)}")
        if leaf.ndim <= dim:
            raise UsageError(f"Buckets is to pad dimension {self.dim} of {name}, which has none; {_shapes(leaves)}")

    def _fitted(self, name: str, leaf: Any, dim: int, size: int | None) -> Any:
        if size is None or leaf.shape[dim] == size:
            return leaf
        value = self.tensors[name] if isinstance(self.tensors, Mapping) else self.value
        shape = [*leaf.shape]
        shape[dim] = size
        if isinstance(leaf, Tensor):
            made = leaf.new_full(shape, _value(name, value, whole=not _is_inexact(leaf.dtype)))
            made.narrow(dim, 0, leaf.shape[dim]).copy_(leaf.detach())
            return made
        widths = [(0, wanted - had) for wanted, had in zip(shape, leaf.shape, strict=True)]
        whole = leaf.dtype.kind not in "fc"
        return np.pad(leaf, widths, constant_values=np.asarray(_value(name, value, whole=whole)).astype(leaf.dtype))


def require_buckets(pad: Any) -> None:
    """Raise an error unless something is what ``pad=`` takes.

    Raises:
        UsageError: It is not.
    """
    if pad is not None and not isinstance(pad, Buckets):
        raise UsageError(f"pad is a {type(pad).__name__}; allowed is onebox.Buckets(...), or None")


def _named(item: Any) -> tuple[dict[str, Any], Callable[[Sequence[Any]], Any]]:
    """Return the leaves of a batch or sample by name, and what nests others again."""
    pair = isinstance(item, tuple | list) and len(item) == 2
    single = isinstance(item, tuple | list) and len(item) == 1
    found, nesting = pytree.tree_flatten_with_path(item)
    named = {}
    for path, leaf in found:
        root, rest = "inputs", path
        if pair or single:
            root, rest = "targets" if path[0] == pytree.SequenceKey(1) else "inputs", path[1:]
        named[root + pytree.keystr(rest)] = leaf
    return named, lambda leaves: pytree.tree_unflatten(list(leaves), nesting)


def _shapes(leaves: Mapping[str, Any]) -> str:
    shapes = ", ".join(f"{name} {list(leaf.shape)}" for name, leaf in leaves.items() if isinstance(leaf, _Leaf))
    return f"shapes: {shapes or 'no tensor at all'}"


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_inexact(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _value(name: str, value: float, *, whole: bool) -> float:
    if whole and value != int(value):
        raise UsageError(f"Buckets is to pad {name} with {value}, and its type has whole numbers only")
    return int(value) if whole else value
