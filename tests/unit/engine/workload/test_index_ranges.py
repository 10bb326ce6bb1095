"""Ranges of a batch's integers: what is allowed, what is ignored, and where the first wrong one is."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onebox.engine.workload.index_ranges import MOST_ELEMENTS, IndexRange
from onebox.errors import OperatorError

END = 5
KINDS = st.sampled_from([torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8])


def allowed(ignored: int | None) -> IndexRange:
    return IndexRange(leaf=0, end=END, ignored=ignored, operator="aten.nll_loss_forward.default", shapes="")


@given(st.lists(st.integers(-3, 8), min_size=1, max_size=9), st.sampled_from([None, -100, -1, 2, 5, 7]), KINDS)
def test_the_first_wrong_one_is_named(numbers: list[int], ignored: int | None, kind: torch.dtype) -> None:
    values = torch.tensor([abs(number) if kind is torch.uint8 else number for number in numbers]).to(kind)
    wrong = [place for place, value in enumerate(values.tolist()) if not 0 <= value < END and value != ignored]
    if not wrong:
        allowed(ignored).require(values)
        return
    with pytest.raises(OperatorError, match=rf"at \[{wrong[0]}\], is {int(values[wrong[0]])}: allowed are 0 to 4"):
        allowed(ignored).require(values)


def test_views_are_looked_at_and_large_tensors_are_not() -> None:
    values = torch.tensor([[1, 9, 2], [-100, 9, 3]])
    allowed(-100).require(values[:, ::2])
    allowed(-100).require(values[:, ::2].T)
    with pytest.raises(OperatorError, match=r"at \[1, 0\], is 9"):
        allowed(-100).require(values.T)
    allowed(None).require(torch.full((MOST_ELEMENTS + 1,), 9))
    with pytest.raises(OperatorError, match="is 9"):
        allowed(None).require(torch.full((64, 512), 9))
