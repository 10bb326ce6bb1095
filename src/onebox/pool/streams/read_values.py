"""The values that a script has read, as far as it takes to compare them with those of a second run. Pure."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from onebox.pool.client.connection import WorkerReply
from onebox.wire import DTYPES, Complex, TensorSpec, encode, from_frame
from onebox.wire.protocol.responses import Digest, OperatorResult, Result, Scalars, Tensors

KEPT_BYTES = 1 << 12
"""The most bytes of a reply that are kept as they are."""

KEPT = 1 << 10
"""The most elements of a tensor that are compared one by one; of a larger one their mean and their mean square."""

TOLERANCE = 1e-2
"""Difference, relative to the largest element, that rounding may make: sums are in another order, in any type."""

Likeness = Literal["same", "rounding", "other"]
"""Likeness of the second reading of values to the first."""


class ReadValues:
    """The values of a reply.

    Args:
        reply: The reply.
        rounded: Whether its device may round otherwise when the same runs again.
    """

    __slots__ = ("_bits", "_kept", "_numbers", "_rounded")

    def __init__(self, reply: WorkerReply, *, rounded: bool) -> None:
        self._rounded = rounded
        self._bits = zlib.crc32(b"".join(map(encode, reply.results)))
        for frame in reply.frames:
            self._bits = zlib.crc32(frame, self._bits)
        small = rounded and sum(map(len, reply.frames)) <= KEPT_BYTES
        self._kept = (reply.results, [bytes(frame) for frame in reply.frames]) if small else None
        self._numbers = [*_numbers(reply.results, reply.frames)] if rounded and not small else []

    def likeness(self, later: ReadValues) -> Likeness:
        """Return how values that were read again are like these."""
        if self._bits == later._bits:
            return "same"
        if not (self._rounded and later._rounded):
            return "other"
        first, second = self._compared(), later._compared()
        return "rounding" if len(first) == len(second) and all(map(_close, first, second)) else "other"

    def _compared(self) -> list[Tensor]:
        """Return the numbers."""
        return self._numbers if self._kept is None else [*_numbers(*self._kept)]


def _numbers(results: Sequence[Result], given: Sequence[Any]) -> Iterator[Tensor]:
    """Yield the numbers of a reply, and what tells the rest; of a digest that it is one."""
    frames = iter(given)
    for result in results:
        match result:
            case Tensors(specs=specs):
                for spec in specs:
                    yield _whole(repr(spec).encode())
                    yield _elements(spec, bytes(next(frames)))
            case Scalars(values=values):
                yield torch.tensor(values, dtype=torch.float64)
            case OperatorResult(results=values, inputs=layouts):
                yield _whole(repr(layouts).encode())
                for value in values:
                    if isinstance(value, Complex):
                        yield torch.tensor([value.real, value.imag], dtype=torch.float64)
                    elif isinstance(value, float):
                        yield torch.tensor([value], dtype=torch.float64)
                    else:
                        yield _whole(repr(value).encode())
            case Digest():
                yield _whole(b"")
            case _:
                yield _whole(encode(result))


def _elements(spec: TensorSpec, frame: bytes) -> Tensor:
    """Return the elements of a tensor as numbers, or what tells of many; integers, too, may count what was rounded."""
    kind = DTYPES[spec.dtype]
    if kind is torch.bool or not frame:
        return _whole(frame)
    tensor = from_frame(spec, frame)
    wide = torch.view_as_real(tensor.to(torch.complex128)) if kind.is_complex else tensor.to(torch.float64)
    flat = wide.flatten()
    return flat if len(flat) <= KEPT else torch.stack([flat.mean(), flat.square().mean()])


def _whole(data: bytes) -> Tensor:
    """Return what tells bytes that have to be equal."""
    return torch.tensor([zlib.crc32(data)])


def _close(first: Tensor, second: Tensor) -> bool:
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    if first.dtype != torch.float64:
        return torch.equal(first, second)
    finite = torch.isfinite(first)
    if not torch.equal(first[~finite].nan_to_num(), second[~finite].nan_to_num()):
        return False
    if not torch.equal(finite, torch.isfinite(second)):
        return False
    most = float(first[finite].abs().max()) if bool(finite.any()) else 0.0
    return torch.allclose(first[finite], second[finite], rtol=TOLERANCE, atol=TOLERANCE * most)
