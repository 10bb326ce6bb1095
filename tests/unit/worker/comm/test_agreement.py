"""Whether ranks that mean different sums are found out."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onebox.errors import WireError
from onebox.wire import TensorSpec, dtype_name
from onebox.worker.comm.agreement import (
    FINGERPRINT_ELEMENTS,
    check_fingerprints,
    collective_fingerprint,
    fingerprint_elements,
)

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
TYPES = [*FLOATS, torch.int64, torch.int32, torch.int8, torch.uint8, torch.complex64]
sizes = st.lists(st.integers(0, 9), min_size=1, max_size=4)


@given(sizes, st.sampled_from(TYPES), st.integers(0, 1 << 40), st.integers(1, 256))
def test_any_number_of_ranks_that_mean_the_same_agree(
    numels: list[int], dtype: torch.dtype, order: int, ranks: int
) -> None:
    fingerprint = collective_fingerprint(order, [TensorSpec(dtype_name(dtype), (numel,)) for numel in numels])
    total = torch.zeros(FINGERPRINT_ELEMENTS, dtype=dtype)
    for _ in range(ranks):
        total += fingerprint_elements(fingerprint, dtype, ranks)
    check_fingerprints(total, fingerprint, ranks, order)


@given(st.lists(st.integers(0, (1 << 32) - 1), min_size=2, max_size=6), st.sampled_from(FLOATS))
def test_of_ranks_that_differ_one_is_told(fingerprints: list[int], dtype: torch.dtype) -> None:
    parts = [fingerprint_elements(each, dtype, len(fingerprints)) for each in fingerprints]
    total = sum(parts[1:], parts[0].clone())
    told = 0
    for each in fingerprints:
        try:
            check_fingerprints(total, each, len(fingerprints), 0)
        except WireError:
            told += 1
    assert bool(told) == any(not torch.equal(part, parts[0]) for part in parts)


def test_order_sizes_and_types_are_what_is_meant() -> None:
    one, two = TensorSpec("float32", (2,)), TensorSpec("float32", (3,))
    others = [TensorSpec("int32", (2,)), TensorSpec("int32", (3,))]
    found = [
        collective_fingerprint(0, [one, two]),
        collective_fingerprint(1, [one, two]),
        collective_fingerprint(0, [two, one]),
        collective_fingerprint(0, others),
    ]
    found += [collective_fingerprint(0, [one, two], 0), collective_fingerprint(0, [one, two], 1)]
    assert len(set(found)) == 6 and collective_fingerprint(0, [TensorSpec("float32", (3, 1)), one]) == found[2]


def test_a_sum_of_several_types_is_refused() -> None:
    with pytest.raises(WireError, match="float32, int32 in one sum"):
        collective_fingerprint(0, [TensorSpec("float32", (1,)), TensorSpec("int32", (1,))])
    with pytest.raises(WireError, match="no type in one sum"):
        collective_fingerprint(0, [])
