"""Collation of samples into a batch, with errors that name the samples that do not match.

The *form* of a sample is its nested types and shapes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import default_collate

from onebox.padding import Buckets

Collate = Callable[[list[Any]], Any]


def form_of(value: Any) -> str:
    """Describe the form of a sample.

    Args:
        value: The sample: tensors, arrays and numbers, nested in tuples and dicts.

    Example:
        >>> import torch
        >>> form_of((torch.zeros(3, 8, 8), 7))
        '(float32 [3, 8, 8], int)'
    """
    match value:
        case Tensor():
            return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
        case np.ndarray():
            return f"{value.dtype} {list(value.shape)}"
        case Mapping():
            return "{" + ", ".join(f"{key}: {form_of(value[key])}" for key in sorted(value, key=str)) + "}"
        case list() | tuple():
            return "(" + ", ".join(map(form_of, value)) + ")"
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def find_mismatches(samples: Sequence[Any]) -> tuple[list[int], str]:
    """Find the samples of a batch whose form is not the most frequent one.

    Args:
        samples: The samples; of equally frequent forms the first one counts.

    Returns:
        Their places in the batch, and the form of the others.
    """
    forms = [form_of(sample) for sample in samples]
    usual = Counter(forms).most_common(1)[0][0]  # of equal counts the first one
    return [place for place, form in enumerate(forms) if form != usual], usual


def collate(samples: list[Any], own: Collate | None = None) -> Any:
    """Collate samples into a batch.

    Args:
        samples: At least one.
        own: Collate function; ``None`` for ``torch.utils.data.default_collate``.

    Returns:
        The batch; a pair is a tuple.

    Raises:
        Exception: Any error of the collate function.
    """
    batch = (own or default_collate)(samples)
    return tuple(batch) if isinstance(batch, list) and len(batch) == 2 else batch


def padded(own: Collate | None, pad: Buckets | None) -> Collate | None:
    """Return a collate function that also pads.

    Args:
        own: Collate function; ``None`` for ``torch.utils.data.default_collate``, before which the samples are padded,
            so that they may be of several lengths.
        pad: Padding; ``None`` for none.
    """
    if pad is None:
        return own
    if own is None:
        return lambda samples: default_collate(pad.samples(samples))
    return lambda samples: pad(collate(samples, own))
