"""Gradient buckets: groups of gradients that are exchanged together. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from onebox.wire import TensorSpec

BUCKET_BYTES = 1 << 20
"""Approximate size of a gradient bucket."""

GPU_BUCKET_BYTES = 25 << 20
"""That among GPUs, where each exchange has kernels of its own: the size of ``DistributedDataParallel``'s buckets."""


class CodecState(NamedTuple):
    """A buffer that a lossy codec keeps on a worker from step to step.

    Args:
        spec: Its spec.
        seed: Seed of its first elements, which are normally distributed; ``None`` for zeros.
    """

    spec: TensorSpec
    seed: int | None = None


class PlacedCodecState(NamedTuple):
    """The state of a codec on a worker.

    Args:
        worker: The worker.
        number: Number of its buffer.
        state: The buffer.
    """

    worker: int
    number: int
    state: CodecState


def fill_buckets(
    names: Sequence[str], specs: Mapping[str, TensorSpec], size_bytes: int = BUCKET_BYTES
) -> list[list[str]]:
    """Group gradients into buckets.

    A bucket holds one element type and, but for the last of its type, at least ``size_bytes``.

    Args:
        names: Parameters, in the order in which their gradients are computed.
        specs: Spec of each gradient.
        size_bytes: Target size.
    """
    found: list[list[str]] = []
    filled, kind = 0, ""
    for name in names:
        spec = specs[name]
        if not found or filled >= size_bytes or spec.dtype != kind:
            found.append([])
            filled, kind = 0, spec.dtype
        found[-1].append(name)
        filled += spec.size_bytes
    return found
