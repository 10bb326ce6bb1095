"""What a script has read twice: the same, the same but for rounding, or something else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from onebox.pool.client.connection import WorkerReply
from onebox.pool.streams.read_values import KEPT_BYTES, Likeness, ReadValues
from onebox.wire import Complex, spec_of, to_frame
from onebox.wire.protocol.responses import Digest, OperatorResult, Scalars, Tensors

LARGE = torch.randn(2 * KEPT_BYTES, generator=torch.Generator().manual_seed(0))
NAN = torch.tensor([1.0, float("nan"), float("inf")])


def read(*values: Tensor) -> WorkerReply:
    return WorkerReply((Tensors(tuple(map(spec_of, values))),), [bytes(to_frame(value)) for value in values], ())


def said(result: Any) -> WorkerReply:
    return WorkerReply((result,), (), ())


def likeness(first: WorkerReply, second: WorkerReply, *, rounded: bool) -> Likeness:
    return ReadValues(first, rounded=rounded).likeness(ReadValues(second, rounded=rounded))


CASES: list[tuple[WorkerReply, WorkerReply, Likeness]] = [
    (read(torch.tensor(2.5)), read(torch.tensor(2.5)), "same"),
    (read(NAN), read(NAN), "same"),
    (read(torch.tensor(2.5)), read(torch.tensor(2.5001)), "rounding"),
    (read(torch.tensor([1e-9, 1.0])), read(torch.tensor([-1e-9, 1.0])), "rounding"),
    (read(torch.tensor([1.0 + 1j])), read(torch.tensor([1.0 + 1.0001j])), "rounding"),
    (read(LARGE), read(LARGE + 1e-4), "rounding"),
    (read(NAN), read(NAN + 1e-5), "rounding"),
    (said(Scalars((1.0,))), said(Scalars((1.00001,))), "rounding"),
    (
        said(OperatorResult((1.0, Complex(1.0, 2.0)), ())),
        said(OperatorResult((1.0, Complex(1.0, 2.0001)), ())),
        "rounding",
    ),
    (said(Digest(b"1")), said(Digest(b"2")), "rounding"),
    (read(torch.tensor(2.5)), read(torch.tensor(2.6)), "other"),
    (read(torch.tensor(310)), read(torch.tensor(311)), "rounding"),
    (read(torch.tensor([7, 1])), read(torch.tensor([8, 1])), "other"),
    (read(torch.tensor([True])), read(torch.tensor([False])), "other"),
    (read(NAN), read(torch.zeros(3)), "other"),
    (read(torch.ones(3)), read(NAN), "other"),
    (read(LARGE), read(LARGE * 1.1), "other"),
    (read(torch.ones(3)), read(torch.ones(4)), "other"),
    (read(torch.ones(3)), read(torch.ones(3), torch.ones(3)), "other"),
    (said(OperatorResult((1,), ())), said(OperatorResult((2,), ())), "other"),
]


@pytest.mark.parametrize(("first", "second", "expected"), CASES)
def test_numbers_may_differ_by_rounding_and_nothing_else(first: Any, second: Any, expected: Likeness) -> None:
    assert likeness(first, second, rounded=True) == expected
    assert likeness(second, first, rounded=True) == expected
    assert likeness(first, second, rounded=False) == ("same" if expected == "same" else "other")
